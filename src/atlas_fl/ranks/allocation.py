"""LoRA ranks per layer under a budget of bytes, by measured importance.

The importance of a layer is the mean squared gradient of its parameters, as a share of the sum over all layers. The
alternative `rngwp` is HSplitLoRA's: the mean of |weight * gradient|, smoothed over passes (arXiv 2505.02795).

A rule sees importance (layers,), cost (layers, candidates) in bytes, the candidate ranks (candidates,) and the budget
in bytes, and returns the index of each layer's candidate, int64 (layers,). Every layer costs something and the smallest
ranks fit. All rules share one frame, so every one of them validates alike and none is ever over budget:

- `budget`: ranks in proportion to importance (algorithm 1 of the first ATLAS, with a rounding that adds up).
- `matched`: the same, limited to the bytes that `uniform` uses: only the shape differs, for a fair comparison.
- `greedy`: the next step always where importance per byte is largest. The utility sum I * r is linear, so the most
  important layer is filled to its largest rank before the next one gets anything.
- `uniform`: the largest candidate that fits everywhere.

`assign_ranks` goes from a device and the importance of its layers to ranks: budget, allocation and memory check.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Num

from atlas_fl.errors import BudgetError, ConfigError, DataError
from atlas_fl.frozen import Frozen
from atlas_fl.models.registry import ModelShape
from atlas_fl.ranks import cost_model
from atlas_fl.ranks.devices import Device

Layers: TypeAlias = Float[np.ndarray, " layers"]
ByClientLayers: TypeAlias = Float[np.ndarray, "clients layers"]
Sums: TypeAlias = Num[np.ndarray, " layers"]


def normalise_importance(values: Sums) -> Layers:
    """The values divided by their sum, float64.

    Raises `DataError` where a value is negative or not finite, or all are zero: no gradient is no measurement.
    """
    measured = np.asarray(values, dtype=np.float64)
    if not np.isfinite(measured).all() or (measured < 0).any() or not measured.any():
        raise DataError(
            f"layer importance cannot be measured from {measured.tolist()}; "
            "the gradients must be finite and not all zero"
        )
    scaled = measured / measured.max()  # the sum of the largest doubles would overflow
    return np.asarray(scaled / scaled.sum())


def layer_importance(square_sums: Sums, num_params: Sums) -> Layers:
    """Importance of every layer from the sums of its squared gradients over `num_params` parameters; sums to one.

    importance_l = (||g_l||^2 / n_l) / sum_m (||g_m||^2 / n_m). Raises `DataError` as `normalise_importance` does.
    """
    return normalise_importance(np.asarray(square_sums, dtype=np.float64) / num_params)


DECAY = 0.9
"""Share of the passes before in what `rngwp` smooths."""


def rngwp(previous: Layers | None, product_sums: Sums, num_params: Sums) -> Layers:
    """The smoothed mean |w * g| of every layer: `DECAY * previous + (1 - DECAY) * mean`, or the mean at first.

    `product_sums` are the sums of |w * g| over a layer's parameters. Not normalised, so that passes can be
    chained; `normalise_importance` makes an importance of it.
    """
    mean = np.asarray(product_sums, dtype=np.float64) / num_params
    return mean if previous is None else DECAY * previous + (1 - DECAY) * mean


def cluster_importance(importance: ByClientLayers, labels: Sequence[int]) -> ByClientLayers:
    """Every client's importance replaced by the mean over its cluster; a client without cluster (-1) keeps its own."""
    groups = np.asarray(labels)
    result = np.array(importance, dtype=np.float64)
    for label in set(groups.tolist()) - {-1}:
        result[groups == label] = importance[groups == label].mean(axis=0)
    return result


def complexity_factors(
    difficulty: Float[np.ndarray, " clients"], labels: Sequence[int], *, floor: float = 0.5
) -> Float[np.ndarray, " clients"]:
    """The share of its budget that each client may use: 1 in the hardest cluster, towards `floor` in easier ones.

    factor = floor + (1 - floor) * d_c / max d, with d_c the mean difficulty of the client's cluster (its own for a
    client without cluster). It multiplies the budget and never exceeds one, so what a device can hold stays the bound.
    Difficulties of different tasks compare only on one scale, such as the loss over the loss of guessing.
    """
    means = cluster_importance(np.asarray(difficulty, dtype=np.float64)[:, None], labels)[:, 0]
    largest = means.max(initial=0.0)
    return np.ones_like(means) if largest == 0 else np.asarray(floor + (1 - floor) * means / largest)


