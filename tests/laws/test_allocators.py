"""Every allocator keeps these laws, whatever the layers, candidates and budget."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from atlas_fl.ranks.allocation import ALLOCATORS
from tests.examples import examples

DENSE = tuple(range(1, 33))
LAWS = examples(50)
REGISTRY = pytest.mark.parametrize("name", ALLOCATORS)


@st.composite
def layers(draw: st.DrawFn, *, equal_cost: bool = False, distinct: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Importance and bytes a rank of up to nine layers."""
    importance = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=9, unique=distinct))
    if not any(importance):
        importance[0] = 1
    units = draw(st.lists(st.integers(1, 40), min_size=len(importance), max_size=len(importance)))
    units = units[:1] * len(units) if equal_cost else units
    return np.array(importance, dtype=np.float64), np.array(units) * 1024


candidate_sets = st.lists(st.integers(1, 64), min_size=1, max_size=8, unique=True).map(lambda c: tuple(sorted(c)))
shares_of_room = st.floats(0, 1.2)


def room(units: np.ndarray, candidates: tuple[int, ...], share: float) -> int:
    """A budget between the smallest ranks everywhere and more than the largest."""
    low, high = units.sum() * candidates[0], units.sum() * candidates[-1]
    return int(low + share * (high - low))


def used(units: np.ndarray, ranks: tuple[int, ...]) -> int:
    return int(units @ np.array(ranks))


def used_beside_uniform(name: str, layers: tuple[np.ndarray, np.ndarray], share: float) -> tuple[int, int]:
    """Bytes that this rule uses with dense candidates, and those of uniform ranks."""
    importance, units = layers
    table, budget = np.outer(units, DENSE), room(units, DENSE, share)
    own, uniform = (
        ALLOCATORS[rule](importance, table, DENSE, budget_bytes=budget, max_rank=32) for rule in (name, "uniform")
    )
    return used(units, own), used(units, uniform)


@REGISTRY
@given(layers=layers(), candidates=candidate_sets, share=shares_of_room, cap=st.integers(1, 64))
@LAWS
def test_never_over_budget_and_only_candidates(
    name: str, layers: tuple[np.ndarray, np.ndarray], candidates: tuple[int, ...], share: float, cap: int
) -> None:
    importance, units = layers
    cap = max(cap, candidates[0])
    budget = room(units, candidates, share)
    ranks = ALLOCATORS[name](importance, np.outer(units, candidates), candidates, budget_bytes=budget, max_rank=cap)
    assert used(units, ranks) <= budget
    assert len(ranks) == len(importance)
    assert set(ranks) <= {rank for rank in candidates if rank <= cap}


@REGISTRY
@given(layers=layers(equal_cost=True), share=shares_of_room)
@LAWS
def test_at_least_95_percent_of_uniform_with_dense_candidates(
    name: str, layers: tuple[np.ndarray, np.ndarray], share: float
) -> None:
    own, uniform = used_beside_uniform(name, layers, share)
    assert own >= 0.95 * uniform


@REGISTRY
@given(layers=layers(), share=shares_of_room)
@LAWS
def test_layers_of_unequal_cost_leave_less_than_two_steps_of_what_uniform_uses(
    name: str, layers: tuple[np.ndarray, np.ndarray], share: float
) -> None:
    own, uniform = used_beside_uniform(name, layers, share)
    assert own > uniform - 2 * layers[1].max()


@REGISTRY
@given(layers=layers(equal_cost=True), candidates=candidate_sets, share=shares_of_room)
@LAWS
def test_a_more_important_layer_never_has_the_smaller_rank(
    name: str, layers: tuple[np.ndarray, np.ndarray], candidates: tuple[int, ...], share: float
) -> None:
    importance, units = layers
    budget = room(units, candidates, share)
    ranks = ALLOCATORS[name](importance, np.outer(units, candidates), candidates, budget_bytes=budget, max_rank=64)
    by_importance = np.array(ranks)[np.argsort(importance, kind="stable")]
    strict = np.diff(np.sort(importance)) > 0
    assert (np.diff(by_importance)[strict] >= 0).all()


