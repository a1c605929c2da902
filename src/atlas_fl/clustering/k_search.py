"""Number of clusters: the ways to cluster, the scores of the k table, and a test for structure.

`METHODS` is the registry of ways to cluster. Each proposes clusters, is tested by its own statistic, and says which
labels clients get without structure. `corrected` cuts average linkage of the noise-corrected similarity where it means
"the same task". The k search runs k-means at every k of a range and reports all scores; one of them,
`--cluster-by`, chooses k. All share the feasible range of k and the merging of small clusters.

A search always returns clusters, of pure noise too, so every method must pass a test for structure. Structure means
that some clients are alike and that some differ. The method's statistic must lie above the 95th percentile of what it
is in both worlds without structure:

- `unrelated`: every client's two sketches are turned by one random rotation of its own. That keeps each client's
  reliability and destroys every resemblance between clients.
- `alike`: every client points in one common direction and differs by its own noise alone, as large as its
  reliability says. That keeps each client's reliability and destroys every difference that is not noise.

The statistic of the k search is the best silhouette over the range of k, whatever rule chooses k; that of `corrected`
is the silhouette of the proposed clusters on the distance 1 - rho, zero when nothing is joined or everything is.
Clients that are all alike, all unlike, or grouped as chance would group them give "no structure". Noise is assumed to
be isotropic in the sketch. With fewer than three clients there is nothing to test.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from scipy.cluster.hierarchy import cut_tree, fcluster
from scipy.cluster.hierarchy import linkage as tree_of
from scipy.spatial.distance import pdist, squareform

from atlas_fl.clustering import sketch
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.frozen import Frozen
from atlas_fl.rng import derive_seed, generator

KTableRow: TypeAlias = dict[str, Any]
"""One line of the k table; a score that is not defined at this k is None."""


def pairwise_distances(points: np.ndarray) -> np.ndarray:
    """Euclidean distances (n, n) of points (n, c), zero on the diagonal."""
    return np.asarray(squareform(pdist(points)))


def silhouette(distance_matrix: np.ndarray, labels: np.ndarray) -> float | None:
    """The mean silhouette (Rousseeuw 1987) in [-1, 1] from distances (n, n); None unless there are 2 to n - 1 clusters.

    `(b - a) / max(a, b)`, a the mean distance to the own cluster and b to the nearest other one; 0 for a client alone.
    scikit-learn's costs forty times as much on nine clients, and the test for structure asks for hundreds.
    """
    member = labels[:, None] == np.unique(labels)  # (n, k)
    if not 2 <= member.shape[1] <= len(labels) - 1:
        return None
    sums, sizes = distance_matrix @ member, member.sum(axis=0)
    within = sums[member] / np.maximum(sizes - 1, 1)[member.argmax(axis=1)]
    nearest = np.where(member, np.inf, sums / sizes).min(axis=1)
    widest = np.maximum(within, nearest)
    width = np.divide(nearest - within, widest, out=np.zeros(len(labels)), where=widest > 0)
    return float(np.where(sizes[member.argmax(axis=1)] > 1, width, 0.0).mean())


def atlas_score(*, silhouette: float, davies_bouldin: float, calinski_harabasz: float, singletons: int) -> float:
    """S(k) of the seeds: `0.5 (silhouette + 1) / 2 + 0.3 / (1 + DB) + 0.2 CH / (CH + 1000) - 0.15 singletons`.

    With nine clients the third term stays below .001, and a singleton costs more than any k gains elsewhere.
    """
    gain = 0.25 * (silhouette + 1) + 0.3 / (1 + davies_bouldin) + 0.2 * calinski_harabasz / (calinski_harabasz + 1000)
    return gain - 0.15 * singletons


def score_row(points: np.ndarray, labels: np.ndarray) -> KTableRow:
    """The line of the k table for these labels (n,) of points (n, c): k, sizes, singletons and the scores."""
    from sklearn.metrics import calinski_harabasz_score, davies_bouldin_score

    sizes = sorted(np.unique(labels, return_counts=True)[1].tolist(), reverse=True)
    row: KTableRow = {"k": len(sizes), "sizes": sizes, "singletons": sizes.count(1)}
    width = silhouette(pairwise_distances(points), labels)
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
    from sklearn.cluster import KMeans

    if k == 1:
        return np.zeros(len(points), dtype=np.int64), float(np.square(points - points.mean(axis=0)).sum())
    model = KMeans(k, n_init=num_starts, random_state=derive_seed(seed, "k-means", k) % 2**32).fit(points)
    return model.labels_.astype(np.int64), float(model.inertia_)


def highest_score(name: str, table: Sequence[KTableRow]) -> int:
    """The k whose score of this name is highest, the smaller k of two equal ones; 1 where none has a score."""
    scored = [row for row in table if row[name] is not None]
    return int(max(scored, key=lambda row: (row[name] + row["bonus"], -row["k"]))["k"]) if scored else 1


Halves: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Sketches (n, d) of the first and of the second half of every client's examples."""

