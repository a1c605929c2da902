"""Files that are either there in full or not there at all.

A file is written under another name, flushed to the disk, and renamed; the rename is what the file system promises
to do in one step. The folder is flushed too, because the new name lives there and not in the file.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of a full disk or a broken one, which the system raises without saying where, with the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Flush the names that a folder holds to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, pieces: Iterable[Any]) -> None:
    """Write pieces of bytes one after the other and flush them to the disk; this is no single step."""
    with path.open("wb") as file, named(path):
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader, or a crash at any moment, sees the old content or the new."""
    write_pieces(path, [content])


def write_pieces(path: Path, pieces: Iterable[Any]) -> None:
    """`write_atomic` for content that comes in pieces of bytes and need not be held at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.writing")
    try:
        write_synced(draft, pieces)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(path)
    sync_folder(path.parent)
