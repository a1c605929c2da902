"""Masks: which weights may move in sparse fine-tuning, by five strategies of equal density.

`least_sensitive` ranks by Fisher information: TaLoS (Iurada, Ciccone and Tommasi, ICLR 2025). The other strategies are
what it is compared with.

A mask keeps exactly k of n weights. A threshold alone keeps too many where values are equal, so `bottom_k` keeps all
below the k-th lowest value, and of those equal to it the first by name and position.

`calibrate_mask` makes a mask in several rounds. One pass scores every weight as if all of them would move. With a
sparsity s and R rounds, round r = 0 .. R-1

1. scores the model theta * (m + shrink (1 - m)), m the mask so far (ones before the first round), so that a frozen
   weight counts with `shrink` of its value;
2. keeps, of the ones of m, the best round((1 - s)^((r + 1) / R) n) by the strategy: the new m.

So masks are nested, the last has the density of a single pass, and R = 1 is the single pass. The schedule is that of
SynFlow (Tanaka et al. 2020); rounds and the factor 0.1 are those of TaLoS, which multiplies weights in the
forward pass.

The module also compares masks, merges them, checks them against a model and reads them from files.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from atlas_fl.errors import ConfigError, ModelError, check_known
from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, Params
from atlas_fl.rng import generator
from atlas_fl.storage.tensors import read_tensors

Mask: TypeAlias = Mapping[str, Tensor]
"""The weights that may move: a bool tensor for every chosen parameter, of its shape."""

Ranking: TypeAlias = Callable[[str], Tensor]
"""The numbers of a parameter by its name; the lower, the sooner a weight is kept."""


def bottom_k(ranking: Ranking, like: Params, *, count: int, within: Mask | None = None) -> dict[str, Tensor]:
    """A mask with exactly `count` ones: the lowest-ranked weights of all of `like` together, in order of the names.

    With `within` only its ones can be kept. Equal numbers are taken by name, then by position.

    Raises:
        ModelError: a number is NaN or infinite.
    """
    names = sorted(like)
    values = torch.cat([_finite_values(ranking, name) for name in names])
    if within is not None:
        values.masked_fill_(~torch.cat([within[name].flatten().cpu() for name in names]), torch.inf)
    kept = torch.zeros(len(values), dtype=torch.bool)
    if count:
        threshold = values.kthvalue(count).values
        assert threshold < torch.inf, "more weights are wanted than the mask has ones"
        kept = values < threshold
        kept[(values == threshold).nonzero()[: count - int(kept.sum()), 0]] = True
    mask = dict(zip(names, torch.split(kept, [like[name].numel() for name in names]), strict=True))
    return {name: mask[name].view(tensor.shape).to(tensor.device) for name, tensor in like.items()}


def _finite_values(ranking: Ranking, name: str) -> Tensor:
    values = ranking(name).flatten().cpu()
    if not bool(values.isfinite().all()):
        raise ModelError(
            f"the scores or weights of {name!r} hold NaN or infinity and cannot be ranked; lower the learning rate or "
            "look at what the clients sent"
        )
    return values


def select_params(params: Params, names: Iterable[str]) -> dict[str, Tensor]:
    """The chosen parameters.

    Raises:
        ModelError: the model has no such parameter.
    """
    names = list(names)
    missing = [name for name in names if name not in params]
    if missing:
        raise ModelError(f"the model has no parameter {missing[0]!r}; it has {len(params)}, such as {min(params)!r}")
    return {name: params[name] for name in names}


_LAYER = re.compile(r".*?\.\d+(?=\.)")


def check_mask(mask: Mask, params: Params) -> None:
    """Raise ModelError unless the mask has a bool tensor of the right shape for each parameter and for nothing else."""
    missing, surplus = sorted(params.keys() - mask.keys()), sorted(mask.keys() - params.keys())
    if missing or surplus:
        what = f"has none for {missing[0]!r}" if missing else f"has {surplus[0]!r}, which the model lacks"
        raise ModelError(f"the mask {what} ({len(missing) + len(surplus)} such names); make the mask for this model")
    for name, tensor in params.items():
        bits = mask[name]
        if bits.shape != tensor.shape or bits.dtype is not torch.bool:
            raise ModelError(
                f"the mask of {name!r} is {_describe(bits)}, the weights are {_describe(tensor)}; make the mask for"
                " this model"
            )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def overlap(masks: Sequence[Mask]) -> Float64[np.ndarray, "masks masks"]:
    """Jaccard index |a and b| / |a or b| of every pair of masks of one model; two empty masks are equal and have 1."""
    both = np.zeros((len(masks), len(masks)))
    for name in masks[0]:
        bits = torch.stack([mask[name].flatten().cpu() for mask in masks]).double()  # counts exactly up to 2^53
        both += (bits @ bits.T).numpy()
    sizes = both.diagonal()
    either = sizes[:, None] + sizes[None, :] - both
    return np.where(either > 0, both / np.where(either > 0, either, 1.0), 1.0)


def density(mask: Mask) -> dict[str, float]:
    """The share of weights that may move, of every parameter; an empty parameter has 0."""
    return {name: float(torch.count_nonzero(bits)) / max(1, bits.numel()) for name, bits in mask.items()}


def density_by_layer(mask: Mask) -> dict[str, float]:
    """The share of weights that may move by layer: embeddings, then numbers in rising order, then the others.

    A layer is all tensors whose names agree up to their first number, such as `encoder.layer.3`; of names without one,
    up to the first dot.
    """
    counts: dict[str, list[int]] = {}
    for name, bits in mask.items():
        match = _LAYER.match(name)
        count = counts.setdefault(match[0] if match else name.partition(".")[0], [0, 0])
        count[0] += int(torch.count_nonzero(bits))
        count[1] += bits.numel()
    return {layer: counts[layer][0] / max(1, counts[layer][1]) for layer in sorted(counts, key=_layer_order)}


def _layer_order(layer: str) -> tuple[int, str, int]:
    """Sort key of a layer: a file holds its tensors in an order of its own."""
    name, _, number = layer.rpartition(".")
    if number.isdecimal():
        return 1, name, int(number)
    return (0 if layer.startswith("embed") else 2), layer, 0


def num_kept(mask: Mask) -> int:
    """Number of weights that may move."""
    return sum(int(torch.count_nonzero(bits)) for bits in mask.values())


Scope: TypeAlias = Literal["global", "layer"]


class Evidence(Frozen, eq=False):
    """Inputs of a mask strategy."""

    params: Params
    """The weights to choose from."""
    scores: Params
    """The sensitivity of each, as `sparse.fisher.fisher_scores` gives it; empty where the strategy needs none."""
    seed: int


def _sensitivity(evidence: Evidence, name: str) -> Tensor:
    tensor, scores = evidence.params[name], evidence.scores
    if name not in scores or scores[name].shape != tensor.shape:
        shape = tuple(scores[name].shape) if name in scores else "none"
        raise ModelError(
            f"scores of {name!r} have the shape {shape}, its weights {tuple(tensor.shape)}; compute the scores "
            "with this model"
        )
    return scores[name].detach()


def _magnitude(evidence: Evidence, name: str) -> Tensor:
    return evidence.params[name].detach().abs()


def _random(evidence: Evidence, name: str) -> Tensor:
    """Uniform numbers from a stream of each parameter's own, so that neither order nor company changes them."""
    return torch.as_tensor(generator(evidence.seed, "mask", name).random(evidence.params[name].shape, dtype="float32"))


