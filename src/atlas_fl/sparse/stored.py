"""Masks in files: of a run, or merged from several, for a run to come."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from atlas_fl.errors import ConfigError, ModelError, unknown
from atlas_fl.io.tensors import read_tensors
from atlas_fl.sparse.algebra import check_mask, intersection, num_kept, union
from atlas_fl.sparse.choose import Mask
from atlas_fl.tree import HEAD
from atlas_fl.types import Params

UNIONS: Mapping[str, Callable[[Sequence[Mask]], dict[str, Tensor]]] = {"union": union, "intersection": intersection}
"""How several masks become one."""


def read_mask(path: Path) -> dict[str, Tensor]:
    """The mask of a file, without heads: these differ from task to task, and no mask lets them move.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
        ModelError: it holds something else than a mask.
    """
    tensors = read_tensors(path)
    if strange := next((name for name, own in tensors.items() if own.dtype is not torch.bool), None):
        kind = str(tensors[strange].dtype).removeprefix("torch.")
        raise ModelError(f"{path} is no mask: {strange!r} is {kind}, not bool; give the mask.safetensors of a run")
    return {name: own for name, own in tensors.items() if not name.startswith(HEAD)}


def stored_mask(path: Path, *, like: Params) -> dict[str, Tensor]:
    """The mask of a file for a model with these weights, in their order.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
        ModelError: it holds no mask, or one of another model.
        ConfigError: it lets nothing move.
    """
    mask = read_mask(path)
    try:
        check_mask(mask, like)
    except ModelError as error:
        raise ModelError(f"--mask-file {path} fits another model: {error}") from error
    if not num_kept(mask):
        raise ConfigError(f"--mask-file {path} lets no weight move; give a mask that keeps some")
    return {name: mask[name].to(tensor.device) for name, tensor in like.items()}


def merged(masks: Mapping[str, Mask], *, method: str) -> dict[str, Tensor]:
    """One mask out of several, by their names.

    Raises:
        ConfigError: the method is unknown, or nothing is left.
        ModelError: one is of another model than the first; the message names both.
    """
    if method not in UNIONS:
        raise unknown("merge", method, UNIONS)
    check_alike(masks)
    found = UNIONS[method](list(masks.values()))
    if not num_kept(found):
        raise ConfigError(
            f"the {method} of these {len(masks)} masks lets no weight move; take the union, or fewer masks"
        )
    return found


def check_alike(masks: Mapping[str, Mask]) -> None:
    """Raise ModelError unless all masks are of one model."""
    first, *others = masks
    for name in others:
        try:
            check_mask(masks[name], masks[first])
        except ModelError as error:
            raise ModelError(f"{name} and {first} are masks of different models: {error}") from error
