"""`atlas doctor`, what there is, and `atlas demo`, a first run that explains itself."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.cli.options import DemoOptions, DoctorOptions
from atlas_fl.config import Config, run_folder, validate
from atlas_fl.config.presets import find_preset
from atlas_fl.report.format import EMPTY, human_bytes
from atlas_fl.storage.assets import Asset, assets, embedded_dir
from atlas_fl.storage.downloads import find_damaged_file
from atlas_fl.storage.extras import PROJECT, accepts, extra_requirements
from atlas_fl.storage.folder_access import free_bytes

if TYPE_CHECKING:
    from atlas_fl.storage.run_folder import RunFolder

MISSING = 1
ALWAYS_SHOWN = ("torch", "transformers", "peft", "datasets", "numpy", "scikit-learn")
RUN_MEMORY_BYTES = 2_500_000_000
"""Most memory of a run of the quick preset, as README says."""


@dataclass(frozen=True)
class Problem:
    """A fault of the installation, and its remedy."""

    text: str
    remedy: str
    is_needed: bool = True
    """True where a run of the embedded presets cannot do without it."""


Findings: TypeAlias = Iterator[str | Problem]
"""Lines on what there is, and problems among them."""


def doctor(options: DoctorOptions) -> int:
    """Show what there is; 0 where a run of the embedded presets needs nothing else, 1 where it does."""
    findings = list(inspect_installation(Path(options.runs_dir)))
    show([line for line in findings if isinstance(line, str)])
    problems = [problem for problem in findings if isinstance(problem, Problem)]
    show(["", *problem_lines(problems)])
    return MISSING if any(problem.is_needed for problem in problems) else 0


def inspect_installation(runs_dir: Path) -> Findings:
    """Findings on packages, the machine, and the embedded models and data; of the packages PyTorch alone is loaded."""
    own = _version(PROJECT)
    yield f"atlas {own or EMPTY}, Python {platform.python_version()}, {platform.platform(terse=True)}"
    if own is None:
        text = f"{PROJECT} is on Python's path and not installed, so that what it needs is not known"
        yield Problem(text, "run `pip install .` in its sources, or `make setup`")
    yield from check_packages(extra_requirements(""))
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield f"processors: {usable} of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}"
    yield from check_gpus()
    yield from check_memory(free_bytes())
    for purpose, path in {"runs": runs_dir.absolute(), "cache": embedded_dir().absolute()}.items():
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        yield f"{purpose}: {path}, {human_bytes(shutil.disk_usage(existing).free)} free on its disk"
    for asset in assets().values():
        yield from check_asset(asset, embedded_dir())


def check_packages(needed: Mapping[str, str]) -> Findings:
    """The versions of packages of which these are needed (`torch>=2.6`), and those that do not fit."""
    installed = {name: _version(name) for name in needed}
    wrong = [name for name, here in installed.items() if here is None or not accepts(needed[name], here)]
    shown = (f"{name} {here or EMPTY}" for name, here in installed.items() if name in (*ALWAYS_SHOWN, *wrong))
    yield f"packages: {', '.join(shown)}"
    for name in wrong:
        here = f"{name} {installed[name]} is here" if installed[name] else f"{name} is missing"
        yield Problem(f"{here} and {needed[name]} is needed", f"run `pip install '{needed[name]}'`")


def check_gpus() -> Findings:
    """The GPUs, or why a PyTorch that is installed cannot be loaded."""
    lines: list[str] = []
    if _version("torch") is not None:
        try:
            cuda = import_module("torch").cuda
            for index in range(cuda.device_count() if cuda.is_available() else 0):
                free, total = cuda.mem_get_info(index)
                lines.append(f"{cuda.get_device_name(index)}, {human_bytes(free)} of {human_bytes(total)} free")
        except (ImportError, OSError) as error:  # of a library that it loads, such as one of CUDA
            text = f"torch is installed and cannot be loaded: {' '.join(str(error).split())}"
            yield Problem(text, "run `pip install --force-reinstall torch`")
    yield f"GPUs: {'; '.join(lines) or 'none that PyTorch can use'}"


def check_memory(free: int | None) -> Findings:
    """So much free memory, and whether it is less than the quick preset takes."""
    yield f"memory: {'free memory is not known here' if free is None else f'{human_bytes(free)} free'}"
    if free is not None and free < RUN_MEMORY_BYTES:
        text = f"{free / 1e9:.1f} GB of memory are free and the quick preset takes {RUN_MEMORY_BYTES / 1e9:.1f} GB"
        yield Problem(text, "end other programs, or take --preset smoke", is_needed=False)


def check_asset(asset: Asset, cache_dir: Path) -> Findings:
    """Where an embedded model or data set lies, or what is wrong with it, by the SHA-256 of its files."""
    folders = asset.folders(cache_dir)
    damaged = {folder: find_damaged_file(folder, asset) for folder in folders}
    whole = next((folder for folder, file in damaged.items() if file is None), None)
    if whole is not None:
        yield f"{asset.name}: {whole}"
        return
    is_needed = asset.group == "embedded"
    fault = f"is damaged: {folders[0] / str(damaged[folders[0]])}" if folders[0].is_dir() else "was not fetched"
    yield f"{asset.name}: not here; `atlas fetch {asset.group}` gets it"
    if is_needed or folders[0].is_dir():
        yield Problem(f"{asset.name} {fault}", f"run `atlas fetch {asset.group}`", is_needed=is_needed)


def problem_lines(problems: list[Problem]) -> Iterator[str]:
    """A line for each problem with its remedy, what is needed first, and the verdict."""
    for problem in sorted(problems, key=lambda problem: not problem.is_needed):
        yield f"{'missing' if problem.is_needed else 'note'}: {problem.text}; {problem.remedy}"
    count = sum(problem.is_needed for problem in problems)
    things = "1 thing is" if count == 1 else f"{count} things are"
    yield f"{things} missing" if count else "everything is here that the embedded presets need"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def demo(options: DemoOptions) -> int:
    """Run what these words name, write its page and print where it lies; 0."""
    base = find_preset(options.preset)
    config = validate(replace(base, run=replace(base.run, runs_dir=options.runs_dir)))
    folder = run_folder(config)
    show([*introduction(config), ""])

    from atlas_fl.cli.tables import outcome
    from atlas_fl.experiment.run import run_config
    from atlas_fl.experiment.summary import gain_note
    from atlas_fl.report.html.write import write_report

    with show_progress() as on_event, going_on("the same command"):
        result = run_config(config, resume=True, on_event=on_event)
    show(outcome(result.folder, result.summary, complete=result.complete))
    page = write_report([result.folder])
    show([*next_steps(config, folder), str(page)])
    show(["", line] if (line := gain_note(result.summary)) else [])
    return 0


def introduction(config: Config) -> Iterator[str]:
    """Description of a run of this config, in the words of a newcomer."""
    data, rounds = config.data, config.training.rounds
    tasks = ", ".join(data.tasks)
    clients = len(data.tasks) * data.clients_per_task
    yield f"{clients} clients train together on this machine, {data.clients_per_task} for each task: {tasks}."
    yield "Each keeps its own texts and ends with its own model, a small adapter on one frozen encoder."
    yield "  1. fingerprints: which clients are alike, from what each computes on its own texts"
    yield "  2. ranks: how large an adapter each client's device can hold"
    yield f"  3. {rounds} rounds of training and mixing: a line each, with the mean score and the worst client's"
    if config.run.alone != "none":
        yield "     and the same clients once more, each alone: what training together is worth"
    yield "  4. report.html: what came out, on one page"
    yield f"It is `atlas run --preset {config.run.preset}`, which repeats to the bit on this machine."
    yield "Each round says about how long the rest takes. Stop it with Ctrl-C; the same command goes on."


def next_steps(config: Config, folder: "RunFolder") -> Iterator[str]:
    """Next steps after this run."""
    preset = config.run.preset
    yield ""
    yield "What to look at next:"
    yield f"  atlas report {folder.path}    also draws each figure as PNG and PDF"
    yield f"  atlas compare --preset {preset} --strategies local fedavg_cluster atlas --seeds 3    with intervals"
    yield "  docs/guides/your-own-data.md    a csv file of yours"
    yield "Open this page in a browser:"
