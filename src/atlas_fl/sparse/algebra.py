"""Masks of several clients or tasks against each other, and a mask against its model."""

import re
from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from atlas_fl.errors import ModelError
from atlas_fl.sparse.choose import Mask
from atlas_fl.types import Params

_LAYER = re.compile(r".*?\.\d+(?=\.)")


def check_mask(mask: Mask, params: Params) -> None:
    """Raise ModelError unless the mask has a bool tensor of the right shape for each parameter and for nothing else."""
    missing, surplus = sorted(params.keys() - mask.keys()), sorted(mask.keys() - params.keys())
    if missing or surplus:
        what = f"has none for {missing[0]!r}" if missing else f"has {surplus[0]!r}, which the model lacks"
        raise ModelError(f"the mask {what} ({len(missing) + len(surplus)} such names); make the mask for this model")
    for name, tensor in params.items():
        own = mask[name]
        if own.shape != tensor.shape or own.dtype is not torch.bool:
            raise ModelError(
                f"the mask of {name!r} is {_kind(own)}, the weights are {_kind(tensor)}; make the mask for this model"
            )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def union(masks: Sequence[Mask]) -> dict[str, Tensor]:
    """What at least one mask lets move."""
    _alike(masks)
    return {name: reduce(torch.logical_or, [mask[name] for mask in masks]).clone() for name in masks[0]}


def intersection(masks: Sequence[Mask]) -> dict[str, Tensor]:
    """What every mask lets move."""
    _alike(masks)
    return {name: reduce(torch.logical_and, [mask[name] for mask in masks]).clone() for name in masks[0]}


def overlap(masks: Sequence[Mask]) -> Float64[np.ndarray, "masks masks"]:
    """Jaccard index |a and b| / |a or b| of every pair; two empty masks are equal and have 1."""
    _alike(masks)
    both = np.zeros((len(masks), len(masks)))
    for name in masks[0]:
        # float64 counts exactly up to 2^53; one row of bits a mask and parameter at a time
        for i, left in enumerate(masks):
            for j in range(i, len(masks)):
                both[i, j] += float(torch.count_nonzero(left[name] & masks[j][name]))
    both = np.triu(both) + np.triu(both, 1).T
    sizes = both.diagonal()
    either = sizes[:, None] + sizes[None, :] - both
    return np.where(either > 0, both / np.where(either > 0, either, 1.0), 1.0)


def density(mask: Mask) -> dict[str, float]:
    """The share of weights that may move, of every parameter; an empty parameter has 0."""
    return {name: float(torch.count_nonzero(own)) / max(1, own.numel()) for name, own in mask.items()}


def layers(mask: Mask) -> dict[str, float]:
    """The share of weights that may move by layer: embeddings, then numbers in rising order, then the others.

    A layer is all tensors whose names agree up to their first number, such as `encoder.layer.3`; of names without one,
    up to the first dot.
    """
    counts: dict[str, list[int]] = {}
    for name, own in mask.items():
        found = _LAYER.match(name)
        count = counts.setdefault(found[0] if found else name.partition(".")[0], [0, 0])
        count[0] += int(torch.count_nonzero(own))
        count[1] += own.numel()
    return {layer: counts[layer][0] / max(1, counts[layer][1]) for layer in sorted(counts, key=_place)}


def _place(layer: str) -> tuple[int, str, int]:
    """Where a layer stands: a file holds its tensors in an order of its own."""
    name, _, number = layer.rpartition(".")
    if number.isdecimal():
        return 1, name, int(number)
    return (0 if layer.startswith("embed") else 2), layer, 0


def num_kept(mask: Mask) -> int:
    """How many weights may move."""
    return sum(int(torch.count_nonzero(own)) for own in mask.values())


def _alike(masks: Sequence[Mask]) -> None:
    if not masks:
        raise ModelError("there are no masks to compare; give one or more")
    for mask in masks[1:]:
        check_mask(mask, masks[0])
