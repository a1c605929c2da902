"""A mask in several rounds, each scored anew with what is already frozen turned down.

One pass scores every weight as if all of them would move. With a sparsity s and R rounds, round r = 0 .. R-1

1. scores the model theta * (m + shrink (1 - m)), m the mask so far (ones before the first round), so that a weight that
   is already frozen counts with `shrink` of its value;
2. keeps, of the ones of m, the best round((1 - s)^((r + 1) / R) n) by the strategy: the new m.

So masks are nested, the last has the density of a single pass, and R = 1 is the single pass. The schedule is that of
SynFlow (Tanaka et al. 2020); rounds and the factor 0.1 are those of TaLoS (Iurada et al., ICLR 2025), which multiplies
weights in the forward pass.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from torch import Tensor

from atlas_fl.errors import ConfigError
from atlas_fl.sparse.choose import Mask, chosen_of
from atlas_fl.sparse.masks import BY_SENSITIVITY, Evidence, Scope, check_sparsity, keep_share
from atlas_fl.types import Params

Score: TypeAlias = Callable[[Params], Params]
"""The sensitivity of the chosen weights at these weights of the whole model."""

SHRINK = 0.1
"""What is left of a weight that is already frozen while the others are scored."""


def calibrate(
    score: Score,
    params: Params,
    *,
    names: Iterable[str],
    strategy: str,
    sparsity: float,
    rounds: int,
    scope: Scope = "global",
    seed: int | None = None,
    shrink: float = SHRINK,
) -> dict[str, Tensor]:
    """The mask over the parameters `names` after that many rounds; `score` sees the whole model once a round.

    Strategies that do not rank by sensitivity never call it, and more rounds give them the same mask.
    """
    check_sparsity(sparsity)
    if rounds < 1:
        raise ConfigError(f"calibration has {rounds} rounds; it needs 1 or more")
    if not 0 <= shrink <= 1:
        raise ConfigError(f"shrink is {shrink}; it is what is left of a frozen weight, from 0 to 1")
    chosen = chosen_of(params, names)
    mask: dict[str, Tensor] | None = None
    for done in range(rounds):
        scores = None
        if strategy in BY_SENSITIVITY:
            scores = score(params if mask is None else turned_down(params, mask, shrink=shrink))
        evidence = Evidence(params=chosen, scores=scores, seed=seed)
        share = (1 - sparsity) ** ((done + 1) / rounds)
        mask = keep_share(strategy, evidence, share=share, scope=scope, within=mask)
    assert mask is not None
    return mask


def turned_down(params: Params, mask: Mask, *, shrink: float) -> dict[str, Tensor]:
    """The model with its frozen weights times `shrink`; parameters without a mask stay as they are."""
    return {
        name: tensor if name not in mask else tensor.where(mask[name], shrink * tensor)
        for name, tensor in params.items()
    }
