"""`atlas doctor`: what is installed, which devices there are, what is missing, and how long runs take here."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from atlas_fl.cli.arguments import parse, split
from atlas_fl.cli.display import show
from atlas_fl.report.format import EMPTY, add_columns, human_bytes, new_table, seconds

if TYPE_CHECKING:
    from atlas_fl.experiment.installation import AssetCheck, Extra, Installation, Package, Problem
    from atlas_fl.experiment.run_time import Measurement

MISSING = 1
PRESETS = ("smoke", "quick")
"""Presets whose time is predicted."""
ALWAYS_SHOWN = ("torch", "transformers", "peft", "datasets", "numpy", "scikit-learn")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Show what is installed, which devices there are, what is missing and how to get it, and how long the presets
    smoke and quick take on this machine; exits with 1 where something is missing that they need."""

    json: bool = False
    """Print JSON for other programs."""
    measure: bool = True
    """Train some steps, a few seconds, to say how long runs take."""
    runs_dir: str = "runs"
    """Where run folders would lie."""


def doctor(words: Sequence[str]) -> int:
    """Show what there is; 0 where a run of the embedded presets needs nothing else, 1 where it does."""
    options = parse(DoctorOptions, split(words), command="atlas doctor")

    from atlas_fl.experiment.installation import inspect_installation, problems_of

    found = inspect_installation(runs_dir=Path(options.runs_dir))
    problems = problems_of(found)
    is_ready = not any(problem.is_needed for problem in problems)
    if options.json:
        measured = measure() if options.measure and is_ready else None
        print(json.dumps(as_json(found, problems, measured), indent=2))
        return 0 if is_ready else MISSING
    show(installation_page(found))
    if is_ready and options.measure:
        show(["measuring some training steps ..."])
        show(speed_lines(measure()))
    elif options.measure:
        show(["speed: not measured, because something is missing"])
    show(["", *problem_lines(problems)])
    return 0 if is_ready else MISSING


def measure(presets: Sequence[str] = PRESETS) -> "Measurement":
    """The speed of training on this machine, by the clients of the last of these presets, and the time of each."""
    start_time = time.perf_counter()

    from atlas_fl.config.presets import find_preset
    from atlas_fl.experiment.run_time import measure_runs

    configs = {name: find_preset(name) for name in presets}
    return measure_runs(configs[presets[-1]], configs, start_time=start_time)


def as_json(found: "Installation", problems: "Sequence[Problem]", measured: "Measurement | None") -> dict[str, Any]:
    """All of it as plain data; bytes and seconds are numbers, and what is not known is null."""
    content: dict[str, Any] = asdict(found)
    content["packages"] = [asdict(package) | {"fits": package.fits} for package in found.packages]
    content["extras"] = [
        {"name": extra.name, "installed": extra.is_installed, "command": extra.command} for extra in found.extras
    ]
    content["folders"] = [asdict(folder) | {"path": str(folder.path)} for folder in found.folders]
    content["assets"] = [asdict(asset) | {"folder": str(asset.folder)} for asset in found.assets]
    content["problems"] = [asdict(problem) for problem in problems]
    content["ready"] = not any(problem.is_needed for problem in problems)
    content["speed"] = None if measured is None else asdict(measured.speed)
    runs = {} if measured is None else measured.runs
    content["runs"] = {name: asdict(run) | {"total": run.total} for name, run in runs.items()}
    return content


def installation_page(found: "Installation") -> Iterator[RenderableType]:
    """Parts of the installation, from packages to files."""
    shown = [package for package in found.packages if package.name in ALWAYS_SHOWN or not package.fits]
    names = ", ".join(f"{package.name} {package.installed or EMPTY}" for package in shown)
    others = len(found.packages) - len(shown)
    yield f"atlas {found.version or EMPTY}, Python {found.python}, {found.system}"
    yield f"packages: {names}" + (f" and {others} others" if others else "")
    devices = found.devices
    threads = "" if devices.threads is None else f", {devices.threads} threads"
    yield f"processors: {devices.usable_cpus} of {devices.cpus}{threads}, load {devices.load:.1f}"
    gpus = (
        f"{gpu.name}, {human_bytes(gpu.free_bytes)} of {human_bytes(gpu.memory_bytes)} free" for gpu in devices.gpus
    )
    yield f"GPUs: {'; '.join(gpus) or 'none that PyTorch can use'}"
    free = found.free_memory_bytes
    yield f"memory: {'free memory is not known here' if free is None else f'{human_bytes(free)} free'}"
    for folder in found.folders:
        yield f"{folder.purpose}: {folder.path}, {human_bytes(folder.free_bytes)} free on its disk"
    yield ""
    yield assets_table(found.assets)
    yield extras_table(found.extras)


def assets_table(assets: "Sequence[AssetCheck]") -> Table:
    """A line for each embedded model and data set."""
    table = new_table("Embedded models and data")
    add_columns(table, ["name", "state", "where it lies, or how to get it"], [])
    for asset in assets:
        here = asset.state == "whole"
        table.add_row(asset.name, asset.state, escape(str(asset.folder)) if here else f"atlas fetch {asset.group}")
    return table


def extras_table(extras: "Sequence[Extra]") -> Table:
    """A line for each optional part."""
    table = new_table("Optional extras")
    add_columns(table, ["extra", "needs", "state"], [])
    for extra in extras:
        state = "installed" if extra.is_installed else extra.command
        table.add_row(extra.name, ", ".join(map(_with_version, extra.packages)), escape(state))
    return table


def _with_version(package: "Package") -> str:
    return package.name if package.installed is None else f"{package.name} {package.installed}"


def speed_lines(measured: "Measurement") -> Iterator[str]:
    """Time that the presets take at the speed that was measured."""
    tokens = 1 / measured.speed.token_seconds
    yield f"speed: {tokens:,.0f} tokens/s in a training step, on {measured.speed.device}, beside what else runs now"
    for name, run in measured.runs.items():
        yield (
            f"  atlas run --preset {name}: about {seconds(run.total)}, of these"
            f" {seconds(run.loading + run.planning)} before round 1 and {seconds(run.round)} a round"
        )


def problem_lines(problems: "Sequence[Problem]") -> Iterator[str]:
    """A line for each problem with its remedy, what is needed first, and the verdict."""
    words: Mapping[bool, str] = {True: "missing", False: "note"}
    for problem in sorted(problems, key=lambda problem: not problem.is_needed):
        yield f"{words[problem.is_needed]}: {problem.text}; {problem.remedy}"
    count = sum(problem.is_needed for problem in problems)
    things = "1 thing is" if count == 1 else f"{count} things are"
    yield f"{things} missing" if count else "everything is here that the embedded presets need"
