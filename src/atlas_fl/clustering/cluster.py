"""Phase 1: which clients share a task, from two sketches of each client's fingerprint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from atlas_fl.clustering.k_search import METHODS, Row, Verdict, judge, mean_sketch, merge_small
from atlas_fl.clustering.labels import UNDECIDED, Settings, by_first_appearance, check, decided_names, stable_labels
from atlas_fl.clustering.result import Clustering
from atlas_fl.clustering.sketch import (
    LOW_VARIANCE,
    Embedding,
    corrected_similarity,
    cross_similarity,
    embed,
    prepare,
    reliability,
)
from atlas_fl.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """Sketches as unit rows and what follows from them before any clustering."""

    first: np.ndarray  # (n, d)
    second: np.ndarray  # (n, d)
    offsets: np.ndarray  # (2, d)
    own: np.ndarray  # (n,)
    decided: np.ndarray  # bool (n,)
    similarity: np.ndarray  # (n, n)


def cluster(
    first: np.ndarray,
    second: np.ndarray,
    *,
    settings: Settings,
    previous: Clustering | None = None,
    names: Sequence[str] | None = None,
) -> Clustering:
    """The clusters of n clients from sketches (n, d) of the two halves of each client's examples.

    Clients whose halves do not agree are undecided (-1) and take part in nothing. The others are clustered by the
    method; the verdict on structure follows; clusters below the smallest size are merged. With `previous`, of the
    same clients, labels keep their meaning. Permuting the clients permutes the result and changes no number in it:
    they are put in an order of their own first. Raises ConfigError for settings, DataError for malformed sketches.
    `names` are for the messages.
    """
    check(settings, methods=METHODS)
    first, second = _checked(first, second)
    if previous is not None and len(previous.labels) != len(first):
        raise ConfigError(f"the previous clustering has {len(previous.labels)} clients, not {len(first)}")
    order = _canonical_order(first, second)
    evidence = _weigh(first[order], second[order], settings)
    before = None if previous is None else np.asarray(previous.labels)[order]
    labels, verdict, notes, table = _decide(evidence, settings, before)
    back = np.argsort(order)
    named = by_first_appearance(labels[back])
    if previous is not None:
        named = stable_labels(previous.labels, named)
    result = _result(evidence, named=np.asarray(named)[order], settings=settings, method=settings.cluster_by)
    undecided = [client for client, label in enumerate(named) if label == UNDECIDED]
    if undecided:
        notes = (_undecided_line([names[client] if names else str(client) for client in undecided], settings), *notes)
    restored = _restore(result, back)
    return replace(restored, structure=verdict.to_json(), k_table=table, warnings=(*notes, *restored.warnings))


def oracle(
    tasks: Sequence[str],
    *,
    first: np.ndarray | None = None,
    second: np.ndarray | None = None,
    settings: Settings | None = None,
) -> Clustering:
    """The clusters of the clients' true tasks (n,), for debugging and as the ceiling of every method.

    With sketches and settings, similarity, reliability and centroids are measured as `cluster` does;
    without, clients of one task have similarity 1 and others 0, and `predict` is refused.
    """
    names = {task: index for index, task in enumerate(dict.fromkeys(tasks))}
    labels = np.array([names[task] for task in tasks], dtype=np.int64)
    verdict = Verdict(found=len(names) > 1, reason="true tasks, given and not tested").to_json()
    if first is None or second is None or settings is None:
        same = (labels[:, None] == labels[None, :]).astype(np.float64)
        return Clustering(
            labels=tuple(labels.tolist()), method="oracle", structure=verdict, similarity=same,
            reliability=np.ones(len(labels)), points=np.zeros((len(labels), 2)),
        )  # fmt: skip
    first, second = _checked(first, second)
    evidence = _weigh(first, second, replace(settings, clusters="auto", cluster_by="corrected"))
    found = _result(evidence, named=labels, settings=replace(settings, clusters="oracle"), method="oracle")
    return replace(found, structure=verdict)


def _checked(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 (n, d); DataError unless they match and are finite."""
    left, right = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if left.ndim != 2 or left.shape != right.shape or not left.size:
        raise DataError(f"sketches of shapes {left.shape} and {right.shape}; each half must be (clients, sketch_dim)")
    for half in (left, right):
        bad = np.flatnonzero(~np.isfinite(half).all(axis=1))
        if bad.size:
            raise DataError(f"the sketch of client {bad[0]} holds NaN or infinity; its fingerprint failed")
    return left, right


