"""Masks: exactly which weights may move in sparse fine-tuning, by five strategies of equal density.

Least sensitive by Fisher information: TaLoS (Iurada, Ciccone and Tommasi, ICLR 2025); the others are what it has to be
compared with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from atlas_fl.errors import ConfigError, ModelError, unknown
from atlas_fl.rng import generator
from atlas_fl.sparse.choose import Mask, Ranking, lowest
from atlas_fl.types import Params

Scope: TypeAlias = Literal["global", "layer"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What a strategy may look at."""

    params: Params
    """The weights to choose from."""
    scores: Params | None = None
    """The sensitivity of each of them, as `sparse.fisher.fisher` gives it."""
    seed: int | None = None


def _sensitivity(evidence: Evidence) -> Ranking:
    scores = evidence.scores
    if scores is None:
        raise ConfigError("this mask strategy ranks by sensitivity and has no scores; compute them with fisher_scores")
    for name, tensor in evidence.params.items():
        if name not in scores or scores[name].shape != tensor.shape:
            found = tuple(scores[name].shape) if name in scores else "none"
            raise ModelError(
                f"scores of {name!r} have the shape {found}, its weights {tuple(tensor.shape)}; compute the scores "
                "with this model"
            )
    return lambda name: scores[name].detach()


def _magnitude(evidence: Evidence) -> Ranking:
    return lambda name: evidence.params[name].detach().abs()


def _least_sensitive(evidence: Evidence) -> Ranking:
    return _sensitivity(evidence)


def _most_sensitive(evidence: Evidence) -> Ranking:
    ranking = _sensitivity(evidence)
    return lambda name: -ranking(name)


def _lowest_magnitude(evidence: Evidence) -> Ranking:
    return _magnitude(evidence)


def _highest_magnitude(evidence: Evidence) -> Ranking:
    ranking = _magnitude(evidence)
    return lambda name: -ranking(name)


def _random(evidence: Evidence) -> Ranking:
    """Uniform numbers from a stream of each parameter's own, so that neither order nor company changes them."""
    if evidence.seed is None:
        raise ConfigError("the mask strategy 'random' needs a seed")
    seed = evidence.seed

    def draw(name: str) -> Tensor:
        tensor = evidence.params[name]
        drawn = generator(seed, "mask", name).random(tensor.shape, dtype="float32")
        return torch.as_tensor(drawn).to(tensor.device)

    return draw


MASKS: Mapping[str, Callable[[Evidence], Ranking]] = {
    "least_sensitive": _least_sensitive,
    "most_sensitive": _most_sensitive,
    "lowest_magnitude": _lowest_magnitude,
    "highest_magnitude": _highest_magnitude,
    "random": _random,
}
"""How each strategy ranks weights: the lowest are kept."""

BY_SENSITIVITY: tuple[str, ...] = ("least_sensitive", "most_sensitive")
"""The strategies that need scores."""


def make_mask(
    strategy: str,
    params: Params,
    *,
    sparsity: float,
    scores: Params | None = None,
    scope: Scope = "global",
    seed: int | None = None,
) -> dict[str, Tensor]:
    """Which of `params` may move: exactly round((1 - sparsity) n) weights, true in a bool tensor of each parameter.

    n counts all the weights together (`scope="global"`) or those of each parameter (`"layer"`). Ties are broken by name
    and position, so the mask depends on nothing but its arguments. `scores` are needed by the strategies of
    `BY_SENSITIVITY`, the `seed` by `random`.

    Raises:
        ConfigError: the strategy is unknown or lacks what it needs, or the sparsity is not inside (0, 1).
        ModelError: scores of another model, or NaN or infinity among what is ranked.
    """
    check_sparsity(sparsity)
    evidence = Evidence(params=params, scores=scores, seed=seed)
    return keep_share(strategy, evidence, share=1 - sparsity, scope=scope)


def check_sparsity(sparsity: float) -> None:
    """Raise ConfigError unless some weights move and some do not."""
    if not 0 < sparsity < 1:
        raise ConfigError(f"sparsity is {sparsity}; it is the share of frozen weights, above 0 and below 1, e.g. 0.9")


def check_kept(params: Params, *, sparsity: float, scope: Scope) -> None:
    """Raise ConfigError unless some of these weights move and some do not."""
    check_sparsity(sparsity)
    sizes = [tensor.numel() for tensor in params.values()]
    if not any(round((1 - sparsity) * size) for size in ([sum(sizes)] if scope == "global" else sizes)):
        raise ConfigError(f"sparsity {sparsity:.12g} lets none of {sum(sizes):,} weights move; give a smaller one")


def keep_share(
    strategy: str, evidence: Evidence, *, share: float, scope: Scope, within: Mask | None = None
) -> dict[str, Tensor]:
    """The mask that keeps round(share n) weights, all of them among the ones of `within` where that is given."""
    if strategy not in MASKS:
        raise unknown("mask strategy", strategy, MASKS)
    if scope not in ("global", "layer"):
        raise unknown("mask scope", scope, ("global", "layer"))
    ranking, params = MASKS[strategy](evidence), evidence.params
    like = params if strategy not in BY_SENSITIVITY or evidence.scores is None else evidence.scores
    like = {name: like[name] for name in params}
    parts = [like] if scope == "global" else [{name: tensor} for name, tensor in like.items()]
    mask: dict[str, Tensor] = {}
    for part in parts:
        count = round(share * sum(tensor.numel() for tensor in part.values()))
        inside = None if within is None else {name: within[name] for name in part}
        mask |= lowest(ranking, part, count=count, within=inside)
    return {name: mask[name].to(params[name].device) for name in params}
