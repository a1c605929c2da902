"""Sharding by classes (MATH 6): exactly N_c classes a client, disjoint, complete, equal where the counts allow."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from atlas_fl.data.partition import assign_classes, deal_classes, plan_rows
from atlas_fl.errors import ConfigError, DataError
from atlas_fl.rng import generator
from tests.data.images import as_images
from tests.data.test_images import make, numbers
from tests.examples import examples


@st.composite
def federations(draw: st.DrawFn) -> tuple[int, int, int]:
    """(clients, classes, classes a client) for which there is an assignment."""
    classes = draw(st.integers(2, 8))
    per_client = draw(st.integers(1, classes))
    return draw(st.integers(-(-classes // per_client), 12)), classes, per_client


def most_even(held: np.ndarray, supply: np.ndarray, *, largest: bool) -> float:
    """The best bound on the size of a client, by linear programming; whole because the constraints are a network."""
    cells = np.argwhere(held)
    by_client = np.stack([cells[:, 0] == client for client in range(len(held))]).astype(float)
    by_class = np.stack([cells[:, 1] == value for value in range(held.shape[1])]).astype(float)
    sign = 1 if largest else -1
    found = linprog(
        [*np.zeros(len(cells)), sign],
        A_ub=np.hstack([sign * by_client, np.full((len(held), 1), -sign)]),
        b_ub=np.zeros(len(held)),
        A_eq=np.hstack([by_class, np.zeros((len(supply), 1))]),
        b_eq=supply,
        bounds=[*[(1, None)] * len(cells), (None, None)],
    )
    assert found.success
    return float(found.x[-1])


@examples(50)
@given(federations(), st.integers(0, 99))
def test_every_client_has_exactly_so_many_classes_and_every_class_about_as_many_clients(federation, seed: int) -> None:
    clients, classes, per_client = federation
    held = assign_classes(clients, classes, per_client, generator(seed))
    assert held.shape == (clients, classes)
    assert (held.sum(axis=1) == per_client).all()
    assert held.sum(axis=0).min() >= 1
    assert np.ptp(held.sum(axis=0)) <= 1
    assert (held == assign_classes(clients, classes, per_client, generator(seed))).all()


@pytest.mark.slow
def test_all_assignments_come_up_about_equally_often() -> None:
    # four clients, four classes of two clients each, two a client: 90 matrices (OEIS A001499)
    drawn = Counter(assign_classes(4, 4, 2, generator(seed)).tobytes() for seed in range(4500))
    assert len(drawn) == 90
    # 50 expected with a standard deviation of 7
    assert min(drawn.values()) >= 25
    assert max(drawn.values()) <= 80


@examples(40)
@given(federations(), st.data())
def test_all_rows_are_dealt_once_and_sizes_are_as_equal_as_any_plan_could_make_them(
    federation: tuple[int, int, int], data: st.DataObject
) -> None:
    clients, classes, per_client = federation
    held = assign_classes(clients, classes, per_client, generator(data.draw(st.integers(0, 99))))
    supply = held.sum(axis=0) + data.draw(st.lists(st.integers(0, 30), min_size=classes, max_size=classes))
    label = generator(5).permutation(np.repeat(np.arange(classes), supply))
    parts = deal_classes(label, held, size=None, rng=generator(6))
    assert np.sort(np.concatenate(parts)).tolist() == list(range(len(label)))
    assert [set(label[part]) for part in parts] == [set(np.flatnonzero(row)) for row in held]
    sizes = np.asarray([len(part) for part in parts])
    assert sizes.max() == np.ceil(most_even(held, supply, largest=True) - 1e-6)
    if np.ptp(sizes) > 1:  # then no plan has all within one of each other
        mean = len(label) / clients
        high, low = most_even(held, supply, largest=True), most_even(held, supply, largest=False)
        assert high > np.ceil(mean) + 1e-6 or low < np.floor(mean) - 1e-6
    assert all((one == two).all() for one, two in zip(parts, deal_classes(label, held, size=None, rng=generator(6))))


@pytest.mark.parametrize("per_client", [1, 2, 5, 10])
def test_where_the_counts_allow_all_clients_have_the_same_number_of_each_of_their_classes(per_client: int) -> None:
    held = assign_classes(100, 10, per_client, generator(1))
    counts = plan_rows(held, np.full(10, 6000), size=None)
    assert (counts.sum(axis=1) == 600).all()
    assert set(counts[held]) == {600 // per_client}
    assert (counts.sum(axis=0) == 6000).all()


def test_five_classes_of_a_hundred_for_a_hundred_clients_by_hand() -> None:
    counts = plan_rows(assign_classes(100, 100, 5, generator(1)), np.full(100, 450), size=None)
    assert (counts.sum(axis=1) == 450).all()
    assert set(counts[counts > 0]) == {90}


def test_sizes_differ_by_one_where_they_do_not_divide() -> None:
    held = assign_classes(7, 10, 10, generator(1))
    counts = plan_rows(held, np.full(10, 33), size=None)
    assert sorted(counts.sum(axis=1)) == [47] * 6 + [48]
    assert set(counts[held]) <= {4, 5}


def test_a_class_of_one_client_goes_to_it_whole_by_hand() -> None:
    held = np.asarray([[True, False, False], [False, True, True], [False, True, True]])
    counts = plan_rows(held, np.asarray([10, 4, 4]), size=None)
    assert counts[0].tolist() == [10, 0, 0]
    assert counts.sum(axis=1).tolist() == [10, 4, 4]
    assert counts[1:, 1:].tolist() == [[2, 2], [2, 2]]


def test_a_size_is_met_exactly_and_as_evenly_as_the_supply_allows() -> None:
    held = np.asarray([[True, True, False], [True, False, True]])
    assert plan_rows(held, np.asarray([20, 20, 20]), size=10).tolist() == [[5, 5, 0], [5, 0, 5]]
    # six rows of the shared class: three each is the most even
    assert plan_rows(held, np.asarray([6, 20, 20]), size=10).tolist() == [[3, 7, 0], [3, 0, 7]]
    with pytest.raises(DataError, match=r"too few rows for 2 clients of 10 .* 2 classes \(rows per class: 6, 5, 5\)"):
        plan_rows(held, np.asarray([6, 5, 5]), size=10)
    with pytest.raises(DataError, match=r"2 clients of 1 with a row or more of each of their 2 classes"):
        plan_rows(held, np.asarray([6, 5, 5]), size=1)


@pytest.mark.parametrize(
    ("clients", "classes", "per_client", "message"),
    [
        (5, 10, 11, "--nc is 11 classes a client and the task has 10; give 1 to 10"),
        (5, 10, 0, "--nc is 0 classes a client and the task has 10; give 1 to 10"),
        (4, 10, 2, "4 clients of 2 classes leave some of the 10 classes to nobody; give --nc 3 or more, or 5 clients"),
    ],
)
def test_what_is_impossible_is_one_line(clients: int, classes: int, per_client: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_classes(clients, classes, per_client, generator(0))


def test_more_clients_than_rows_of_a_class_is_one_line() -> None:
    with pytest.raises(DataError, match="class 1 has 3 rows for 4 clients; lower --clients-per-task or --nc"):
        plan_rows(np.ones((4, 2), dtype=bool), np.asarray([9, 3]), size=None)


WHOLE: dict[str, Any] = {"samples": None, "validation_samples": None, "test_samples": None}


@pytest.mark.parametrize("per_client", [1, 2, 3])
def test_clients_have_the_same_classes_in_all_their_splits(per_client: int) -> None:
    clients = make(partition="classes", classes_per_client=per_client, clients_per_task=6, **WHOLE)
    for client in clients:
        held = [set(part.label) for part in (client.train, client.validation, client.test)]
        assert held[0] == held[1] == held[2]
        assert len(held[0]) == per_client
    given = [n for client in clients for part in (client.train, client.validation, client.test) for n in numbers(part)]
    assert sorted(given) == list(range(430))
    assert np.ptp([len(client.train) for client in clients]) <= 2  # of 67, 67 and 66 rows of a class


def test_the_seed_decides_who_has_what() -> None:
    def drawn(seed: int) -> list[list[int]]:
        clients = make(partition="classes", classes_per_client=1, clients_per_task=6, seed=seed, **WHOLE)
        return [numbers(as_images(client.train)) for client in clients]

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_number_of_samples_is_met_in_every_split() -> None:
    clients = make(partition="classes", classes_per_client=2, samples=30, validation_samples=10, test_samples=20)
    assert {(len(c.train), len(c.validation), len(c.test)) for c in clients} == {(30, 10, 20)}


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "quantity"])
def test_other_partitions_deal_a_whole_split_too(partition: str) -> None:
    clients = make(partition=partition, clients_per_task=7, **WHOLE)
    given = [n for client in clients for part in (client.train, client.validation, client.test) for n in numbers(part)]
    assert sorted(given) == list(range(430))
    if partition != "quantity":
        assert np.ptp([len(client.train) for client in clients]) <= 1
    assert np.ptp([len(client.test) for client in clients]) <= 1


def test_settings_that_do_not_fit_are_one_line() -> None:
    with pytest.raises(DataError, match=r"test of task 'toy': the classes have too few rows .* \(--test-samples\)"):
        make(partition="classes", classes_per_client=1, samples=30, validation_samples=5, test_samples=30)
    with pytest.raises(DataError, match=r"200 train rows and 101 clients need 202 \(--clients-per-task\); lower"):
        make(clients_per_task=101, **WHOLE)
