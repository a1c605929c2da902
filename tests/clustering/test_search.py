from dataclasses import replace

import numpy as np
import pytest
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.metrics import adjusted_rand_score, silhouette_score

from atlas_fl.clustering.cluster import cluster_clients
from atlas_fl.clustering.k_search import (
    best_silhouette,
    feasible_ks,
    mean_sketch,
    merge_small,
    pairwise_distances,
    search_k,
    silhouette,
)
from atlas_fl.clustering.labels import ClusteringSettings

SETTINGS = ClusteringSettings(seed=0, cluster_by="silhouette", k_range=(2, 4))


def corners():
    """Four clients on a square: two ways of halving it are equally good."""
    square = np.array([[1.0, 1, 2], [1, -1, 2], [-1, 1, 2], [-1, -1, 2]])
    return square / np.linalg.norm(square, axis=1, keepdims=True)


def test_scores_are_those_of_k_means_on_the_unit_fingerprints(planted):
    first, second, _ = planted([3, 3, 3])
    proposal = search_k(first, second, SETTINGS)
    rows = mean_sketch(first, second)
    by_k = {row["k"]: row for row in proposal.k_table}
    assert list(by_k) == [2, 3, 4]
    for k in (2, 3, 4):
        best = max(
            silhouette(pairwise_distances(rows), KMeans(k, n_init=20, random_state=seed).fit_predict(rows))
            for seed in (0, 1)
        )
        assert by_k[k]["silhouette"] == pytest.approx(best, abs=0.02)
    assert [row["k"] for row in proposal.k_table if row["chosen"]] == [3]
    assert best_silhouette(first, second, SETTINGS) == pytest.approx(by_k[3]["silhouette"])


def test_fixed_k_is_not_searched(planted):
    first, second, _ = planted([3, 3, 3])
    for k in (1, 2, 9):
        proposal = search_k(first, second, replace(SETTINGS, clusters=str(k)))
        assert len(np.unique(proposal.labels)) == k and not proposal.warnings
        assert [row["k"] for row in proposal.k_table if row["chosen"]] == [k]


def test_a_range_beyond_the_clients_is_cut_with_a_warning():
    points = np.arange(4.0)[:, None]
    assert feasible_ks(points, replace(SETTINGS, k_range=(2, 3))) == ((2, 3), ())
    ks, (line,) = feasible_ks(points, replace(SETTINGS, k_range=(2, 9)))
    assert ks == (2, 3)
    assert line == "k_range 2 9 was cut to at most 3: 4 clients with 4 distinct fingerprints allow no more"
    assert feasible_ks(points, replace(SETTINGS, k_range=(7, 9)))[0] == (3,)
    ks, (line,) = feasible_ks(np.array([[0.0], [0], [0], [1]]), replace(SETTINGS, k_range=(2, 3)))
    assert ks == (2,) and "4 clients with 2 distinct fingerprints" in line
    assert feasible_ks(np.zeros((2, 1)), SETTINGS)[0] == ()
    ks, (line,) = feasible_ks(points, replace(SETTINGS, clusters="7"))
    assert ks == (4,)
    assert line == "7 clusters were asked for; 4 clients with 4 distinct fingerprints allow 4"


@pytest.mark.parametrize("before", [[0, 0, 1, 1], [0, 1, 0, 1]])
def test_a_warm_start_keeps_the_previous_clusters_where_others_are_no_better(before):
    found = search_k(corners(), corners(), replace(SETTINGS, clusters="2"), previous=np.array(before))
    assert adjusted_rand_score(before, found.labels) == 1


def test_a_warm_start_gives_way_to_what_is_better_unless_told_otherwise():
    # two far pairs: keeping the crossed pairs is a local optimum of nothing, fresh starts find the true ones
    rows = np.array([[1.0, 0], [1, 0.05], [0, 1], [0.05, 1]])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    found = search_k(rows, rows, replace(SETTINGS, clusters="2"), previous=np.array([0, 1, 0, 1]))
    assert adjusted_rand_score([0, 0, 1, 1], found.labels) == 1


