"""`atlas doctor`: what is installed, which devices there are, what is missing, and how long runs take here."""

import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.markup import escape

from atlas_fl.cli.display import show
from atlas_fl.cli.options import DoctorOptions
from atlas_fl.report.format import EMPTY, add_columns, human_bytes, new_table, seconds
from atlas_fl.storage.extras import install_command

if TYPE_CHECKING:
    from atlas_fl.experiment.installation import Installation, Problem
    from atlas_fl.experiment.run_time import Measurement

MISSING = 1
PRESETS = ("smoke", "quick")
"""Presets whose time is predicted."""
ALWAYS_SHOWN = ("torch", "transformers", "peft", "datasets", "numpy", "scikit-learn")


def doctor(options: DoctorOptions) -> int:
    """Show what there is; 0 where a run of the embedded presets needs nothing else, 1 where it does."""
    from atlas_fl.experiment.installation import inspect_installation, problems_of

    found = inspect_installation(runs_dir=Path(options.runs_dir))
    problems = problems_of(found)
    is_ready = not any(problem.is_needed for problem in problems)
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


def installation_page(found: "Installation") -> Iterator[RenderableType]:
    """Parts of the installation, from packages to files."""
    shown = [package for package in found.packages if package.name in ALWAYS_SHOWN or not package.fits]
    names = ", ".join(f"{package.name} {package.installed or EMPTY}" for package in shown)
    yield f"atlas {found.version or EMPTY}, Python {platform.python_version()}, {platform.platform(terse=True)}"
    yield f"packages: {names}"
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield f"processors: {usable} of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}"
    yield f"GPUs: {'; '.join(gpu_lines(found.torch)) or 'none that PyTorch can use'}"
    free = found.free_memory_bytes
    yield f"memory: {'free memory is not known here' if free is None else f'{human_bytes(free)} free'}"
    for folder in found.folders:
        yield f"{folder.purpose}: {folder.path}, {human_bytes(folder.free_bytes)} free on its disk"
    yield ""
    assets = new_table("Embedded models and data")
    add_columns(assets, ["name", "state", "where it lies, or how to get it"], [])
    for asset in found.assets:
        here = asset.state == "whole"
        assets.add_row(asset.name, asset.state, escape(str(asset.folder)) if here else f"atlas fetch {asset.group}")
    yield assets
    extras = new_table("Optional extras")
    add_columns(extras, ["extra", "needs", "state"], [])
    for extra, packages in found.extras.items():
        state = "installed" if all(package.fits for package in packages) else install_command(extra)
        extras.add_row(extra, ", ".join(package.name for package in packages), escape(state))
    yield extras


def gpu_lines(torch: Any) -> Iterator[str]:
    """Name and memory of each GPU that this PyTorch can use."""
    for index in range(torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        yield f"{torch.cuda.get_device_name(index)}, {human_bytes(free)} of {human_bytes(total)} free"


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
    for problem in sorted(problems, key=lambda problem: not problem.is_needed):
        yield f"{'missing' if problem.is_needed else 'note'}: {problem.text}; {problem.remedy}"
    count = sum(problem.is_needed for problem in problems)
    things = "1 thing is" if count == 1 else f"{count} things are"
    yield f"{things} missing" if count else "everything is here that the embedded presets need"
