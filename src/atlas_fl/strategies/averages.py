"""Local training and weighted averages: over everyone, or inside clusters. FedAvg: McMahan et al., 2017."""

import numpy as np

from atlas_fl.mixing.matrices import average, cluster_labels, group_ids
from atlas_fl.strategies.base import Strategy, StrategyOptions, mixing_strategy
from atlas_fl.strategies.rule import Step


def _identity(step: Step) -> np.ndarray:
    return np.eye(len(step.present))


def _everyone(step: Step) -> np.ndarray:
    return np.asarray(average(step.federation.weights, step.groups, step.present))


def _clusters(step: Step) -> np.ndarray:
    labels = zip(cluster_labels(step.federation.clusters), step.groups.tolist())
    return np.asarray(average(step.federation.weights, group_ids(list(labels)), step.present))


def local(_: StrategyOptions) -> Strategy:
    """Everyone keeps what it trained; nothing is sent, and no option says anything."""
    return mixing_strategy("local", _identity, StrategyOptions(), communicates=False)


def fedavg(options: StrategyOptions) -> Strategy:
    """One average over all clients, weighted by examples; heads only inside their task."""
    return mixing_strategy("fedavg", _everyone, options)


def fedavg_cluster(options: StrategyOptions) -> Strategy:
    """The weighted average inside each cluster; who is undecided stays alone.

    With one rank everywhere and `space="factors"` this is the baseline of the papers.
    """
    return mixing_strategy("fedavg_cluster", _clusters, options, clustered=True)


def atlas_no_laplacian(options: StrategyOptions) -> Strategy:
    """ATLAS without phase 4: its clusters, its ranks and its space, but the in-cluster average for the Laplacian.

    The matrix is that of `fedavg_cluster`; the two differ in what a run puts around them (ranks and space).
    """
    return mixing_strategy("atlas_no_laplacian", _clusters, options, clustered=True)
