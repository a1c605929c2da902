"""Data sets that were read already, shared by the parts of a run and the runs of a process.

What was read is used for as long as its files have the size, the inode and the times that they had; else they are read
anew.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from stat import S_ISDIR
from threading import RLock
from typing import Any, TypeAlias, TypeVar

from atlas_fl.data.task import Source, Task, TaskData

MOST_KEPT = 32
"""Data sets that are kept; the one that was read first goes first."""

Signature: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Path, and device, inode, size, time of the content and time of the inode; nothing of these for a missing file."""
Value = TypeVar("Value")

_KEPT: dict[Hashable, tuple[Signature, Any]] = {}
_LOCK = RLock()


def file_signature(paths: Iterable[Path]) -> Signature:
    """Signature that tells files, and folders with all in them, from later versions, without opening any."""
    return tuple(entry for path in paths for entry in _entries(path, above=()))


def _entries(path: Path, *, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Entries of a path and of all below it, through links too; `above` are the folders that it lies in."""
    try:
        stat = path.stat()
        folder = (stat.st_dev, stat.st_ino)
        inner = sorted(path.iterdir()) if S_ISDIR(stat.st_mode) and folder not in above else []
    except OSError:
        yield str(path), ()
        return
    yield str(path), (*folder, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    for child in inner:
        yield from _entries(child, above=(*above, folder))


def read_once(key: Hashable, *, files: Iterable[Path], read: Callable[[], Value]) -> Value:
    """Value that `read` returns, or returned for this key while these files were as they are now; not to be altered."""
    with _LOCK:  # another thread that asks for the same waits for it
        signature = file_signature(files)
        if key not in _KEPT or _KEPT[key][0] != signature:
            _KEPT[key] = (signature, read())
        value: Value = _KEPT[key][1]
        while len(_KEPT) > MOST_KEPT:
            del _KEPT[next(iter(_KEPT))]
        return value


def forget() -> None:
    """Drop all that was read."""
    _KEPT.clear()


def load_task(task: Task, source: Source) -> TaskData:
    """The splits of a task; read once for as long as its files do not change, if the task names them."""
    if task.files is None:
        return task.load(source)
    return read_once((task.load, source), files=task.files(source), read=lambda: task.load(source))
