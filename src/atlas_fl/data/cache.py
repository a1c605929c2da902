"""Cache of data sets that were read already, shared by the parts of a run and the runs of a process.

An entry is used for as long as the files that it was read from have the size, the inode and the times that they had;
else they are read anew.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from sys import getsizeof
from threading import RLock
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from atlas_fl.data.task import Images, Rows, Source, Task, TaskData

MAX_BYTES = 256 << 20
"""Bytes of texts, pixels and labels that stay in memory: CIFAR-10 whole, or some millions of sentences."""
CLOCK_TICK_SECONDS = 0.02
"""File systems take their times from a clock that stands still for up to some hundredths of a second."""

Signature: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Path, and device, inode, size, time of the content and time of the inode; nothing of these for a missing file."""
Value = TypeVar("Value")


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


@dataclass(frozen=True, kw_only=True)
class _Entry:
    signature: Signature
    value: Any
    num_bytes: int


@dataclass(kw_only=True, eq=False)
class DataCache:
    """Values that were read from files, the least recently used of them dropped beyond a number of bytes.

    Their arrays are read-only, so that no reader can alter what the next one gets. Threads may share a cache: who asks
    for what another is reading waits for it.
    """

    max_bytes: int = MAX_BYTES
    _entries: dict[Hashable, _Entry] = field(default_factory=dict)
    """The most recently used last."""
    _lock: Any = field(default_factory=RLock)

    @property
    def num_bytes(self) -> int:
        """Bytes of texts, pixels and labels in all entries."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def get(self, key: Hashable, *, files: Iterable[Path], read: Callable[[], Value]) -> Value:
        """Value that `read` returns, or returned for this key while these files were as they are now.

        A value of more than `max_bytes` is returned and not kept. What `read` raises is raised every time.
        """
        with self._lock:
            signature = file_signature(files)
            entry = self._entries.pop(key, None)
            if entry is None or entry.signature != signature:
                _wait_for_clock(signature)
                value = read()
                entry = _Entry(signature=signature, value=value, num_bytes=_make_read_only(value))
            if entry.num_bytes <= self.max_bytes:
                self._entries[key] = entry
            while self.num_bytes > self.max_bytes:
                del self._entries[next(iter(self._entries))]
            return cast("Value", entry.value)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._entries.clear()


DATA_CACHE = DataCache()
"""The cache of this process."""


def load_task(task: Task, source: Source) -> TaskData:
    """The splits of a task; read once for as long as its files do not change, if the task names them."""
    if task.files is None:
        return task.load(source)
    return DATA_CACHE.get((task.load, source), files=task.files(source), read=lambda: task.load(source))


def _wait_for_clock(signature: Signature) -> None:
    """Return once a later change of these files would change their times: some hundredths of a second at most."""
    newest = max((max(numbers[-2:]) for _, numbers in signature if numbers), default=0)
    age = (time.time_ns() - newest) / 1e9
    if 0 <= age < CLOCK_TICK_SECONDS:
        time.sleep(CLOCK_TICK_SECONDS - age)


def _make_read_only(value: Any) -> int:
    """The bytes of the texts and arrays in a value; its arrays are read-only from now on."""
    num_bytes = 0
    for leaf in _leaves(value):
        if isinstance(leaf, str):
            num_bytes += getsizeof(leaf)
        else:
            leaf.flags.writeable = False
            num_bytes += leaf.nbytes
    return num_bytes


def _leaves(value: Any) -> Iterator[str | np.ndarray[Any, Any]]:
    """The texts and arrays in the examples of a value."""
    if isinstance(value, str | np.ndarray):
        yield value
    elif isinstance(value, TaskData | Rows | Images):
        yield from _leaves(tuple(vars(value).values()))
    elif isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
