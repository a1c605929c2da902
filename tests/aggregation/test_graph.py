import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.neighbors import NearestNeighbors

from atlas_fl.aggregation.graph import (
    GraphOptions,
    affinity,
    blocks,
    join_singletons,
    make_graph,
    nearest,
    similarity_distances,
    symmetrize,
)
from atlas_fl.errors import ConfigError

NAMES = ("movie-0", "movie-1", "trec-0", "trec-1", "pairs-0")
TASKS = ("movie", "movie", "trec", "trec", "pairs")
CLUSTERS = np.array([0, 0, 1, 1, 2])


@pytest.fixture
def points():
    return np.random.default_rng(5).normal(size=(5, 16))


def squared_distances(points):
    return cdist(points, points, "sqeuclidean")


@pytest.fixture
def distances(points):
    return squared_distances(points)


def graph(distances, clusters=CLUSTERS, *, performance=None, previous=None, **words):
    options = GraphOptions(**words)
    return make_graph(
        distances, clusters, options, clients=NAMES, tasks=TASKS, performance=performance, previous=previous
    )


def test_three_points_by_hand():
    squares = squared_distances(np.array([[0.0], [1.0], [3.0]]))
    assert squares == pytest.approx(np.array([[0, 1, 9], [1, 0, 4], [9, 4, 0]]))
    # the median of 1, 4, 9 is 4
    expected = [[0, np.exp(-1 / 4), np.exp(-9 / 4)], [np.exp(-1 / 4), 0, np.exp(-1)], [np.exp(-9 / 4), np.exp(-1), 0]]
    assert affinity(squares) == pytest.approx(np.array(expected))


def test_closeness_equals_sklearns_rbf(points, distances):
    expected = rbf_kernel(points, gamma=0.3) - np.eye(5)
    assert affinity(distances, alpha=0.3) == pytest.approx(expected)


def test_closeness_leaves_out_who_is_not_used(distances):
    used = np.array([True, True, False, True, True])
    distances[2], distances[:, 2] = 0.0, 0.0
    close = affinity(distances, used=used)
    assert not close[2].any()
    assert close[np.ix_(used, used)] == pytest.approx(affinity(distances[np.ix_(used, used)]))


def test_similarity_becomes_the_squared_distance_of_unit_vectors(points):
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    assert similarity_distances(unit @ unit.T) == pytest.approx(squared_distances(unit), abs=1e-12)
    assert similarity_distances(np.array([[0.4, 1.3], [1.3, 0.7]])).tolist() == [[0, 0], [0, 0]]


def test_equal_fingerprints_have_the_greatest_closeness():
    assert affinity(np.zeros((3, 3))).tolist() == (1 - np.eye(3)).tolist()


def test_distances_that_are_not_finite_are_refused_unless_the_client_is_undecided(distances):
    distances[0, 1] = distances[1, 0] = np.nan
    with pytest.raises(ConfigError, match="not finite; the fingerprints hold NaN"):
        graph(distances)
    assert np.isfinite(graph(distances, np.array([-1, 0, 1, 1, 2])).adjacency).all()


def test_similarity_graph_is_the_closeness_inside_blocks(distances):
    made = graph(distances, singleton_neighbours=0)
    assert made.adjacency == pytest.approx(affinity(distances) * blocks(CLUSTERS))
    assert made.warnings == ("pairs-0 has no neighbour on the graph",)


def test_uniform_graph_has_equal_edges(distances):
    adjacency = graph(distances, graph="uniform", block_diagonal=False).adjacency
    assert adjacency.tolist() == (1 - np.eye(5)).tolist()


def test_adaptive_graph_by_hand():
    two = squared_distances(np.array([[0.0], [1.0]]))
    # a listens to b with exp(-1) * 0.8 / 0.8, b to a with exp(-1) * 0.4 / 0.8
    for symmetric, share in (("max", 1.0), ("average", 0.75)):
        options = GraphOptions(graph="adaptive", alpha=1.0, symmetrize=symmetric)
        scores = np.array([0.4, 0.8])
        made = make_graph(two, np.array([0, 0]), options, clients="ab", tasks="tt", performance=scores)
        assert made.adjacency[0, 1] == pytest.approx(np.exp(-1) * share)


def test_adaptive_graph_survives_scores_of_zero_and_below(distances):
    low = graph(distances, graph="adaptive", performance=np.array([-0.1, 0.0, 0, 0, 0]), block_diagonal=False)
    assert low.adjacency == pytest.approx(affinity(distances))


