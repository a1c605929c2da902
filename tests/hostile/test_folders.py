"""Folders that somebody else has filled: links, pipes, devices, depth and sizes end in one line and change nothing.

A folder is that of a finished run, or of one that is to go on, in which entries are replaced. Every command that reads
or writes a run's folder is tried on it in this process: it succeeds, or says one line, within a time, and what lies
outside is what it was, byte for byte.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import pytest

from atlas_fl.cli.main import main
from atlas_fl.config import Config
from tests.runs.conftest import loaded_models as loaded_models
from tests.runs.conftest import models_loaded_once as models_loaded_once
from tests.runs.finished import FinishedRuns

SECONDS = 120
"""Longest time of a command; only a hang takes it."""
CANARY = b"what a user has outside\n" * 50

Change: TypeAlias = Callable[[Path, Path, random.Random], None]
"""(the entry to replace, what lies outside, a generator)."""


@pytest.fixture(scope="module")
def templates(
    shared_config: Callable[..., Config], finished: FinishedRuns, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A finished run, and the same run before its end was written."""
    folder = tmp_path_factory.mktemp("templates")
    complete = finished(shared_config(tasks=("movie",), rounds=2)).folder
    shutil.copytree(complete, folder / "complete")
    shutil.copytree(complete, folder / "begun")
    for name in ("summary.json", "digests.json", "adapters"):
        _remove(folder / "begun" / name)
    return {name: folder / name for name in ("complete", "begun")}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def link_to_file(path: Path, outside: Path, _: random.Random) -> None:
    path.symlink_to(outside / "canary.txt")


def link_to_folder(path: Path, outside: Path, _: random.Random) -> None:
    path.symlink_to(outside)


def link_to_nothing(path: Path, outside: Path, _: random.Random) -> None:
    path.symlink_to(outside / "not-there")


def hard_link(path: Path, outside: Path, _: random.Random) -> None:
    path.hardlink_to(outside / "canary.txt")


def device(path: Path, _: Path, draw: random.Random) -> None:
    path.symlink_to(draw.choice(["/dev/zero", "/dev/null", "/dev/full"]))


def pipe(path: Path, _: Path, __: random.Random) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, _: Path, __: random.Random) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(path.name)
    finally:
        os.chdir(here)


def empty_folder(path: Path, _: Path, __: random.Random) -> None:
    path.mkdir()


def empty_file(path: Path, _: Path, __: random.Random) -> None:
    path.touch()


def huge(path: Path, _: Path, draw: random.Random) -> None:
    # one in four fits into memory: a digest is taken of all of it, which takes a second
    with path.open("wb") as file:
        file.truncate(draw.choice([(1 << 30) + 1, *[1 << 40] * 3]))


def deep(path: Path, _: Path, draw: random.Random) -> None:
    depth = draw.choice([65, 400, 980, 100_000])
    path.write_text('{"notes": ' + "[" * depth + "]" * depth + "}")


def wrong_type(path: Path, _: Path, draw: random.Random) -> None:
    path.write_text(json.dumps(draw.choice([None, 1, "x", [], {}, [[]], {"runs": 1}, {"files": []}, {"clients": 3}])))


def noise(path: Path, _: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(300))


CHANGES: tuple[Change, ...] = (
    *(link_to_file, link_to_folder, link_to_nothing, hard_link, device, pipe, unix_socket),
    *(empty_folder, empty_file, huge, deep, wrong_type, noise),
)
LINKS: tuple[Change, ...] = (link_to_file, link_to_folder, link_to_nothing, hard_link, device, pipe)
DRAFTS = (
    *(".report.html.writing", "figures", "figures/.adjacency.csv.writing", ".summary.json.writing"),
    *(".digests.json.writing", "adapters", "adapters/.movie-0.writing", "adapters/movie-0", ".lock", "report.html"),
    *("figures/adjacency.csv", "figures/classes.csv", "figures/classes.png"),
    *("models", "checkpoints/.round-0002.writing"),
    *("audit/round-0003", "tuning.json", "heard.json", "sites.json", "mask.safetensors", ".plan.json.writing"),
)
"""What a finished run does not have, and a command may write or read."""


def entries(folder: Path) -> list[str]:
    """What lies in a run's folder, and what a command may put there."""
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return [*there, *(name for name in DRAFTS if name not in there)]


COMMANDS: dict[str, tuple[str, Callable[[Path, Path], int]]] = {
    "report": ("complete", lambda run, _: main(["report", str(run), "--page-only"])),
    "results": ("complete", lambda run, _: main(["results", str(run.parent)])),
    "audit": ("complete", lambda run, _: main(["audit", str(run)])),
    "export": ("complete", lambda run, to: main(["export", str(run), "--client", "0", "--to", str(to / "exported")])),
    "masks": ("complete", lambda run, _: main(["masks", str(run)])),
    "resume": ("begun", lambda run, _: main(["resume", str(run)])),
    "resume of a complete one": ("complete", lambda run, _: main(["resume", str(run)])),
    "report of one that goes on": ("begun", lambda run, _: main(["report", str(run), "--page-only"])),
}


@contextmanager
def limited() -> Iterator[None]:
    """Fail what takes longer than `SECONDS`."""

    def stop(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"no end after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outside_of(folder: Path) -> Path:
    outside = folder / "outside"
    outside.mkdir()
    (outside / "canary.txt").write_bytes(CANARY)
    (outside / "record.json").write_bytes(CANARY)
    return outside


def seen(outside: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in outside.iterdir()}


def try_folder(
    template: Path,
    place: Path,
    changes: list[tuple[str, Change]],
    run_command: Callable[[Path, Path], int],
    draw: random.Random,
    capsys: pytest.CaptureFixture[str],
) -> int:
    """The exit code of a command on a copy of the template with these entries replaced; it ends in order."""
    outside, run = outside_of(place), place / "runs" / "run"
    shutil.copytree(template, run)
    for name, change in changes:
        path = run / name
        _remove(path)
        if path.parent.is_dir() and not path.parent.is_symlink():
            change(path, outside, draw)
    before = seen(outside)
    capsys.readouterr()
    with limited(), contextlib.suppress(FileNotFoundError):
        code = run_command(run, place)
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out
    assert code in (0, 1, 2)
    if code == 2:
        assert told.err.splitlines()[-1].startswith("atlas: ")
    assert seen(outside) == before, f"{changes} of {run}"
    return code


def hostile_case(seed: int, template: dict[str, Path]) -> tuple[str, list[tuple[str, Change]], random.Random]:
    draw = random.Random(seed)
    command = draw.choice(sorted(COMMANDS))
    names = entries(template[COMMANDS[command][0]])
    chosen = [
        (draw.choice(names if draw.random() < 0.5 else [name for name in names if name.count("/") == 0]), change)
        for change in draw.choices(CHANGES, k=draw.choice([1, 1, 2, 3]))
    ]
    return command, chosen, draw


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [0, 75, *(pytest.param(start, marks=pytest.mark.product) for start in range(150, 525, 75))]
)
def test_five_hundred_hostile_folders_end_in_one_line_and_change_nothing_outside(
    start: int, templates: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(start, start + 75):
        command, changes, draw = hostile_case(seed, templates)
        place = tmp_path / str(seed)
        place.mkdir()
        try:
            template, run_command = COMMANDS[command]
            try_folder(templates[template], place, changes, run_command, draw, capsys)
        except BaseException as error:
            error.add_note(f"seed {seed}: {command}, {[(name, change.__name__) for name, change in changes]}")
            raise
        shutil.rmtree(place)
