import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.csgraph import laplacian as scipy_laplacian

from atlas_fl.aggregation.matrices import (
    average,
    bounded_weights,
    cluster_labels,
    drop_edges,
    group_ids,
    laplacian,
    laplacian_step,
    layer_factors,
    share_warnings,
    without_edges,
)
from tests.aggregation.federations import federation_of

# a path: a - b - c with weights 1 and 3
PATH = np.array([[0, 1, 0], [1, 0, 3], [0, 3, 0]], float)
ALL = np.ones(3, bool)


def federation(adjacency=PATH, **words):
    names = "abcdef"[: len(adjacency)]
    return federation_of(names, adjacency=adjacency, **{"weights": range(1, len(names) + 1), **words})


def test_average_by_hand():
    matrix = average(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 1]), ALL)
    assert matrix.tolist() == [[0.25, 0.75, 0], [0.25, 0.75, 0], [0, 0, 1]]


def test_average_is_over_those_present_and_reaches_everyone_of_the_group():
    present = np.array([True, False, True, False])
    matrix = average(np.array([1.0, 9.0, 3.0, 2.0]), np.array([0, 0, 0, 1]), present)
    assert matrix.tolist() == [[0.25, 0, 0.75, 0]] * 3 + [[0, 0, 0, 1]], "who is alone and absent keeps its model"


def test_labels_that_agree_share_a_number():
    assert group_ids(["movie", "trec", "movie"]).tolist() == [0, 1, 0]
    labels = group_ids(cluster_labels(np.array([0, -1, 0, -1])))
    assert len({labels[1], labels[3], labels[0]}) == 3, "each undecided client is a group of its own"
    assert labels[0] == labels[2]


def test_cut_drops_the_edges_between_groups():
    assert drop_edges(PATH, np.array([0, 0, 1])).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_the_laplacian_of_a_path_by_hand():
    assert laplacian(PATH).tolist() == [[1, -1, 0], [-0.25, 1, -0.75], [0, -1, 1]]


def test_random_walk_equals_scipys():
    rng = np.random.default_rng(0)
    weights = rng.random((6, 6))
    weights = np.triu(weights, 1) + np.triu(weights, 1).T
    degrees = weights.sum(1)
    expected = scipy_laplacian(weights) / degrees[:, None]
    assert laplacian(weights) == pytest.approx(expected)


def test_a_client_without_edges_does_not_move():
    lonely = np.zeros((4, 4))
    lonely[:3, :3] = PATH
    matrix = laplacian_step(lonely, eta=0.7, present=np.ones(4, bool))
    assert matrix[3].tolist() == [0, 0, 0, 1]
    assert laplacian(np.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]


def test_absent_clients_keep_their_model_and_stay_neighbours():
    matrix = laplacian_step(PATH, eta=0.5, present=np.array([True, False, True]))
    assert matrix.tolist() == [[0.5, 0.5, 0], [0, 1, 0], [0, 0.5, 0.5]]


def test_who_is_without_edges_is_nobodys_neighbour_and_the_rows_stay_stochastic():
    triangle = federation(np.array([[0, 1, 1], [1, 0, 3], [1, 3, 0]], float))
    fed = without_edges(triangle, {"b"})
    matrix = laplacian_step(fed.adjacency, eta=0.5, present=np.array([True, False, True]))
    assert matrix.tolist() == [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]]
    alone = without_edges(federation(), {"b"})
    assert laplacian_step(alone.adjacency, eta=0.5, present=ALL).tolist() == np.eye(3).tolist()
    assert without_edges(triangle, {}) is triangle, "with nobody refused no digit changes"


def test_a_swap_is_legal():
    two = federation(np.array([[0.0, 0.3], [0.3, 0.0]]))
    swap = laplacian_step(two.adjacency, eta=1.0, present=np.ones(2, bool))
    assert swap.tolist() == [[0, 1], [1, 0]]


def test_layer_factors_are_the_mean_importance_over_the_largest():
    known = federation(importance=np.array([[0.2, 0.8], [0.2, 0.8], [0.5, 0.5]]), layer_of={"q": 0})
    assert layer_factors(known) == pytest.approx(np.array([0.3 / 0.7, 1.0]))


@pytest.mark.parametrize(
    ("weights", "max_share", "expected"),
    [
        ([1e7, 100, 100, 200], 0.5, [400, 100, 100, 200]),  # as much as all others together
        ([900, 800, 100, 100, 100], 0.3, [225, 225, 100, 100, 100]),  # two at three tenths, 300 / .4 * .3
        ([9, 1, 1], 0.2, [1, 1, 1]),  # one fifth of each of three cannot be: all alike
        ([5, 1], 0.5, [5, 1]),  # one of two always has half
        ([7], 0.5, [7]),
        ([], 0.5, []),
    ],
)
def test_bounded_weights_by_hand(weights, max_share, expected):
    assert bounded_weights(np.array(weights, float), max_share) == pytest.approx(np.array(expected, float))


@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=9), st.floats(0.05, 1.0))
def test_no_bounded_share_is_above_the_limit_and_the_others_keep_their_ratios(weights, max_share):
    given_weights = np.array(weights, float)
    new = bounded_weights(given_weights, max_share)
    limit = max(max_share, 1 / len(weights))
    assert (new / new.sum()).max() <= limit * (1 + 1e-9)
    if given_weights.max() <= limit * given_weights.sum():
        assert (new == given_weights).all(), "honest weights do not change a bit"
    inside = new / new.sum() < limit * (1 - 1e-9)
    assert new[inside] == pytest.approx(given_weights[inside])


def test_a_claim_of_examples_is_bounded_inside_each_group_over_those_present():
    weights, groups = np.array([1e7, 100, 300, 50, 150]), np.array([0, 0, 0, 1, 1])
    row = average(weights, groups, np.ones(5, bool), max_share=0.5)[1]
    assert row == pytest.approx(np.array([0.5, 0.125, 0.375, 0, 0]))
    assert (average(weights, groups, np.ones(5, bool))[3] == [0, 0, 0, 0.25, 0.75]).all()
    two = average(weights, groups, np.array([True, True, False, True, True]), max_share=0.5)[0]
    assert two[0] > 0.99, "of two one always has half, so two are not bounded"


def test_who_claims_more_than_half_of_all_examples_is_named():
    claims = federation(weights=np.array([100.0, 200.0, 1e7]))
    (line,) = share_warnings(claims, 0.5)
    assert line == "c says that it has 1 of all training examples; an average gives it at most 0.5 (--max-share)"
    assert not share_warnings(federation(weights=np.array([100.0, 200.0, 300.0])), 0.5)