MASKS: Mapping[str, Callable[[Evidence, str], Tensor]] = {
    "least_sensitive": _sensitivity,
    "most_sensitive": lambda evidence, name: -_sensitivity(evidence, name),
    "lowest_magnitude": _magnitude,
    "highest_magnitude": lambda evidence, name: -_magnitude(evidence, name),
    "random": _random,
}
"""Numbers of a parameter's weights by strategy: the lowest are kept."""

BY_SENSITIVITY: tuple[str, ...] = ("least_sensitive", "most_sensitive")
"""The strategies that need scores."""


def check_any_kept(params: Params, *, sparsity: float, scope: Scope) -> None:
    """Raise ConfigError unless some of these weights move."""
    sizes = [tensor.numel() for tensor in params.values()]
    if not any(round((1 - sparsity) * size) for size in ([sum(sizes)] if scope == "global" else sizes)):
        raise ConfigError(f"sparsity {sparsity:.12g} lets none of {sum(sizes):,} weights move; give a smaller one")


ScoreFn: TypeAlias = Callable[[Params], Params]
"""The sensitivity of the chosen weights at these weights of the whole model."""

SHRINK = 0.1
"""Share that is left of an already frozen weight while the others are scored."""


def calibrate_mask(
    score: ScoreFn,
    params: Params,
    *,
    names: Iterable[str],
    strategy: str,
    sparsity: float,
    seed: int,
    rounds: int = 1,
    scope: Scope = "global",
) -> dict[str, Tensor]:
    """The mask over the parameters `names` after that many rounds; `score` sees the whole model once a round.

    Exactly round((1 - sparsity) n) weights may move, n of all parameters together (`scope="global"`) or of each one
    (`"layer"`). Ties are broken by name and position, so the mask depends on nothing but the arguments. Strategies that
    do not rank by sensitivity never call `score`, and more rounds give them the same mask.

    Raises:
        ConfigError: the strategy or the scope is unknown, the sparsity is not inside (0, 1), or there is no round.
        ModelError: the model lacks a parameter, scores are of another one, or NaN or infinity is among what is ranked.
    """
    check_known("mask strategy", strategy, among=MASKS)
    check_known("mask scope", scope, among=("global", "layer"))
    if not 0 < sparsity < 1:
        raise ConfigError(f"sparsity is {sparsity}; it is the share of frozen weights, above 0 and below 1, e.g. 0.9")
    if rounds < 1:
        raise ConfigError(f"calibration has {rounds} rounds; it needs 1 or more")
    chosen = select_params(params, names)
    parts = [chosen] if scope == "global" else [{name: tensor} for name, tensor in chosen.items()]
    mask: dict[str, Tensor] = {}
    for completed in range(rounds):
        scores = score(shrink_frozen(params, mask)) if strategy in BY_SENSITIVITY else {}
        ranking = partial(MASKS[strategy], Evidence(params=chosen, scores=scores, seed=seed))
        share, within = (1 - sparsity) ** ((completed + 1) / rounds), mask or None
        for part in parts:
            count = round(share * sum(tensor.numel() for tensor in part.values()))
            mask = {**mask, **bottom_k(ranking, part, count=count, within=within)}
    return mask


