"""Clusters without k: average linkage of the noise-corrected similarity, cut where it means "the same task"."""

import numpy as np
from scipy.cluster.hierarchy import cut_tree, fcluster
from scipy.cluster.hierarchy import linkage as tree_of
from scipy.spatial.distance import squareform

from atlas_fl.clustering.pca import embed
from atlas_fl.clustering.scores import Row, score_row, silhouette
from atlas_fl.clustering.search import Proposal, feasible_ks, mean_sketch
from atlas_fl.clustering.settings import Settings
from atlas_fl.clustering.similarity import corrected_similarity, cross_similarity


def similarity_of(first: np.ndarray, second: np.ndarray, settings: Settings) -> np.ndarray:
    """Noise-corrected similarity (n, n) of decided clients, whose reliability is at least `min_reliability`."""
    return corrected_similarity(cross_similarity(first, second), floor=max(settings.min_reliability, 0.0))


def merge_tree(similarity: np.ndarray) -> np.ndarray:
    """SciPy's linkage matrix (n - 1, 4) of average linkage on the distance `1 - rho`; needs two clients."""
    return np.asarray(tree_of(squareform(1.0 - similarity, checks=False), method="average"))


def cut_at(similarity: np.ndarray, *, threshold: float) -> np.ndarray:
    """Labels (n,): clusters join while their mean similarity is at least the threshold."""
    if len(similarity) < 2:
        return np.zeros(len(similarity), dtype=np.int64)
    clusters = fcluster(merge_tree(similarity), 1.0 - threshold, criterion="distance")
    return np.asarray(clusters, dtype=np.int64) - 1


def cut_into(similarity: np.ndarray, k: int) -> np.ndarray:
    """Labels (n,) of the k clusters that stand before the last k - 1 merges."""
    if len(similarity) < 2:
        return np.zeros(len(similarity), dtype=np.int64)
    return np.asarray(cut_tree(merge_tree(similarity), n_clusters=k)[:, 0], dtype=np.int64)


def _labels(similarity: np.ndarray, settings: Settings, *, k: int | None) -> np.ndarray:
    return cut_at(similarity, threshold=settings.threshold) if k is None else cut_into(similarity, k)


def propose(
    first: np.ndarray, second: np.ndarray, settings: Settings, *, previous: np.ndarray | None = None
) -> Proposal:
    """Clusters at the threshold, or the fixed k, with the other cuts of the tree as the k table.

    `previous` labels (n,) blend in: `(1 - stability) rho + stability * (same cluster before)`.
    """
    similarity = similarity_of(first, second, settings)
    points = embed(mean_sketch(first, second), components=settings.pca_components).points
    ks, warnings = feasible_ks(points, settings)
    if previous is not None:
        together = (previous[:, None] == previous[None, :]).astype(np.float64)
        similarity = (1 - settings.stability) * similarity + settings.stability * together
    labels = _labels(similarity, settings, k=ks[0] if settings.fixed_k else None)
    chosen = len(np.unique(labels))
    table = tuple(_row(similarity, points, k, chosen=chosen) for k in sorted({chosen, *ks}))
    return Proposal(labels=labels, k_table=table, warnings=warnings if settings.fixed_k else ())


def _row(similarity: np.ndarray, points: np.ndarray, k: int, *, chosen: int) -> Row:
    """Scores of the tree cut into k, and the mean similarity at which two of these clusters would merge."""
    merge = 1.0 - float(merge_tree(similarity)[len(points) - k, 2]) if k > 1 else None
    return {**score_row(points, cut_into(similarity, k)), "merge_similarity": merge, "chosen": k == chosen}


def separation(first: np.ndarray, second: np.ndarray, settings: Settings) -> float:
    """Silhouette of the proposed clusters on the distance `1 - rho`; 0 for one cluster or none shared."""
    similarity = similarity_of(first, second, settings)
    k = min(settings.fixed_k, len(similarity)) if settings.fixed_k else None
    return silhouette(1.0 - similarity, _labels(similarity, settings, k=k)) or 0.0


def without_structure(first: np.ndarray, second: np.ndarray, settings: Settings, labels: np.ndarray) -> np.ndarray:
    """Labels (n,) where no structure was found: one cluster if clients are alike on average, else each alone.

    One cluster for clients that measurably differ would average unrelated models. A proposal that is already one
    of the two stands.
    """
    num = len(labels)
    if len(np.unique(labels)) in (1, num):
        return labels
    similarity = similarity_of(first, second, settings)
    mean = (similarity.sum() - num) / (num * (num - 1))
    return np.zeros(num, dtype=np.int64) if mean >= settings.threshold else np.arange(num)
