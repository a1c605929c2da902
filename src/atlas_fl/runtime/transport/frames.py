"""Framing of messages: a versioned header, a JSON head, tensors as safetensors, sent in pieces of `CHUNK` bytes.

    bytes 0-3    ATLS
    bytes 4-5    version
    bytes 6-7    zero
    bytes 8-15   length of the head
    bytes 16-23  length of the tensors
    then the head, padded with spaces to eight bytes, and the tensors; every number is little-endian and unsigned

A frame has no copy of its tensors: a piece is copied out of them when it is sent. What arrives may have been written by
anybody: a frame that announces more than it may have is refused at its first piece, memory is taken for what has come
and not for what is announced, and nothing is made of a frame that would be larger than the frame itself.

One end puts the pieces together that have come while the other still encrypts the rest. Every piece but the last has
`CHUNK` bytes; the last has fewer, or none.
"""

import math
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import grpc
import torch

from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.params import Params
from atlas_fl.storage.jsonl import from_json, to_json
from atlas_fl.storage.tensors import DTYPES, Piece, encode_pieces, encoded_size

Head: TypeAlias = Mapping[str, Any]
"""The entries of a message beside its tensors: plain data for strict JSON."""
Message: TypeAlias = tuple[Head, Params]
"""(head, tensors)."""

VERSION = 1
FRAME_LIMIT = 256 * 2**20
"""Most bytes of a frame where no model needs more."""
HEAD_LIMIT = 256 * 2**10
"""Most bytes of a head, and of the list of its tensors: parsed JSON is some fifty times as large as its text."""

_MAGIC = b"ATLS"
_HEADER = struct.Struct("<4sHHQQ")
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class FrameTooLongError(ProtocolError):
    """A frame that is, or says that it is, longer than it may be."""


@dataclass(frozen=True, eq=False)
class Frame:
    """A message as it travels: its header and head, and views of its tensors."""

    parts: tuple[Piece, ...]
    """Rows of bytes, none of them empty."""

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


def make_frame(head: Head, tensors: Params, *, limit: int = FRAME_LIMIT) -> Frame:
    """The message, whose tensors must keep their values until it is sent.

    Raises:
        ProtocolError: it is longer than `limit` bytes, or its head is no strict JSON or longer than `HEAD_LIMIT`.
    """
    try:
        text = to_json(head).encode()
    except (DataError, TypeError) as error:
        raise ProtocolError(f"a message's head is no strict JSON: {error}") from None
    text += b" " * (-len(text) % 8)
    size = encoded_size(tensors) if tensors else 0
    total = _HEADER.size + len(text) + size
    if len(text) > HEAD_LIMIT or total > limit:
        raise FrameTooLongError(
            f"a message of {total} bytes, {len(text)} of them its head; allowed: {limit} and {HEAD_LIMIT};"
            " take a smaller model, lower ranks or smaller batches in the settings of the run"
        )
    header = _HEADER.pack(_MAGIC, VERSION, 0, len(text), size)
    pieces = encode_pieces(tensors) if tensors else ()
    return Frame((header + text, *(memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes)))


def encode_frame(head: Head, tensors: Params, *, limit: int = FRAME_LIMIT) -> bytes:
    """The message as bytes; raises as `make_frame` does."""
    return bytes(make_frame(head, tensors, limit=limit))


def decode_frame(frame: bytes | bytearray, *, limit: int = FRAME_LIMIT) -> Message:
    """(head, tensors) of a message; tensors are on the CPU, and views of the frame where that is a `bytearray`.

    Raises:
        ProtocolError: the bytes are no frame of this version, or longer than `limit`.
    """
    if not _HEADER.size <= len(frame) <= limit:
        raise ProtocolError(f"a frame of {len(frame)} bytes; allowed: {_HEADER.size} to {limit}")
    head_size, size = _announced_sizes(frame)
    if head_size > HEAD_LIMIT or _HEADER.size + head_size + size != len(frame):
        raise ProtocolError(f"a frame of {len(frame)} bytes says that it holds {head_size} and {size}")
    start = _HEADER.size + head_size
    head = _object(bytes(frame[_HEADER.size : start]), "head")
    # torch takes no read-only memory.
    writable = frame if isinstance(frame, bytearray) else bytearray(frame)
    return head, _tensors(memoryview(writable)[start:]) if size else {}


def _announced_sizes(frame: bytes | bytearray) -> tuple[int, int]:
    """(bytes of the head, bytes of the tensors) that a frame says it holds, from its first bytes."""
    magic, version, zero, head_size, size = _HEADER.unpack_from(frame)
    if magic != _MAGIC or zero:
        raise ProtocolError(f"a frame begins with {frame[:8].hex()}, not with {_MAGIC.hex()}; is this an ATLAS end?")
    if version != VERSION:
        raise ProtocolError(
            f"a frame of version {version}; this end speaks version {VERSION}: install the same atlas-fl on both ends"
        )
    return head_size, size


