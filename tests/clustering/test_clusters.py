import json
import re
from dataclasses import replace

import numpy as np
import pytest

from atlas_fl.clustering.cluster import cluster_clients, oracle_clustering
from atlas_fl.clustering.k_search import METHODS
from atlas_fl.clustering.labels import ClusteringSettings, decided_labels
from atlas_fl.clustering.result import Clustering, agreement, assign_client
from atlas_fl.errors import CheckpointError, ConfigError

SETTINGS = ClusteringSettings(seed=0, draws=19)
ORACLE = replace(SETTINGS, clusters="oracle")
K_SEARCH = replace(SETTINGS, cluster_by="silhouette", k_range=(2, 3))


def noise(num, *, dim=256, seed=9):
    rows = np.random.default_rng(seed).normal(size=(num, dim))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_every_decision_is_recorded(planted):
    first, second, _ = planted([3, 3, 3])
    found = cluster_clients(first, second, settings=SETTINGS)
    assert found.labels == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert found.settings == SETTINGS and found.method == "corrected"
    assert found.structure["found"] and "above" in found.structure["reason"] and not found.warnings
    assert found.similarity.shape == (9, 9) and found.points.shape == (9, 2)
    assert found.reliability == pytest.approx(np.sum(first * second, axis=1))
    assert [row["k"] for row in found.k_table if row["chosen"]] == [3]


def test_undecided_clients_change_nothing_for_the_others(planted):
    first, second, _ = planted([3, 3, 3])
    alone = cluster_clients(first, second, settings=SETTINGS)
    with_noise = [np.concatenate([noise(2, seed=seed), half]) for seed, half in ((5, first), (6, second))]
    found = cluster_clients(*with_noise, settings=SETTINGS)
    assert found.labels == (-1, -1, *alone.labels)
    # a product of more rows may be added up in another order
    assert found.similarity[2:, 2:] == pytest.approx(alone.similarity, abs=1e-12) and not found.similarity[:2, 2:].any()
    assert found.structure == alone.structure and found.k_table == alone.k_table
    assert found.centroids == pytest.approx(alone.centroids)
    assert found.warnings == ("2 undecided (clients 0, 1): their halves agree less than 0.1; they are in no cluster",)
    named = cluster_clients(*with_noise, settings=SETTINGS, names=[f"site-{number}" for number in range(11)])
    assert named.warnings[0].startswith("2 undecided (clients site-0, site-1): ")


@pytest.mark.parametrize("method", METHODS)
def test_all_undecided(method):
    settings = replace(SETTINGS, cluster_by=method)
    found = cluster_clients(noise(4), noise(4, seed=1), settings=settings)
    assert found.labels == (-1,) * 4 and not found.structure["found"]
    assert any(line.startswith("no structure: no client's halves agree to 0.1; give") for line in found.warnings)
    assert Clustering.from_json(found.to_json()).to_json() == found.to_json()
    assert assign_client(found, noise(1)[0], noise(1)[0]).cluster == -1


def test_undecided_clients_can_be_forced_in():
    found = cluster_clients(noise(5), noise(5, seed=1), settings=replace(K_SEARCH, min_reliability=-1, clusters="2"))
    assert set(found.labels) == {0, 1}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num", [1, 2])
def test_one_and_two_clients(method, num, planted):
    settings = replace(SETTINGS, cluster_by=method)
    first, second, _ = planted([num], signal=0.9)
    found = cluster_clients(first, second, settings=settings)
    assert found.labels == (0,) * num and not found.structure["found"]
    assert "too few to test for structure; one cluster is used" in found.warnings[-1]
    assert found.points.shape == (num, 2)


def test_two_unlike_clients_are_not_averaged_by_corrected(planted):
    first, second, _ = planted([1, 1], signal=0.9)
    found = cluster_clients(first, second, settings=SETTINGS)
    assert found.labels == (0, 1)
    assert "every client is a cluster of its own" in found.warnings[-1]


