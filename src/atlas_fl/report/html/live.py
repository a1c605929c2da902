"""Pages of `atlas watch`: a list of runs, and of each the page that `atlas report` makes of what it has written so far.

A comparison or a sweep is a file that names its runs (`experiment.sweep.write_planned_runs`); its page compares those
that are complete. `live.js` looks for news.
"""

import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TypeAlias
from urllib.parse import quote

from atlas_fl.config import load_config
from atlas_fl.errors import AtlasError
from atlas_fl.report.html.elements import Block, Page, Section, Text, render
from atlas_fl.report.html.run_page import run_page
from atlas_fl.report.table import Cell, Table, plain
from atlas_fl.storage.digests import read_checked_rows
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import PLANNED_RUNS, RunFolder, is_readable_file

CACHED = 16
"""Pages that are kept until their run writes again."""

Places: TypeAlias = Mapping[str, Path]
"""The folders of runs, and the files that name the runs of a comparison, by the names of their pages."""


def find_places(runs: Iterable[Path], runs_dir: Path | None) -> Places:
    """The runs among these folders, and the comparisons that have begun in `runs_dir`."""
    files = sorted(runs_dir.glob(f"*{PLANNED_RUNS}")) if runs_dir else []
    places = [file for file in files if is_readable_file(file)]
    places += [run for run in runs if RunFolder(run).is_resumable()]
    return {_name_of(place): place for place in places}


def _name_of(place: Path) -> str:
    """Its name; bytes that are no text are shown as such."""
    name = place.name or place.resolve().name
    return os.fsencode(name).decode(errors="replace").removesuffix(PLANNED_RUNS)


def state_of(places: Places) -> str:
    """The times of the files that the pages show: another text where one has changed, and where a run is new."""
    return " ".join(f"{name}:{_modified(file)}" for name, place in places.items() for file in _files_of(place))


def _files_of(place: Path) -> list[Path]:
    if place.name.endswith(PLANNED_RUNS):
        return [place, *(RunFolder(run).summary for run in _planned_runs(place))]
    run = RunFolder(place)
    return [run.log, run.plan, run.metrics, run.summary]


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _planned_runs(file: Path) -> list[Path]:
    """The folders of all runs of a comparison, begun or not; none where the file cannot be read now."""
    try:
        return [file.parent / Path(name).name for name in dict.fromkeys(read_json(file)["runs"])]
    except (AtlasError, OSError):
        return []


@lru_cache(CACHED)
def page_text(place: Path, state: str) -> str:
    """The page of a run or a comparison in this state, or why there is none yet."""
    try:
        page = _comparison(place) if place.name.endswith(PLANNED_RUNS) else run_page(place)
    except (AtlasError, OSError) as error:
        page = Page(title=_name_of(place), subtitle="cannot be shown yet", sections=[], warnings=[str(error)])
    return render(page, state=state)


def _comparison(file: Path) -> Page:
    from atlas_fl.report.html.comparison_page import comparison_page  # statistics take seconds to load

    planned = _planned_runs(file)
    complete = [run for run in planned if RunFolder(run).summary.exists()]
    words = f"{len(complete)} of {len(planned)} runs are complete."
    if not complete:
        return Page(title=_name_of(file), subtitle="a comparison that begins", sections=[], warnings=[words])
    page = comparison_page(complete)
    return Page(title=page.title, subtitle=f"{page.subtitle}; {words}", sections=page.sections, warnings=page.warnings)


def list_text(places: Places, state: str) -> str:
    """The page that lists runs, with a link to the page of each and of each comparison."""
    runs = {name: place for name, place in places.items() if not place.name.endswith(PLANNED_RUNS)}
    rows = [[name, *_progress(run, state_of({name: run}))] for name, run in runs.items()]
    block: Block = Table(title="Runs", columns=("run", "rounds", "mean validation score"), rows=rows)
    complete = sum(RunFolder(run).summary.exists() for run in runs.values())
    page = Page(
        title="Runs",
        subtitle=f"{len(runs)} runs, {complete} complete",
        sections=[Section(name="runs", title="How far each is", blocks=[block if rows else Text(lines=["None yet."])])],
        links=[(name, f"/{quote(name)}") for name in places],
    )
    return render(page, state=state)


@lru_cache(1024)
def _progress(run: Path, state: str) -> list[Cell]:  # noqa: ARG001  # what is read changes with the state
    """Rounds and the newest mean validation score of a run, by its settings and rows."""
    folder = RunFolder(run)
    try:
        metrics = read_checked_rows(folder, folder.metrics) if folder.is_run() else []
        rounds = load_config(folder.config, within=run).training.rounds
    except (AtlasError, OSError):
        return ["cannot be read now", plain(None)]
    scores = [(row["round"], row["primary"]) for row in metrics if row.get("split") == "validation"]
    newest = [score for at, score in scores if at == scores[-1][0]]
    done = f"{max(row['round'] for row in metrics)} of {rounds}" if metrics else "begins"
    return ["complete" if folder.summary.exists() else done, plain(fmean(newest) if newest else None)]