Statistic: TypeAlias = Callable[[np.ndarray, np.ndarray, ClusteringSettings], float]
"""Number that a method measures on both halves, and compares with that of clients without structure."""

MIN_CLIENTS = 3
"""Clients below which no grouping can be told from chance."""
MOST_TESTED = 256
"""Clients on which structure is tested, drawn at random of more: the test then takes as long however many there are."""


class Verdict(Frozen):
    """Outcome of the test for structure."""

    found: bool
    """True if the clusters may be used."""
    reason: str
    """One line for the plan, with the method's statistic and the larger of its 95th percentiles in the two worlds."""


def draw_unrelated(first: np.ndarray, second: np.ndarray, *, rng: np.random.Generator) -> Halves:
    """Both halves (n, d) as unit rows, each client's turned by a random rotation of its own.

    The rotation acts on the plane of the client's two sketches, so a random orthonormal pair of directions stands
    for the whole d x d matrix.
    """
    along = sketch.unit_rows(rng.standard_normal(first.shape))
    across = rng.standard_normal(first.shape)
    across = sketch.unit_rows(across - np.sum(across * along, axis=1, keepdims=True) * along)
    shared = np.sum(sketch.unit_rows(first) * sketch.unit_rows(second), axis=1, keepdims=True)
    return along, shared * along + np.sqrt(np.maximum(1.0 - shared**2, 0.0)) * across


def draw_alike(first: np.ndarray, second: np.ndarray, *, rng: np.random.Generator) -> Halves:
    """Both halves (n, d) as unit rows: `sqrt(c_kk)` of one common direction and noise of their own for the rest."""
    signal = np.clip(sketch.reliability(sketch.cross_similarity(first, second)), 0.0, 1.0)[:, None]
    common = sketch.unit_rows(rng.standard_normal((1, first.shape[1])))
    noise = (rng.standard_normal(first.shape) for _ in range(2))
    orthogonal = [sketch.unit_rows(direction - (direction @ common.T) * common) for direction in noise]
    left, right = (np.sqrt(signal) * common + np.sqrt(1.0 - signal) * direction for direction in orthogonal)
    return left, right


WORLDS = {"unrelated": draw_unrelated, "alike": draw_alike}
"""The two worlds without structure."""


def structure_test(
    first: np.ndarray, second: np.ndarray, statistic: Statistic, settings: ClusteringSettings
) -> Verdict:
    """The verdict on sketches (n, d), (n, d) of decided clients, from those of `MOST_TESTED` where there are more."""
    if len(first) < MIN_CLIENTS:
        return Verdict(found=False, reason=f"{len(first)} decided clients are too few to test for structure")
    tested = ""
    if len(first) > MOST_TESTED:
        tested = f" (of {MOST_TESTED} of {len(first)} clients, drawn at random)"
        chosen = generator(settings.seed, "structure", "clients").choice(len(first), MOST_TESTED, replace=False)
        first, second = first[chosen], second[chosen]
    observed, limits = statistic(first, second, settings), {}
    for world, draw_from in WORLDS.items():
        rngs = (generator(settings.seed, "structure", world, draw) for draw in range(settings.draws))
        draws = [statistic(*draw_from(first, second, rng=rng), settings) for rng in rngs]
        limits[world] = float(np.quantile(np.array(draws), 0.95, method="higher"))
    world = max(WORLDS, key=lambda name: limits[name])
    found = observed > max(limits[world], 0.0)
    compared = f"{'above' if found else 'not above'} the 95th percentile {limits[world]:.3f} of {world} clients"
    return Verdict(found=found, reason=f"silhouette {observed:.3f}{tested} is {compared}")


class Proposal(Frozen):
    """Proposal of a method before the test for structure."""

    labels: np.ndarray
    """Cluster of each client, int (n,)."""
    k_table: tuple[KTableRow, ...]
    """The alternatives that were weighed; the chosen one has `chosen`."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user."""


