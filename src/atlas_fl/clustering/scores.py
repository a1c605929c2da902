"""How well clients fall into k clusters: every score of the k table, and the rules that choose k from it."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import KMeans
from sklearn.metrics import calinski_harabasz_score, davies_bouldin_score

from atlas_fl.rng import seed_of

Row: TypeAlias = dict[str, Any]
"""One line of the k table; a score that is not defined at this k is None."""


NO_SCATTER = 1e-12
"""What stands for W_k = 0, where a cluster holds one client or identical ones: this share of W_1."""


def sizes_of(labels: np.ndarray) -> list[int]:
    """How many clients each cluster holds, largest first."""
    return sorted(np.unique(labels, return_counts=True)[1].tolist(), reverse=True)


def distances(points: np.ndarray) -> np.ndarray:
    """Euclidean distances (n, n) of points (n, c), zero on the diagonal."""
    return np.asarray(squareform(pdist(points)))


def silhouette(apart: np.ndarray, labels: np.ndarray) -> float | None:
    """The mean silhouette (Rousseeuw 1987) in [-1, 1] from distances (n, n); None unless there are 2 to n - 1 clusters.

    `(b - a) / max(a, b)`, a the mean distance to the own cluster and b to the nearest other one; 0 for a client alone.
    scikit-learn's costs forty times as much on nine clients, and the test for structure asks for hundreds.
    """
    member = labels[:, None] == np.unique(labels)  # (n, k)
    if not 2 <= member.shape[1] <= len(labels) - 1:
        return None
    sums, sizes = apart @ member, member.sum(axis=0)
    own = sums[member] / np.maximum(sizes - 1, 1)[member.argmax(axis=1)]
    other = np.where(member, np.inf, sums / sizes).min(axis=1)
    widest = np.maximum(own, other)
    width = np.divide(other - own, widest, out=np.zeros(len(labels)), where=widest > 0)
    return float(np.where(sizes[member.argmax(axis=1)] > 1, width, 0.0).mean())


def atlas_score(*, silhouette: float, davies_bouldin: float, calinski_harabasz: float, singletons: int) -> float:
    """S(k) of the seeds: `0.5 (silhouette + 1) / 2 + 0.3 / (1 + DB) + 0.2 CH / (CH + 1000) - 0.15 singletons`.

    With nine clients the third term stays below .001, and a singleton costs more than any k gains elsewhere.
    """
    gain = 0.25 * (silhouette + 1) + 0.3 / (1 + davies_bouldin) + 0.2 * calinski_harabasz / (calinski_harabasz + 1000)
    return gain - 0.15 * singletons


def score_row(points: np.ndarray, labels: np.ndarray) -> Row:
    """The line of the k table for these labels (n,) of points (n, c): k, sizes, singletons and the scores."""
    sizes = sizes_of(labels)
    row: Row = {"k": len(sizes), "sizes": sizes, "singletons": sizes.count(1)}
    width = silhouette(distances(points), labels)
    if width is None:
        return {**row, "silhouette": None, "davies_bouldin": None, "calinski_harabasz": None, "atlas": None}
    scores = {
        "silhouette": width,
        "davies_bouldin": float(davies_bouldin_score(points, labels)),
        "calinski_harabasz": float(calinski_harabasz_score(points, labels)),
    }
    return {**row, **scores, "atlas": atlas_score(**scores, singletons=row["singletons"])}


def k_means(points: np.ndarray, k: int, *, seed: int, num_starts: int = 10) -> tuple[np.ndarray, float]:
    """Labels (n,) and the sum of squared distances to the centres, from the best of several starts."""
    if k == 1:
        return np.zeros(len(points), dtype=np.int64), float(np.square(points - points.mean(axis=0)).sum())
    model = KMeans(k, n_init=num_starts, random_state=seed_of(seed, "k-means", k) % 2**32).fit(points)
    return model.labels_.astype(np.int64), float(model.inertia_)


def gaps(
    references: Sequence[np.ndarray], ks: Sequence[int], *, inertia: Mapping[int, float], seed: int
) -> dict[int, Row]:
    """By k: the gap statistic and its error (Tibshirani, Walther and Hastie 2001).

    `Gap(k) = E log W_k(reference) - log W_k`, W_k the sum of squares within clusters; the error is
    `sd sqrt(1 + 1 / references)`. The references are points (n, c) without clusters. The paper draws them uniformly
    from a box, which with n points in n - 1 dimensions finds one cluster always; here they are unrelated clients.
    """
    drawn = np.array([[k_means(each, k, seed=seed, num_starts=3)[1] for k in (1, *ks)] for each in references])
    logs = np.log(np.maximum(drawn[:, 1:], NO_SCATTER * drawn[:, :1]))
    errors = logs.std(axis=0) * np.sqrt(1 + 1 / len(references))
    observed = np.log([max(inertia[k], NO_SCATTER * inertia[1]) for k in ks])
    gap = logs.mean(axis=0) - observed
    return {k: {"gap": float(gap[i]), "gap_error": float(errors[i])} for i, k in enumerate(ks)}


def highest(name: str) -> Callable[[Sequence[Row]], int]:
    """The rule that takes the k whose score of this name is highest, the smaller k of two equal ones."""

    def choose(table: Sequence[Row]) -> int:
        scored = [row for row in table if row[name] is not None]
        return int(max(scored, key=lambda row: (row[name] + row["bonus"], -row["k"]))["k"]) if scored else 1

    return choose


def first_gap(table: Sequence[Row]) -> int:
    """The smallest k with `Gap(k) >= Gap(next k) - 2 error(next k)`, else the largest; k = 1 finds no clusters.

    The paper takes one error, which splits a planted cluster in about one federation of nine clients in ten.
    """
    for row, after in pairwise(table):
        if row["gap"] + row["bonus"] >= after["gap"] + after["bonus"] - 2 * after["gap_error"]:
            return int(row["k"])
    return int(table[-1]["k"])


RULES: dict[str, Callable[[Sequence[Row]], int]] = {
    "atlas": highest("atlas"),
    "silhouette": highest("silhouette"),
    "gap": first_gap,
}
"""How the k search chooses k from the k table."""