def test_symmetrize_by_hand():
    directed = np.array([[0.0, 1.0], [0.5, 0.0]])
    assert [symmetrize(directed, how)[0, 1] for how in ("average", "max", "min")] == [0.75, 1.0, 0.5]


def test_nearest_equals_sklearns_neighbours(points, distances):
    everyone = ~np.eye(5, dtype=bool)
    found = nearest(distances, everyone, 2)
    expected = NearestNeighbors(n_neighbors=2).fit(points).kneighbors_graph().toarray().astype(bool)
    assert (found == expected).all()
    assert nearest(distances, everyone, 9).sum() == 20


def test_nearest_neighbours_thin_the_graph(distances):
    full = graph(distances, block_diagonal=False).adjacency
    kept = graph(distances, block_diagonal=False, neighbours=1, symmetrize="max").adjacency
    for k in range(5):
        others = np.delete(np.arange(5), k)
        first = others[distances[k][others].argmin()]
        assert kept[k, first] == full[k, first]
    assert 0 < (kept > 0).sum() < (full > 0).sum()


def test_no_edge_crosses_clusters(distances):
    adjacency = graph(distances, singleton_neighbours=0, neighbours=1).adjacency
    assert not adjacency[CLUSTERS[:, None] != CLUSTERS[None, :]].any()


@pytest.mark.parametrize("block_diagonal", [True, False])
def test_undecided_clients_have_no_edges(distances, block_diagonal):
    made = graph(distances, np.array([0, -1, -1, 0, 1]), block_diagonal=block_diagonal)
    assert not made.adjacency[[1, 2]].any()
    assert made.adjacency[0].any()
    assert "movie-1 has no neighbour on the graph" in made.warnings


def test_a_singleton_is_joined_inside_its_task(distances):
    clusters = np.array([0, 1, 2, 2, 2])  # movie-0 and movie-1 are each alone
    joined, warnings = join_singletons(distances, clusters, count=3, tasks=TASKS, clients=NAMES)
    assert np.argwhere(joined).tolist() == [[0, 1], [1, 0]]
    assert warnings == ()
    made = graph(distances, clusters, singleton_neighbours=3)
    assert made.adjacency[0, 1] == pytest.approx(affinity(distances)[0, 1])
    assert not made.adjacency[:2, 2:].any()


def test_a_singleton_without_a_mate_is_joined_to_the_nearest_and_flagged(distances):
    made = graph(distances, singleton_neighbours=2)
    closest = np.argsort(distances[4, :4])[:2]
    assert sorted(np.flatnonzero(made.adjacency[4])) == sorted(closest)
    assert made.warnings[0].startswith(
        "pairs-0 is alone in its cluster and no other decided client has its task: joined to "
    )


def test_a_singleton_is_never_joined_to_an_undecided_client(distances):
    made = graph(distances, np.array([-1, -1, -1, -1, 0]), singleton_neighbours=4)
    assert not made.adjacency.any()
    assert len(made.warnings) == 5


def test_moving_average_by_hand(distances):
    previous = np.full((5, 5), 0.5) - 0.5 * np.eye(5)
    now = graph(distances, singleton_neighbours=0).adjacency
    blended = graph(distances, singleton_neighbours=0, ema=0.25, previous=previous).adjacency
    assert blended[0, 1] == pytest.approx(0.75 * now[0, 1] + 0.25 * 0.5)
    assert blended[0, 2] == 0, "edges that the new clusters cut stay cut"


@pytest.mark.parametrize("words", [{}, {"block_diagonal": False}, {"neighbours": 1}, {"symmetrize": "min"}])
def test_permuting_clients_permutes_the_graph(distances, words):
    order = np.array([3, 0, 4, 1, 2])
    clusters = np.array([0, 0, 0, 1, 2])
    straight = graph(distances, clusters, **words).adjacency
    shuffled = make_graph(
        distances[np.ix_(order, order)],
        clusters[order],
        GraphOptions(**words),
        clients=[NAMES[k] for k in order],
        tasks=[TASKS[k] for k in order],
    ).adjacency
    assert shuffled == pytest.approx(straight[np.ix_(order, order)], abs=1e-15)


def test_inputs_are_untouched(distances):
    copy, clusters, previous = distances.copy(), CLUSTERS.copy(), np.ones((5, 5))
    graph(distances, clusters, previous=previous, ema=0.5)
    assert (distances == copy).all()
    assert (clusters == CLUSTERS).all()
    assert (previous == 1).all()


def test_one_client_has_an_empty_graph():
    made = make_graph(np.zeros((1, 1)), np.array([0]), GraphOptions(), clients=("a",), tasks=("t",))
    assert made.adjacency.tolist() == [[0.0]]
