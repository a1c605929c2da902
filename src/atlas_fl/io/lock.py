"""One writer for each run: two sessions that resume the same run would interleave their rounds."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from atlas_fl.errors import CheckpointError

LOCK = ".lock"
DRAFTS = frozenset({LOCK, ".config.toml.writing"})
"""What may lie in a folder where a run was only about to begin."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the run in this folder; the system lets go of it when the process ends, however it ends.

    Raises:
        CheckpointError: another process holds it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a") as file:  # whoever else has put a file of this name there keeps what is in it
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"run {folder} is being written by another process; wait for it, or end it and resume"
                ) from None
            if _is_there(folder / LOCK, file):
                yield
                return


def _is_there(path: Path, file: TextIO) -> bool:
    """Whether this file still has its name: a run that could not be planned may have removed the folder meanwhile."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
