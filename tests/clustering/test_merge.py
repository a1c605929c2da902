"""Clusters are joined by what their labels ask, and by nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from atlas_fl.clustering.cluster import cluster_clients, merge_clusters
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.clustering.result import Clustering, append_client, assign_client

NAMES = ("a", "b", "c", "d", "e", "f")


def found(*, threshold: float = 0.6, clusters: str = "auto") -> tuple[Clustering, np.ndarray]:
    """Six clients, two of each of three sources, and their sketches (2, 6, 64)."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(3, 64))[[0, 0, 1, 1, 2, 2]]
    sketches = np.stack([means + 0.3 * rng.normal(size=means.shape) for _ in range(2)])
    settings = ClusteringSettings(seed=1, draws=19, threshold=threshold, clusters=clusters)
    clustering = cluster_clients(*sketches, settings=settings)
    assert clustering.labels == (0, 0, 1, 1, 2, 2)
    return clustering, sketches


def test_by_hand() -> None:
    # The means of the first two clusters are (1, 0) and (.6, .8), a cosine of .6; the third points away from both.
    labels = np.array([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.6, 0.8], [-1.0, 0.0], [-1.0, 0.0]])
    clustering, _ = found()
    assert merge_clusters(clustering, labels, threshold=0.61, names=NAMES) is clustering
    merged = merge_clusters(clustering, labels, threshold=0.59, names=NAMES)
    assert merged.labels == (0, 0, 0, 0, 1, 1)
    assert merged.before_merging == clustering.labels
    assert merged.warnings[-1].startswith("the clusters of a and c are one")
    assert "(cosine 0.60, --merge-similarity 0.59)" in merged.warnings[-1]


def test_what_was_joined_is_compared_anew_by_its_mean() -> None:
    # The last two are nearest, .8. Their mean is (.3, .9), whose cosine with the first is .3 / sqrt(.9) = .316; before,
    # the second alone had .6 with it.
    labels = np.repeat([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], 2, axis=0)
    assert merge_clusters(found()[0], labels, threshold=0.32, names=NAMES).labels == (0, 0, 1, 1, 1, 1)
    assert merge_clusters(found()[0], labels, threshold=0.31, names=NAMES).labels == (0,) * 6


def test_who_has_no_labels_to_show_is_joined_with_nobody_and_follows_its_cluster() -> None:
    labels = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert merge_clusters(found()[0], labels, threshold=0.3, names=NAMES).labels == (0, 0, 0, 0, 1, 1)


@pytest.mark.parametrize("clusters", ["3", "oracle"])
def test_given_clusters_and_clients_without_structure_stay(clusters: str) -> None:
    clustering, _ = found(clusters="3")
    clustering = replace(clustering, settings=replace(clustering.settings, clusters=clusters))
    alike = np.ones((6, 2))
    assert merge_clusters(clustering, alike, threshold=0.3, names=NAMES) is clustering
    without = replace(found()[0], structure={"found": False})
    assert merge_clusters(without, alike, threshold=0.3, names=NAMES) is without


def test_the_order_of_clients_does_not_matter_and_labels_keep_their_meaning() -> None:
    rng = np.random.default_rng(2)
    asked = rng.normal(size=(2, 32))
    labels = (asked[[0, 0, 1, 1, 0, 0]] + 0.2 * rng.normal(size=(6, 32))).astype(np.float32)
    clustering, _ = found()
    merged = merge_clusters(clustering, labels, threshold=0.3, names=NAMES)
    assert merged.labels == (0, 0, 1, 1, 0, 0)
    order = np.array([3, 0, 5, 2, 4, 1])
    permuted = replace(clustering, labels=tuple(np.array(clustering.labels)[order].tolist()))
    again = merge_clusters(permuted, labels[order], threshold=0.3, names=[NAMES[index] for index in order])
    same = np.equal.outer(merged.labels, merged.labels)[np.ix_(order, order)]
    np.testing.assert_array_equal(np.equal.outer(again.labels, again.labels), same)
    kept = merge_clusters(clustering, labels, threshold=0.3, names=NAMES, previous=(7, 7, 4, 4, 7, 7))
    assert kept.labels == (7, 7, 4, 4, 7, 7)


def test_a_newcomer_is_compared_with_the_parts_and_belongs_to_the_whole() -> None:
    clustering, sketches = found()
    labels = np.repeat([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]], 2, axis=0)
    merged = merge_clusters(clustering, labels, threshold=0.3, names=NAMES)
    assert merged.labels == (0, 0, 1, 1, 0, 0)
    rng = np.random.default_rng(5)
    newcomer = sketches.mean(axis=(0,))[4] + 0.3 * rng.normal(size=(2, 64))  # a client of the third source
    alone, joined = assign_client(clustering, *newcomer), assign_client(merged, *newcomer)
    assert (alone.cluster, joined.cluster) == (2, 0)
    assert set(joined.similarity) == {0, 1}
    assert joined.similarity[0] == pytest.approx(alone.similarity[2])
    with_it = append_client(merged, np.concatenate([sketches, newcomer[:, None]], axis=1), label=joined.cluster)
    assert with_it.labels == (0, 0, 1, 1, 0, 0, 0)
    assert Clustering.from_json(with_it.to_json()).before_merging == with_it.before_merging == (0, 0, 1, 1, 2, 2, 0)
    assert assign_client(with_it, *newcomer).cluster == 0
