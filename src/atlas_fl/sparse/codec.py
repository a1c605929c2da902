"""Sparse tensors as messages: the mask once, then only the values that it keeps, in one order.

A mask travels in the shortest of three forms. Its bits are taken parameter by parameter in the order of the names, row
by row:

| form | bytes of its payload | shortest where |
|---|---|---|
| `bitmap` | n / 8 | kept weights are scattered |
| `runs` | run lengths, zeros first, in LEB128 (base 128, low digits first) | they lie together, or are few |
| `seed` | 24: strategy `random` with this seed, sparsity and scope | the mask was drawn |

All messages are safetensors files, and their length is what a ledger counts. A bitmap, the longest form at all but the
lowest densities, is 1/32 of the dense fp32 bytes, once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from safetensors import SafetensorError
from torch import Tensor

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.params import Params
from atlas_fl.sparse.masks import Mask, Scope, check_mask, make_mask
from atlas_fl.storage.tensors import DTYPES, decode_tensors, encode_tensors, encoded_size

_Array: TypeAlias = np.ndarray[Any, Any]
MOST_DIGITS = 8
"""Most digits of a length; 2^56 values are more than any model has."""


def encode_runs(bits: Bool[np.ndarray, " n"]) -> UInt8[np.ndarray, "bytes"]:
    """The bytes of the run lengths; none for no bits."""
    if not len(bits):
        return np.zeros(0, np.uint8)
    changes = np.flatnonzero(bits[1:] != bits[:-1]) + 1
    edges = np.concatenate([[0], changes, [len(bits)]])
    lengths = np.diff(edges)
    if bits[0]:
        lengths = np.concatenate([[0], lengths])  # the zeros come first, even if there are none
    return _encode_leb128(lengths)


def decode_runs(payload: UInt8[np.ndarray, "bytes"], total: int) -> Bool[np.ndarray, " total"]:
    """The bits again.

    Raises:
        ProtocolError: the runs do not add up to `total` bits.
    """
    lengths = _decode_leb128(payload)
    if lengths.max(initial=0) > total or int(lengths.sum()) != total:
        raise ProtocolError(f"the runs of a mask do not add up to its {total} bits; send it again")
    bits: _Array = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return bits


def _encode_leb128(lengths: _Array) -> _Array:
    positions = np.arange(MOST_DIGITS)
    num_digits = int(lengths.max()).bit_length() // 7 + 1
    digits = (lengths[:, None] >> (7 * positions[:num_digits])) & 127  # (runs, digits)
    continues = (lengths[:, None] >> (7 * (positions[:num_digits] + 1))) > 0
    needed = np.concatenate([np.ones((len(lengths), 1), bool), continues[:, :-1]], axis=1)
    payload: _Array = (digits | (continues << 7)).astype(np.uint8)[needed]
    return payload


def _decode_leb128(payload: _Array) -> _Array:
    if not len(payload):
        return np.zeros(0, np.int64)
    last = np.flatnonzero(payload < 128)
    starts = np.concatenate([[0], last + 1])[:-1]
    widths = np.diff(np.concatenate([starts, [len(payload)]]))
    if not len(last) or last[-1] != len(payload) - 1 or widths.max() > MOST_DIGITS:
        raise ProtocolError("the runs of a mask are cut off; send it again")
    position = np.arange(len(payload)) - np.repeat(starts, widths)
    lengths: _Array = np.add.reduceat((payload.astype(np.int64) & 127) << (7 * position), starts)
    return lengths


SCOPES: tuple[Scope, ...] = ("global", "layer")
_LAYOUT, _PREFIX = "layout", "values."


@dataclass(frozen=True, kw_only=True)
class RandomMask:
    """Seed, sparsity and scope of a mask of the strategy `random`: all that needs to travel of it."""

    seed: int
    sparsity: float
    scope: Scope = "global"


def encode_mask(mask: Mask, *, random_mask: RandomMask | None = None) -> bytes:
    """The message that carries a mask, in the shortest form; `random_mask` says how a random one was made."""
    if random_mask is not None:
        redrawn = make_mask(
            "random", mask, sparsity=random_mask.sparsity, scope=random_mask.scope, seed=random_mask.seed
        )
        if any(not torch.equal(redrawn[name], bits) for name, bits in mask.items()):
            raise ConfigError(f"the mask is not the random one of {random_mask}; encode it without")
    return encode_tensors(min(_forms(mask, random_mask), key=encoded_size))


def mask_size(mask: Mask, *, random_mask: RandomMask | None = None) -> int:
    """Bytes of `encode_mask`."""
    return min(encoded_size(form) for form in _forms(mask, random_mask))


def decode_mask(message: bytes, like: Params) -> dict[str, Tensor]:
    """The mask of a message, for a model of the shapes of `like`.

    Raises:
        ProtocolError: the message is damaged or was made for another model.
    """
    tensors = _decode_tensors(message)
    if _LAYOUT not in tensors or not torch.equal(tensors[_LAYOUT], _layout_hash(like)):
        raise ProtocolError("a mask came for a model of other parameters; both sides must run the same model")
    if "seed" in tensors:
        return _redraw_mask(tensors, like)
    total = sum(tensor.numel() for tensor in like.values())
    runs = tensors.get("runs")
    bits = _from_bitmap(tensors.get("bitmap"), total) if runs is None else decode_runs(runs.numpy(), total)
    return _split_bits(torch.from_numpy(bits), like)


def encode_values(params: Params, mask: Mask) -> bytes:
    """The message with the kept values of the parameters, exactly, and nothing of the frozen ones."""
    check_mask(mask, params)
    order = sorted(params)
    kept: dict[str, list[Tensor]] = {}
    for name in order:
        kept.setdefault(_PREFIX + DTYPES[params[name].dtype], []).append(params[name].detach()[mask[name]])
    return encode_tensors({key: torch.cat(values) for key, values in kept.items()})


def values_size(count: int, *, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that `encode_values` makes of this number of kept values of one dtype, without any values."""
    return encoded_size({_PREFIX + DTYPES[dtype]: torch.empty(count, dtype=dtype, device="meta")})


