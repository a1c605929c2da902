from itertools import permutations

import numpy as np
import pytest

from atlas_fl.clustering.labels import decided_labels, number_by_first_client, stable_labels


def test_renaming_by_hand():
    assert stable_labels([0, 0, 1, 1, 2], [2, 2, 0, 0, 1]) == (0, 0, 1, 1, 2)
    # the new cluster of clients 3 and 4 has no counterpart left: the smallest unused label
    assert stable_labels([0, 0, 0, 0, 0], [5, 5, 5, 7, 7]) == (0, 0, 0, 1, 1)
    assert stable_labels([3, 3, 1, 1], [0, 0, 0, 0]) in ((3,) * 4, (1,) * 4)


def test_undecided_clients_stay_undecided_and_match_nothing():
    assert stable_labels([-1, -1, 4, 4], [0, 0, 1, -1]) == (0, 0, 4, -1)
    assert stable_labels([-1, -1], [-1, 0]) == (-1, 0)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_renaming_keeps_more_clients(seed):
    rng = np.random.default_rng(seed)
    before, after = rng.integers(0, 4, 12), rng.integers(0, 4, 12)
    kept = np.sum(np.array(stable_labels(before.tolist(), after.tolist())) == before)
    best = max(np.sum(np.array(names)[after] == before) for names in permutations(range(4)))
    assert kept == best


def test_renaming_keeps_the_partition():
    rng = np.random.default_rng(0)
    for _ in range(20):
        before, after = rng.integers(-1, 3, 10).tolist(), rng.integers(-1, 5, 10).tolist()
        named = stable_labels(before, after)
        assert number_by_first_client(np.array(named)) == number_by_first_client(np.array(after))


def test_first_appearance():
    assert number_by_first_client(np.array([7, -1, 2, 7, 0])) == (0, -1, 1, 0, 2)
    assert decided_labels([2, -1, 0, 2]) == [0, 2]
