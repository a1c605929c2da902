from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from atlas_fl.clustering.k_search import (
    cut_linkage,
    labels_without_structure,
    linkage_silhouette,
    merge_tree,
    propose_linkage,
)
from atlas_fl.clustering.labels import ClusteringSettings

SETTINGS = ClusteringSettings(seed=0)
CHAIN = np.array([[1, 0.9, 0.7], [0.9, 1, 0.3], [0.7, 0.3, 1]])


def partition(labels):
    return {frozenset(np.flatnonzero(labels == name).tolist()) for name in np.unique(labels)}


def test_average_linkage_by_hand():
    # 0 and 1 join at .9; their mean similarity to 2 is (.7 + .3) / 2 = .5
    assert merge_tree(CHAIN)[:, 2] == pytest.approx([0.1, 0.5])
    assert partition(cut_linkage(CHAIN, threshold=0.6)) == {frozenset({0, 1}), frozenset({2})}
    assert partition(cut_linkage(CHAIN, threshold=0.45)) == {frozenset({0, 1, 2})}
    assert len(partition(cut_linkage(CHAIN, threshold=0.95))) == 3
    assert partition(cut_linkage(CHAIN, k=2)) == {frozenset({0, 1}), frozenset({2})}


def joined(similarity, threshold):
    """Average linkage straight from its definition."""
    groups = [frozenset({i}) for i in range(len(similarity))]
    while len(groups) > 1:
        pairs = {pair: similarity[np.ix_(sorted(pair[0]), sorted(pair[1]))].mean() for pair in combinations(groups, 2)}
        left, right = max(pairs, key=pairs.get)
        if pairs[left, right] < threshold:
            break
        groups = [each for each in groups if each not in (left, right)] + [left | right]
    return set(groups)


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_definition(seed):
    rng = np.random.default_rng(seed)
    noise = rng.uniform(size=(8, 8))
    similarity = (noise + noise.T) / 2
    np.fill_diagonal(similarity, 1.0)
    for threshold in (0.4, 0.6, 0.8):
        assert partition(cut_linkage(similarity, threshold=threshold)) == joined(similarity, threshold)


def test_one_client_is_one_cluster():
    assert cut_linkage(np.eye(1), threshold=0.6).tolist() == [0] and cut_linkage(np.eye(1), k=1).tolist() == [0]


def test_the_k_table_holds_the_other_cuts(planted):
    first, second, tasks = planted([3, 3, 3])
    proposal = propose_linkage(first, second, SETTINGS)
    assert adjusted_rand_score(tasks, proposal.labels) == 1
    rows = {row["k"]: row for row in proposal.k_table}
    assert list(rows) == [2, 3, 4, 5] and [k for k in rows if rows[k]["chosen"]] == [3]
    # three clusters would merge well below the threshold, four well above
    assert rows[3]["merge_similarity"] < 0.6 < rows[4]["merge_similarity"]
    assert rows[3]["silhouette"] > rows[2]["silhouette"]


def test_fixed_k_cuts_the_same_tree(planted):
    first, second, _ = planted([3, 3, 3], signal=0.9)
    for k in (1, 2, 3, 9):
        assert len(partition(propose_linkage(first, second, replace(SETTINGS, clusters=str(k))).labels)) == k
    found = propose_linkage(first, second, replace(SETTINGS, clusters="20"))
    assert len(partition(found.labels)) == 9
    assert found.warnings == ("20 clusters were asked for; 9 clients with 9 distinct fingerprints allow 9",)


def test_stability_blends_the_previous_clusters_in(planted):
    first, second, _ = planted([3, 3])
    before = np.zeros(6, dtype=int)
    assert len(partition(propose_linkage(first, second, SETTINGS, previous=before).labels)) == 2
    assert len(partition(propose_linkage(first, second, replace(SETTINGS, stability=0.7), previous=before).labels)) == 1


def test_separation_is_zero_without_two_groups(planted):
    for sizes in ([6], [1] * 6):
        first, second, _ = planted(sizes, signal=0.8)
        assert linkage_silhouette(first, second, SETTINGS) == 0
    assert linkage_silhouette(*planted([3, 3], signal=0.8)[:2], SETTINGS) > 0.8


def test_without_structure_like_clients_share_and_unlike_ones_stay_alone(planted):
    split = np.array([0, 0, 0, 1, 1, 1])
    first, second, _ = planted([6], signal=0.8)
    assert labels_without_structure(first, second, SETTINGS, split).tolist() == [0] * 6
    first, second, _ = planted([1] * 6, signal=0.8)
    assert len(set(labels_without_structure(first, second, SETTINGS, split).tolist())) == 6
    assert labels_without_structure(first, second, SETTINGS, np.zeros(6)).tolist() == [0] * 6
    first, second, _ = planted([6], signal=0.8)
    assert labels_without_structure(first, second, SETTINGS, np.arange(6)).tolist() == [0, 1, 2, 3, 4, 5], (
        "a proposal stands"
    )
