import numpy as np
import pytest

from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.ranks.allocation import ALLOCATORS

SPARSE = (4, 8, 16, 32, 64)
DENSE = tuple(range(1, 65))


def allocate(
    rule: str,
    importance: list[float],
    units: list[int],
    budget: int,
    *,
    candidates: tuple[int, ...] = SPARSE,
    max_rank: int = 64,
) -> tuple[int, ...]:
    table = np.outer(units, candidates)
    return ALLOCATORS[rule](np.array(importance), table, candidates, budget_bytes=budget, max_rank=max_rank)


# Ranks that the first ATLAS rounded one by one (the sums that it printed), and what they had to stay below.
SEEDS = [
    ((3, 5, 6.5, 7, 12.5, 14), SPARSE, 48, 56, (4, 4, 8, 8, 8, 16)),
    ((4, 6.5, 7, 8, 9.5, 13), SPARSE, 48, 52, (4, 4, 8, 8, 8, 16)),
    ((11, 27, 30, 35, 39, 50), SPARSE, 192, 200, (16, 16, 32, 32, 32, 64)),
    ((22, 54, 60, 70, 78, 100), (*SPARSE, 128), 384, 400, (32, 32, 64, 64, 64, 128)),
]


@pytest.mark.parametrize(("targets", "candidates", "total", "overrun", "expected"), SEEDS)
def test_the_sums_that_overran_no_longer_do(
    targets: tuple[float, ...], candidates: tuple[int, ...], total: int, overrun: int, expected: tuple[int, ...]
) -> None:
    nearest = [min(candidates, key=lambda rank: abs(rank - target)) for target in targets]
    assert sum(targets) == total
    assert sum(nearest) == overrun
    for name in ("budget", "matched"):
        found = allocate(name, list(targets), [24_576] * 6, 24_576 * total, candidates=candidates, max_rank=128)
        assert found == expected
        assert sum(found) == total


def test_largest_remainder_by_hand() -> None:
    # B = 13: targets 6.5, 3.9, 2.6; floors 6, 3, 2 leave two, which go to .9 and .6
    assert allocate("budget", [0.5, 0.3, 0.2], [10] * 3, 130, candidates=DENSE) == (6, 4, 3)


def test_what_a_full_layer_cannot_take_goes_to_the_others() -> None:
    # B = 24 and at most 8 a layer: 19.2 is cut to 8, the other 16 stay in proportion 3 to 1, cut to 8 again
    assert allocate("budget", [0.8, 0.15, 0.05], [1] * 3, 20, candidates=DENSE, max_rank=8) == (8, 8, 4)


def test_downgrade_takes_where_importance_per_byte_is_least() -> None:
    # Targets 4, 3.65 and 2.74 cost 25 at 1, 5 and 1 bytes a rank; the nearest of sum 10, (4, 4, 2), cost 26.
    # A step down frees 2, 10 and 1 bytes, so importance per byte is 2.5, 0.4 and 3: the second layer goes to 2.
    # Of the 9 bytes then left the third layer takes 2. (By importance alone it would be the third that goes down.)
    assert allocate("budget", [5.0, 4.0, 3.0], [1, 5, 1], 25, candidates=(1, 2, 4), max_rank=4) == (4, 2, 4)


def test_greedy_fills_the_most_important_layer_first() -> None:
    assert allocate("greedy", [0.2, 0.5, 0.3], [1] * 3, 48, max_rank=32) == (8, 32, 8)
    assert allocate("greedy", [0.4, 0.6], [1, 2], 28, max_rank=16) == (16, 4)  # .4 a byte against .3


def test_uniform_is_the_largest_candidate_that_fits() -> None:
    for budget, max_rank, rank in ((127, 64, 16), (128, 64, 32), (128, 8, 8)):
        assert allocate("uniform", [0.9, 0.1], [1, 3], budget, max_rank=max_rank) == (rank, rank)


def test_matched_uses_the_bytes_of_uniform() -> None:
    found = allocate("matched", [0.6, 0.2, 0.1, 0.05, 0.03, 0.02], [1] * 6, 81, max_rank=32)
    assert (sum(found), found[0]) == (48, 16)  # 8 everywhere is the largest uniform rank
    assert len(set(found)) == 3


def test_a_layer_without_adapted_modules_gets_no_rank() -> None:
    for rule in ALLOCATORS:
        assert allocate(rule, [0.9, 0.1], [0, 1], 8) == (0, 8)


def test_layers_without_importance_take_what_the_others_cannot() -> None:
    assert allocate("budget", [1.0, 0.0, 0.0], [1] * 3, 100, candidates=DENSE) == (64, 18, 18)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_impossible_budget_names_the_numbers_and_the_remedy(name: str) -> None:
    with pytest.raises(BudgetError) as error:
        allocate(name, [1.0] * 6, [1000] * 6, 23_999)
    assert str(error.value) == (
        "rank 4 in each of 6 layers takes 24,000 bytes (parameters, gradients and Adam's moments) and the budget is "
        "23,999; give a smaller rank candidate, more adapter_bytes or a larger device"
    )


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_device_below_every_candidate_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        allocate(name, [1.0] * 2, [1, 1], 1000, candidates=(4, 8), max_rank=3)
    assert str(error.value) == (
        "no rank candidate of (4, 8) is at most 3, the largest rank of the device; add a smaller one"
    )


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("importance", [[0.0, 0.0], [np.nan, 1.0], [-1.0, 1.0]])
def test_importance_that_is_no_share_is_refused(name: str, importance: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"importance \[.*\] is not allowed; give finite shares of at least 0"):
        allocate(name, importance, [1, 1], 1000)
