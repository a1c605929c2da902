"""Task vectors: what training has added to a model, as something to add, scale (below zero negates) and merge.

Ilharco et al. 2023, "Editing Models with Task Arithmetic"; TIES: Yadav et al. 2023, "TIES-Merging: Resolving
Interference When Merging Models".
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from atlas_fl.errors import ConfigError, ModelError, check_known
from atlas_fl.params import Params
from atlas_fl.sparse.masks import Mask, bottom_k


def task_vector(trained: Params, start: Params) -> dict[str, Tensor]:
    """tau = theta - theta_0, parameter by parameter."""
    _check_same_shapes([start, trained])
    return {name: trained[name] - start[name] for name in start}


def apply_vector(start: Params, vector: Params, *, scale: float = 1.0) -> dict[str, Tensor]:
    """theta_0 + scale tau; parameters that the vector lacks stay as they are."""
    _check_same_shapes([{name: start[name] for name in vector if name in start}, vector])
    return {name: tensor + scale * vector[name] if name in vector else tensor for name, tensor in start.items()}


def merge_vectors(vectors: Sequence[Params], *, method: str, keep: float = 0.2) -> dict[str, Tensor]:
    """One task vector out of several: their `mean`, or `ties`, which keeps the share `keep` of each first.

    Raises:
        ConfigError: an unknown method, or a share outside (0, 1].
        ModelError: no vectors, or vectors of different models.
    """
    check_known("merge", method, among=MERGES)
    if not 0 < keep <= 1:
        raise ConfigError(f"keep is {keep}; it is the share of each task vector that TIES keeps, above 0, at most 1")
    _check_same_shapes(vectors)
    return MERGES[method](vectors, keep)


def _mean(vectors: Sequence[Params], keep: float) -> dict[str, Tensor]:  # noqa: ARG001 - one signature for all
    return {name: torch.stack([vector[name] for vector in vectors]).mean(0) for name in vectors[0]}


def _ties(vectors: Sequence[Params], keep: float) -> dict[str, Tensor]:
    """Trim, elect, merge (Yadav et al. 2023, algorithm 1).

    Trim: of each vector the round(keep n) largest magnitudes stay, exactly so many. Elect: the sign of the sum of what
    stayed. Merge: the mean of the values of that sign; where masses cancel exactly, or nothing stayed, zero.
    """
    masks = [trim_mask(vector, keep=keep) for vector in vectors]
    merged = {}
    for name in vectors[0]:
        values = torch.stack([vector[name] * mask[name] for vector, mask in zip(vectors, masks, strict=True)])
        agrees = values.sign() == values.sum(0).sign()
        merged[name] = values.where(agrees, 0.0).sum(0) / agrees.sum(0).clamp(min=1)
    return merged


MERGES: Mapping[str, Callable[[Sequence[Params], float], dict[str, Tensor]]] = {"mean": _mean, "ties": _ties}


def trim_mask(vector: Params, *, keep: float) -> Mask:
    """The round(keep n) largest magnitudes over the whole vector, ties by name and position."""
    count = round(keep * sum(tensor.numel() for tensor in vector.values()))
    return bottom_k(lambda name: -vector[name].abs(), vector, count=count)


def _check_same_shapes(vectors: Sequence[Params]) -> None:
    if not vectors:
        raise ModelError("there is no task vector to work with; give one or more")
    first, *others = ({name: tuple(tensor.shape) for name, tensor in vector.items()} for vector in vectors)
    for shapes in others:
        if shapes != first:
            name = min(name for name, _ in first.items() ^ shapes.items())
            raise ModelError(
                f"task vectors of different models: {name!r} is {first.get(name, 'absent')} and"
                f" {shapes.get(name, 'absent')}; take the same architecture"
            )
