"""Pages of `atlas watch`: a list of runs, and of each the page that `atlas report` makes of what it has written so far.

`live.js` looks for news.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TypeAlias
from urllib.parse import quote

from atlas_fl.config import load_config
from atlas_fl.errors import AtlasError
from atlas_fl.report.format import EMPTY, seconds
from atlas_fl.report.html.elements import Block, Page, Section, Text, render
from atlas_fl.report.html.run_page import run_page
from atlas_fl.report.table import Cell, Table, plain
from atlas_fl.storage.digests import read_checked_rows
from atlas_fl.storage.folder_access import MOST_JSON_BYTES, read_file
from atlas_fl.storage.run_folder import RunFolder

_ROUND = re.compile(r"^\S+ INFO round (\d{1,9}) of (\d{1,9}): loss \S+, (\d{1,9}\.\d) s, ", re.MULTILINE)
"""The line that a finished round leaves in the log: its number, the rounds of the run, its seconds."""
CACHED = 16
"""Pages that are kept until their run writes again."""

Places: TypeAlias = Mapping[str, Path]
"""The folders of runs by the names of their pages."""


def find_places(runs: Iterable[Path]) -> Places:
    """The runs among these folders."""
    return {_name_of(run): run for run in runs if RunFolder(run).is_resumable()}


def _name_of(run: Path) -> str:
    """Its name; bytes that are no text are shown as such."""
    return os.fsencode(run.name or run.resolve().name).decode(errors="replace")


def state_of(places: Places) -> str:
    """The times of the files that the pages show: another text where one has changed, and where a run is new."""
    folders = {name: RunFolder(run) for name, run in places.items()}
    return " ".join(
        f"{name}:{_modified(file)}"
        for name, run in folders.items()
        for file in (run.log, run.plan, run.metrics, run.summary)
    )


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(CACHED)
def page_text(run: Path, state: str) -> str:
    """The page of a run in this state, or why there is none yet."""
    try:
        page = run_page(run)
    except (AtlasError, OSError) as error:
        page = Page(title=_name_of(run), subtitle="cannot be shown yet", sections=[], warnings=[str(error)])
    left = _time_left(RunFolder(run))
    warnings = [*page.warnings, f"About {left} left, by what its rounds took."] if left else page.warnings
    return render(replace(page, warnings=warnings), state=state)


def _time_left(folder: RunFolder) -> str:
    """About how long the rounds to come of a run take, by the mean of those in its log; empty before round one."""
    try:
        log = read_file(folder.log, max_bytes=MOST_JSON_BYTES, within=folder.path).decode(errors="replace")
    except OSError:
        return ""
    finished = _ROUND.findall(log)
    left = int(finished[-1][1]) - int(finished[-1][0]) if finished and not folder.summary.exists() else 0
    return seconds(left * fmean(float(taken) for _, _, taken in finished)) if left > 0 else ""


def list_text(places: Places, state: str) -> str:
    """The page that lists runs, with a link to the page of each."""
    rows = [[name, *_progress(run, state_of({name: run}))] for name, run in places.items()]
    block: Block = Table(title="Runs", columns=("run", "rounds", "time left", "mean validation score"), rows=rows)
    complete = sum(RunFolder(run).summary.exists() for run in places.values())
    page = Page(
        title="Runs",
        subtitle=f"{len(places)} runs, {complete} complete",
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
        return ["cannot be read now", EMPTY, plain(None)]
    scores = [(row["round"], row["primary"]) for row in metrics if row.get("split") == "validation"]
    newest = [score for at, score in scores if at == scores[-1][0]]
    done = f"{max(row['round'] for row in metrics)} of {rounds}" if metrics else "begins"
    state_of_rounds = "complete" if folder.summary.exists() else done
    return [state_of_rounds, _time_left(folder) or EMPTY, plain(fmean(newest) if newest else None)]
