"""Backbone weights in shared memory: several processes see one copy.

A tensor begins at a multiple of 64 bytes, as in torch's own memory: products of what lies otherwise may end in other
last bits.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from atlas_fl.params import Params
from atlas_fl.storage.tensors import DTYPES

ALIGNMENT = 64

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def buffer_entries(weights: Params) -> tuple[list[dict[str, Any]], int]:
    """(where each tensor lies, as plain data; bytes of all)."""
    entries, end = [], 0
    for name, tensor in weights.items():
        entries.append(
            {"name": name, "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "offset": end},
        )
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return entries, max(end, ALIGNMENT)


def tensor_views(memory: Any, entries: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors that lie at these places of a buffer, without a copy; nobody may write to what is shared."""
    tensors = {}
    for entry in entries:
        dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nor is it written
            flat = torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=entry["offset"])
        tensors[entry["name"]] = flat.reshape(shape)
    return tensors


def write_weights(weights: Params, memory: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    """Put the weights at their places of a writable buffer."""
    whole = np.frombuffer(memory, dtype=np.uint8)
    for entry in entries:
        values = weights[entry["name"]].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        whole[entry["offset"] : entry["offset"] + values.size] = values
