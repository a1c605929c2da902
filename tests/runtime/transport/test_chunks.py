import asyncio
import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import grpc
import pytest
import torch

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.transport.frames import (
    CHUNK,
    Frame,
    FrameTooLongError,
    decode_frame,
    join_chunks,
    make_frame,
    split_frame,
)
from tests.runtime.transport.test_frames import at_most


def received(pieces: Iterable[Any], *, frames: int = 1, limit: int = 4 * CHUNK) -> list[bytearray | None]:
    waiting = iter([*pieces, grpc.aio.EOF])

    async def read() -> Any:
        return next(waiting)

    async def play() -> list[bytearray | None]:
        return [await join_chunks(read, limit=limit) for _ in range(frames)]

    return asyncio.run(play())


def announcing(size: int, *parts: bytes) -> Frame:
    """A frame of these parts after a header that announces so many bytes of tensors."""
    return Frame((b"ATLS" + bytes([1, 0, 0, 0]) + struct.pack("<QQ", 0, size), *parts))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 25, CHUNK - 24, CHUNK - 23, 3 * CHUNK - 24, 3 * CHUNK + 7])
@pytest.mark.parametrize("num_parts", [1, 2, 50])
def test_frames_of_every_length_come_out_as_they_went_in(size: int, num_parts: int) -> None:
    data = bytes(range(251)) * (size // 251) + bytes(size % 251)
    ends = [size * index // num_parts for index in range(num_parts + 1)]
    frame = announcing(size, *(data[start:end] for start, end in pairwise(ends)))
    whole, after = bytes(frame), announcing(3, b"end")
    pieces = list(split_frame(frame))
    assert len(frame) == len(whole) == size + 24
    assert [len(piece) for piece in pieces] == [CHUNK] * (len(whole) // CHUNK) + [len(whole) % CHUNK]
    assert received([*pieces, *split_frame(after)], frames=3) == [whole, bytes(after), None]


def test_a_stream_that_ends_within_a_frame_gives_none() -> None:
    assert received(list(split_frame(announcing(2 * CHUNK - 24, bytes(2 * CHUNK - 24))))[:-1]) == [None]


def test_a_frame_that_announces_more_than_it_may_have_is_refused_at_its_first_piece() -> None:
    reads = iter([next(split_frame(announcing(2 * CHUNK, bytes(CHUNK))))])
    with pytest.raises(FrameTooLongError, match=rf"a frame of more than {2 * CHUNK} bytes: it says that it holds 0"):
        asyncio.run(join_chunks(lambda: asyncio.sleep(0, next(reads)), limit=2 * CHUNK))


def test_a_frame_that_goes_on_and_on_is_refused_where_it_said_that_it_ends() -> None:
    endless = split_frame(announcing(CHUNK, bytes(9 * CHUNK)))
    with pytest.raises(FrameTooLongError, match=f"a frame of more than {CHUNK + 24} bytes, which it says"):
        asyncio.run(join_chunks(lambda: asyncio.sleep(0, next(endless)), limit=4 * CHUNK))
    assert len(list(endless)) == 8, "two of ten pieces were read"


def test_what_is_no_frame_is_refused_at_its_first_piece() -> None:
    with pytest.raises(ProtocolError, match="is this an ATLAS end"):
        received([bytes(CHUNK)])


def test_a_frame_that_announces_a_gigabyte_takes_memory_for_what_has_come() -> None:
    first = next(split_frame(announcing(2**30, bytes(CHUNK))))
    with at_most(4 * CHUNK):
        assert received([first], limit=2**31) == [None]


def test_a_frame_has_no_copy_of_its_tensors_and_is_read_as_it_was_written() -> None:
    tensors = {"a": torch.randn(4 * CHUNK), "b": torch.tensor(3), "c": torch.zeros(0, 4), "d": torch.ones(3).bfloat16()}
    with at_most(4 * CHUNK):
        frame = make_frame({"k": 1}, tensors)
        sizes = [len(piece) for piece in split_frame(frame)]
    assert sum(sizes) == len(frame) == len(bytes(frame))
    found = decode_frame(bytes(frame))[1]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_views_of_the_frame_that_was_put_together() -> None:
    tensors = {"a": torch.randn(CHUNK // 4), "b": torch.tensor([3, 5])}
    [frame] = received(split_frame(make_frame({"k": 1}, tensors)))
    assert frame is not None
    head, found = decode_frame(frame)
    assert head == {"k": 1}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    before = bytes(frame)
    found["a"].zero_()
    assert bytes(frame) != before
