"""A frame on its way in pieces, so that one end puts together what has come while the other still encrypts the rest.

Every piece but the last has `CHUNK` bytes; the last has fewer, or none. Between frames a client sends `BEAT` every
`BEAT_SECONDS`, and `LONG` before a frame of several pieces, whose first one may take long.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

from atlas_fl.engines.stream.frames import FRAME_LIMIT
from atlas_fl.errors import ProtocolError

CHUNK = 2**20
"""Bytes of a piece; gRPC takes no longer message."""
BEAT, LONG = b"", b"L"
"""What says that its sender is there; shorter than any frame."""
BEAT_SECONDS = 3.0


def chunks(frame: bytes) -> Iterator[bytes]:
    """The pieces of a frame, in order."""
    for start in range(0, len(frame) + 1, CHUNK):
        yield frame[start : start + CHUNK]


async def joined(read: Callable[[], Awaitable[Any]], *, limit: int = FRAME_LIMIT) -> bytearray | None:
    """The next frame, from pieces as they are read; None where the stream ends before it is whole.

    Raises `ProtocolError` where it grows longer than `limit` bytes.
    """
    frame = bytearray()
    while (piece := await read()) is not grpc.aio.EOF:
        frame += piece
        if len(frame) > limit:
            raise ProtocolError(f"a frame of more than {limit} bytes; send fewer or smaller tensors")
        if len(piece) < CHUNK:
            return frame
    return None