def decode_values(message: bytes, mask: Mask, like: Params, *, into: Params | None = None) -> dict[str, Tensor]:
    """The parameters of a message: its values where the mask is one, elsewhere those of `into`, or zeros.

    Shapes and dtypes are those of `like`, of which no value is read. With zeros an update of differences is the dense
    one; with `into`, what the frozen weights are on both sides, weights are.

    Raises:
        ProtocolError: the message is damaged, or has other values than the mask keeps.
    """
    check_mask(mask, like)
    tensors = _decode_tensors(message)
    counts: dict[torch.dtype, dict[str, int]] = {}
    for name in sorted(like):
        counts.setdefault(like[name].dtype, {})[name] = int(torch.count_nonzero(mask[name]))
    expected = {_PREFIX + DTYPES[dtype]: (dtype, (sum(by_name.values()),)) for dtype, by_name in counts.items()}
    if {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()} != expected:
        num_values = sum(tensor.numel() for tensor in tensors.values())
        num_kept = sum(sum(by_name.values()) for by_name in counts.values())
        raise ProtocolError(
            f"a sparse message has {num_values} values and its mask keeps {num_kept}; both sides need one mask"
        )
    values: dict[str, Tensor] = {}
    for dtype, by_name in counts.items():
        parts = torch.split(tensors[_PREFIX + DTYPES[dtype]], list(by_name.values()))
        values |= zip(by_name, parts, strict=True)
    params = {}
    for name, tensor in like.items():
        dense = torch.zeros(tensor.shape, dtype=tensor.dtype) if into is None else into[name].detach().clone()
        dense[mask[name]] = values[name].to(dense.device)
        params[name] = dense
    return params


def _decode_tensors(message: bytes) -> dict[str, Tensor]:
    try:
        return decode_tensors(message)
    except SafetensorError as error:
        raise ProtocolError(f"a sparse message is damaged: {error}; send it again") from error


def _forms(mask: Mask, random_mask: RandomMask | None) -> list[dict[str, Tensor]]:
    layout = _layout_hash(mask)
    if random_mask is not None:
        numbers = torch.tensor([random_mask.seed, SCOPES.index(random_mask.scope)])
        return [
            {_LAYOUT: layout, "seed": numbers, "sparsity": torch.tensor([random_mask.sparsity], dtype=torch.float64)}
        ]
    bits = torch.cat([mask[name].flatten().cpu() for name in sorted(mask)]).numpy()
    return [
        {_LAYOUT: layout, "bitmap": torch.from_numpy(np.packbits(bits))},
        {_LAYOUT: layout, "runs": torch.from_numpy(encode_runs(bits))},
    ]


def _layout_hash(like: Mapping[str, Tensor]) -> Tensor:
    """A number for the names and shapes, so that a mask of another model is found out."""
    text = ";".join(f"{name}:{tuple(like[name].shape)}" for name in sorted(like))
    return torch.tensor([int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1])


def _redraw_mask(tensors: Params, like: Params) -> dict[str, Tensor]:
    if tensors["seed"].numel() != 2 or "sparsity" not in tensors:
        raise ProtocolError("a mask message has a seed and not what belongs to it; send it again")
    seed, scope = tensors["seed"].tolist()
    sparsity = float(tensors["sparsity"])
    return make_mask("random", like, sparsity=sparsity, scope=SCOPES[scope], seed=seed)


def _split_bits(bits: Tensor, like: Params) -> dict[str, Tensor]:
    names = sorted(like)
    parts = dict(zip(names, torch.split(bits, [like[name].numel() for name in names]), strict=True))
    return {name: parts[name].view(tensor.shape).to(tensor.device) for name, tensor in like.items()}


def _from_bitmap(packed: Tensor | None, total: int) -> "np.ndarray[Any, Any]":
    if packed is None or packed.numel() != -(-total // 8):
        raise ProtocolError("a mask message has neither a bitmap nor runs of the right length; send it again")
    return np.unpackbits(packed.numpy(), count=total).astype(bool)
