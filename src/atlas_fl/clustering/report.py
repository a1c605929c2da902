"""Clusters held against what is known of the clients: agreement with the true tasks, and a summary of each cluster."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from atlas_fl.clustering.result import Clustering
from atlas_fl.clustering.stability import UNDECIDED, decided_names

LOW_PURITY = 0.7
"""Purity below which clusters and tasks are said to disagree."""


def agreement(labels: Sequence[int], truth: Sequence[str]) -> dict[str, float]:
    """purity, ari and nmi of clusters against the true tasks of the same clients.

    Purity is the share of decided clients whose task is their cluster's most frequent one, 0 if nobody is decided; it
    rises with the number of clusters, so read it beside the adjusted Rand index. For ari and nmi every undecided
    client is a cluster of its own, because it trains alone.
    """
    pairs = [(label, task) for label, task in zip(labels, truth, strict=True) if label != UNDECIDED]
    majorities = [Counter(task for label, task in pairs if label == name).most_common(1)[0][1] for name in
                  decided_names(labels)]  # fmt: skip
    alone = [label if label != UNDECIDED else -1 - client for client, label in enumerate(labels)]
    return {
        "purity": sum(majorities) / len(pairs) if pairs else 0.0,
        "ari": float(adjusted_rand_score(truth, alone)),
        "nmi": float(normalized_mutual_info_score(truth, alone)),
    }


def summarise_clusters(
    clustering: Clustering, *, clients: Sequence[str], tasks: Sequence[str], losses: Mapping[str, float] | None = None
) -> tuple[dict[str, Any], ...]:
    """One summary a cluster: its clients, their tasks with counts, purity, reliability, cohesion and difficulty.

    Cohesion is the mean similarity of pairs inside (absent for one client); difficulty is the mean loss, absent where
    no loss of a member is known. Undecided clients come last, as cluster -1.
    """
    known = losses or {}
    names = [*decided_names(clustering.labels), *([UNDECIDED] if UNDECIDED in clustering.labels else [])]
    members = {name: [index for index, label in enumerate(clustering.labels) if label == name] for name in names}
    return tuple(
        _summary(name, members[name], clustering=clustering, clients=clients, tasks=tasks, losses=known)
        for name in names
    )


def _summary(
    name: int,
    members: list[int],
    *,
    clustering: Clustering,
    clients: Sequence[str],
    tasks: Sequence[str],
    losses: Mapping[str, float],
) -> dict[str, Any]:
    counts = Counter(tasks[index] for index in members)
    inside = clustering.similarity[np.ix_(members, members)][np.triu_indices(len(members), 1)]
    loss = [losses[clients[index]] for index in members if clients[index] in losses]
    summary: dict[str, Any] = {
        "cluster": name,
        "size": len(members),
        "clients": [clients[index] for index in members],
        "tasks": dict(counts.most_common()),
        "purity": counts.most_common(1)[0][1] / len(members),
        "reliability": float(clustering.reliability[members].mean()),
    }
    cohesion = {"cohesion": float(inside.mean())} if inside.size else {}
    return {**summary, **cohesion, **({"difficulty": float(np.mean(loss))} if loss else {})}


def purity_warnings(labels: Sequence[int], truth: Sequence[str], *, least: float = LOW_PURITY) -> tuple[str, ...]:
    """One line for each decided cluster whose most frequent task has less than this share of it."""
    lines = []
    for name in decided_names(labels):
        counts = Counter(task for label, task in zip(labels, truth, strict=True) if label == name)
        task, count = counts.most_common(1)[0]
        if count / counts.total() < least:
            share = f"{count} of {counts.total()} clients on {task}"
            lines.append(f"cluster {name} mixes tasks: {share}, a purity of {count / counts.total():.2f} below {least}")
    return tuple(lines)