def _canonical_order(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Client indices (n,) ordered by the sketches themselves: k-means' starts must not depend on who came first."""
    return np.array(sorted(range(len(first)), key=lambda client: first[client].tobytes() + second[client].tobytes()))


def _weigh(first: np.ndarray, second: np.ndarray, settings: Settings) -> _Evidence:
    """Unit rows, reliabilities, who is decided, and the corrected similarity among those."""
    offsets = np.zeros((2, first.shape[1]))
    if settings.centre:
        offsets = np.stack([prepare(half).mean(axis=0) for half in (first, second)])
    left, right = prepare(first, offset=offsets[0]), prepare(second, offset=offsets[1])
    cross = cross_similarity(left, right)
    own = reliability(cross)
    decided = (own >= settings.min_reliability) & left.any(axis=1) & right.any(axis=1)
    rho = corrected_similarity(cross, floor=max(settings.min_reliability, 0.0))
    similarity = np.where(np.outer(decided, decided), rho, np.eye(len(own)))
    return _Evidence(first=left, second=right, offsets=offsets, own=own, decided=decided, similarity=similarity)


def _decide(
    evidence: _Evidence, settings: Settings, before: np.ndarray | None
) -> tuple[np.ndarray, Verdict, tuple[str, ...], tuple[Row, ...]]:
    """Labels (n,), the verdict, the warnings and the k table, for clients in canonical order."""
    decided = evidence.decided
    labels = np.full(len(decided), UNDECIDED, dtype=np.int64)
    if not decided.any():
        reason = f"no client's halves agree to {settings.min_reliability:g}; give clients more examples"
        return labels, Verdict(found=False, reason=reason), (f"no structure: {reason}",), ()
    method = METHODS[settings.cluster_by]
    halves = evidence.first[decided], evidence.second[decided]
    former = None if before is None else _alone_where_undecided(before[decided])
    proposal = method.propose(*halves, settings, previous=former)
    verdict = judge(*halves, partial(method.statistic, settings=settings), draws=settings.draws, seed=settings.seed)
    verdict = _without_choice(verdict, proposal.labels, settings)
    found = proposal.labels
    if not verdict.found and settings.fixed_k is None:
        found = method.without_structure(*halves, settings, found)
    notes = proposal.warnings
    if not verdict.found:
        notes = (*notes, f"no structure: {verdict.reason}; {_consequence(found, settings)}")
    among = evidence.similarity[np.ix_(decided, decided)]
    labels[decided], merges = merge_small(found, among, min_size=settings.min_cluster_size)
    return labels, verdict, (*notes, *merges), proposal.k_table


def _without_choice(verdict: Verdict, labels: np.ndarray, settings: Settings) -> Verdict:
    """The verdict, overturned where the method itself chose a single cluster."""
    if not verdict.found or len(np.unique(labels)) > 1:
        return verdict
    reason = f"{settings.cluster_by} itself chose one cluster"
    return replace(verdict, found=False, reason=f"{reason}, though the {verdict.reason}")


def _consequence(labels: np.ndarray, settings: Settings) -> str:
    if settings.fixed_k is not None:
        return f"the {settings.fixed_k} clusters asked for are used all the same"
    return "one cluster is used" if len(np.unique(labels)) == 1 else "every client is a cluster of its own"


def _undecided_line(clients: Sequence[str], settings: Settings) -> str:
    return (
        f"{len(clients)} undecided (clients {', '.join(clients)}): their halves agree less than "
        f"{settings.min_reliability:g}; they train alone"
    )


def _alone_where_undecided(labels: np.ndarray) -> np.ndarray:
    """The labels with every -1 replaced by a label of its own."""
    return np.where(labels == UNDECIDED, labels.max() + 1 + np.arange(len(labels)), labels)


def _result(evidence: _Evidence, *, named: np.ndarray, settings: Settings, method: str) -> Clustering:
    """The clustering of these labels (n,), in the order of the evidence, without verdict and k table."""
    middle = mean_sketch(evidence.first, evidence.second)
    picture = embed(middle, components=2).points
    seen = evidence.decided if evidence.decided.any() else np.ones(len(named), dtype=bool)
    space = embed(middle[seen], components=settings.pca_components, incremental=settings.incremental_pca)
    corrected = method == "oracle" or METHODS[method].corrected
    return Clustering(
        labels=tuple(named.tolist()),
        method=method,
        similarity=evidence.similarity,
        reliability=evidence.own,
        structure={},
        settings=settings,
        explained_variance=space.explained_variance,
        components=space.components,
        warnings=_variance_warning(space),
        points=np.pad(picture, ((0, 0), (0, 2 - picture.shape[1]))),
        centroids=_centroids(evidence, named, settings, corrected=corrected),
        offsets=np.round(evidence.offsets, 7),
    )


def _variance_warning(space: Embedding) -> tuple[str, ...]:
    if space.explained_variance >= LOW_VARIANCE:
        return ()
    share = f"{space.components} principal components explain {space.explained_variance:.2f} of the variance"
    return (f"{share}, less than {LOW_VARIANCE}; raise pca_components",)


def _centroids(evidence: _Evidence, named: np.ndarray, settings: Settings, *, corrected: bool) -> np.ndarray:
    """What `predict` compares with (halves, k, d), rounded so that the plan stays small."""
    rows: list[Any] = [mean_sketch(evidence.first, evidence.second)]
    if corrected:
        scale = np.sqrt(np.maximum(evidence.own, max(settings.min_reliability, 1e-3)))[:, None]
        rows = [evidence.first / scale, evidence.second / scale]
    names = decided_names(named.tolist())
    means = [[half[named == name].mean(axis=0) for name in names] for half in rows]
    return np.round(np.array(means).reshape(len(rows), len(names), evidence.first.shape[1]), 7)


def _restore(result: Clustering, back: np.ndarray) -> Clustering:
    """The same clustering with the clients in the order in which they came."""
    return replace(
        result,
        labels=tuple(np.asarray(result.labels)[back].tolist()),
        similarity=result.similarity[np.ix_(back, back)],
        reliability=result.reliability[back],
        points=result.points[back],
    )
