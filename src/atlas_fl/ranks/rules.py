"""The rules of `allocate` at their heart: from importance, costs and a budget to the index of each layer's candidate.

Every rule takes importance (layers,), cost (layers, candidates) in bytes, the candidate ranks (candidates,) and the
budget in bytes; every layer costs something and the smallest ranks fit. The result, int64 (layers,), is within budget.
"""

from typing import Protocol, runtime_checkable

import numpy as np

_EPSILON = 1e-9  # a target of 7.999999999 is 8: sums in another order must not change a rank


@runtime_checkable
class Rule(Protocol):
    """One rule."""

    def __call__(self, importance: np.ndarray, cost: np.ndarray, ranks: np.ndarray, *, budget: int) -> np.ndarray:
        """The index of every layer's candidate."""
        ...


def _total(table: np.ndarray, levels: np.ndarray) -> float:
    return float(table[np.arange(len(levels)), levels].sum())


def proportional(importance: np.ndarray, cost: np.ndarray, ranks: np.ndarray, *, budget: int) -> np.ndarray:
    """Ranks in proportion to importance that spend the budget.

    target_l = importance_l * B, where B is what the budget pays for (layers * r* for layers of equal cost), clipped
    to the candidates and rescaled so that the targets still cost the budget. The candidates are those `_nearest` to
    them. Then, where layers differ in cost, steps down where importance per byte is least until the bytes fit, and
    steps up by largest remainder while they do.
    """
    target = _targets(importance, cost[:, -1] / ranks[-1], budget, low=int(ranks[0]), high=int(ranks[-1]))
    order = np.argsort(-importance, kind="stable")
    # a target at its bound no longer tells layers apart, so the order of importance is put back
    levels = np.empty(len(order), dtype=np.int64)
    levels[order] = np.sort(_nearest(target, ranks))[::-1]
    levels = _lower(levels, importance, cost, budget=budget)
    return _raise(levels, importance, cost, budget=budget, target=target, ranks=ranks)


def _targets(importance: np.ndarray, unit: np.ndarray, budget: int, *, low: int, high: int) -> np.ndarray:
    """`clip(scale * importance, low, high)` with the scale at which `unit` bytes a rank cost the budget."""
    share = np.maximum(importance / importance.max(), 1e-12)  # what the others cannot take falls even to the least
    scales = np.sort(np.concatenate([low / share, high / share]))
    costs = np.clip(np.outer(scales, share), low, high) @ unit  # piecewise linear between these scales
    return np.asarray(np.clip(np.interp(budget, costs, scales) * share, low, high))


def _nearest(target: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Largest-remainder rounding for candidates with gaps: the indices of the ranks.

    Their sum is as near the targets' as the candidates allow and never above it; among those they are the ones that
    minimise sum (r_l - target_l)^2. With every integer a candidate this is the method of the largest remainder.
    Exact, by dynamic programming over the sum.
    """
    limit = int(target.sum() + _EPSILON)
    best = np.full(limit + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for aim in target:
        options = np.full((len(ranks), limit + 1), np.inf)
        for row, rank in zip(options, ranks):
            row[rank:] = best[: max(limit + 1 - rank, 0)] + (rank - aim) ** 2
        chosen.append(options.argmin(axis=0))
        best = options.min(axis=0)
    left = int(np.flatnonzero(np.isfinite(best))[-1])
    levels = np.empty(len(target), dtype=np.int64)
    for layer in reversed(range(len(target))):
        levels[layer] = chosen[layer][left]
        left -= ranks[levels[layer]]
    return levels


def _raise(
    levels: np.ndarray,
    importance: np.ndarray,
    cost: np.ndarray,
    *,
    budget: int,
    target: np.ndarray,
    ranks: np.ndarray,
) -> np.ndarray:
    """Steps up by largest remainder, counted in parts of the step, while one fits and its layer is below its target."""
    rows, top = np.arange(len(levels)), len(ranks) - 1
    levels = levels.copy()
    while True:
        above = np.minimum(levels + 1, top)
        step = cost[rows, above] - cost[rows, levels]
        remainder = np.round((target - ranks[levels]) / np.maximum(ranks[above] - ranks[levels], 1), 9)
        fits = (levels < top) & (remainder > 0) & (step <= budget - _total(cost, levels))
        if not fits.any():
            return levels
        levels[_first(fits, remainder, importance)] += 1


def _lower(levels: np.ndarray, importance: np.ndarray, cost: np.ndarray, *, budget: int) -> np.ndarray:
    """Steps down where importance per byte is least, until the bytes are within the budget."""
    rows = np.arange(len(levels))
    levels = levels.copy()
    while _total(cost, levels) > budget:
        freed = cost[rows, levels] - cost[rows, np.maximum(levels - 1, 0)]
        value = np.round(-importance / np.maximum(freed, 1) / importance.max() * freed.max(), 9)
        levels[_first(levels > 0, value, -importance)] -= 1
    return levels


def greedy(importance: np.ndarray, cost: np.ndarray, ranks: np.ndarray, *, budget: int) -> np.ndarray:
    """From the smallest ranks up, always the step with the most importance * rank per byte that still fits."""
    rows, top = np.arange(len(cost)), len(ranks) - 1
    levels = np.zeros(len(cost), dtype=np.int64)
    while True:
        above = np.minimum(levels + 1, top)
        step = cost[rows, above] - cost[rows, levels]
        fits = (levels < top) & (step <= budget - _total(cost, levels))
        if not fits.any():
            return levels
        gain = importance * (ranks[above] - ranks[levels]) / np.maximum(step, 1)
        levels[_first(fits, np.round(gain / max(gain.max(), 1e-300), 12), importance)] += 1


def _first(allowed: np.ndarray, *keys: np.ndarray) -> int:
    """The allowed index with the largest first key, then the largest second, then the smallest index."""
    order = np.lexsort((np.arange(len(allowed)), *(-key for key in reversed(keys)), ~allowed))
    return int(order[0])


def uniform(importance: np.ndarray, cost: np.ndarray, ranks: np.ndarray, *, budget: int) -> np.ndarray:
    """The largest candidate that every layer can have."""
    del ranks  # the signature is shared
    largest = int(np.searchsorted(cost.sum(axis=0), budget, side="right")) - 1
    return np.full(len(importance), largest, dtype=np.int64)


def matched(importance: np.ndarray, cost: np.ndarray, ranks: np.ndarray, *, budget: int) -> np.ndarray:
    """Ranks in proportion to importance that take no more bytes than `uniform` would."""
    levels = uniform(importance, cost, ranks, budget=budget)
    return proportional(importance, cost, ranks, budget=int(_total(cost, levels)))
