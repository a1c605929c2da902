"""The result of a clustering: labels, similarities and decisions, as one value that can be saved and queried.

`assign_client` assigns a client that joins later to a cluster, and `append_client` adds it to the clustering without
changing the label of any other client. `agreement` compares clusters with the true tasks; `summarise_clusters` and
`purity_warnings` report on each cluster.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from atlas_fl.clustering import sketch
from atlas_fl.clustering.blocks import Matrix, from_plain, grow, pairs_inside, to_plain
from atlas_fl.clustering.k_search import KTableRow, mean_sketch
from atlas_fl.clustering.labels import UNDECIDED, ClusteringSettings, decided_labels
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.frozen import Frozen

TUPLES = ("labels", "warnings", "k_table")
ARRAYS = ("similarity", "reliability", "points", "centroids", "offsets")
"""Fields of a clustering that are lists in JSON; a sparse similarity is three."""


class Clustering(Frozen, eq=False):
    """Clusters of n clients, in the order in which their sketches came."""

    labels: tuple[int, ...]
    """Cluster of each client; -1 for an undecided one, which is in none."""
    warnings: tuple[str, ...] = ()
    """One line for each thing the user should know."""
    k_table: tuple[KTableRow, ...] = ()
    """The alternatives with all their scores; `chosen` marks the method's choice, before the verdict."""
    settings: ClusteringSettings
    """The numbers it was made with."""
    method: str
    """A name of METHODS, or `oracle`."""
    structure: dict[str, Any]
    """The verdict on structure: `found` and `reason`."""
    similarity: Matrix
    """Noise-corrected similarity, float64 (n, n), ones on the diagonal; 0 beside an undecided client. Of more than
    `MOST_EXACT` clients it is sparse: inside blocks of clusters, undecided clients in none."""
    reliability: np.ndarray
    """c_kk, float64 (n,): agreement of each client's own halves."""
    points: np.ndarray
    """First two principal components of every client, float64 (n, 2), for the scatter plot."""
    centroids: np.ndarray
    """By ascending label, for `assign_client`: (1, k, d) mean unit sketches, or (2, k, d) halves over sqrt(c_kk)."""
    offsets: np.ndarray
    """The means (2, d) that were subtracted from each half; zero unless centred."""
    alike: int | None
    """Label of the cluster of clients that differ from the mean no more than their own halves do, if there is one."""

    def to_json(self) -> dict[str, Any]:
        """Every field as plain data for strict JSON."""
        data = vars(self) | {name: list(getattr(self, name)) for name in TUPLES}
        return data | {"settings": asdict(self.settings)} | {name: to_plain(getattr(self, name)) for name in ARRAYS}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Clustering":
        """The inverse of `to_json`, other keys aside; CheckpointError names a field that is missing."""
        fields = Clustering.__dataclass_fields__
        if missing := [name for name in fields if name not in data]:
            raise CheckpointError(
                f"the clustering lacks {missing[0]!r}; it was not written by this version, plan again"
            )
        settings = ClusteringSettings(**{**data["settings"], "k_range": tuple(data["settings"]["k_range"])})
        arrays = {name: from_plain(data[name]) for name in ARRAYS}
        tuples = {name: tuple(data[name]) for name in TUPLES}
        return Clustering(**{name: data[name] for name in fields} | arrays | tuples | {"settings": settings})


class Placement(Frozen):
    """Place of a client that joins later beside the clusters."""

    cluster: int
    """Label of its cluster; -1 if it is undecided."""
    reliability: float
    """c_kk: agreement of its own halves."""
    similarity: Mapping[int, float]
    """Its similarity to each cluster by label: the mean noise-corrected similarity to the members, or, where the
    method is k-means, 1 - d^2 / 2 with d the distance from the centroid; empty where the halves contradict."""


def similarity_to_clusters(
    centroids: np.ndarray, first: np.ndarray, second: np.ndarray, reliability: np.ndarray
) -> np.ndarray:
    """Similarity (m, k) of clients with these halves (m, d) to clusters, as in `Placement.similarity`.

    Args:
        centroids: (1, k, d) or (2, k, d), as in `Clustering`.
        reliability: (m,), above zero where similarity is noise-corrected.
    """
    if len(centroids) == 2:
        return np.asarray((first @ centroids[1].T + second @ centroids[0].T) / 2 / np.sqrt(reliability)[:, None])
    return np.asarray(1 - cdist(sketch.normalise_sketches(first + second), centroids[0], "sqeuclidean") / 2)


def assign_client(clustering: Clustering, first: np.ndarray, second: np.ndarray) -> Placement:
    """The place of a client that joins later, from its two sketches (d,), (d,).

    Among the clients that are alike where it differs from the mean no more than its halves do, if there are such.
    Alone where its halves agree less than `min_reliability`, and under `corrected` without a fixed k also where its
    mean similarity to every cluster is below the threshold. The mean is over members, as in average linkage.
    Raises ConfigError for sketches of another length.
    """
    settings, centroids, dim = clustering.settings, clustering.centroids, clustering.offsets.shape[1]
    if np.shape(first) != (dim,) or np.shape(second) != (dim,):
        raise ConfigError(f"sketch of shape {np.shape(first)} beside clusters of sketches of {dim}")
    left = sketch.normalise_sketches(first[None], offset=clustering.offsets[0])[0]
    right = sketch.normalise_sketches(second[None], offset=clustering.offsets[1])[0]
    client_reliability = float(left @ right)
    whole = float(sketch.cross_similarity(first[None], second[None])[0, 0])
    if clustering.alike is not None and whole >= settings.min_reliability and client_reliability < settings.threshold:
        return Placement(cluster=clustering.alike, reliability=whole, similarity={clustering.alike: 1.0})
    names = decided_labels(clustering.labels)
    corrected = len(centroids) == 2
    if not names or (corrected and client_reliability <= 0.0):
        return Placement(cluster=UNDECIDED, reliability=client_reliability, similarity={})  # rho is not defined
    (similarities,) = similarity_to_clusters(centroids, left[None], right[None], np.array([client_reliability]))
    alone = corrected and settings.fixed_k is None and similarities.max() < settings.threshold
    alone = alone or client_reliability < settings.min_reliability
    return Placement(
        cluster=UNDECIDED if alone else names[int(similarities.argmax())],
        reliability=client_reliability,
        similarity=dict(zip(names, similarities.tolist(), strict=True)),
    )


