"""`atlas doctor`, what there is, and `atlas demo`, a first run that explains itself."""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.cli.options import DemoOptions, DoctorOptions
from atlas_fl.config import Config, run_folder, validate
from atlas_fl.config.presets import find_preset
from atlas_fl.report.format import EMPTY, human_bytes
from atlas_fl.report.table import Table

if TYPE_CHECKING:
    from atlas_fl.experiment.installation import Installation, Problem
    from atlas_fl.storage.run_folder import RunFolder

MISSING = 1
ALWAYS_SHOWN = ("torch", "transformers", "peft", "datasets", "numpy", "scikit-learn")


def doctor(options: DoctorOptions) -> int:
    """Show what there is; 0 where a run of the embedded presets needs nothing else, 1 where it does."""
    from atlas_fl.experiment.installation import inspect_installation, problems_of

    found = inspect_installation(runs_dir=Path(options.runs_dir))
    problems = tuple(problems_of(found))
    is_ready = not any(problem.is_needed for problem in problems)
    show(installation_page(found))
    show(["", *problem_lines(problems)])
    return 0 if is_ready else MISSING


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
    for purpose, (path, free_on_disk) in found.folders.items():
        yield f"{purpose}: {path}, {human_bytes(free_on_disk)} free on its disk"
    yield ""
    rows = [
        (asset.name, asset.state, str(asset.folder) if asset.state == "whole" else f"atlas fetch {asset.group}")
        for asset in found.assets
    ]
    columns = ("name", "state", "where it lies, or how to get it")
    yield Table(title="Embedded models and data", columns=columns, rows=rows)


def gpu_lines(torch: Any) -> Iterator[str]:
    """Name and memory of each GPU that this PyTorch can use."""
    for index in range(torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        yield f"{torch.cuda.get_device_name(index)}, {human_bytes(free)} of {human_bytes(total)} free"


def problem_lines(problems: "Sequence[Problem]") -> Iterator[str]:
    """A line for each problem with its remedy, what is needed first, and the verdict."""
    for problem in sorted(problems, key=lambda problem: not problem.is_needed):
        yield f"{'missing' if problem.is_needed else 'note'}: {problem.text}; {problem.remedy}"
    count = sum(problem.is_needed for problem in problems)
    things = "1 thing is" if count == 1 else f"{count} things are"
    yield f"{things} missing" if count else "everything is here that the embedded presets need"


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
