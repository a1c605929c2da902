"""Files written whole or not at all, locked for one writer, and read only where they are regular; a machine's secret.

A file is written under another name, flushed to the disk, and renamed: the rename is what the file system promises to
do in one step. The folder is flushed too, because the new name is an entry of the folder. The lock keeps two processes
from resuming the same run.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from atlas_fl.errors import CheckpointError, ConfigError


def check_regular(path: Path) -> None:
    """Nothing where the path is of a file, of a folder, or of nothing at all, which its reader tells.

    A device has no end, and a pipe may never begin.

    Raises:
        OSError: it is of something else.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "no regular file", str(path))


DRAFT_MARKER = ".atlas"
"""Marks a folder of drafts as one that may be removed."""
_OS_ERROR = re.compile(r"os error (\d+)")


@contextmanager
def os_errors_with_path(path: Path) -> Iterator[None]:
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
    # what a failed write left in the file's buffer is tried again when it is closed, and fails without a name
    with os_errors_with_path(path), path.open("wb") as file:
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
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to write files into; with all of them it becomes `path` in one step, or nothing is left of it.

    Files that lie at `path` before are kept, but for those of the same names, which are replaced one by one.

    Raises:
        OSError: the disk takes no more, or failed; it names `path`, whoever wrote.
    """
    drafts = path.with_name(f".{path.name}.writing")
    _remove_drafts(drafts)
    content = drafts / "content"
    try:
        drafts.mkdir(parents=True)
        (drafts / DRAFT_MARKER).touch()
        content.mkdir()
        yield content
        for file in sorted(content.iterdir()):
            _sync_file(file)
        sync_folder(content)
        _publish(content, path)
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    except SafetensorError as error:
        match = _OS_ERROR.search(str(error))
        code = int(match[1]) if match else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    finally:
        _remove_drafts(drafts)


def set_aside(path: Path, *, name: str | None = None) -> Path:
    """Where what lay at a path lies now: beside it, as `NAME.kept-1` or the next that is free.

    So is kept what is in the way and was not written here.
    """
    number = 1
    while os.path.lexists(backup := path.with_name(f"{name or path.name}.kept-{number}")):
        number += 1
    path.rename(backup)
    return backup


def _sync_file(file: Path) -> None:
    """Have a file on the disk that another library has written."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _publish(content: Path, path: Path) -> None:
    if not path.exists() or not any(path.iterdir()):
        content.rename(path)
        return
    for file in sorted(content.iterdir()):
        file.replace(path / file.name)


def _remove_drafts(folder: Path) -> None:
    """Remove what a write that did not end has left; raises `ConfigError` for a folder of this name of another's."""
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / DRAFT_MARKER).is_file():
        raise ConfigError(f"{folder} is in the way, and is not of ATLAS; move it away")
    shutil.rmtree(folder)


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
            if _is_same_file(folder / LOCK, file):
                yield
                return


def _is_same_file(path: Path, file: TextIO) -> bool:
    """Whether this file still has its name: a run that could not be planned may have removed the folder meanwhile."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


SECRET_BYTES = 32


def secret_file(folder: Path, name: str) -> Path:
    """Where the secret of the client of this name lies in a folder."""
    return folder / f"{name}-secret"


def load_or_create_secret(path: Path) -> bytes:
    """The 32 bytes that this file holds as hexadecimal digits; where there is no file, they are drawn and written.

    Raises `ConfigError` where something else is there.
    """
    if not path.exists():
        _write_private(path, secrets.token_bytes(SECRET_BYTES).hex())
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """The 32 bytes that this file holds as hexadecimal digits.

    Raises `ConfigError` where there is no file, or something else.
    """
    if not path.exists():
        raise ConfigError(f"no secret {path}; copy it there from where its site keeps it, beside --to")
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii")) if path.is_file() else b""
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{path} is no secret of {2 * SECRET_BYTES} hexadecimal digits; put back the one that was there, or"
            " remove it and a new one is drawn"
        )
    return secret


def secret_digest(secret: bytes | None) -> str:
    """Sixteen hexadecimal digits that tell two secrets apart and tell nothing of either; none of no secret."""
    return "" if secret is None else blake2b(secret, person=b"secret digest", digest_size=8).hexdigest()


def _write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600 in one step, so that a process that is killed leaves none or the whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.writing")
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600, exist_ok=False)
    write_synced(draft, [text.encode()])
    draft.replace(path)
    sync_folder(path.parent)
