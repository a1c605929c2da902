"""Bits as the lengths of their runs, zeros first and then in turns, in base 128 with the low digits first (LEB128)."""

from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, UInt8

from atlas_fl.errors import ProtocolError

_Array: TypeAlias = np.ndarray[Any, Any]
MOST_DIGITS = 8
"""Of a length; 2^56 values are more than any model has."""


def to_runs(bits: Bool[np.ndarray, " n"]) -> UInt8[np.ndarray, "bytes"]:
    """The bytes of the run lengths; none for no bits."""
    if not len(bits):
        return np.zeros(0, np.uint8)
    changes = np.flatnonzero(bits[1:] != bits[:-1]) + 1
    edges = np.concatenate([[0], changes, [len(bits)]])
    lengths = np.diff(edges)
    if bits[0]:
        lengths = np.concatenate([[0], lengths])  # the zeros come first, even if there are none
    return _to_digits(lengths)


def from_runs(payload: UInt8[np.ndarray, "bytes"], total: int) -> Bool[np.ndarray, " total"]:
    """The bits again.

    Raises:
        ProtocolError: the runs do not add up to `total` bits.
    """
    lengths = _from_digits(payload)
    if lengths.max(initial=0) > total or int(lengths.sum()) != total:
        raise ProtocolError(f"the runs of a mask do not add up to its {total} bits; send it again")
    bits: _Array = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return bits


def _to_digits(lengths: _Array) -> _Array:
    places = np.arange(MOST_DIGITS)
    used = int(lengths.max()).bit_length() // 7 + 1
    digits = (lengths[:, None] >> (7 * places[:used])) & 127  # (runs, digits)
    more = (lengths[:, None] >> (7 * (places[:used] + 1))) > 0
    needed = np.concatenate([np.ones((len(lengths), 1), bool), more[:, :-1]], axis=1)
    payload: _Array = (digits | (more << 7)).astype(np.uint8)[needed]
    return payload


def _from_digits(payload: _Array) -> _Array:
    if not len(payload):
        return np.zeros(0, np.int64)
    last = np.flatnonzero(payload < 128)
    starts = np.concatenate([[0], last + 1])[:-1]
    widths = np.diff(np.concatenate([starts, [len(payload)]]))
    if not len(last) or last[-1] != len(payload) - 1 or widths.max() > MOST_DIGITS:
        raise ProtocolError("the runs of a mask are cut off; send it again")
    place = np.arange(len(payload)) - np.repeat(starts, widths)
    lengths: _Array = np.add.reduceat((payload.astype(np.int64) & 127) << (7 * place), starts)
    return lengths