_EPSILON = 1e-9  # a target of 7.999999999 is 8: sums in another order must not change a rank


RankRule: TypeAlias = Callable[..., np.ndarray]
"""(importance, cost, ranks, *, budget) -> the index of every layer's candidate."""


def _total_cost(table: np.ndarray, levels: np.ndarray) -> float:
    return float(table[np.arange(len(levels)), levels].sum())


def proportional(importance: np.ndarray, cost: np.ndarray, ranks: np.ndarray, *, budget: int) -> np.ndarray:
    """Ranks in proportion to importance that spend the budget.

    target_l = importance_l * B, where B is what the budget pays for (layers * r* for layers of equal cost), clipped
    to the candidates and rescaled so that the targets still cost the budget. The candidates are those `_nearest` to
    them. Then, where layers differ in cost, steps down where importance per byte is least until the bytes fit, and
    steps up by largest remainder, counted in parts of the step, while they do and a layer is below its target.
    """
    target = _targets(importance, cost[:, -1] / ranks[-1], budget, low=int(ranks[0]), high=int(ranks[-1]))
    order = np.argsort(-importance, kind="stable")
    # a target at its bound no longer tells layers apart, so the order of importance is put back
    levels = np.empty(len(order), dtype=np.int64)
    levels[order] = np.sort(_nearest(target, ranks))[::-1]
    levels = _lower_levels(levels, importance, cost, budget=budget)

    def remainder(lower: np.ndarray, upper: np.ndarray, _: np.ndarray) -> np.ndarray:
        parts = np.round((target - ranks[lower]) / np.maximum(ranks[upper] - ranks[lower], 1), 9)
        return np.asarray(np.where(parts > 0, parts, -1.0))

    return _raise_levels(levels, importance, cost, budget=budget, worth_of=remainder)


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