def shrink_frozen(params: Params, mask: Mask) -> dict[str, Tensor]:
    """The model with its frozen weights times `SHRINK`; parameters without a mask stay as they are."""
    return {
        name: tensor if name not in mask else tensor.where(mask[name], SHRINK * tensor)
        for name, tensor in params.items()
    }


MASK_MERGES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "union": torch.logical_or,
    "intersection": torch.logical_and,
}
"""Ways to make one mask of several: a weight may move where at least one mask lets it, or where every one does."""


def read_mask(path: Path) -> dict[str, Tensor]:
    """The mask of a file, without heads: these differ from task to task, and no mask lets them move.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
        ModelError: it holds something else than a mask.
    """
    tensors = read_tensors(path)
    if offender := next((name for name, bits in tensors.items() if bits.dtype is not torch.bool), None):
        kind = str(tensors[offender].dtype).removeprefix("torch.")
        raise ModelError(f"{path} is no mask: {offender!r} is {kind}, not bool; give the mask.safetensors of a run")
    return {name: bits for name, bits in tensors.items() if not name.startswith(HEAD)}


def load_mask(path: Path, *, like: Params) -> dict[str, Tensor]:
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


def merge_masks(masks: Mapping[str, Mask], *, method: str) -> dict[str, Tensor]:
    """One mask out of several, by their names and the method's (`MASK_MERGES`).

    Raises:
        ConfigError: nothing is left.
        ModelError: one is of another model than the first; the message names both.
    """
    check_same_model(masks)
    first, *_ = masks.values()
    merge = MASK_MERGES[method]
    mask = {name: reduce(merge, [other[name] for other in masks.values()]) for name in first}
    if not num_kept(mask):
        raise ConfigError(
            f"the {method} of these {len(masks)} masks lets no weight move; take the union, or fewer masks"
        )
    return mask


def check_same_model(masks: Mapping[str, Mask]) -> None:
    """Raise ModelError unless all masks are of one model."""
    first, *others = masks
    for name in others:
        try:
            check_mask(masks[name], masks[first])
        except ModelError as error:
            raise ModelError(f"{name} and {first} are masks of different models: {error}") from error
