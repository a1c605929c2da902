import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.data.partition import PARTITIONS, actual_mixes, deal, dirichlet, iid, quantity
from atlas_fl.errors import DataError
from atlas_fl.rng import generator
from tests.examples import examples

PRIOR = np.asarray([0.5, 0.3, 0.2])


def test_iid_by_hand() -> None:
    mixes, sizes = iid(PRIOR, 3, 100, 0.5, generator(0))
    assert mixes.tolist() == [PRIOR.tolist()] * 3
    assert sizes.tolist() == [100, 100, 100]


def test_a_dealt_hand_has_the_mix_it_was_asked_for() -> None:
    classes = np.repeat([0, 1, 2], [50, 30, 20])
    parts = deal(classes, np.tile(PRIOR, (2, 1)), np.asarray([20, 40]), rng=generator(1))
    assert [np.bincount(classes[part]).tolist() for part in parts] == [[10, 6, 4], [20, 12, 8]]


def test_a_class_that_runs_out_is_made_up_for_from_the_others() -> None:
    classes = np.repeat([0, 1, 2], [5, 30, 30])
    (part,) = deal(classes, np.asarray([[1.0, 0.0, 0.0]]), np.asarray([25]), rng=generator(1))
    counts = np.bincount(classes[part])
    assert counts[0] == 5
    assert counts[1:].tolist() == [10, 10]


def test_dirichlet_means_are_the_prior_and_alpha_is_its_evenness() -> None:
    # Var(q_c) = p (1 - p) / (alpha C + 1) for Dirichlet(alpha C p).
    for alpha in (0.1, 1.0, 10.0):
        mixes, _ = dirichlet(PRIOR, 20_000, 10, alpha, generator(2))
        assert mixes.mean(axis=0) == pytest.approx(PRIOR, abs=0.01)
        assert mixes.var(axis=0) == pytest.approx(PRIOR * (1 - PRIOR) / (3 * alpha + 1), rel=0.06)


def test_quantity_shares_out_the_same_total_with_a_floor() -> None:
    _, sizes = quantity(PRIOR, 8, 200, 0.3, generator(3))
    assert sizes.sum() == 1600
    assert sizes.min() >= 20
    assert sizes.max() > 400


@pytest.mark.parametrize(
    ("partition", "expected"),
    [("linear", [10, 20, 30, 40]), ("square", [10, 40, 90, 160]), ("exponential", [9.8, 26.7, 72.6, 197.4])],
)
def test_sizes_grow_by_the_number_of_the_client(partition: str, expected: list[float]) -> None:
    """Four clients of 302, 302 and 308.5 rows in all: two rows each, and the rest in the proportion of k, k^2, e^k."""
    samples = int(sum(expected) / 4) + 2
    mixes, sizes = PARTITIONS[partition](PRIOR, 4, samples, 0.5, generator(0))
    assert sizes.sum() == 4 * samples
    assert sizes - 2 == pytest.approx(np.asarray(expected) * 4 * (samples - 2) / sum(expected), abs=1)
    assert mixes.tolist() == [PRIOR.tolist()] * 4


def test_two_shards_of_sorted_rows_a_client_by_hand() -> None:
    """Classes of 1/2, 1/4, 1/4 in four shards are 0, 0, 1, 2: a client has two of them, and together all."""
    mixes, sizes = PARTITIONS["shard"](np.asarray([2.0, 1.0, 1.0]), 2, 8, 0.5, generator(3))
    assert sizes.tolist() == [8, 8]
    assert mixes.sum(axis=0) == pytest.approx([1, 0.5, 0.5])
    assert set(np.round(mixes.ravel(), 6)) <= {0.0, 0.5, 1.0}


def test_two_classes_even_where_the_mix_has_one() -> None:
    classes = np.repeat([0, 1, 2], [100, 4, 4])
    parts = deal(classes, np.tile([1.0, 0, 0], (6, 1)), np.full(6, 10), rng=generator(4), two_classes=True)
    assert [len(np.unique(classes[part])) for part in parts] == [2] * 6


def test_scarce_classes_are_not_spent_on_one_client() -> None:
    # Client 0 would rather have both scarce rows; then client 1 could only get class 0.
    classes = np.repeat([0, 1, 2], [50, 1, 1])
    mixes = np.asarray([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    parts = deal(classes, mixes, np.asarray([5, 5]), rng=generator(5), two_classes=True)
    assert all(len(np.unique(classes[part])) >= 2 for part in parts)


def test_where_two_classes_are_impossible_the_error_says_for_how_many_they_are() -> None:
    classes = np.repeat([0, 1], [100, 3])
    with pytest.raises(
        DataError, match=r"no rows of two classes for each of 5 clients \(rows per class: 100, 3\); lower --cl"
    ):
        deal(classes, np.tile([0.5, 0.5], (5, 1)), np.full(5, 4), rng=generator(6), two_classes=True)


@examples(60)
@given(st.data())
def test_any_deal_is_disjoint_complete_and_exact(data: st.DataObject) -> None:
    supply = data.draw(st.lists(st.integers(0, 30), min_size=2, max_size=5).filter(lambda s: sum(s) > 3))
    sizes = np.asarray(data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4)))
    if sizes.sum() > sum(supply):
        sizes = sizes * 0 + sum(supply) // len(sizes)
    classes = np.repeat(np.arange(len(supply)), supply)
    mixes = generator(data.draw(st.integers(0, 99))).dirichlet(np.full(len(supply), 0.05), size=len(sizes))
    parts = deal(classes, mixes, sizes, rng=generator(7))
    assert [len(part) for part in parts] == sizes.tolist()
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)


def test_realised_follows_the_rows_only_where_they_left_the_mix() -> None:
    classes = np.asarray([0] * 10 + [1] * 10)
    mixes = np.asarray([[0.45, 0.55], [1.0, 0.0]])
    dealt = [np.arange(6, 15), np.asarray([0, 1, 16, 17])]  # 4 : 5 is .45 : .55 rounded; 2 : 2 is not 1 : 0
    assert actual_mixes(classes, dealt, mixes).tolist() == [[0.45, 0.55], [0.5, 0.5]]
    even, three_and_one = np.asarray([[0.5, 0.5]]), [np.asarray([0, 1, 2, 19])]
    assert actual_mixes(classes, three_and_one, even).tolist() == [[0.5, 0.5]], "one row more than the mix is rounding"
