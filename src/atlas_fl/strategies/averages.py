"""Local training and weighted averages: over everyone, or inside clusters. FedAvg: McMahan et al., 2017.

What a claim of examples may weigh is bounded (`mixing.matrices.bounded_weights`).
"""

import numpy as np

from atlas_fl.mixing.matrices import average
from atlas_fl.strategies.base import Strategy, StrategyOptions, mixing_strategy
from atlas_fl.strategies.rule import Rule, Step, within_clusters


def _identity(step: Step) -> np.ndarray:
    return np.eye(len(step.present))


def _everyone(options: StrategyOptions) -> Rule:
    def rule(step: Step) -> np.ndarray:
        weights = step.federation.weights
        return np.asarray(average(weights, step.groups, step.present, max_share=options.max_share))

    return rule


def _clusters(options: StrategyOptions) -> Rule:
    def rule(step: Step) -> np.ndarray:
        weights = step.federation.weights
        return np.asarray(average(weights, within_clusters(step), step.present, max_share=options.max_share))

    return rule


def local(_: StrategyOptions) -> Strategy:
    """Everyone keeps what it trained; nothing is sent, and no option says anything."""
    return mixing_strategy("local", _identity, StrategyOptions(), communicates=False)


def fedavg(options: StrategyOptions) -> Strategy:
    """One average over all clients, weighted by examples; heads only inside their task."""
    return mixing_strategy("fedavg", _everyone(options), options)


def fedavg_cluster(options: StrategyOptions) -> Strategy:
    """The weighted average inside each cluster; who is undecided stays alone.

    With one rank everywhere and `space="factors"` this is the baseline of the papers.
    """
    return mixing_strategy("fedavg_cluster", _clusters(options), options, clustered=True)


def atlas_no_laplacian(options: StrategyOptions) -> Strategy:
    """ATLAS without phase 4: its clusters, its ranks and its space, but the in-cluster average for the Laplacian.

    The matrix is that of `fedavg_cluster`; the two differ in what a run puts around them (ranks and space).
    """
    return mixing_strategy("atlas_no_laplacian", _clusters(options), options, clustered=True)
