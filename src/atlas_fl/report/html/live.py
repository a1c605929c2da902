"""Pages of `atlas watch`: a list of runs, and of each the page that `atlas report` makes of what it has written so far.

`live.js` looks for news.
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
from atlas_fl.storage.run_folder import RunFolder

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
    return render(page, state=state)


def list_text(places: Places, state: str) -> str:
    """The page that lists runs, with a link to the page of each."""
    rows = [[name, *_progress(run, state_of({name: run}))] for name, run in places.items()]
    block: Block = Table(title="Runs", columns=("run", "rounds", "mean validation score"), rows=rows)
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
        return ["cannot be read now", plain(None)]
    scores = [(row["round"], row["primary"]) for row in metrics if row.get("split") == "validation"]
    newest = [score for at, score in scores if at == scores[-1][0]]
    done = f"{max(row['round'] for row in metrics)} of {rounds}" if metrics else "begins"
    return ["complete" if folder.summary.exists() else done, plain(fmean(newest) if newest else None)]
