"""`atlas_laplacian`, MIRA's Laplacian: everyone keeps a model of its own, and neighbours pull each other together.

    w_k <- w_k - eta sum_l L_kl w_l          on the models as trained, L of the graph of clients

Elbakary et al. 2024, "MIRA: A method of federated multi-task learning for large language models".
"""

from collections.abc import Callable

import numpy as np

from atlas_fl.aggregation.matrices import Chosen, Rows, Square, drop_edges, laplacian_step, rows_over_sums
from atlas_fl.aggregation.rules import MixingContext
from atlas_fl.clustering.blocks import by_blocks
from atlas_fl.methods.averages import FedAvgCluster
from atlas_fl.methods.method import Method


class AtlasLaplacian(Method):
    """`w_k <- w_k - eta sum_l L_kl w_l` on the models as trained: everyone keeps a model of its own.

    It replaces an average inside clusters; after one the step would be zero. Heads follow the graph without the
    edges between tasks. Who took no part keeps its model and still counts as a neighbour.
    """

    name = "atlas_laplacian"
    needs = "validation data with --graph adaptive"
    clustered = True
    not_a_sum = "mixes by I - eta L, which can be inverted: what it gives out gives every model away"
    uses = (
        *("eta", "eta_decay", "layer_weighting"),
        *("alpha", "graph", "symmetrize", "neighbours", "singleton_neighbours", "graph_ema", "block_diagonal"),
    )

    def rule(self, step: MixingContext) -> Square | Rows:
        """I - eta L."""
        return rows_of_graph(step, lambda graph, present: laplacian_step(graph, eta=step.eta, present=present))

    def arrival(self, step: MixingContext) -> Square | Rows:
        """The mean of a newcomer's neighbours by the weights of its edges, `w_k = sum_l a_kl w_l / sum_l a_kl`.

        It is the whole step of a client that has no model yet.
        """
        return rows_of_graph(step, lambda graph, present: rows_over_sums(graph * present[None, :]))


def rows_of_graph(step: MixingContext, rows: Callable[[Square, Chosen], Square]) -> Square | Rows:
    """The rows that follow from the graph without the edges between groups; of a sparse graph block by block."""
    graph = step.federation.adjacency
    matrix = by_blocks(graph, lambda part, at: rows(drop_edges(part, step.groups[at]), step.present[at]))
    return matrix if isinstance(matrix, np.ndarray) else Rows(distinct=matrix, of=np.arange(len(step.groups)))


class AtlasNoLaplacian(FedAvgCluster):
    """ATLAS without phase 4: its clusters, its ranks and its space, but the in-cluster average for the Laplacian.

    The matrix is that of `fedavg_cluster`; the two differ in what a run puts around them (ranks and space).
    """

    name = "atlas_no_laplacian"
