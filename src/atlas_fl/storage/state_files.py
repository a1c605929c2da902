"""States of frozen blocks on the disk: sealed files by key that processes and runs share, within a budget of bytes.

A file is named by its key, which says all that its states follow from, so whoever writes it writes the same. It is
written under a name of its writer and renamed. It begins with the SHA-256 of key and content: one that is damaged, was
cut short or stands under another's name is told once and counts as missing.

What this run has written or read stays; of what is older, the least recently used makes room. A file's time of change
is that of its last use. Several processes may count at once, so the files may exceed the budget for a while, by a
sixteenth of it for each.
"""

import os
import re
import secrets
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import platformdirs
from torch import Tensor

from atlas_fl.storage.folder_access import memory_bytes, read_file
from atlas_fl.storage.tensors import decode_tensors, encode_tensors

SEAL_BYTES = 32
ABANDONED_SECONDS = 3600
"""A draft is written in milliseconds: one of this age is of a process that was killed."""
_OWN_NAMES = re.compile(r"[0-9a-f]{64}\.(states|[0-9a-f]{16}\.draft)")


def state_folder() -> Path:
    """The folder of hidden states: in `ATLAS_CACHE`, or in the user's cache directory."""
    override = os.environ.get("ATLAS_CACHE")
    return (Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("atlas-fl"))) / "states"


class StateFiles:
    """States in the files of one folder, up to a number of bytes."""

    def __init__(self, folder: Path, *, budget_bytes: int) -> None:
        """Set the folder and the budget; no file is made or read yet."""
        self.folder, self.budget_bytes = folder, budget_bytes
        self.report: Callable[[str], None] = warnings.warn
        """Takes a line that the user must see."""
        self._told = False
        self.begin_run()

    def begin_run(self) -> None:
        """From here on what was used before may be removed for what comes."""
        self._begin_ns = time.time_ns()
        self._is_full = False
        self._room = 0
        """Bytes that may be written before files are counted again."""

    def read(self, key: str) -> Tensor | None:
        """The states of a key of 64 hexadecimal digits; None where there are none, or none that can be used."""
        path = self._path(key)
        try:
            content = read_file(path, max_bytes=memory_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(f"{path}: {error.strerror}; its states are computed anew")
            return None
        body = content[SEAL_BYTES:]
        if _seal(key, body) == content[:SEAL_BYTES]:
            with suppress(OSError):  # it may be on a disk that is only read, and its last use decides nothing there
                os.utime(path)
            return decode_tensors(body)["states"]
        self._tell(f"{path} is damaged, or of another model; its states are computed anew")
        return None

    def write(self, key: str, states: Tensor) -> None:
        """Keep the states of a key where there is room; a disk that takes no more is told once and left alone."""
        body = encode_tensors({"states": states})
        path, size = self._path(key), SEAL_BYTES + len(body)
        draft = path.with_name(f"{key}.{secrets.token_hex(8)}.draft")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._has_room(size):
                return
            # not flushed to the disk: what a crash has cut short does not bear its seal
            with draft.open("xb") as file:
                file.write(_seal(key, body))
                file.write(body)
            draft.replace(path)
            self._room -= size
        except FileNotFoundError:  # somebody has cleared the folder at this moment
            return
        except OSError as error:
            self._is_full = True
            self._tell(f"{self.folder}: {error.strerror}; no more states are kept on the disk (--prefix-disk-gb 0)")
            if self.folder.is_dir():
                draft.unlink(missing_ok=True)

    def used_bytes(self) -> int:
        """Bytes of all files of this folder, whoever wrote them."""
        return sum(size for _, size, _ in self._files())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.states"

    def _has_room(self, size: int) -> bool:
        """Return whether so many bytes may be written; files are removed for them."""
        if self._is_full or size <= self._room or size > self.budget_bytes:
            return not self._is_full and size <= self.budget_bytes
        files = sorted(self._files())
        used, spare = sum(own for _, own, _ in files), max(size, self.budget_bytes // 16)
        for changed_ns, own, path in files:
            if used + spare <= self.budget_bytes or changed_ns >= self._begin_ns:
                break
            path.unlink(missing_ok=True)
            used -= own
        self._room = min(spare, self.budget_bytes - used)
        self._is_full = size > self._room
        return not self._is_full

    def _files(self) -> list[tuple[int, int, Path]]:
        """Time of last use in ns, bytes and path of every file that is ours, but for drafts that may be at work."""
        files = []
        for entry in os.scandir(self.folder) if self.folder.is_dir() else ():
            if _OWN_NAMES.fullmatch(entry.name):
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process has removed it
                    continue
                if not entry.name.endswith(".draft") or stat.st_mtime < time.time() - ABANDONED_SECONDS:
                    files.append((stat.st_mtime_ns, stat.st_size, Path(entry.path)))
        return files

    def _tell(self, line: str) -> None:
        if not self._told:
            self._told = True
            self.report(line)


def _seal(key: str, body: bytes) -> bytes:
    return sha256(key.encode() + body).digest()
