"""Laplacian personalisation on the graph of clients. MIRA: Elbakary et al., 2024."""

import numpy as np

from atlas_fl.mixing.matrices import cut, laplacian_step
from atlas_fl.strategies.base import Step, Strategy, StrategyOptions, mixing_strategy


def atlas(options: StrategyOptions) -> Strategy:
    """`w_k <- w_k - eta sum_l L_kl w_l` on the models as trained: everyone keeps a model of its own.

    It replaces an average inside clusters; after one the step would be zero. Heads follow the graph without the
    edges between tasks. Who took no part keeps its model and still counts as a neighbour.
    """

    def rule(step: Step) -> np.ndarray:
        graph = cut(step.federation.adjacency, step.groups)
        return np.asarray(laplacian_step(graph, kind=options.laplacian, eta=step.eta, present=step.present))

    return mixing_strategy("atlas", rule, options, clustered=True, has_eta=True)
