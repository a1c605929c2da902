"""Trained tensors in as few bytes as hold them exactly, for an end that has the model that the client began with.

A filter of updates (`methods.update_filters`) leaves few values, or many zeros, in the change of a tensor. The message
of a tensor is

    bytes of a number, exponent e, whether zeros are left out, [a bit for each value: is it sent], numbers

where a number is the whole k of the change k 2^e in one or two bytes, and otherwise the bits of the trained value that
differ from those of the start, in four (exclusive or). So every tensor can be sent, and comes back with all its bits.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atlas_fl.errors import ProtocolError
from atlas_fl.params import Params

_HEAD = 3
_TYPES: dict[int, np.dtype[np.signedinteger]] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}


def step_exponent(largest: float, *, steps: float) -> int:
    """The least exponent e with which so many steps of 2^e reach this value."""
    return int(np.clip(np.ceil(np.log2(largest / steps)), -126, 126)) if largest > 0 else 0


def compress(params: Params, start: Params) -> dict[str, Tensor]:
    """Each of these float32 tensors as bytes (uint8, in one row); others as they are."""
    return {
        key: _encode(tensor, start[key]) if tensor.dtype is torch.float32 and key in start else tensor
        for key, tensor in params.items()
    }


def decompress(params: Params, start: Params) -> dict[str, Tensor]:
    """The tensors of `compress`; raises `ProtocolError` for bytes that it does not make."""
    return {
        key: _decode(tensor, start[key])
        if tensor.dtype is torch.uint8 and key in start and start[key].dtype is torch.float32
        else tensor
        for key, tensor in params.items()
    }


def _encode(tensor: Tensor, start: Tensor) -> Tensor:
    values, begun = _flat(tensor), _flat(start)
    width, exponent, numbers = _numbers(values, begun)
    sent = numbers != 0
    is_sparse = -(-sent.size // 8) + sent.sum() * width < numbers.nbytes
    head = np.array([width, exponent, is_sparse], dtype=np.int8).tobytes()
    rest = np.packbits(sent).tobytes() + numbers[sent].tobytes() if is_sparse else numbers.tobytes()
    return torch.frombuffer(bytearray(head + rest), dtype=torch.uint8)


def _flat(tensor: Tensor) -> NDArray[np.float32]:
    return np.asarray(tensor.detach().cpu().contiguous().numpy().ravel(), dtype=np.float32)


def _numbers(values: NDArray[np.float32], begun: NDArray[np.float32]) -> tuple[int, int, NDArray[np.signedinteger]]:
    """(bytes of a number, exponent, numbers) in the shortest form that gives back these values."""
    change = values.astype(np.float64) - begun
    largest = float(np.abs(change).max(initial=0.0))
    for width in (1, 2) if np.isfinite(largest) else ():
        exponent = step_exponent(largest, steps=2.0 ** (8 * width - 1) - 0.5)
        numbers = np.rint(change * 2.0**-exponent).astype(_TYPES[width])
        if np.array_equal(_move(begun, numbers, exponent).view(np.int32), values.view(np.int32)):
            return width, exponent, numbers
    return 4, 0, values.view(np.int32) ^ begun.view(np.int32)


def _move(begun: NDArray[np.float32], numbers: NDArray[np.signedinteger], exponent: int) -> NDArray[np.float32]:
    """Move the start by these numbers of steps, as a client's filter moves it: one sum in float32."""
    with np.errstate(over="ignore"):  # a hostile exponent: what is not finite is refused where updates meet
        return np.asarray(begun + numbers.astype(np.float32) * np.float32(2.0**exponent), dtype=np.float32)


def _decode(message: Tensor, start: Tensor) -> Tensor:
    begun, raw = _flat(start), np.asarray(message.cpu().contiguous().numpy(), dtype=np.uint8)
    width, exponent, is_sparse = (
        map(int, raw[:_HEAD].view(np.int8)) if raw.ndim == 1 and len(raw) >= _HEAD else (0, 0, 0)
    )
    positions = np.ones(begun.size, dtype=bool)
    end = _HEAD + -(-begun.size // 8) * bool(is_sparse)
    if is_sparse and raw.size >= end:
        positions = np.unpackbits(raw[_HEAD:end], count=begun.size).astype(bool)
    if width not in _TYPES or raw.size != end + width * int(positions.sum()):
        raise ProtocolError(
            "a compressed tensor is damaged, or of another model; install the same atlas-fl on both ends"
        )
    numbers = np.zeros(begun.size, dtype=_TYPES[width])
    numbers[positions] = np.frombuffer(raw[end:].tobytes(), dtype=_TYPES[width])
    values = (begun.view(np.int32) ^ numbers).view(np.float32) if width == 4 else _move(begun, numbers, exponent)
    return torch.from_numpy(values).view(start.shape)
