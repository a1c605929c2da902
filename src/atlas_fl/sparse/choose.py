"""Exactly k of n numbers, without sorting them and without an index for each.

`torch.quantile` refuses more than 2^24 values, and a threshold alone keeps too many where values are equal. So the
k-th lowest value is found by partition in one buffer (introselect, expected O(n)), all below it are kept, and of those
equal to it the first by name and position.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from atlas_fl.errors import ModelError
from atlas_fl.types import Params

Mask: TypeAlias = Mapping[str, Tensor]
"""Which weights may move: a bool tensor for every chosen parameter, of its shape."""

Ranking: TypeAlias = Callable[[str], Tensor]
"""The numbers of a parameter by its name; the lower, the sooner a weight is kept. Asked twice, so that no second copy
of all of them has to be held: both times it must give the same."""


def lowest(ranking: Ranking, like: Params, *, count: int, within: Mask | None = None) -> dict[str, Tensor]:
    """A mask with exactly `count` ones: the lowest-ranked weights of all of `like` together, in order of the names.

    With `within` only its ones can be kept. Equal numbers are taken by name, then by position.

    Raises:
        ModelError: a number is NaN or infinite.
    """
    assert 0 <= count <= sum(tensor.numel() for tensor in like.values())
    if count == 0:
        return {name: torch.zeros(like[name].shape, dtype=torch.bool, device=like[name].device) for name in like}
    wide = any(tensor.dtype is torch.float64 for tensor in like.values())
    dtype = torch.float64 if wide else torch.float32
    threshold, ties = _threshold(_gather(ranking, like, dtype, within), count)
    assert threshold < torch.inf, "more weights are wanted than the mask has ones"
    kept: dict[str, Tensor] = {}
    for name in sorted(like):
        values = _values(ranking, name, dtype, within)
        kept[name] = values < threshold
        if ties > 0:
            first = (values == threshold).flatten().nonzero()[:ties, 0]
            kept[name].view(-1)[first] = True
            ties -= len(first)
    return {name: kept[name] for name in like}


def _threshold(numbers: "np.ndarray[Any, Any]", count: int) -> tuple[float, int]:
    """The `count`-th lowest number, and how many of those equal to it belong to the lowest `count`."""
    numbers.partition(count - 1)
    threshold = numbers[count - 1]
    return float(threshold), count - int(np.count_nonzero(numbers[:count] < threshold))


def _gather(ranking: Ranking, like: Params, dtype: torch.dtype, within: Mask | None) -> "np.ndarray[Any, Any]":
    numbers = torch.empty(sum(tensor.numel() for tensor in like.values()), dtype=dtype)
    start = 0
    for name in sorted(like):
        end = start + like[name].numel()
        numbers[start:end] = _values(ranking, name, dtype, within).flatten()
        start = end
    return numbers.numpy()


def _values(ranking: Ranking, name: str, dtype: torch.dtype, within: Mask | None) -> Tensor:
    values = ranking(name).to(dtype)
    if not bool(values.isfinite().all()):
        raise ModelError(
            f"the scores or weights of {name!r} hold NaN or infinity and cannot be ranked; lower the learning rate or "
            "look at what the clients sent"
        )
    return values if within is None else values.masked_fill(~within[name], torch.inf)


def chosen_of(params: Params, names: Iterable[str]) -> dict[str, Tensor]:
    """The chosen parameters.

    Raises:
        ModelError: the model has no such parameter.
    """
    names = list(names)
    strange = [name for name in names if name not in params]
    if strange:
        raise ModelError(f"the model has no parameter {strange[0]!r}; it has {len(params)}, such as {min(params)!r}")
    return {name: params[name] for name in names}
