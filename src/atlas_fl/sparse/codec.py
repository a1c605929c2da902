"""Sparse tensors as messages: the mask once, then only the values that it keeps, in one order.

A mask is its bits, parameter by parameter in the order of the names, row by row: 1/32 of the dense fp32 bytes, once.
All messages are safetensors files, and their length is what a ledger counts.
"""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from atlas_fl.errors import ProtocolError
from atlas_fl.params import Params
from atlas_fl.sparse.masks import Mask, check_mask
from atlas_fl.storage.tensors import DTYPES, decode_tensors, encode_tensors, encoded_size

_LAYOUT, _BITMAP, _PREFIX = "layout", "bitmap", "values."


def encode_mask(mask: Mask) -> bytes:
    """The message that carries a mask."""
    bits = torch.cat([mask[name].flatten().cpu() for name in sorted(mask)]).numpy()
    return encode_tensors({_LAYOUT: _layout_hash(mask), _BITMAP: torch.from_numpy(np.packbits(bits))})


def mask_size(mask: Mask) -> int:
    """Bytes of `encode_mask`."""
    total = sum(bits.numel() for bits in mask.values())
    bitmap = torch.empty(-(-total // 8), dtype=torch.uint8, device="meta")
    return encoded_size({_LAYOUT: _layout_hash(mask), _BITMAP: bitmap})


def decode_mask(message: bytes, like: Params) -> dict[str, Tensor]:
    """The mask of a message, for a model of the shapes of `like`.

    Raises:
        ProtocolError: the message is damaged or was made for another model.
    """
    tensors = _decode_tensors(message)
    if _LAYOUT not in tensors or not torch.equal(tensors[_LAYOUT], _layout_hash(like)):
        raise ProtocolError("a mask came for a model of other parameters; both sides must run the same model")
    total = sum(tensor.numel() for tensor in like.values())
    packed = tensors.get(_BITMAP)
    if packed is None or packed.dtype != torch.uint8 or packed.numel() != -(-total // 8):
        raise ProtocolError("a mask message has no bitmap of the right length; send it again")
    bits = torch.from_numpy(np.unpackbits(packed.numpy(), count=total).astype(bool))
    names = sorted(like)
    parts = dict(zip(names, torch.split(bits, [like[name].numel() for name in names]), strict=True))
    return {name: parts[name].view(tensor.shape).to(tensor.device) for name, tensor in like.items()}


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


def _layout_hash(like: Mapping[str, Tensor]) -> Tensor:
    """A number for the names and shapes, so that a mask of another model is found out."""
    text = ";".join(f"{name}:{tuple(like[name].shape)}" for name in sorted(like))
    return torch.tensor([int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1])
