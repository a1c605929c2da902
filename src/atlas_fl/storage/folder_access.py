"""The one way to open what lies in a folder: no link below it, regular files alone, bounded sizes, unguessable drafts.

A folder may come from somebody else, and then holds what its sender has put there: links to files of the user, pipes
that never begin, devices that never end. The path up to the folder (`within`) is the user's own: links in it are
followed. Below it every part is opened through the descriptor of the part above it, without following links, and
the descriptor is asked for the kind and the size of the file. A file is written under a random name that nobody else
can have put there, flushed to the disk, and renamed: the rename is what the file system promises to do in one step.

Without `within` the folder is the one in which the file lies. Files that a user names himself (`open_named_file`) may
be links, and are regular files of bounded size too.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any

from atlas_fl.errors import CheckpointError

MOST_JSON_BYTES = 1 << 28
"""Most bytes of a file of JSON: a plan of 2,000 clients takes 160 MB."""
MOST_ROWS_BYTES = 1 << 30
"""Most bytes of a file of rows."""
IS_LINK = "a link, which is not followed here"
NOT_REGULAR = "no regular file"
OUTSIDE = "no path inside its folder"
HAS_OTHER_NAME = "a hard link, and so a file with another name, which is not written to; copy the folder"
DRAFT = re.compile(r"\.(.+)\.[0-9a-f]{16}\.writing", re.DOTALL)
"""The name of a draft; its group is the name that the file was to have, or the beginning of a long one."""
_MOST_NAME_BYTES = 200
"""Most bytes of a name in that of its draft: a name of a file system has 255."""


def memory_bytes() -> int:
    """The memory of this machine: what is read whole cannot be larger."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(*, root: Path = Path("/")) -> int | None:
    """Memory that a new process may take: of the machine, or less where a control group (a container) allows less.

    None where the system does not say, as on macOS.
    """
    memory, group = root / "proc/meminfo", root / "sys/fs/cgroup"
    lines = memory.read_text().splitlines() if memory.is_file() else []
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    most, used = group / "memory.max", group / "memory.current"
    if most.is_file() and used.is_file() and most.read_text().strip() != "max":
        limits.append(max(0, int(most.read_text()) - int(used.read_text())))
    return min(limits, default=None)


def check_regular(path: Path) -> None:
    """Raise OSError where the path is of a device, a pipe or a socket; its reader says that nothing is there.

    A device has no end, and a pipe may never begin.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


@contextmanager
def os_errors_with_path(path: Path) -> Iterator[None]:
    """Errors of a full disk or a broken one, which the system raises without saying where, with the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def opened_folder(path: Path, *, within: Path | None = None, create: bool = False) -> Iterator[int]:
    """The descriptor of a folder; no part of its path below `within` is a link. `create` makes what is missing.

    Raises:
        OSError: a part is a link or no folder, or it is not there.
    """
    root = path if within is None else within
    if not path.is_relative_to(root) or ".." in path.relative_to(root).parts:
        raise OSError(errno.EINVAL, OUTSIDE, str(path))
    if create:
        root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        place = root
        for part in path.relative_to(root).parts:
            place = place / part
            inner = _open_inner_folder(descriptor, part, place, create=create)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _open_inner_folder(above: int, name: str, place: Path, *, create: bool) -> int:
    with os_errors_with_path(place):
        if create:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=above)
        if S_ISLNK(os.lstat(name, dir_fd=above).st_mode):
            raise OSError(errno.ELOOP, IS_LINK)
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)


def make_folder(path: Path, *, within: Path) -> Path:
    """Make a folder inside another one, with those between them, and return it; one that is there stays."""
    with opened_folder(path, within=within, create=True):
        return path


def names_in(descriptor: int) -> list[str]:
    """The names in an opened folder."""
    with os.scandir(descriptor) as entries:
        return [entry.name for entry in entries]


def list_folder(path: Path, *, within: Path | None = None) -> list[str]:
    """The names in a folder, sorted; none where there is no such folder. Raises OSError where it is a link."""
    try:
        with opened_folder(path, within=within) as folder:
            return sorted(names_in(folder))
    except FileNotFoundError:
        return []


def is_inner_folder(path: Path) -> bool:
    """Return whether this is a folder itself, and no link to one."""
    return S_ISDIR(_own_mode(path))


def is_inner_file(path: Path) -> bool:
    """Return whether this is a regular file itself, and no link to one."""
    return S_ISREG(_own_mode(path))