def mean_sketch(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The fingerprint of both halves together, unit rows (n, d)."""
    return sketch.unit_rows(first + second)


def feasible_ks(points: np.ndarray, settings: ClusteringSettings) -> tuple[tuple[int, ...], tuple[str, ...]]:
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


def search_k(
    first: np.ndarray, second: np.ndarray, settings: ClusteringSettings, *, previous: np.ndarray | None = None
) -> Proposal:
    """K-means on the principal components at each k; the score of `cluster_by` chooses.

    `previous` labels (n,) are one more start where they have as many clusters, and earn each k a bonus of
    `stability` times the adjusted Rand index with them.
    """
    from sklearn.metrics import adjusted_rand_score

    points = _project(first, second, settings)
    ks, warnings = feasible_ks(points, settings)
    if not ks or ks == (1,):
        row = {**score_row(points, np.zeros(len(points))), "chosen": True}
        return Proposal(labels=np.zeros(len(points), dtype=np.int64), k_table=(row,), warnings=warnings)
    fits = {k: _with_warm_start(points, k, settings, previous) for k in ks}
    table = []
    for labels in fits.values():
        stays = 0.0 if previous is None else float(adjusted_rand_score(previous, labels))
        table.append({**score_row(points, labels), "bonus": settings.stability * stays})
    chosen = ks[0] if settings.fixed_k else highest_score(settings.cluster_by, table)
    rows = tuple({**row, "chosen": row["k"] == chosen} for row in table)
    return Proposal(labels=fits[chosen], k_table=rows, warnings=warnings)


def _project(first: np.ndarray, second: np.ndarray, settings: ClusteringSettings) -> np.ndarray:
    return sketch.project_sketches(
        mean_sketch(first, second), components=settings.pca_components, incremental=settings.incremental_pca
    ).points


def _with_warm_start(
    points: np.ndarray, k: int, settings: ClusteringSettings, previous: np.ndarray | None
) -> np.ndarray:
    """K-means from fresh starts, and from the previous clusters' centres, kept unless a fresh one is better."""
    from sklearn.cluster import KMeans

    labels, inertia = k_means(points, k, seed=settings.seed)
    names = np.unique(previous) if previous is not None else np.empty(0)
    if k == 1 or len(names) != k:
        return labels
    centres = np.stack([points[previous == name].mean(axis=0) for name in names])
    warm = KMeans(k, init=centres, n_init=1).fit(points)
    if inertia < (1 - settings.stability) * float(warm.inertia_) * (1 - 1e-9):
        return labels
    return np.asarray(warm.labels_, dtype=np.int64)


def best_silhouette(first: np.ndarray, second: np.ndarray, settings: ClusteringSettings) -> float:
    """The largest silhouette over the k that can be searched, whatever rule chooses k; 0 if there is none."""
    points = _project(first, second, settings)
    ks, _ = feasible_ks(points, settings)
    distance_matrix = pairwise_distances(points)
    labels = [k_means(points, k, seed=settings.seed, num_starts=1)[0] for k in ks if k > 1]
    return max((silhouette(distance_matrix, labels_of_k) or 0.0 for labels_of_k in labels), default=0.0)


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
        similarities = [float(similarity[np.ix_(merged == small, merged == name)].mean()) for name in others]
        lines.append(
            f"a cluster of {sizes.min()} below min_cluster_size {min_size} joined its nearest "
            f"(mean similarity {max(similarities):.2f})"
        )
        merged[merged == small] = others[int(np.argmax(similarities))]


def similarity_of_halves(first: np.ndarray, second: np.ndarray, settings: ClusteringSettings) -> np.ndarray:
    """Noise-corrected similarity (n, n) of decided clients, whose reliability is at least `min_reliability`."""
    return sketch.corrected_similarity(sketch.cross_similarity(first, second), floor=max(settings.min_reliability, 0.0))


def merge_tree(similarity: np.ndarray) -> np.ndarray:
    """SciPy's linkage matrix (n - 1, 4) of average linkage on the distance `1 - rho`; needs two clients."""
    return np.asarray(tree_of(squareform(1.0 - similarity, checks=False), method="average"))


def cut_linkage(similarity: np.ndarray, *, threshold: float = 0.0, k: int | None = None) -> np.ndarray:
    """Labels (n,): clusters join while their mean similarity is at least the threshold, or until `k` are left."""
    if len(similarity) < 2:
        return np.zeros(len(similarity), dtype=np.int64)
    tree = merge_tree(similarity)
    if k is None:
        return np.asarray(fcluster(tree, 1.0 - threshold, criterion="distance"), dtype=np.int64) - 1
    return np.asarray(cut_tree(tree, n_clusters=k)[:, 0], dtype=np.int64)


def propose_linkage(
    first: np.ndarray, second: np.ndarray, settings: ClusteringSettings, *, previous: np.ndarray | None = None
) -> Proposal:
    """Clusters at the threshold, or the fixed k, with the other cuts of the tree as the k table.

    `previous` labels (n,) blend in: `(1 - stability) rho + stability * (same cluster before)`.
    """
    similarity = similarity_of_halves(first, second, settings)
    points = sketch.project_sketches(mean_sketch(first, second), components=settings.pca_components).points
    ks, warnings = feasible_ks(points, settings)
    if previous is not None:
        together = (previous[:, None] == previous[None, :]).astype(np.float64)
        similarity = (1 - settings.stability) * similarity + settings.stability * together
    labels = cut_linkage(similarity, threshold=settings.threshold, k=ks[0] if settings.fixed_k else None)
    chosen = len(np.unique(labels))
    table = tuple(_row(similarity, points, k, chosen=chosen) for k in sorted({chosen, *ks}))
    return Proposal(labels=labels, k_table=table, warnings=warnings if settings.fixed_k else ())


def _row(similarity: np.ndarray, points: np.ndarray, k: int, *, chosen: int) -> KTableRow:
    """Scores of the tree cut into k, and the mean similarity at which two of these clusters would merge."""
    merge = 1.0 - float(merge_tree(similarity)[len(points) - k, 2]) if k > 1 else None
    return {**score_row(points, cut_linkage(similarity, k=k)), "merge_similarity": merge, "chosen": k == chosen}


def propose_cosine(
    first: np.ndarray, second: np.ndarray, settings: ClusteringSettings, *, previous: np.ndarray | None = None
) -> Proposal:
    """Average linkage on 1 - cosine of whole sketches, cut where the silhouette is largest; never one cluster.

    FedLEASE (arXiv:2509.15087): a sketch is the sum of its layers' unit sketches, so its cosine is the mean of theirs.
    """
    del previous
    rows = mean_sketch(first, second)
    similarity = rows @ rows.T
    np.fill_diagonal(similarity, 1.0)
    ks, warnings = feasible_ks(rows, settings)
    fits = {k: cut_linkage(similarity, k=k) for k in ks or (1,)}
    points = _project(first, second, settings)
    distances = 1.0 - similarity
    table = [
        {**score_row(points, labels), "silhouette": silhouette(distances, labels), "bonus": 0.0}
        for labels in fits.values()
    ]
    chosen = highest_score("silhouette", table) if len(fits) > 1 else next(iter(fits))
    k_table = tuple({**row, "chosen": row["k"] == chosen} for row in table)
    return Proposal(labels=fits[chosen], k_table=k_table, warnings=warnings)


def linkage_silhouette(first: np.ndarray, second: np.ndarray, settings: ClusteringSettings) -> float:
    """Silhouette of the proposed clusters on the distance `1 - rho`; 0 for one cluster or none shared."""
    similarity = similarity_of_halves(first, second, settings)
    k = min(settings.fixed_k, len(similarity)) if settings.fixed_k else None
    return silhouette(1.0 - similarity, cut_linkage(similarity, threshold=settings.threshold, k=k)) or 0.0


def labels_without_structure(
    first: np.ndarray, second: np.ndarray, settings: ClusteringSettings, labels: np.ndarray
) -> np.ndarray:
    """Labels (n,) where no structure was found: one cluster if clients are alike on average, else each alone.

    One cluster for clients that measurably differ would average unrelated models. A proposal that is already one
    of the two stands.
    """
    num = len(labels)
    if len(np.unique(labels)) in (1, num):
        return labels
    mean = (similarity_of_halves(first, second, settings).sum() - num) / (num * (num - 1))
    return np.zeros(num, dtype=np.int64) if mean >= settings.threshold else np.arange(num)


class Method(Frozen):
    """A way to cluster."""

    propose: Callable[..., Proposal]
    """(first, second, settings, *, previous) -> clusters and the k table, of decided clients' halves (n, d);
    `previous` are the labels (n,) of the clustering before, or None."""
    statistic: Statistic
    uses_corrected_similarity: bool
    """True if a new client is placed by corrected similarity, and clients without structure are joined by it; else
    by the nearest centroid, and all of them in one cluster."""
    tests_structure: bool = True
    """False if what it proposes stands without a test."""


K_SEARCH = Method(propose=search_k, statistic=best_silhouette, uses_corrected_similarity=False)

METHODS: dict[str, Method] = {
    "corrected": Method(propose=propose_linkage, statistic=linkage_silhouette, uses_corrected_similarity=True),
    "atlas": K_SEARCH,
    "silhouette": K_SEARCH,
    "cosine": replace(K_SEARCH, propose=propose_cosine, tests_structure=False),
}
"""`cluster_by`: noise-corrected average linkage, the k search by the score of that name, and FedLEASE's."""
