"""An asyncio loop in a thread of its own, so that training and networking do not wait for each other."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class LoopThread:
    """Runs coroutines until it is stopped; used as a context."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # A daemon, so that Ctrl-C ends the program whatever the network does.
        self._thread = threading.Thread(target=self.loop.run_forever, name="atlas-network", daemon=True)

    def __enter__(self) -> "LoopThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _cancel_all(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def submit(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Begin this work; what it will give."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What this work gives; blocks until it is done, and cancels it where the wait is interrupted."""
        future = self.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