def test_stability_is_worth_its_weight_in_score(planted):
    first, second, tasks = planted([3, 3, 3])
    before = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1])
    settled = search_k(first, second, replace(SETTINGS, stability=0.9), previous=before)
    assert len(np.unique(settled.labels)) == 2 and adjusted_rand_score(before, settled.labels) == 1
    bonus = {row["k"]: row["bonus"] for row in settled.k_table}
    assert bonus[2] == pytest.approx(0.9)
    free = search_k(first, second, SETTINGS, previous=before)
    assert adjusted_rand_score(tasks, free.labels) == 1


def test_small_clusters_join_their_nearest_by_hand():
    # client 3 is alone; its mean similarity to {0, 1} is .25 and to {2, 4} is .4
    similarity = np.eye(5)
    similarity[3, :3] = similarity[:3, 3] = [0.3, 0.2, 0.3]
    similarity[3, 4] = similarity[4, 3] = 0.5
    labels = np.array([0, 0, 1, 2, 1])
    merged, lines = merge_small(labels, similarity, min_size=2)
    assert merged.tolist() == [0, 0, 1, 1, 1] and labels.tolist() == [0, 0, 1, 2, 1]
    assert lines == ("a cluster of 1 below min_cluster_size 2 joined its nearest (mean similarity 0.40)",)
    assert merge_small(labels, similarity, min_size=1) == (pytest.approx(labels), ())
    everyone, lines = merge_small(labels, similarity, min_size=9)
    assert len(set(everyone.tolist())) == 1 and len(lines) == 2


def test_where_no_k_has_a_silhouette_none_is_good(monkeypatch, planted):
    first, second, _ = planted([3, 3])
    assert best_silhouette(first, second, SETTINGS) > 0
    monkeypatch.setattr("atlas_fl.clustering.k_search.silhouette", lambda *_: None)
    assert best_silhouette(first, second, SETTINGS) == 0


def test_cosine_is_the_clustering_of_fedlease() -> None:
    """Against scikit-learn on the mean over layers of 1 - cosine, sketches of several layers, k = 2 to 4."""
    rng, layers, n = np.random.default_rng(4), 3, 9
    groups = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    centres = rng.normal(size=(3, layers, 40))
    factors = centres[groups] + 0.7 * rng.normal(size=(n, layers, 40))
    unit = factors / np.linalg.norm(factors, axis=2, keepdims=True)
    distances = 1 - np.einsum("ild,jld->ij", unit, unit) / layers
    np.fill_diagonal(distances, 0.0)
    fits = {
        k: AgglomerativeClustering(n_clusters=k, metric="precomputed", linkage="average").fit_predict(distances)
        for k in (2, 3, 4)
    }
    best = max(fits, key=lambda k: silhouette_score(distances, fits[k], metric="precomputed"))
    sketches = unit.reshape(n, -1) / np.sqrt(layers)
    found = cluster_clients(sketches, sketches, settings=replace(SETTINGS, cluster_by="cosine", min_reliability=-0.99))
    assert best == 3 and adjusted_rand_score(found.labels, fits[best]) == 1.0
    (row,) = [row for row in found.k_table if row["chosen"]]
    assert row["silhouette"] == pytest.approx(silhouette_score(distances, fits[best], metric="precomputed"))


def test_cosine_never_finds_one_cluster() -> None:
    sketches = np.random.default_rng(5).normal(size=(2, 8, 64)) + 3.0
    by = {name: replace(SETTINGS, cluster_by=name, min_reliability=-0.99) for name in ("cosine", "corrected")}
    found = {name: len(set(cluster_clients(*sketches, settings=settings).labels)) for name, settings in by.items()}
    assert found["corrected"] == 1 < found["cosine"]
