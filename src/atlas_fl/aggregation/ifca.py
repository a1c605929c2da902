"""IFCA's averages: inside the clusters whose models the clients have chosen by their losses.

Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020,
arXiv:2006.04088, with model averaging. Who chooses what is the begin of a round (`experiment.ifca_choice`).
"""

import numpy as np

from atlas_fl.aggregation.cfl import CLUSTERS, average_inside, clusters_in
from atlas_fl.aggregation.strategies import MixingContext, Strategy, StrategyOptions, mixing_strategy
from atlas_fl.params import ServerState


def ifca(options: StrategyOptions) -> Strategy:
    """Averages inside clusters whose models the clients choose by their losses (`--ifca-clusters`); equal ranks."""

    def rule(step: MixingContext) -> np.ndarray:
        state: ServerState = {} if step.models is None else step.models.server_state
        return average_inside(clusters_in(state.get(CLUSTERS), step.federation), step, options)

    return mixing_strategy("ifca", rule, options)