@REGISTRY
@given(layers=layers(distinct=True), candidates=candidate_sets, share=shares_of_room, data=st.data())
@LAWS
def test_permuting_layers_permutes_ranks(
    name: str, layers: tuple[np.ndarray, np.ndarray], candidates: tuple[int, ...], share: float, data: st.DataObject
) -> None:
    importance, units = layers
    order = np.array(data.draw(st.permutations(range(len(units)))))
    budget, allocate = room(units, candidates, share), ALLOCATORS[name]
    ranks = allocate(importance, np.outer(units, candidates), candidates, budget_bytes=budget, max_rank=64)
    moved = allocate(
        importance[order], np.outer(units[order], candidates), candidates, budget_bytes=budget, max_rank=64
    )
    assert moved == tuple(np.array(ranks)[order])


@REGISTRY
@given(layers=layers(), share=shares_of_room, scale=st.sampled_from([2.0**-40, 0.5, 2.0**40]))
@LAWS
def test_the_scale_of_importance_does_not_matter_and_inputs_stay(
    name: str, layers: tuple[np.ndarray, np.ndarray], share: float, scale: float
) -> None:
    importance, units = layers
    table, kept, budget = np.outer(units, DENSE), importance.copy(), room(units, DENSE, share)
    ranks = ALLOCATORS[name](importance, table, DENSE, budget_bytes=budget, max_rank=32)
    assert ALLOCATORS[name](importance * scale, table, DENSE, budget_bytes=budget, max_rank=32) == ranks
    np.testing.assert_array_equal(importance, kept)
    np.testing.assert_array_equal(table, np.outer(units, DENSE))


@REGISTRY
@given(layers=layers(), candidates=candidate_sets)
@LAWS
def test_a_budget_for_everything_gives_the_largest_rank_everywhere(
    name: str, layers: tuple[np.ndarray, np.ndarray], candidates: tuple[int, ...]
) -> None:
    importance, units = layers
    table, budget = np.outer(units, candidates), room(units, candidates, 1.0)
    largest = (candidates[-1],) * len(units)
    assert ALLOCATORS[name](importance, table, candidates, budget_bytes=budget, max_rank=64) == largest


@given(
    importance=st.lists(st.integers(1, 1000), min_size=2, max_size=4),
    candidates=candidate_sets.filter(lambda c: len(c) <= 5),
    share=st.floats(0, 1),
)
@LAWS
def test_budget_reaches_the_sum_that_brute_force_reaches(
    importance: list[int], candidates: tuple[int, ...], share: float
) -> None:
    units = np.full(len(importance), 1000)
    budget = room(units, candidates, share)
    table = np.outer(units, candidates)
    ranks = ALLOCATORS["budget"](np.array(importance, float), table, candidates, budget_bytes=budget, max_rank=64)
    sums = [sum(choice) for choice in product(candidates, repeat=len(importance))]
    assert sum(ranks) == max(total for total in sums if total * 1000 <= budget)


@given(importance=st.lists(st.integers(50, 1000), min_size=2, max_size=8, unique=True), total=st.integers(400, 500))
@LAWS
def test_budget_with_dense_candidates_is_hamiltons_method(importance: list[int], total: int) -> None:
    candidates = tuple(range(1, 501))
    table = np.outer(np.full(len(importance), 7), candidates)
    ranks = ALLOCATORS["budget"](np.array(importance, float), table, candidates, budget_bytes=7 * total, max_rank=500)
    quota = [weight * total for weight in importance]  # in parts of the sum, so that remainders are exact
    seats = [part // sum(importance) for part in quota]
    remainders = [part % sum(importance) for part in quota]
    for index in sorted(range(len(quota)), key=lambda i: -remainders[i])[: total - sum(seats)]:
        seats[index] += 1
    deviation = [abs(rank * sum(importance) - part) for rank, part in zip(ranks, quota, strict=True)]
    reference = [abs(seat * sum(importance) - part) for seat, part in zip(seats, quota, strict=True)]
    assert sorted(deviation) == sorted(reference)  # equal but for exact ties of the remainders
    assert sum(ranks) == total


@given(layers=layers(equal_cost=True), share=st.floats(0, 1))
@examples(25)
def test_greedy_with_dense_candidates_has_the_utility_of_an_integer_program(
    layers: tuple[np.ndarray, np.ndarray], share: float
) -> None:
    importance, units = layers
    budget = room(units, DENSE, share)
    ranks = ALLOCATORS["greedy"](importance, np.outer(units, DENSE), DENSE, budget_bytes=budget, max_rank=32)
    best = milp(
        -importance,
        integrality=np.ones(len(units)),
        bounds=(1, 32),
        constraints=LinearConstraint(units[None], -np.inf, budget),
    )
    assert importance @ np.array(ranks) == pytest.approx(-best.fun)
