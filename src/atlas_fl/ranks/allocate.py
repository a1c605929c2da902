"""Which rank each layer gets within a byte budget.

A rule sees importance (layers,), cost in bytes of every candidate (layers, candidates), and a budget in the same
bytes. All rules share one frame, so every one of them validates alike and none is ever over budget:

- `budget`: ranks in proportion to importance (algorithm 1 of the first ATLAS, with a rounding that adds up).
- `matched`: the same, limited to the bytes that `uniform` uses: only the shape differs, for a fair comparison.
- `greedy`: the next step always where importance per byte is largest. The utility sum I * r is linear, so the most
  important layer is filled to its largest rank before the next one gets anything.
- `uniform`: the largest candidate that fits everywhere.
- `fixed(rank)`: that rank everywhere, as a user asked for it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Num

from atlas_fl.errors import BudgetError, ConfigError, unknown
from atlas_fl.ranks import rules


@runtime_checkable
class Allocator(Protocol):
    """A rule as the registry holds it: the rank of every layer, 0 for a layer that has no adapted module.

    Raises `ConfigError` for malformed candidates or importance, `BudgetError` where the smallest one does not fit.
    """

    def __call__(
        self,
        importance: Num[np.ndarray, " layers"],
        cost: Num[np.ndarray, "rows candidates"],
        candidates: Sequence[int],
        *,
        budget_bytes: int,
        max_rank: int,
    ) -> tuple[int, ...]:
        """The ranks; `cost` and `budget_bytes` in one unit, `importance` on any scale."""
        ...


def _checked(rule: rules.Rule) -> Allocator:
    def allocate(
        importance: Num[np.ndarray, " layers"],
        cost: Num[np.ndarray, "rows candidates"],
        candidates: Sequence[int],
        *,
        budget_bytes: int,
        max_rank: int,
    ) -> tuple[int, ...]:
        ranks = np.array(usable_candidates(candidates, max_rank=max_rank))
        adapted = _adapted(importance, cost, candidates)
        table = np.asarray(cost)[adapted, : len(ranks)]
        _check_budget(table, ranks, budget_bytes)
        levels = rule(np.asarray(importance, np.float64)[adapted], table, ranks, budget=budget_bytes)
        chosen = np.zeros(len(adapted), dtype=np.int64)
        chosen[adapted] = ranks[levels]
        return tuple(chosen.tolist())

    return allocate


def check_candidates(candidates: Sequence[int]) -> None:
    """Nothing where the candidates are positive and strictly ascending; else a `ConfigError`."""
    if not candidates or candidates[0] < 1 or any(low >= high for low, high in pairwise(candidates)):
        raise ConfigError(
            f"rank candidates {tuple(candidates)} are not allowed; give positive ranks in ascending order"
        )


def usable_candidates(candidates: Sequence[int], *, max_rank: int) -> tuple[int, ...]:
    """The candidates up to `max_rank`; a `ConfigError` where there is none."""
    check_candidates(candidates)
    ranks = tuple(rank for rank in candidates if rank <= max_rank)
    if not ranks:
        raise ConfigError(
            f"no rank candidate of {tuple(candidates)} is at most {max_rank}, the largest rank of the device; "
            "add a smaller one"
        )
    return ranks


def _adapted(importance: np.ndarray, cost: np.ndarray, candidates: Sequence[int]) -> np.ndarray:
    values = np.asarray(importance, dtype=np.float64)
    if np.shape(cost) != (len(values), len(candidates)):
        raise ConfigError(
            f"costs of shape {np.shape(cost)} do not fit; give ({len(values)}, {len(candidates)}), layers by candidates"
        )
    adapted = np.asarray(cost)[:, 0] > 0
    if not adapted.any():
        raise ConfigError("no layer has an adapted module; name modules of the model with --targets")
    if not np.isfinite(values).all() or (values < 0).any() or not values[adapted].any():
        raise ConfigError(f"importance {values.tolist()} is not allowed; give finite shares of at least 0, not all 0")
    return adapted


def _check_budget(cost: np.ndarray, ranks: np.ndarray, budget: int) -> None:
    least = int(cost[:, 0].sum())
    if least > budget:
        raise BudgetError(
            f"rank {ranks[0]} in each of {len(cost)} layers takes {least:,} bytes (parameters, gradients and Adam's "
            f"moments) and the budget is {budget:,}; "
            "give a smaller rank candidate, more adapter_bytes or a larger device"
        )


ALLOCATORS: dict[str, Allocator] = {
    "budget": _checked(rules.proportional),
    "matched": _checked(rules.matched),
    "greedy": _checked(rules.greedy),
    "uniform": _checked(rules.uniform),
}


def fixed(rank: int) -> Allocator:
    """The allocator that gives this rank to every layer.

    The user's own number stands above the device's largest rank, but not above the budget (`BudgetError`);
    a rank that is no candidate is a `ConfigError`.
    """

    def allocate(
        importance: Num[np.ndarray, " layers"],
        cost: Num[np.ndarray, "rows candidates"],
        candidates: Sequence[int],
        *,
        budget_bytes: int,
        max_rank: int,
    ) -> tuple[int, ...]:
        del max_rank
        check_candidates(candidates)
        if rank not in candidates:
            raise ConfigError(
                f"rank {rank} is no candidate; choose from {tuple(candidates)} or add it to the candidates"
            )
        only = np.asarray(cost)[:, [list(candidates).index(rank)]]
        return ALLOCATORS["uniform"](importance, only, (rank,), budget_bytes=budget_bytes, max_rank=rank)

    return allocate


def find_allocator(name: str) -> Allocator:
    """The allocator of this name, or `fixed` for a number; a `ConfigError` with the nearest name for anything else."""
    if name.lstrip("-").isdecimal():
        return fixed(int(name))
    if name not in ALLOCATORS:
        raise unknown("rank rule", name, [*ALLOCATORS, "a number"])
    return ALLOCATORS[name]
