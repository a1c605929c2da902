"""Laplacian personalisation on the graph of clients. MIRA: Elbakary et al., 2024."""

import numpy as np

from atlas_fl.mixing.matrices import cut, laplacian_step
from atlas_fl.strategies.base import Strategy, StrategyOptions, mixing_strategy
from atlas_fl.strategies.rule import Step


def atlas(options: StrategyOptions) -> Strategy:
    """`w_k <- w_k - eta sum_l L_kl w_l` on the models as trained: everyone keeps a model of its own.

    It replaces an average inside clusters; after one the step would be zero. Heads follow the graph without the
    edges between tasks. Who took no part keeps its model and still counts as a neighbour. Who joins later begins with
    the mean of its neighbours by the weights of its edges, `w_k = sum_l a_kl w_l / sum_l a_kl`: the whole step of the
    random walk, of a client that has no model yet.
    """

    def rule(step: Step) -> np.ndarray:
        graph = cut(step.federation.adjacency, step.groups)
        return np.asarray(laplacian_step(graph, kind=options.laplacian, eta=step.eta, present=step.present))

    def neighbours(step: Step) -> np.ndarray:
        edges = cut(step.federation.adjacency, step.groups) * step.present[None, :]
        degree = edges.sum(axis=1, keepdims=True)
        return np.where(degree > 0, edges / np.where(degree > 0, degree, 1.0), np.eye(len(edges)))

    return mixing_strategy("atlas", rule, options, arrival=neighbours, clustered=True, has_eta=True)
