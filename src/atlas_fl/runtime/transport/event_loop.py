"""An asyncio event loop in a thread beside the run, so that training and networking do not wait for each other.

Freed memory stays with the process (`keep_freed_memory`). glibc gives large freed blocks back at once, and a stream of
frames of some megabytes then spends most of its computing on fresh pages: on a virtual machine half the time of an
exchange of 8 MB (`benchmarks/exchange.py`).
"""

import asyncio
import ctypes
import platform
import queue
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from atlas_fl.events import Note, OnEvent, Progress, ignore

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT_BYTES = 256 * 2**20
"""Most that a process keeps at the end of each of its heaps."""


def keep_freed_memory() -> bool:
    """Ask glibc for it, for this process from now on; whether it is glibc and did so. Elsewhere nothing changes."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_THRESHOLD, KEPT_BYTES)) and bool(libc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


ResultT = TypeVar("ResultT")


@dataclass(kw_only=True, eq=False)
class LoopThread:
    """Runs coroutines inside its context, which makes the loop and closes it; tells events to the calling thread."""

    on_event: OnEvent = ignore
    _told: "queue.SimpleQueue[Note | Progress | None]" = field(default_factory=queue.SimpleQueue)

    def __enter__(self) -> "LoopThread":
        self.loop = asyncio.new_event_loop()
        # A daemon, so that Ctrl-C ends the program whatever the network does.
        self._thread = threading.Thread(target=self.loop.run_forever, name="atlas-network", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _cancel_all(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def submit(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Begin this work; return the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of this work; blocks until it is done, and cancels it where the wait is interrupted."""
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # without effect on what has ended

    def note(self, text: str) -> None:
        """Tell this; from any thread."""
        self._told.put(Note(text))

    def progress(self, action: str, done: int, total: int) -> None:
        """Tell this; from any thread."""
        self._told.put(Progress(action, done, total))

    def call(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of this work, from one thread; while it lasts, events reach `on_event` from that thread."""
        future = self.submit(work)
        future.add_done_callback(lambda _: self._told.put(None))
        try:
            while (event := self._told.get()) is not None:
                self.on_event(event)
        finally:
            future.cancel()  # without effect on what has ended
        return future.result()
