import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
import torch

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.transport.frames import CHUNK, decode_frame, encode_frame, join_chunks, split_frame


def received(pieces: Iterable[Any], *, frames: int = 1, limit: int = 4 * CHUNK) -> list[bytearray | None]:
    waiting = iter([*pieces, grpc.aio.EOF])

    async def read() -> Any:
        return next(waiting)

    async def play() -> list[bytearray | None]:
        return [await join_chunks(read, limit=limit) for _ in range(frames)]

    return asyncio.run(play())


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7])
def test_frames_of_every_length_come_out_as_they_went_in(size: int) -> None:
    frame, after = bytes(range(251)) * (size // 251) + bytes(size % 251), b"the next"
    pieces = list(split_frame(frame))
    assert [len(piece) for piece in pieces] == [CHUNK] * (size // CHUNK) + [size % CHUNK]
    assert received([*pieces, *split_frame(after)], frames=3) == [frame, after, None]


def test_a_stream_that_ends_within_a_frame_gives_none() -> None:
    assert received(list(split_frame(bytes(2 * CHUNK)))[:-1]) == [None]


def test_a_frame_that_goes_on_and_on_is_refused_at_its_limit() -> None:
    endless = (bytes(CHUNK) for _ in range(10**6))
    with pytest.raises(ProtocolError, match=f"a frame of more than {2 * CHUNK} bytes"):
        asyncio.run(join_chunks(lambda: asyncio.sleep(0, next(endless)), limit=2 * CHUNK))


def test_tensors_are_views_of_the_frame_that_was_put_together() -> None:
    tensors = {"a": torch.randn(CHUNK // 4), "b": torch.tensor([3, 5])}
    [frame] = received(split_frame(encode_frame({"k": 1}, tensors)))
    assert frame is not None
    head, found = decode_frame(frame)
    assert head == {"k": 1}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    before = bytes(frame)
    found["a"].zero_()
    assert bytes(frame) != before
