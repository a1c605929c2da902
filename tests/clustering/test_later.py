"""A client that comes later stands beside the others as if it had been there, and nobody else moves."""

import numpy as np
import pytest

from atlas_fl.clustering.cluster import cluster_clients
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.clustering.result import append_client


def halves(rng: np.random.Generator, *, dim: int = 48, noise: float = 0.4) -> np.ndarray:
    """(2, 7, dim): three clients of one kind and four of another."""
    kinds = rng.normal(size=(2, dim))
    means = kinds[[0, 1, 0, 1, 1, 0, 1]]
    return np.stack([means + noise * rng.normal(size=means.shape) for _ in range(2)]).astype(np.float32)


@pytest.mark.parametrize("by", ["corrected", "silhouette"])
def test_its_similarities_are_those_of_clustering_all_at_once(by: str) -> None:
    sketches, settings = halves(np.random.default_rng(3)), ClusteringSettings(seed=1, cluster_by=by, draws=19)
    before = cluster_clients(*sketches[:, :-1], settings=settings)
    after = append_client(before, sketches, label=before.labels[1])
    whole = cluster_clients(*sketches, settings=settings)
    assert after.labels == whole.labels == (*before.labels, before.labels[1])
    np.testing.assert_allclose(after.similarity, whole.similarity, atol=1e-6)
    np.testing.assert_allclose(after.reliability, whole.reliability, atol=1e-6)
    np.testing.assert_allclose(after.points, whole.points, atol=1e-6)
    np.testing.assert_array_equal(after.similarity[:-1, :-1], before.similarity)
    np.testing.assert_array_equal(after.centroids, before.centroids)


def test_a_newcomer_whose_halves_contradict_is_like_nobody() -> None:
    sketches = halves(np.random.default_rng(3))
    sketches[1, -1] = -sketches[0, -1]
    before = cluster_clients(*sketches[:, :-1], settings=ClusteringSettings(seed=1, draws=19))
    after = append_client(before, sketches, label=-1)
    assert after.similarity[-1].tolist() == [0.0] * 6 + [1.0]
