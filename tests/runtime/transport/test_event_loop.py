"""A signal may come anywhere in the calling thread, and leaves no coroutine that was made and not begun."""

import asyncio
import gc
import sys
import threading
import warnings
from types import FrameType
from typing import Any

import pytest

from atlas_fl.runtime.transport import event_loop
from atlas_fl.runtime.transport.event_loop import LoopThread


async def _double(value: int) -> int:
    await asyncio.sleep(0)
    assert threading.current_thread().name == "atlas-network"
    return 2 * value


async def _refuse() -> None:
    raise ValueError("no")


def _interrupted(threads: LoopThread, how: str, step: int) -> bool:
    """Whether an interrupt came at this step of the calling thread through the module, before the result was there."""
    left = step

    def trace(frame: FrameType, _event: str, _arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != event_loop.__file__:
            return None
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        result = getattr(threads, how)(_double, 21)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    assert result == 42
    return False


@pytest.mark.parametrize("how", ["call", "wait"])
def test_an_interrupt_at_any_step_leaves_no_coroutine_that_was_never_awaited(how: str) -> None:
    with warnings.catch_warnings(record=True) as caught, LoopThread() as threads:
        warnings.simplefilter("always")
        steps = 1
        while _interrupted(threads, how, steps):
            threads._told = type(threads._told)()  # the end of what was interrupted is nobody's
            steps += 1
        assert threads.call(_double, 4) == 8
        gc.collect()
    assert steps > 5
    assert [str(warning.message) for warning in caught] == []


def test_what_was_raised_in_the_loop_is_raised_here() -> None:
    with LoopThread() as threads, pytest.raises(ValueError, match="no"):
        threads.call(_refuse)


def test_a_wait_that_is_cancelled_cancels_the_work() -> None:
    ended = threading.Event()

    async def wait_long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with LoopThread() as threads:
        future = threads.submit(wait_long)
        assert threads.call(_double, 1) == 2  # it has begun
        assert future.cancel()
        assert ended.wait(10)
