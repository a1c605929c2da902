"""The page of a comparison or a sweep while it goes on: how many of its runs are complete, and what they say so far.

`atlas compare` and `atlas sweep` write the names of their runs beside them before the first begins
(`experiment.sweep.write_planned_runs`); everything else is read from the runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean

from atlas_fl.errors import CheckpointError, ConfigError, DataError
from atlas_fl.report.html.comparison_page import comparison_page
from atlas_fl.report.html.elements import Fact, Facts, Page, Section, Text
from atlas_fl.report.html.live_page import SILENT, Progress, read_progress, summary_row
from atlas_fl.report.table import Table, count, duration
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class ComparisonProgress:
    """Progress of the runs of a comparison."""

    complete: tuple[Path, ...]
    going_on: tuple[Path, ...]
    """Runs that have begun, are not complete, and have logged something of late."""
    total: int
    seconds_left: float | None
    """Time of all that is not complete if each run takes as long as those before, and as many go on at once as now;
    None before one is complete and while none goes on."""


def planned_folders(file: Path) -> list[Path]:
    """The folders of all runs of a comparison, begun or not; raises `CheckpointError` where the file is damaged."""
    content = read_json(file)
    names = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(_is_name(name) for name in names):
        raise CheckpointError(f"damaged file {file}: it does not name runs; delete it, the runs themselves are whole")
    return [file.parent / name for name in dict.fromkeys(names)]


def _is_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name != ".."


def comparison_progress(folders: Sequence[Path], *, now: datetime) -> ComparisonProgress:
    """Progress of these runs, by their logs. Raises OSError if one cannot be read."""
    begun = {path: read_progress(RunFolder(path), now=now) for path in folders if RunFolder(path).is_resumable()}
    complete = tuple(path for path, progress in begun.items() if progress.is_over)
    going_on = tuple(path for path, one in begun.items() if not one.is_over and one.silent <= SILENT)
    seconds = [begun[path].seconds for path in complete]
    rest = sum(_share_left(begun.get(path)) for path in folders)
    return ComparisonProgress(
        complete=complete,
        going_on=going_on,
        total=len(folders),
        seconds_left=fmean(seconds) * rest / len(going_on) if seconds and going_on else None,
    )


def _share_left(progress: Progress | None) -> float:
    """Share of a run that is still to be done."""
    if progress is not None and progress.is_over:
        return 0.0
    return 1.0 if progress is None or progress.rounds is None else 1 - progress.done / progress.rounds


def live_comparison(name: str, file: Path, *, now: datetime, compared: dict[tuple[Path, ...], Page]) -> Page:
    """The page of a comparison: what happens now, and below it the comparison of the runs that are complete.

    `compared` holds the page of the complete runs that were compared last, since statistics over many seeds take
    seconds; it is replaced when another run is complete.
    """
    try:
        progress = comparison_progress(planned_folders(file), now=now)
        page = compared.get(progress.complete) or _comparison_page(progress.complete)
    except (CheckpointError, OSError) as error:
        return Page(title=name, subtitle="cannot be read now", sections=[], warnings=[str(error)])
    compared.clear()
    compared[progress.complete] = page
    if len(progress.complete) == progress.total:
        return page
    return replace(page, title=name, subtitle=_words(progress), sections=[_now(progress, now=now), *page.sections])


def _comparison_page(complete: tuple[Path, ...]) -> Page:
    """The comparison of these runs; the reason where they cannot be compared yet."""
    if not complete:
        return Page(title="", subtitle="", sections=[], warnings=["No run is complete so far."])
    try:
        return comparison_page(complete)
    except (ConfigError, DataError, CheckpointError) as error:
        return Page(title="", subtitle="", sections=[], warnings=[f"Not compared so far: {error}"])


def _words(progress: ComparisonProgress) -> str:
    return f"{len(progress.complete)} of {progress.total} runs complete, {len(progress.going_on)} going on"


def _now(progress: ComparisonProgress, *, now: datetime) -> Section:
    facts = [
        Fact(name="runs complete", value=f"{len(progress.complete)} of {progress.total}"),
        Fact(name="going on", value=count(len(progress.going_on))),
    ]
    if progress.seconds_left is not None:
        facts.append(Fact(name="left, about", value=duration(progress.seconds_left), note="as the runs before took"))
    rows = [[path.name, *summary_row(RunFolder(path), now=now)] for path in progress.going_on]
    columns = ("run", "state", "rounds", "mean validation score")
    runs = Table(title="Runs that go on", columns=columns, rows=rows) if rows else Text(lines=["No run goes on now."])
    return Section(name="now", title="What happens now", blocks=[Facts(facts=facts), runs])
