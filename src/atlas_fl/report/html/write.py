"""Write `report.html` of a run, or of several."""

import sys
from collections.abc import Sequence
from pathlib import Path

from atlas_fl.errors import ConfigError
from atlas_fl.report.html.comparison_page import comparison_page
from atlas_fl.report.html.elements import GENERATOR, Page, render
from atlas_fl.report.html.run_page import run_page
from atlas_fl.storage import files, folder_access
from atlas_fl.storage.run_folder import find_run

PAGE = "report.html"
"""In the folder of a run, or in the one in which several runs lie."""
HEAD = 4096
"""Bytes at the beginning of a page among which its generator stands."""


def write_report(runs: Sequence[Path | str], *, to: Path | str | None = None, control: str | None = None) -> Path:
    """Write the page of a run, or the one that compares several, and return its path.

    Args:
        runs: run folders.
        to: the file; by default `report.html` in the folder of the run, or beside the first one of several. What lies
            there and is no page of ours is kept under another name.
        control: of several runs the method that the others are compared with.

    Raises:
        ConfigError: no run is named, no method is called `control`, or nothing can be compared.
        CheckpointError: one is no run folder, or a file in it is damaged.
        DataError: the runs of two methods differ in their clients, or a client has no test score.
    """
    if not runs:
        raise ConfigError("no run is named; give the folders of one or more")
    folders = [find_run(run) for run in runs]
    page: Page = run_page(folders[0].path) if len(folders) == 1 else comparison_page(runs, control=control)
    place = folders[0].path if len(folders) == 1 else folders[0].path.resolve().parent
    path = place / PAGE if to is None else Path(to)
    if path.is_file() and not is_page(path):
        files.set_aside(path)
    folder_access.write_atomic(path, render(page).encode())
    return path


def is_page(path: Path) -> bool:
    """Return whether a file is a page that `write_report` has written."""
    with folder_access.open_named_file(path, max_bytes=sys.maxsize) as file:
        return f'name=generator content="{GENERATOR}"'.encode() in file.read(HEAD)
