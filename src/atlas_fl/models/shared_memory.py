"""The weights of one backbone in memory that several processes see: each has its own model, and none its own copy.

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


def places_of(weights: Params) -> tuple[list[dict[str, Any]], int]:
    """(where each tensor lies, as plain data; bytes of all)."""
    places, end = [], 0
    for name, tensor in weights.items():
        places.append(
            {"name": name, "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "offset": end},
        )
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, max(end, ALIGNMENT)


def views(memory: Any, places: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors that lie at these places of a buffer, without a copy; nobody may write to what is shared."""
    found = {}
    for place in places:
        dtype, shape = _DTYPES[place["dtype"]], torch.Size(place["shape"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nor is it written
            flat = torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=place["offset"])
        found[place["name"]] = flat.reshape(shape)
    return found


def write(weights: Params, memory: Any, places: Sequence[Mapping[str, Any]]) -> None:
    """Put the weights at their places of a writable buffer."""
    whole = np.frombuffer(memory, dtype=np.uint8)
    for place in places:
        values = weights[place["name"]].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        whole[place["offset"] : place["offset"] + values.size] = values