@pytest.mark.parametrize("method", ["corrected", "silhouette"])
def test_fixed_k_overrules_the_verdict_and_says_so(method, planted):
    first, second, _ = planted([6], signal=0.8)
    found = cluster_clients(first, second, settings=replace(SETTINGS, cluster_by=method, clusters="3"))
    assert len(decided_labels(found.labels)) == 3 and not found.structure["found"]
    assert "the 3 clusters asked for are used all the same" in found.warnings[-1]


def test_min_cluster_size_is_applied_last(planted):
    first, second, _ = planted([3, 3, 1])
    assert len(decided_labels(cluster_clients(first, second, settings=SETTINGS).labels)) == 3
    found = cluster_clients(first, second, settings=replace(SETTINGS, min_cluster_size=2))
    assert (
        len(decided_labels(found.labels)) == 2 and "below min_cluster_size 2 joined its nearest" in found.warnings[-1]
    )


def test_few_components_are_reported(planted):
    first, second, _ = planted([3, 3, 3])
    found = cluster_clients(first, second, settings=replace(SETTINGS, pca_components=2))
    (warning,) = found.warnings
    assert re.fullmatch(
        r"2 principal components explain 0\.[0-7]\d of the variance, less than 0\.8; raise pca_components", warning
    )


def test_incremental_components_find_the_same_clusters(planted):
    first, second, tasks = planted([4, 4])
    found = cluster_clients(first, second, settings=replace(K_SEARCH, incremental_pca=True))
    whole = cluster_clients(first, second, settings=K_SEARCH)
    assert agreement(found.labels, tasks)["ari"] == 1
    assert [row["silhouette"] for row in found.k_table[1:]] == pytest.approx(
        [row["silhouette"] for row in whole.k_table[1:]]
    )


def test_centring_finds_tasks_behind_a_common_part(planted):
    first, second, tasks = planted([3, 3, 3])
    common = 3 * noise(1)
    hidden = [common + half for half in (first, second)]
    assert len(decided_labels(cluster_clients(*hidden, settings=SETTINGS).labels)) == 1
    found = cluster_clients(*hidden, settings=replace(SETTINGS, centre=True, min_reliability=0.3))
    assert agreement(found.labels, tasks)["ari"] == 1
    assert [assign_client(found, *pair).cluster for pair in zip(*hidden, strict=True)] == list(found.labels)


def test_a_newcomer_is_placed_like_average_linkage_would(planted):
    first, second, _ = planted([4, 4])
    found = cluster_clients(first[1:], second[1:], settings=SETTINGS)
    assert assign_client(found, first[0], second[0]).cluster == found.labels[0]
    # by hand: the mean over members of the corrected similarity
    left, right = first[1:4], second[1:4]
    own = np.sum(first[0] * second[0])
    rho = (right @ first[0] + left @ second[0]) / 2 / np.sqrt(own * found.reliability[:3])
    likeness = (found.centroids[1, 0] @ first[0] + found.centroids[0, 0] @ second[0]) / 2 / np.sqrt(own)
    assert likeness == pytest.approx(rho.mean(), abs=1e-5)
    place = assign_client(found, first[0], second[0])
    assert place.similarity[0] == pytest.approx(rho.mean(), abs=1e-5) and place.similarity[1] < 0.5
    assert (place.cluster, place.reliability) == (found.labels[0], pytest.approx(own))


def test_beside_k_means_a_newcomer_has_one_less_half_the_squared_distance(planted):
    first, second, _ = planted([4, 4])
    found = cluster_clients(first[1:], second[1:], settings=K_SEARCH)
    place = assign_client(found, first[0], second[0])
    middle = (first[0] + second[0]) / np.linalg.norm(first[0] + second[0])
    by_hand = [1 - np.sum((centre - middle) ** 2) / 2 for centre in found.centroids[0]]
    assert list(place.similarity.values()) == pytest.approx(by_hand, abs=1e-5)
    assert place.cluster == found.labels[0] == int(np.argmax(by_hand))


