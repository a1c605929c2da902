"""Phase 1: the clusters of clients that share a task, from two sketches of each client's fingerprint.

Up to `MOST_EXACT` clients are clustered together, by the similarities of all pairs. Of more so many are, drawn at
random; each other client joins the cluster that it is most similar to, and those that are like none are clustered
among themselves. Similarities are then those inside blocks of clusters.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from atlas_fl.clustering import k_search, sketch
from atlas_fl.clustering.blocks import MOST_EXACT, MOST_IN_BLOCK, Matrix, blocks_of, from_blocks, take
from atlas_fl.clustering.labels import UNDECIDED, ClusteringSettings, decided_labels, name_labels
from atlas_fl.clustering.result import Clustering, similarity_to_clusters
from atlas_fl.frozen import Frozen
from atlas_fl.rng import generator


class _Evidence(Frozen):
    """Sketches as unit rows and what follows from them before any clustering."""

    first: np.ndarray  # (n, d)
    second: np.ndarray  # (n, d)
    offsets: np.ndarray  # (2, d)
    reliability: np.ndarray  # (n,)
    decided: np.ndarray  # bool (n,)
    alike: np.ndarray  # bool (n,)
    floor: float
    """Least reliability that similarities are divided by."""

    def of(self, clients: np.ndarray) -> "_Evidence":
        """The evidence of these clients alone."""
        rows = {name: getattr(self, name)[clients] for name in ("first", "second", "reliability", "decided", "alike")}
        return replace(self, **rows)

    @cached_property
    def similarity(self) -> np.ndarray:
        """Noise-corrected similarity of all pairs, (n, n); clients that are alike have 1, undecided ones 0."""
        rho = sketch.corrected_similarity(sketch.cross_similarity(self.first, self.second), floor=self.floor)
        rho = np.where(np.add.outer(self.alike, self.alike), np.outer(self.alike, self.alike), rho)
        return np.where(np.outer(self.decided, self.decided), rho, np.eye(len(rho)))


_Decision: TypeAlias = tuple[np.ndarray, k_search.Verdict, tuple[str, ...], tuple[k_search.KTableRow, ...]]
"""Labels (n,), the verdict, the warnings and the k table."""


def cluster_clients(
    first: np.ndarray,
    second: np.ndarray,
    *,
    settings: ClusteringSettings,
    previous: Clustering | None = None,
    names: Sequence[str] | None = None,
) -> Clustering:
    """The clusters of n clients from sketches (n, d) of the two halves of each client's examples.

    Clients whose halves do not agree are undecided (-1) and take part in nothing. The others are clustered by the
    method; the verdict on structure follows; clusters below the smallest size are merged. Where sketches are centred
    and most clients differ from their mean no more than their own halves do, these are one cluster: what is left of
    them is noise, on which halves do not agree. With `previous`, of the same clients, labels keep their meaning.
    Permuting the clients permutes the result and changes no number in it: they are put in an order of their own first.
    `names` are for the messages.
    """
    first = np.asarray(first, dtype=np.float64)
    second = np.asarray(second, dtype=np.float64)
    # k-means' starts must not depend on who came first, so the sketches themselves give the order
    order = np.array(sorted(range(len(first)), key=lambda client: first[client].tobytes() + second[client].tobytes()))
    evidence = _prepare_evidence(first[order], second[order], settings)
    previous_labels = None if previous is None else np.asarray(previous.labels)[order]
    labels, verdict, notes, table = _decide(evidence, settings, previous_labels)
    inverse_order = np.argsort(order)
    new_labels = name_labels(labels[inverse_order], previous=None if previous is None else previous.labels)
    undecided = [
        names[client] if names else str(client) for client, label in enumerate(new_labels) if label == UNDECIDED
    ]
    if undecided:
        notes = (
            f"{len(undecided)} undecided (clients {', '.join(undecided)}): their halves agree less than "
            f"{settings.min_reliability:g}; they are in no cluster",
            *notes,
        )
    result = _result(evidence, labels=np.asarray(new_labels)[order], settings=settings)
    return replace(
        result,
        labels=new_labels,
        similarity=take(result.similarity, inverse_order),
        reliability=result.reliability[inverse_order],
        points=result.points[inverse_order],
        structure=asdict(verdict),
        k_table=table,
        warnings=(*notes, *result.warnings),
    )


def oracle_clustering(
    first: np.ndarray, second: np.ndarray, *, tasks: Sequence[str], settings: ClusteringSettings
) -> Clustering:
    """The clusters of the clients' true tasks (n,), for debugging and as the ceiling of every method.

    Similarity, reliability and centroids are measured on the sketches as `cluster_clients` does.
    """
    names = {task: index for index, task in enumerate(dict.fromkeys(tasks))}
    evidence = _prepare_evidence(first, second, settings)
    labels = np.array([names[task] for task in tasks], dtype=np.int64)
    verdict = k_search.Verdict(found=len(names) > 1, reason="true tasks, given and not tested")
    return replace(_result(evidence, labels=labels, settings=settings), structure=asdict(verdict))


def _prepare_evidence(first: np.ndarray, second: np.ndarray, settings: ClusteringSettings) -> _Evidence:
    """Unit rows, reliabilities, who is decided, and the corrected similarity among those."""
    evidence = _less_mean(first, second, settings, of=np.ones(len(first), dtype=bool))
    if not settings.centre or settings.clusters != "auto":
        return evidence
    whole = sketch.own_reliability(first, second)
    reliable = whole >= settings.min_reliability
    usual = reliable & (evidence.reliability < settings.threshold)
    if 2 * usual.sum() <= reliable.sum():
        return evidence
    beside = _less_mean(first, second, settings, of=usual)
    if 2 * (usual & beside.decided).sum() >= usual.sum():
        return evidence
    alike = reliable & (beside.reliability < settings.threshold)
    decided = reliable & (alike | beside.decided)
    return replace(beside, alike=alike, decided=decided, reliability=np.where(alike, whole, beside.reliability))


def _less_mean(first: np.ndarray, second: np.ndarray, settings: ClusteringSettings, *, of: np.ndarray) -> _Evidence:
    """The evidence of the sketches less the mean of these clients, bool (n,), where they are centred; none is alike."""
    offsets = np.zeros((2, first.shape[1]))
    if settings.centre:
        offsets = np.stack([sketch.normalise_sketches(half)[of].mean(axis=0) for half in (first, second)])
    left, right = (sketch.normalise_sketches(half, offset=mean) for half, mean in zip((first, second), offsets))
    reliabilities = sketch.own_reliability(left, right)
    return _Evidence(
        first=left,
        second=right,
        offsets=offsets,
        reliability=reliabilities,
        decided=(reliabilities >= settings.min_reliability) & left.any(axis=1) & right.any(axis=1),
        alike=np.zeros(len(first), dtype=bool),
        floor=max(settings.min_reliability, 0.0),
    )


def _decide(evidence: _Evidence, settings: ClusteringSettings, previous_labels: np.ndarray | None) -> _Decision:
    """The decision on clients in canonical order; of very many on a random sample.

    The others join the most similar cluster, or are decided on by themselves. Clients of clusters below the smallest
    size then join the most similar other one.
    """
    if len(evidence.decided) <= MOST_EXACT:
        return _decide_together(evidence, settings, previous_labels)
    drawn = generator(settings.seed, "clusters", "clients").choice(len(evidence.decided), MOST_EXACT, replace=False)
    sample, few = np.sort(drawn), replace(settings, min_cluster_size=1)
    previous = None if previous_labels is None else previous_labels[sample]
    known, verdict, notes, table = _decide(evidence.of(sample), few, previous)
    labels, decided, names = np.full(len(evidence.decided), UNDECIDED), evidence.decided, decided_labels(known.tolist())
    labels[sample] = known
    is_open = k_search.METHODS[settings.cluster_by].uses_corrected_similarity and settings.fixed_k is None
    has_groups = verdict.found or evidence.alike.any()
    if is_open and len(names) > 1 and not has_groups:
        labels = np.where(decided, np.arange(len(labels)), UNDECIDED)  # each is alone
    elif names:
        nearest, similarity = _most_similar(evidence, evidence.of(sample), known, settings)
        labels = np.where(decided & ~(is_open & (similarity < settings.threshold)), nearest, UNDECIDED)
        labels = np.where(evidence.alike, known[evidence.alike[sample]].max(initial=0), labels)
        labels[sample] = known
        unlike = decided & (labels == UNDECIDED)
        others = _decide(evidence.of(unlike), few, None)[0] if unlike.any() else known[:0]
        if has_groups or len(np.unique(others)) < len(others):
            labels[unlike] = np.where(others == UNDECIDED, UNDECIDED, labels.max() + 1 + others)
            verdict = replace(verdict, found=verdict.found or bool(unlike.any()))
        else:  # noise, of the one cluster
            labels[unlike] = nearest[unlike]
    note = f"{len(labels)} clients: {MOST_EXACT} drawn at random were clustered, the others assigned; similarities are"
    notes = (f"{note} those inside blocks of at most {MOST_IN_BLOCK}", *notes)
    sizes = np.bincount(labels[labels >= 0], minlength=1)
    small = (labels >= 0) & (sizes[labels] < min(settings.min_cluster_size, sizes.max()))
    if small.any():
        labels[small] = _most_similar(evidence.of(small), evidence, np.where(small, UNDECIDED, labels), settings)[0]
        notes += (f"{small.sum()} clients of clusters below min_cluster_size joined the most similar others",)
    return labels, verdict, notes, table


def _most_similar(
    evidence: _Evidence, clustered: _Evidence, labels: np.ndarray, settings: ClusteringSettings
) -> tuple[np.ndarray, np.ndarray]:
    """(labels, similarities) of the clusters, of clustered clients, that each client is most similar to."""
    centroids = _centroids(clustered, labels, settings)
    scale = np.maximum(evidence.reliability, max(evidence.floor, 1e-3))
    similarity = similarity_to_clusters(centroids, evidence.first, evidence.second, scale)
    return np.array(decided_labels(labels.tolist()))[similarity.argmax(axis=1)], similarity.max(axis=1)


def _decide_together(
    evidence: _Evidence, settings: ClusteringSettings, previous_labels: np.ndarray | None
) -> _Decision:
    """The decision on clients of whom all pairs are compared."""
    decided = evidence.decided
    labels = np.full(len(decided), UNDECIDED, dtype=np.int64)
    if not decided.any():
        reason = f"no client's halves agree to {settings.min_reliability:g}; give clients more examples"
        return labels, k_search.Verdict(found=False, reason=reason), (f"no structure: {reason}",), ()
    if evidence.alike.any():
        return _labels_beside_alike(evidence, settings)
    method = k_search.METHODS[settings.cluster_by]
    halves = evidence.first[decided], evidence.second[decided]
    previous = None
    if previous_labels is not None:
        previous = previous_labels[decided]
        # a client that was undecided was a cluster of its own
        previous = np.where(previous == UNDECIDED, previous.max() + 1 + np.arange(len(previous)), previous)
    proposal = method.propose(*halves, settings, previous=previous)
    proposed, notes = proposal.labels, proposal.warnings
    verdict = k_search.Verdict(found=True, reason=f"{settings.cluster_by} takes what it finds")
    if method.tests_structure or decided.sum() < 3:
        verdict = k_search.structure_test(*halves, method.statistic, settings)
    if verdict.found and len(np.unique(proposed)) == 1:
        reason = f"{settings.cluster_by} itself chose one cluster, though the {verdict.reason}"
        verdict = replace(verdict, found=False, reason=reason)
    if not verdict.found:
        if settings.fixed_k is None and method.uses_corrected_similarity:
            proposed = k_search.labels_without_structure(*halves, settings, proposed)
        elif settings.fixed_k is None:
            proposed = np.zeros_like(proposed)
        if settings.fixed_k is None and len(np.unique(proposed)) == len(proposed) > 1:
            reason = f"each of {len(proposed)} clients differs from all others by more than its own halves differ"
            verdict = replace(verdict, reason=reason)
        notes = (*notes, f"no structure: {verdict.reason}; {_consequence(proposed, settings)}")
    among = evidence.similarity[np.ix_(decided, decided)]
    labels[decided], merges = k_search.merge_small(proposed, among, min_size=settings.min_cluster_size)
    return labels, verdict, (*notes, *merges), proposal.k_table


def _labels_beside_alike(evidence: _Evidence, settings: ClusteringSettings) -> _Decision:
    """Labels (n,) where most clients are alike: one cluster of these, and those that differ by their similarity."""
    labels = np.where(evidence.alike, 0, UNDECIDED)
    others = evidence.decided & ~evidence.alike
    labels[others] = 1 + k_search.cut_linkage(evidence.similarity[np.ix_(others, others)], threshold=settings.threshold)
    among = evidence.similarity[np.ix_(evidence.decided, evidence.decided)]
    labels[evidence.decided], merges = k_search.merge_small(
        labels[evidence.decided], among, min_size=settings.min_cluster_size
    )
    alike, differing = int(evidence.alike.sum()), int(others.sum())
    reason = f"{alike} of {len(labels)} clients are alike: they differ no more than the two halves of one client do"
    consequence = "they are one cluster" + (f", and {differing} differ from them" if differing else "")
    return labels, k_search.Verdict(found=bool(differing), reason=reason), (f"{reason}; {consequence}", *merges), ()


def _consequence(labels: np.ndarray, settings: ClusteringSettings) -> str:
    if settings.fixed_k is not None:
        return f"the {settings.fixed_k} clusters asked for are used all the same"
    return "one cluster is used" if len(np.unique(labels)) == 1 else "every client is a cluster of its own"


def _result(evidence: _Evidence, *, labels: np.ndarray, settings: ClusteringSettings) -> Clustering:
    """The clustering of these labels (n,), in the order of the evidence, without verdict and k table."""
    mean = k_search.mean_sketch(evidence.first, evidence.second)
    plane = sketch.project_sketches(mean, components=2).points
    seen = evidence.decided if evidence.decided.any() else np.ones(len(labels), dtype=bool)
    space = sketch.project_sketches(
        mean[seen], components=settings.pca_components, incremental=settings.incremental_pca
    )
    warnings: tuple[str, ...] = ()
    if space.explained_variance < sketch.LOW_VARIANCE:
        share = f"{space.points.shape[1]} principal components explain {space.explained_variance:.2f} of the variance"
        warnings = (f"{share}, less than {sketch.LOW_VARIANCE}; raise pca_components",)
    if len(labels) <= MOST_EXACT:
        similarity: Matrix = evidence.similarity
    else:
        blocks = blocks_of(labels)
        similarity = from_blocks(blocks, [evidence.of(block).similarity for block in blocks], len(labels))
    return Clustering(
        labels=tuple(labels.tolist()),
        method="oracle" if settings.clusters == "oracle" else settings.cluster_by,
        similarity=similarity,
        reliability=evidence.reliability,
        structure={},
        settings=settings,
        warnings=warnings,
        points=np.pad(plane, ((0, 0), (0, 2 - plane.shape[1]))),
        centroids=_centroids(evidence, labels, settings),
        alike=int(labels[evidence.alike][0]) if evidence.alike.any() else None,
        offsets=np.round(evidence.offsets, 7),
    )


def _centroids(evidence: _Evidence, labels: np.ndarray, settings: ClusteringSettings) -> np.ndarray:
    """Means that `assign_client` compares with, (halves, k, d), rounded so that the plan stays small."""
    rows: list[Any] = [k_search.mean_sketch(evidence.first, evidence.second)]
    if settings.clusters == "oracle" or k_search.METHODS[settings.cluster_by].uses_corrected_similarity:
        scale = np.sqrt(np.maximum(evidence.reliability, max(settings.min_reliability, 1e-3)))[:, None]
        rows = [evidence.first / scale, evidence.second / scale]
    names = decided_labels(labels.tolist())
    means = [[half[labels == name].mean(axis=0) for name in names] for half in rows]
    return np.round(np.array(means).reshape(len(rows), len(names), evidence.first.shape[1]), 7)
