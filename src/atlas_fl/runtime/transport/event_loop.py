"""An asyncio event loop in a thread beside the run, so that training and networking do not wait for each other.

Freed memory stays with the process (`keep_freed_memory`). glibc gives large freed blocks back at once, and a stream of
frames of some megabytes then spends most of its computing on fresh pages: on a virtual machine half the time of an
exchange of 8 MB (`benchmarks/exchange.py`). Larger blocks go back, or whole models would take a third more memory.
"""

import asyncio
import ctypes
import platform
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from atlas_fl.events import Note, OnEvent, Progress, ignore

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT_BYTES = 32 * 2**20
"""Most that a process keeps at the end of each of its heaps, and least of a block that goes back at once."""


def keep_freed_memory() -> bool:
    """Ask glibc for it, for this process from now on; whether it is glibc and did so. Elsewhere nothing changes."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_THRESHOLD, KEPT_BYTES)) and bool(libc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")


@dataclass(kw_only=True, eq=False)
class LoopThread:
    """Runs coroutines inside its context, which makes the loop and closes it; tells events to the calling thread.

    Takes a coroutine function and its arguments: the coroutine is made in the thread of the loop, where no signal can
    come between its making and its start.
    """

    on_event: OnEvent = ignore
    _told: "queue.SimpleQueue[Note | Progress | None]" = field(default_factory=queue.SimpleQueue)

    def __enter__(self) -> "LoopThread":
        self.loop = asyncio.new_event_loop()
        # A daemon, so that Ctrl-C ends the program whatever the network does.
        self._thread = threading.Thread(target=self.loop.run_forever, name="atlas-network", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self._cancel_all)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _cancel_all(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def submit(
        self, work: Callable[ArgsT, Coroutine[Any, Any, ResultT]], *args: ArgsT.args, **kwargs: ArgsT.kwargs
    ) -> Future[ResultT]:
        """Begin this work; return the future of its result, whose cancelling cancels the work."""
        future = Future[ResultT]()

        def begin() -> None:
            task = self.loop.create_task(work(*args, **kwargs))
            task.add_done_callback(lambda _: _copy_outcome(task, future))
            # without effect on a task that has ended
            future.add_done_callback(lambda _: self.loop.call_soon_threadsafe(task.cancel))

        self.loop.call_soon_threadsafe(begin)
        return future

    def wait(
        self, work: Callable[ArgsT, Coroutine[Any, Any, ResultT]], *args: ArgsT.args, **kwargs: ArgsT.kwargs
    ) -> ResultT:
        """The result of this work; blocks until it is done, and cancels it where the wait is interrupted."""
        future = self.submit(work, *args, **kwargs)
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

    def call(
        self, work: Callable[ArgsT, Coroutine[Any, Any, ResultT]], *args: ArgsT.args, **kwargs: ArgsT.kwargs
    ) -> ResultT:
        """The result of this work, from one thread; while it lasts, events reach `on_event` from that thread."""
        future = self.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._told.put(None))
        try:
            while (event := self._told.get()) is not None:
                self.on_event(event)
        finally:
            future.cancel()  # without effect on what has ended
        return future.result()


def _copy_outcome(task: asyncio.Task[ResultT], future: Future[ResultT]) -> None:
    """Give the future what this task has ended with, unless it was cancelled meanwhile."""
    if task.cancelled():
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    if (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
