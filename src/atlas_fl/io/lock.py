"""One writer for each run: two sessions that resume the same run would interleave their rounds."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atlas_fl.errors import CheckpointError


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the run in this folder; the system lets go of it when the process ends, however it ends.

    Raises:
        CheckpointError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"run {folder} is being written by another process; wait for it, or end it and resume"
            ) from None
        yield
