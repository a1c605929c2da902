"""The k search: k-means at every k of a range, all scores reported, one of them chooses.

Also what every method shares: which k are feasible and the merging of small clusters.
"""

from dataclasses import dataclass

import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from atlas_fl.clustering.pca import embed
from atlas_fl.clustering.scores import RULES, Row, distances, gaps, k_means, score_row, silhouette
from atlas_fl.clustering.settings import Settings
from atlas_fl.clustering.similarity import unit_rows
from atlas_fl.clustering.structure import unrelated
from atlas_fl.rng import generator

NUM_REFERENCES = 20
"""Reference data sets of the gap statistic."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a method proposes before the test for structure."""

    labels: np.ndarray
    """Cluster of each client, int (n,)."""
    k_table: tuple[Row, ...]
    """The alternatives that were weighed; the chosen one has `chosen`."""
    warnings: tuple[str, ...] = ()
    """What the user should know."""


def mean_sketch(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The fingerprint of both halves together, unit rows (n, d)."""
    return unit_rows(first + second)


def feasible_ks(points: np.ndarray, settings: Settings) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The k that can be searched on points (n, c), and a warning where the range had to be cut.

    A search needs 2 <= k <= n - 1 and no more clusters than distinct points; a fixed k may reach the distinct points.
    """
    distinct = len(np.unique(np.round(points, 9), axis=0))
    if settings.fixed_k is not None:
        k = min(settings.fixed_k, distinct)
        cut = f"{settings.fixed_k} clusters were asked for; {len(points)} clients with {distinct} distinct fingerprints"
        return (k,), () if k == settings.fixed_k else (f"{cut} allow {k}",)
    low, high = settings.k_range
    limit = min(len(points) - 1, distinct)
    cut = f"k_range {low} {high} was cut to at most {max(limit, 1)}: {len(points)} clients"
    warning = () if high <= limit else (f"{cut} with {distinct} distinct fingerprints allow no more",)
    if limit < 2:
        return (), warning
    return tuple(range(min(low, limit), min(high, limit) + 1)), warning


def search(
    first: np.ndarray, second: np.ndarray, settings: Settings, *, previous: np.ndarray | None = None
) -> Proposal:
    """K-means on the principal components at each k; the rule of `cluster_by` chooses (RULES).

    `previous` labels (n,) are one more start where they have as many clusters, and earn each k a bonus of
    `stability` times the adjusted Rand index with them.
    """
    points = _points(first, second, settings)
    ks, warnings = feasible_ks(points, settings)
    if not ks or ks == (1,):
        row = {**score_row(points, np.zeros(len(points))), "chosen": True}
        return Proposal(labels=np.zeros(len(points), dtype=np.int64), k_table=(row,), warnings=warnings)
    found = {k: _with_warm_start(points, k, settings, previous) for k in sorted({1, *ks})}
    rngs = [generator(settings.seed, "gap", draw) for draw in range(NUM_REFERENCES)]
    references = [_points(*unrelated(first, second, rng=rng), settings) for rng in rngs]
    statistics = gaps(references, list(found), inertia={k: found[k][1] for k in found}, seed=settings.seed)
    bonus = {
        k: 0.0 if previous is None else settings.stability * float(adjusted_rand_score(previous, found[k][0]))
        for k in found
    }
    table = [{**score_row(points, found[k][0]), **statistics[k], "bonus": bonus[k]} for k in found]
    chosen = ks[0] if settings.fixed_k else RULES[settings.cluster_by](table)
    rows_out = tuple({**row, "chosen": row["k"] == chosen} for row in table)
    return Proposal(labels=found[chosen][0], k_table=rows_out, warnings=warnings)


def _points(first: np.ndarray, second: np.ndarray, settings: Settings) -> np.ndarray:
    rows = mean_sketch(first, second)
    return embed(rows, components=settings.pca_components, incremental=settings.incremental_pca).points


def _with_warm_start(
    points: np.ndarray, k: int, settings: Settings, previous: np.ndarray | None
) -> tuple[np.ndarray, float]:
    """K-means from fresh starts, and from the previous clusters' centres, kept unless a fresh one is better."""
    labels, inertia = k_means(points, k, seed=settings.seed)
    names = np.unique(previous) if previous is not None else np.empty(0)
    if k == 1 or len(names) != k:
        return labels, inertia
    centres = np.stack([points[previous == name].mean(axis=0) for name in names])
    warm = KMeans(k, init=centres, n_init=1).fit(points)
    if inertia < (1 - settings.stability) * float(warm.inertia_) * (1 - 1e-9):
        return labels, inertia
    return warm.labels_.astype(np.int64), float(warm.inertia_)


def best_silhouette(first: np.ndarray, second: np.ndarray, settings: Settings) -> float:
    """The largest silhouette over the k that can be searched, whatever rule chooses k; 0 if there is none."""
    points = _points(first, second, settings)
    ks, _ = feasible_ks(points, settings)
    apart = distances(points)
    labels = [k_means(points, k, seed=settings.seed, num_starts=1)[0] for k in ks if k > 1]
    return max((silhouette(apart, each) or 0.0 for each in labels), default=0.0)


def merge_small(labels: np.ndarray, similarity: np.ndarray, *, min_size: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels (n,) after every cluster below `min_size` has joined its nearest, smallest first, and a line for each.

    Nearest is the cluster with the highest mean similarity (n, n) between members.
    """
    merged = labels.copy()
    lines: list[str] = []
    while True:
        names, sizes = np.unique(merged, return_counts=True)
        if len(names) < 2 or sizes.min() >= min_size:
            return merged, tuple(lines)
        small = names[sizes.argmin()]
        others = [name for name in names if name != small]
        near = [float(similarity[np.ix_(merged == small, merged == name)].mean()) for name in others]
        lines.append(
            f"a cluster of {sizes.min()} below min_cluster_size {min_size} joined its nearest "
            f"(mean similarity {max(near):.2f})"
        )
        merged[merged == small] = others[int(np.argmax(near))]