def test_a_newcomer_that_is_unlike_all_or_undecided_trains_alone(planted):
    first, second, _ = planted([4, 4])
    found = cluster_clients(first, second, settings=SETTINGS)
    stranger = noise(1)[0]
    assert assign_client(found, stranger, stranger).cluster == -1
    assert assign_client(found, noise(1, seed=3)[0], noise(1, seed=4)[0]).cluster == -1
    fixed = cluster_clients(first, second, settings=replace(SETTINGS, clusters="2"))
    assert assign_client(fixed, stranger, stranger).cluster in (0, 1)


def test_predict_needs_sketches_of_the_same_length(planted):
    first, second, _ = planted([3, 3])
    found = cluster_clients(first, second, settings=SETTINGS)
    with pytest.raises(ConfigError, match=r"sketch of shape \(5,\) beside clusters of sketches of 256"):
        assign_client(found, np.ones(5), np.ones(5))


def test_clustering_again_keeps_labels(planted):
    first, second, _ = planted([3, 3, 3])
    before = replace(cluster_clients(first, second, settings=SETTINGS), labels=(2, 2, 2, 0, 0, 0, 1, 1, 1))
    again = cluster_clients(first, second, settings=SETTINGS, previous=before)
    assert again.labels == before.labels
    # the centroids follow the labels, so a newcomer is placed by the old names
    assert (
        assign_client(again, first[0], second[0]).cluster == 2
        and assign_client(again, first[8], second[8]).cluster == 1
    )
    moved = np.arange(9)
    moved[2] = 3  # client 2 now works on the second task
    found = cluster_clients(first[moved], second[moved], settings=SETTINGS, previous=before)
    assert found.labels == (2, 2, 0, 0, 0, 0, 1, 1, 1)


def test_clustering_again_with_clients_that_were_undecided(planted):
    first, second, _ = planted([3, 3])
    before = replace(cluster_clients(first, second, settings=SETTINGS), labels=(1, 1, -1, -1, 0, 0))
    for settings in (SETTINGS, K_SEARCH):
        assert cluster_clients(first, second, settings=settings, previous=before).labels == (1, 1, 1, 0, 0, 0)


def test_oracle_is_the_truth(planted):
    first, second, tasks = planted([2, 3])
    measured = oracle_clustering(first, second, tasks=tasks, settings=ORACLE)
    assert measured.method == "oracle" and measured.structure["reason"] == "true tasks, given and not tested"
    found = cluster_clients(first, second, settings=SETTINGS)
    assert measured.labels == found.labels and measured.similarity == pytest.approx(found.similarity)
    assert assign_client(measured, first[4], second[4]).cluster == 1
    assert oracle_clustering(first, second, tasks=tasks[2:] + tasks[:2], settings=ORACLE).labels == (0, 0, 0, 1, 1)


@pytest.mark.parametrize("method", ["corrected", "silhouette", "oracle"])
def test_json_and_back_is_the_same_clustering(method, planted):
    first, second, tasks = planted([3, 3])
    if method == "oracle":
        found = oracle_clustering(first, second, tasks=tasks, settings=ORACLE)
    else:
        found = cluster_clients(first, second, settings=replace(K_SEARCH, cluster_by=method))
    text = json.dumps(found.to_json(), allow_nan=False)
    back = Clustering.from_json(json.loads(text))
    assert back.to_json() == found.to_json() and back.settings == found.settings
    assert [assign_client(back, *pair).cluster for pair in zip(first, second, strict=True)] == list(found.labels)


def test_json_that_lacks_a_field_is_named():
    data = cluster_clients(noise(2), noise(2), settings=SETTINGS).to_json()
    del data["points"]
    with pytest.raises(CheckpointError, match="the clustering lacks 'points'"):
        Clustering.from_json(data)
