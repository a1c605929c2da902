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
from atlas_fl.sparse.masks import Mask, check_mask, num_kept
from atlas_fl.storage.tensors import decode_tensors, encode_tensors, encoded_size

_LAYOUT, _BITMAP, _VALUES = "layout", "bitmap", "values.F32"


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
    """The message with the kept values of the parameters, which have one dtype, and nothing of the frozen ones."""
    check_mask(mask, params)
    return encode_tensors({_VALUES: torch.cat([params[name].detach()[mask[name]] for name in sorted(params)])})


def values_size(count: int) -> int:
    """Bytes that `encode_values` makes of this number of kept float32 values, without any values."""
    return encoded_size({_VALUES: torch.empty(count, device="meta")})


def message_size(params: Params, mask: Mask | None) -> int:
    """Bytes of these tensors as a message, none of no tensors; under a mask only the values that it keeps are sent."""
    if mask is None or not params:
        return encoded_size(params) if params else 0
    kept = num_kept({name: mask[name] for name in params})
    return values_size(kept) if kept else 0


def decode_values(message: bytes, mask: Mask, like: Params, *, into: Params | None = None) -> dict[str, Tensor]:
    """The parameters of a message: its values where the mask is one, elsewhere those of `into`, or zeros.

    Shapes and dtype are those of `like`, of which no value is read. With zeros an update of differences is the dense
    one; with `into`, what the frozen weights are on both sides, weights are.

    Raises:
        ProtocolError: the message is damaged, or has other values than the mask keeps.
    """
    check_mask(mask, like)
    values = _decode_tensors(message).get(_VALUES, torch.empty(0))
    names = sorted(like)
    counts = [int(torch.count_nonzero(mask[name])) for name in names]
    if values.dtype is not like[names[0]].dtype or values.shape != (sum(counts),):
        raise ProtocolError(
            f"a sparse message has {values.numel()} values of {values.dtype} and its mask keeps {sum(counts)} of"
            f" {like[names[0]].dtype}; both sides need one mask"
        )
    parts = dict(zip(names, torch.split(values, counts), strict=True))
    params = {}
    for name, tensor in like.items():
        dense = torch.zeros(tensor.shape, dtype=tensor.dtype) if into is None else into[name].detach().clone()
        dense[mask[name]] = parts[name].to(dense.device)
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