def append_client(clustering: Clustering, sketches: np.ndarray, *, label: int) -> Clustering:
    """The clustering of n clients and one that came later, under this label.

    `sketches` (2, n + 1, d) are both halves of all of them, the newcomer's last; its similarities are measured as those
    of the others were (noise-corrected, less the same offsets) and stand beside theirs; where these are sparse, those
    to the block of its cluster. What a later client is compared with stays what it was.
    """
    left, right = (
        sketch.normalise_sketches(half, offset=mean) for half, mean in zip(sketches, clustering.offsets, strict=True)
    )
    labels, others = np.array(clustering.labels), np.arange(len(clustering.labels))
    if not isinstance(clustering.similarity, np.ndarray):
        mates = np.flatnonzero((labels == label) & (label != UNDECIDED))
        others = clustering.similarity[mates[-1:]].indices
    places = np.append(others, len(labels))
    cross = sketch.cross_similarity(left[places], right[places])
    reliabilities = sketch.reliability(cross)
    floor = clustering.settings.min_reliability
    decided = np.append(clustering.reliability[others] >= floor, reliabilities[-1] >= floor)
    new_row = np.zeros(len(labels) + 1)
    new_row[places] = sketch.corrected_similarity(cross, floor=max(floor, 0.0))[-1] * (decided & decided[-1])
    if label == clustering.alike:
        new_row[places] = np.append(labels[others] == label, True)
    new_row[-1] = 1.0
    points = sketch.project_sketches(mean_sketch(left, right), components=2).points
    return replace(
        clustering,
        labels=(*clustering.labels, label),
        similarity=grow(clustering.similarity, new_row),
        reliability=np.append(clustering.reliability, reliabilities[-1]),
        points=np.pad(points, ((0, 0), (0, 2 - points.shape[1]))),
    )


LOW_PURITY = 0.7
"""Purity below which clusters and tasks are said to disagree."""


def agreement(labels: Sequence[int], truth: Sequence[str]) -> dict[str, float]:
    """purity, ari and nmi of clusters against the true tasks of the same clients.

    Purity is the share of decided clients whose task is their cluster's most frequent one, 0 if nobody is decided; it
    rises with the number of clusters, so read it beside the adjusted Rand index. For ari and nmi every undecided
    client is a cluster of its own.
    """
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    pairs = [(label, task) for label, task in zip(labels, truth, strict=True) if label != UNDECIDED]
    counts = Counter(pairs)
    majorities = [max(counts[label, task] for task in set(truth)) for label in decided_labels(labels)]
    alone = [label if label != UNDECIDED else -1 - client for client, label in enumerate(labels)]
    return {
        "purity": sum(majorities) / len(pairs) if pairs else 0.0,
        "ari": float(adjusted_rand_score(truth, alone)),
        "nmi": float(normalized_mutual_info_score(truth, alone)),
    }


def summarise_clusters(
    clustering: Clustering, *, clients: Sequence[str], tasks: Sequence[str], losses: Mapping[str, float]
) -> tuple[dict[str, Any], ...]:
    """One summary a cluster: its clients, their tasks with counts, purity, reliability, cohesion and difficulty.

    Cohesion is the mean similarity of pairs inside (absent for one client); difficulty is the mean loss, absent where
    no loss of a member is known. Undecided clients come last, as cluster -1.
    """
    summaries = []
    for name in sorted(set(clustering.labels), key=lambda label: (label == UNDECIDED, label)):
        members = [index for index, label in enumerate(clustering.labels) if label == name]
        counts = Counter(tasks[index] for index in members)
        inside = pairs_inside(clustering.similarity, np.array(members))
        loss = [losses[clients[index]] for index in members if clients[index] in losses]
        summary: dict[str, Any] = {
            "cluster": name,
            "size": len(members),
            "clients": [clients[index] for index in members],
            "tasks": dict(counts.most_common()),
            "purity": counts.most_common(1)[0][1] / len(members),
            "reliability": float(clustering.reliability[members].mean()),
        }
        if inside.size:
            summary["cohesion"] = float(inside.mean())
        if loss:
            summary["difficulty"] = float(np.mean(loss))
        summaries.append(summary)
    return tuple(summaries)


def purity_warnings(summaries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """One line for each decided cluster whose most frequent task has less than `LOW_PURITY` of it."""
    lines = []
    for row in summaries:
        if row["cluster"] != UNDECIDED and row["purity"] < LOW_PURITY:
            task, count = next(iter(row["tasks"].items()))
            share = f"{count} of {row['size']} clients on {task}, a purity of {row['purity']:.2f}"
            lines.append(f"cluster {row['cluster']} mixes tasks: {share} below {LOW_PURITY}")
    return tuple(lines)
