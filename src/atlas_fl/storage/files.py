"""Folders written whole or not at all, what is set aside, the lock of one writer, and a machine's secret.

Everything is opened by `storage.folder_access`. The lock keeps two processes from resuming the same run, and from
writing the same account.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from io import BufferedWriter
from pathlib import Path

from safetensors import SafetensorError

from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.storage import folder_access

DRAFT_MARKER = ".atlas"
"""Marks a folder of drafts as one that may be removed."""
_OS_ERROR = re.compile(r"os error (\d+)")


@contextmanager
def atomic_folder(path: Path, *, within: Path | None = None, mode: int = 0o777) -> Iterator[Path]:
    """A folder to write files into; with all of them it becomes `path` in one step, or nothing is left of it.

    Files that lie at `path` before are kept, but for those of the same names, which are replaced one by one. No part of
    the path below `within` is a link, nor is `path` itself. The draft of a folder is no folder with a draft of its own.

    Raises:
        OSError: the disk takes no more, or failed, or there is a link; it names `path`, whoever wrote.
    """
    if folder_access.is_inner_file(path.parent / DRAFT_MARKER):
        yield path
        return
    drafts = path.with_name(folder_access.draft_name(path.name))
    content = drafts / "content"
    try:
        with folder_access.opened_folder(path.parent, within=within, create=True) as parent:
            _remove_drafts(parent, of=path)
            os.mkdir(drafts.name, 0o700, dir_fd=parent)
            (drafts / DRAFT_MARKER).touch()
            content.mkdir(mode)
            yield content
            for file in sorted(path for path in content.rglob("*") if not path.is_dir()):  # of other libraries, too
                with folder_access.open_to_read(file, max_bytes=sys.maxsize) as opened:
                    os.fsync(opened.fileno())
            with folder_access.opened_folder(content) as descriptor:
                os.fsync(descriptor)
            _publish(content, path)
            os.fsync(parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    except SafetensorError as error:
        match = _OS_ERROR.search(str(error))
        code = int(match[1]) if match else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    finally:
        if folder_access.is_inner_folder(drafts):
            shutil.rmtree(drafts)


def set_aside(path: Path, *, name: str | None = None) -> Path:
    """Move what lies at a path beside it, as `NAME.kept-1` or the next that is free, and return its place.

    So is kept what is in the way and was not written here.
    """
    number = 1
    while os.path.lexists(backup := path.with_name(f"{name or path.name}.kept-{number}")):
        number += 1
    path.rename(backup)
    return backup


def _publish(content: Path, path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, folder_access.IS_LINK, str(path))
    if not path.exists() or not any(path.iterdir()):
        content.rename(path)
        return
    for file in sorted(content.iterdir()):
        file.replace(path / file.name)


def _remove_drafts(parent: int, *, of: Path) -> None:
    """Remove what writes of this folder that did not end have left: folders of a draft's name that bear its mark."""
    for name in folder_access.names_in(parent):
        match = folder_access.DRAFT.fullmatch(name) if name.startswith(".") else None
        if match is None or match[1] != of.name or not folder_access.is_inner_folder(drafts := of.with_name(name)):
            continue
        if folder_access.is_inner_file(drafts / DRAFT_MARKER) or not folder_access.list_folder(drafts):
            shutil.rmtree(drafts)


LOCK = ".lock"
_DRAFT_OF_SETTINGS = re.compile(r"\.config\.toml\.([0-9a-f]{16}\.)?writing")


def is_left_of_beginning(name: str) -> bool:
    """Return whether a file of this name may lie in a folder where a run was only about to begin."""
    return name == LOCK or _DRAFT_OF_SETTINGS.fullmatch(name) is not None


@contextmanager
def run_lock(folder: Path, *, file: str = LOCK, waits: bool = False) -> Iterator[None]:
    """Hold the run in this folder, or what another `file` there is the lock of.

    The system lets go of it when the process ends, however it ends.

    Raises:
        CheckpointError: another process holds it, and this one does not wait for that.
        OSError: what has the name of the lock is a link, or no regular file.
    """
    path = folder / file
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        # whoever else has put a file there keeps what is in it; who can open a lock that is waited for can hold it
        with folder_access.open_to_append(path, mode=0o600 if waits else 0o666) as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                raise CheckpointError(
                    f"run {folder} is being written by another process; wait for it, or end it and resume"
                ) from None
            if _is_same_file(path, opened):
                yield
                return


def _is_same_file(path: Path, file: BufferedWriter) -> bool:
    """Return whether this file still has its name: a run that could not be planned may have removed the folder."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


SECRET_BYTES = 32


def secret_file(folder: Path, name: str) -> Path:
    """Path of this client's secret in a folder."""
    return folder / f"{name}-secret"


def load_or_create_secret(path: Path) -> bytes:
    """The 32 bytes that this file holds as hexadecimal digits; where there is no file, they are drawn and written.

    Raises `ConfigError` where something else is there.
    """
    if not os.path.lexists(path):
        if path.parent.is_dir():
            folder_access.remove_drafts(path.parent, of=re.compile(re.escape(path.name)))
        folder_access.write_atomic(path, secrets.token_bytes(SECRET_BYTES).hex().encode(), mode=0o600)
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """The 32 bytes that this file holds as hexadecimal digits.

    Raises `ConfigError` where there is no file, or something else.
    """
    if not path.exists():
        raise ConfigError(f"no secret {path}; copy it there from where its site keeps it, beside --to")
    try:
        secret = bytes.fromhex(folder_access.read_file(path, max_bytes=8 * SECRET_BYTES).decode("ascii"))
    except (OSError, ValueError):
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
