"""Freed memory that stays with the process, so that every message does not ask the system for the same pages again.

glibc gives large freed blocks back at once. A stream of frames of some megabytes then spends most of its computing on
fresh pages: on a virtual machine half the time of an exchange of 8 MB (`benchmarks/exchange.py`).
"""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT_BYTES = 256 * 2**20
"""Most that a process keeps at the end of each of its heaps."""


def keep_freed_memory() -> bool:
    """Ask glibc for it, for this process from now on; whether it is glibc and did so. Elsewhere nothing changes."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_THRESHOLD, KEPT_BYTES)) and bool(libc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