def _object(text: bytes, what: str) -> dict[str, Any]:
    try:
        content = from_json(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame's {what} is no strict JSON ({error!s:.80})") from None
    if not isinstance(content, dict):
        raise ProtocolError(f"a frame's {what} is a {type(content).__name__}; it must be an object")
    return content


def _tensors(payload: memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors payload as `encode_tensors` writes it: aligned, in order, without a gap."""
    listed = int.from_bytes(payload[:8], "little")
    start = 8 + listed
    if listed > HEAD_LIMIT or start > len(payload) or start % 8:
        raise ProtocolError(f"a frame's list of tensors has {listed} bytes; allowed: {HEAD_LIMIT}, by eights")
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in _object(bytes(payload[8:start]), "list of tensors").items():
        dtype, shape, begin, end = _entry(name, entry, most=len(payload))
        if begin != start - 8 - listed or end > len(payload) - 8 - listed:
            raise ProtocolError(f"tensor {name!s:.80} lies at {begin}, {end}; there is a gap, or not so much")
        count = (end - begin) // dtype.itemsize
        flat = (
            torch.frombuffer(payload, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        )
        # a byte that is neither is undefined behaviour in whatever computes with it
        if dtype is torch.bool and count and int(flat.view(torch.uint8).max()) > 1:
            raise ProtocolError(f"tensor {name!s:.80} holds a truth value that is neither 0 nor 1")
        tensors[name] = flat.reshape(shape)
        start += end - begin
    if start != len(payload):
        raise ProtocolError(f"a frame holds {len(payload) - start} bytes that belong to no tensor")
    return tensors


def _entry(name: str, entry: Any, *, most: int) -> tuple[torch.dtype, list[int], int, int]:
    """(dtype, shape, begin, end) of a tensor, where these fit each other and the payload's length."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = _DTYPES.get(str(fields.get("dtype"))), fields.get("shape"), fields.get("data_offsets")
    if dtype is None:
        raise ProtocolError(f"tensor {name!s:.80} is {fields.get('dtype')!s:.20}; allowed: {', '.join(_DTYPES)}")
    if not _whole(shape, most=most) or not _whole(offsets, most=most) or len(offsets) != 2:
        raise ProtocolError(f"tensor {name!s:.80} has the shape {shape!s:.80} and lies at {offsets!s:.80}")
    begin, end = offsets
    # The second bound is for tensors without values, whose other sizes nothing else limits.
    if end - begin != math.prod(shape) * dtype.itemsize or math.prod(max(1, size) for size in shape) > 2**48:
        raise ProtocolError(f"tensor {name!s:.80} of shape {shape!s:.80} and {dtype} takes not {end - begin} bytes")
    if begin % dtype.itemsize:
        raise ProtocolError(f"tensor {name!s:.80} lies at {begin}, which its {dtype} is not aligned to")
    return dtype, shape, begin, end


def _whole(values: Any, *, most: int) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= most for value in values)


CHUNK = 2**20
"""Bytes of a piece; gRPC takes no longer message."""


def split_frame(frame: Frame) -> Iterator[bytes]:
    """The pieces of a frame, in order, each copied when it is asked for."""
    begun, begun_bytes = list[Piece](), 0
    for part in frame.parts:
        start = 0
        while len(part) - start >= CHUNK - begun_bytes:
            end = start + CHUNK - begun_bytes
            yield b"".join([*begun, part[start:end]])
            begun, begun_bytes, start = [], 0, end
        if start < len(part):
            begun.append(part[start:])
            begun_bytes += len(part) - start
    yield b"".join(begun)


async def join_chunks(read: Callable[[], Awaitable[Any]], *, limit: int = FRAME_LIMIT) -> bytearray | None:
    """The next frame, from pieces as they are read; None where the stream ends before it is whole.

    Raises `FrameTooLongError` where it says at its beginning that it is longer than `limit` bytes, or is longer than it
    said, and `ProtocolError` where it is none.
    """
    frame, most = bytearray(), limit
    while (piece := await read()) is not grpc.aio.EOF:
        if not frame and len(piece) >= _HEADER.size:
            head_size, size = _announced_sizes(piece)
            most = _HEADER.size + head_size + size
            if most > limit:
                raise FrameTooLongError(
                    f"a frame of more than {limit} bytes: it says that it holds {head_size} and {size}; install the"
                    " same atlas-fl on both ends"
                )
        frame += piece
        if len(frame) > most:
            raise FrameTooLongError(f"a frame of more than {most} bytes, which it says that it holds")
        if len(piece) < CHUNK:
            return frame
    return None