def _raise_levels(
    levels: np.ndarray,
    importance: np.ndarray,
    cost: np.ndarray,
    *,
    budget: int,
    worth_of: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """Steps up, always the one that is worth most, while one fits into the budget.

    `worth_of` gives what the steps are worth from their lower and upper levels and bytes; none is taken below 0.
    """
    rows, top = np.arange(len(levels)), cost.shape[1] - 1
    levels = levels.copy()
    while True:
        above = np.minimum(levels + 1, top)
        step = cost[rows, above] - cost[rows, levels]
        worth = worth_of(levels, above, step)
        fits = (levels < top) & (worth >= 0) & (step <= budget - _total_cost(cost, levels))
        if not fits.any():
            return levels
        levels[_best_index(fits, worth, importance)] += 1


def _lower_levels(levels: np.ndarray, importance: np.ndarray, cost: np.ndarray, *, budget: int) -> np.ndarray:
    """Steps down where importance per byte is least, until the bytes are within the budget."""
    rows = np.arange(len(levels))
    levels = levels.copy()
    while _total_cost(cost, levels) > budget:
        freed = cost[rows, levels] - cost[rows, np.maximum(levels - 1, 0)]
        value = np.round(-importance / np.maximum(freed, 1) / importance.max() * freed.max(), 9)
        levels[_best_index(levels > 0, value, -importance)] -= 1
    return levels


def greedy(importance: np.ndarray, cost: np.ndarray, ranks: np.ndarray, *, budget: int) -> np.ndarray:
    """From the smallest ranks up, always the step with the most importance * rank per byte that still fits."""

    def gain_by_byte(lower: np.ndarray, upper: np.ndarray, step: np.ndarray) -> np.ndarray:
        gain = importance * (ranks[upper] - ranks[lower]) / np.maximum(step, 1)
        return np.asarray(np.round(gain / max(gain.max(), 1e-300), 12))

    return _raise_levels(np.zeros(len(cost), dtype=np.int64), importance, cost, budget=budget, worth_of=gain_by_byte)


def _best_index(allowed: np.ndarray, *keys: np.ndarray) -> int:
    """The allowed index with the largest first key, then the largest second, then the smallest index."""
    return int(np.lexsort((np.arange(len(allowed)), *(-key for key in reversed(keys)), ~allowed))[0])


def uniform(importance: np.ndarray, cost: np.ndarray, _: np.ndarray, *, budget: int) -> np.ndarray:
    """The largest candidate that every layer can have."""
    largest = int(np.searchsorted(cost.sum(axis=0), budget, side="right")) - 1
    return np.full(len(importance), largest, dtype=np.int64)


def proportional_within_uniform(
    importance: np.ndarray, cost: np.ndarray, ranks: np.ndarray, *, budget: int
) -> np.ndarray:
    """Ranks in proportion to importance that take no more bytes than `uniform` would."""
    levels = uniform(importance, cost, ranks, budget=budget)
    return proportional(importance, cost, ranks, budget=int(_total_cost(cost, levels)))


Allocator: TypeAlias = Callable[..., tuple[int, ...]]
"""(importance (layers,), cost (layers, candidates), candidates, *, budget_bytes, max_rank) -> the rank of every layer.

`cost` and `budget_bytes` are in one unit, `importance` on any scale; a layer without adapted modules has rank 0. Raises
`ConfigError` for malformed candidates or importance, `BudgetError` where the smallest candidate does not fit.
"""


def _allocate(
    rule: RankRule,
    importance: Sums,
    cost: Num[np.ndarray, "rows candidates"],
    candidates: Sequence[int],
    *,
    budget_bytes: int,
    max_rank: int,
) -> tuple[int, ...]:
    """The frame of all rules: an `Allocator` without its first argument."""
    ranks = np.array(usable_candidates(candidates, max_rank=max_rank))
    adapted = np.asarray(cost)[:, 0] > 0
    values = np.asarray(importance, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any() or not values[adapted].any():
        raise ConfigError(f"importance {values.tolist()} is not allowed; give finite shares of at least 0, not all 0")
    table = np.asarray(cost)[adapted, : len(ranks)]
    least = int(table[:, 0].sum())
    if least > budget_bytes:
        raise BudgetError(
            f"rank {ranks[0]} in each of {len(table)} layers takes {least:,} bytes (parameters, gradients and Adam's "
            f"moments) and the budget is {budget_bytes:,}; "
            "give a smaller rank candidate, more adapter_bytes or a larger device"
        )
    levels = rule(values[adapted], table, ranks, budget=budget_bytes)
    chosen = np.zeros(len(adapted), dtype=np.int64)
    chosen[adapted] = ranks[levels]
    return tuple(chosen.tolist())


def usable_candidates(candidates: Sequence[int], *, max_rank: int) -> tuple[int, ...]:
    """The candidates up to `max_rank`; a `ConfigError` where there is none."""
    ranks = tuple(rank for rank in candidates if rank <= max_rank)
    if not ranks:
        raise ConfigError(
            f"no rank candidate of {tuple(candidates)} is at most {max_rank}, the largest rank of the device; "
            "add a smaller one"
        )
    return ranks


ALLOCATORS: dict[str, Allocator] = {
    "budget": partial(_allocate, proportional),
    "matched": partial(_allocate, proportional_within_uniform),
    "greedy": partial(_allocate, greedy),
    "uniform": partial(_allocate, uniform),
}


class RankAssignment(Frozen):
    """The ranks of a client and what they were chosen from."""

    ranks: tuple[int, ...]
    """Rank of every layer; 0 where nothing is adapted."""
    budget_bytes: int
    """Training bytes (four copies of every parameter) that the ranks may take."""
    largest_rank: int
    """Estimate: the largest rank that every layer could have within the budget."""
    notes: tuple[str, ...]
    """Notes for the user on how the budget came about."""


def assign_ranks(
    shape: ModelShape,
    device: Device,
    *,
    importance: Layers,
    rule: str,
    candidates: Sequence[int],
    step: cost_model.TrainingStep,
    allowance_bytes: int | None = None,
    memory_budget: int | None = None,
    factor: float = 1.0,
) -> RankAssignment:
    """The ranks that `rule`, a name of `ALLOCATORS`, gives the layers of this client, or a number: one rank for all.

    The budget is the lesser of upload and memory (`memory_budget`, else the device's free memory). Upload is
    `allowance_bytes` of parameters, else the device's allowance. An allowance that follows from the upload rate is a
    wish and not a law: it gives way, with a note, where not even the smallest candidate goes through in time, and it
    does not bind a number, which is the user's own word and stands above the device's largest rank. Memory,
    `allowance_bytes` and an allowance that the profile spells out always bind. `factor` scales the budget
    (`complexity_factors`), never above itself nor below the smallest ranks. Of a client that holds the first
    `step.blocks` blocks alone, the allowance is the same and memory binds the ranks of these blocks alone. Raises
    `ConfigError` and `BudgetError`.
    """
    options, max_rank, allocate = tuple(candidates), device.max_rank, ALLOCATORS.get(rule)
    if allocate is None:
        options, max_rank, allocate = (int(rule),), int(rule), ALLOCATORS["uniform"]
    least, upload, notes = _upload_allowance(
        shape,
        device,
        smallest=usable_candidates(options, max_rank=max_rank)[0],
        allowance_bytes=allowance_bytes,
        by_rate=rule in ALLOCATORS,
    )
    free = cost_model.free_memory(shape, device, step=step) if memory_budget is None else memory_budget
    if step.blocks is None:
        budget = free if upload is None else min(free, upload * cost_model.TRAINING_COPIES)
    else:
        most = cost_model.adapter_bytes(shape, (candidates[-1],) * shape.num_layers)
        budget = (most if upload is None else upload) * cost_model.TRAINING_COPIES
    budget = min(budget, max(int(budget * factor), least * cost_model.TRAINING_COPIES))
    table = cost_model.cost_table(shape, options)

    ranks = allocate(importance, table, options, budget_bytes=budget, max_rank=max_rank)
    num_on_device = step.blocks or 0
    if cost_model.adapter_bytes(shape, ranks[:num_on_device]) * cost_model.TRAINING_COPIES > free:
        # Memory binds what is on the device alone; the blocks above the cut keep theirs.
        below = allocate(
            importance[:num_on_device], table[:num_on_device], options, budget_bytes=free, max_rank=max_rank
        )
        ranks = (*below, *ranks[num_on_device:])
    cost_model.check_memory(cost_model.device_memory(shape, device, ranks=ranks, step=step), shape, name=device.name)
    one_rank_bytes = cost_model.adapter_bytes(shape, (1,) * shape.num_layers) * cost_model.TRAINING_COPIES
    return RankAssignment(ranks=ranks, budget_bytes=budget, largest_rank=budget // max(1, one_rank_bytes), notes=notes)


def _upload_allowance(
    shape: ModelShape, device: Device, *, smallest: int, allowance_bytes: int | None, by_rate: bool
) -> tuple[int, int | None, tuple[str, ...]]:
    """(parameter bytes of the smallest adapters, bytes that may be uploaded or None for any, notes on these)."""
    least = cost_model.adapter_bytes(shape, (smallest,) * shape.num_layers)
    bound = device.own_adapter_bytes if allowance_bytes is None else allowance_bytes
    if bound is not None and bound < least:
        raise BudgetError(
            f"adapter_bytes {bound:,} does not hold rank {smallest} in each of"
            f" {shape.num_layers - shape.first_adapted} layers ({least:,} bytes of parameters); give more bytes or a"
            " smaller rank candidate"
        )
    if bound is not None or not by_rate:
        return least, bound, ()
    if least <= device.adapter_bytes:
        return least, device.adapter_bytes, ()
    note = (
        f"{device.name}: an upload allowance of {device.adapter_bytes:,} bytes does not hold rank {smallest} in every "
        f"layer; {least:,} bytes ({least / device.up_bytes_per_second:.1f} s) are allowed instead"
    )
    return least, least, (note,)
