"""One message as bytes: a versioned header, a head in JSON, tensors in the safetensors format.

    bytes 0-3    ATLS
    bytes 4-5    version
    bytes 6-7    zero
    bytes 8-15   length of the head
    bytes 16-23  length of the tensors
    then the head, padded with spaces to eight bytes, and the tensors; every number is little-endian and unsigned

What arrives may have been written by anybody: a frame is refused before anything is made of it that would be larger
than the frame itself.
"""

import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError

from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.io.results import from_json, to_json
from atlas_fl.io.tensors import DTYPES, decode, encoded_size, parts
from atlas_fl.types import Params

Head: TypeAlias = Mapping[str, Any]
"""What a message says beside its tensors: plain data for strict JSON."""

VERSION = 1
FRAME_LIMIT = 256 * 2**20
"""Most bytes of a frame."""
HEAD_LIMIT = 256 * 2**10
"""Most bytes of a head, and of the list of its tensors: parsed JSON is some fifty times as large as its text."""

_MAGIC = b"ATLS"
_HEADER = struct.Struct("<4sHHQQ")


def encode_frame(head: Head, tensors: Params, *, limit: int = FRAME_LIMIT) -> bytes:
    """The message as bytes.

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
        raise ProtocolError(
            f"a message of {total} bytes, {len(text)} of them its head; allowed: {limit} and {HEAD_LIMIT};"
            " send fewer or smaller tensors"
        )
    header = _HEADER.pack(_MAGIC, VERSION, 0, len(text), size)
    return b"".join([header, text, *(parts(tensors) if tensors else ())])


def decode_frame(frame: bytes, *, limit: int = FRAME_LIMIT) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(head, tensors) of a message; tensors are on the CPU.

    Raises:
        ProtocolError: the bytes are no frame of this version, or longer than `limit`.
    """
    if not _HEADER.size <= len(frame) <= limit:
        raise ProtocolError(f"a frame of {len(frame)} bytes; allowed: {_HEADER.size} to {limit}")
    magic, version, zero, head_size, size = _HEADER.unpack_from(frame)
    if magic != _MAGIC or zero:
        raise ProtocolError(f"a frame begins with {frame[:8].hex()}, not with {_MAGIC.hex()}; is this an ATLAS end?")
    if version != VERSION:
        raise ProtocolError(
            f"a frame of version {version}; this end speaks version {VERSION}: install the same atlas-fl on both ends"
        )
    if head_size > HEAD_LIMIT or _HEADER.size + head_size + size != len(frame):
        raise ProtocolError(f"a frame of {len(frame)} bytes says that it holds {head_size} and {size}")
    start = _HEADER.size + head_size
    return _head(frame[_HEADER.size : start]), _tensors(frame[start:])


def _head(text: bytes) -> dict[str, Any]:
    try:
        head = from_json(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame's head is no strict JSON ({error!s:.80})") from None
    if not isinstance(head, dict):
        raise ProtocolError(f"a frame's head is a {type(head).__name__}; it must be an object")
    return head


def _tensors(payload: bytes) -> dict[str, torch.Tensor]:
    if not payload:
        return {}
    listed = int.from_bytes(payload[:8], "little")
    if listed > HEAD_LIMIT:
        raise ProtocolError(f"a frame's list of tensors has {listed} bytes; allowed: {HEAD_LIMIT}")
    try:
        tensors = decode(payload)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise ProtocolError(f"a frame's tensors cannot be read ({error!s:.80})") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ProtocolError(f"tensor {name!s:.80} is {tensor.dtype}; allowed: {', '.join(DTYPES.values())}")
        # a byte that is neither is undefined behaviour in whatever computes with it
        if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise ProtocolError(f"tensor {name!s:.80} holds a truth value that is neither 0 nor 1")
    return tensors