def _own_mode(path: Path) -> int:
    """The kind and the rights of what lies there, a link not followed; 0, which is of no kind, where nothing does."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def files_below(path: Path, *, within: Path | None = None) -> Iterator[Path]:
    """The regular files in a folder and in the folders below it, sorted in each; links are left out."""
    folders = [path]
    while folders:
        folder = folders.pop()
        entries = [folder / name for name in list_folder(folder, within=path if within is None else within)]
        yield from (entry for entry in entries if is_inner_file(entry))
        folders += [entry for entry in reversed(entries) if is_inner_folder(entry)]


def _open_file(path: Path, flags: int, *, within: Path | None, max_bytes: int | None = None, mode: int = 0o666) -> int:
    """The descriptor of a regular file that is no link; one that is written to has no other name."""
    with opened_folder(path.parent, within=within) as folder, os_errors_with_path(path):
        with suppress(FileNotFoundError):
            _check_kind(os.stat(path.name, dir_fd=folder, follow_symlinks=False))
        # what it was a moment ago it need not be: the descriptor is asked again, and a pipe is not waited for
        handle = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder)
        return _checked(handle, writes=flags & os.O_ACCMODE != os.O_RDONLY, max_bytes=max_bytes)


def _check_kind(status: os.stat_result) -> None:
    if S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, IS_LINK)
    if S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR)


def _checked(handle: int, *, writes: bool = False, max_bytes: int | None) -> int:
    """The descriptor, closed where it is of no regular file, of a larger one or of one that is not to be written to."""
    try:
        status = os.fstat(handle)
        _check_kind(status)
        if writes and status.st_nlink > 1:
            raise OSError(errno.EMLINK, HAS_OTHER_NAME)
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, and at most {max_bytes:,} are read")
    except OSError:
        os.close(handle)
        raise
    return handle


def open_to_read(path: Path, *, max_bytes: int, within: Path | None = None) -> BufferedReader:
    """A regular file of at most so many bytes, opened to read.

    Raises:
        OSError: it is not there, a link, no regular file or larger.
    """
    return os.fdopen(_open_file(path, os.O_RDONLY, within=within, max_bytes=max_bytes), "rb")


def read_file(path: Path, *, max_bytes: int, within: Path | None = None) -> bytes:
    """The content of a regular file of at most so many bytes; raises OSError as `open_to_read`."""
    with open_to_read(path, max_bytes=max_bytes, within=within) as file, os_errors_with_path(path):
        return file.read()


def read_written(path: Path, *, max_bytes: int, within: Path | None = None) -> bytes:
    """The content of a file that a run has written, as `read_file`.

    Raises:
        CheckpointError: it is not there, or cannot be read.
    """
    try:
        return read_file(path, max_bytes=max_bytes, within=within)
    except FileNotFoundError:
        raise CheckpointError(f"no file {path}; the run did not write it or it was removed") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); restore it or repeat the run") from None


def open_named_file(path: Path, *, max_bytes: int) -> BufferedReader:
    """A file that a user names, opened to read: a link is followed.

    Raises:
        OSError: it is not there, no regular file, or has more bytes.
    """
    with os_errors_with_path(path):
        _check_kind(path.stat())
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return os.fdopen(_checked(handle, max_bytes=max_bytes), "rb")


def read_named_file(path: Path, *, max_bytes: int) -> bytes:
    """The content of a file that a user names; raises OSError as `open_named_file`."""
    with open_named_file(path, max_bytes=max_bytes) as file, os_errors_with_path(path):
        return file.read()


def open_to_append(path: Path, *, within: Path | None = None, mode: int = 0o666) -> BufferedWriter:
    """A regular file opened to append to; one that is not there is made.

    Raises:
        OSError: it is a link, no regular file, or a hard link to a file that has another name.
    """
    return os.fdopen(_open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, within=within, mode=mode), "ab")


def cut_file(path: Path, length: int, *, within: Path | None = None) -> None:
    """Cut a file to its first bytes and flush it to the disk; raises OSError as `open_to_append`."""
    handle = _open_file(path, os.O_RDWR, within=within)
    with os_errors_with_path(path), os.fdopen(handle, "r+b") as file:
        file.truncate(length)
        os.fsync(file.fileno())


def draft_name(name: str) -> str:
    """A new name for the draft of this file, which nobody can guess."""
    beginning = os.fsdecode(os.fsencode(name)[:_MOST_NAME_BYTES])
    return f".{beginning}.{secrets.token_hex(8)}.writing"


def write_pieces(path: Path, pieces: Iterable[Any], *, within: Path | None = None, mode: int = 0o666) -> None:
    """`write_atomic` for content that comes in pieces of bytes and need not be held at once."""
    with opened_folder(path.parent, within=within, create=True) as folder:
        draft = draft_name(path.name)
        try:
            with os_errors_with_path(path):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(draft, flags, mode, dir_fd=folder), "wb") as file:
                    for piece in pieces:
                        file.write(piece)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        finally:
            with suppress(FileNotFoundError):  # it has the file's name, unless something failed
                os.unlink(draft, dir_fd=folder)


def write_atomic(path: Path, content: bytes, *, within: Path | None = None, mode: int = 0o666) -> None:
    """Replace a file in one step: a reader, or a crash at any moment, sees the old content or the new.

    A link in its place is replaced, and what it points to stays.
    """
    write_pieces(path, [content], within=within, mode=mode)


def remove_drafts(folder: Path, *, of: re.Pattern[str]) -> None:
    """Remove what writes that did not end have left in a folder, of files whose names match this.

    Only for who alone writes such files there: somebody else's write that goes on would fail.
    """
    with opened_folder(folder) as descriptor:
        for name in names_in(descriptor):
            match = DRAFT.fullmatch(name)
            if match and of.fullmatch(match[1]) and S_ISREG(os.lstat(name, dir_fd=descriptor).st_mode):
                os.unlink(name, dir_fd=descriptor)
