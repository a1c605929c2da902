"""pFedGraph: mixing rows from the directions of the clients' changes, for all parameters or by layer.

    d_kl = -cos(w_k - w_k^0, w_l - w_l^0)                        w^0: what the client began the run with
    m_k  = argmin over the simplex of sum_l m_l d_kl + alpha || m - p ||^2 = Proj_simplex(p - d_k / (2 alpha))

p are the shares of the examples among those that took part; who did not keeps its model. Ye, Ni, Xu, Wang, Chen and
Wang, "Personalized Federated Learning with Inferred Collaboration Graphs", ICML 2023. Their term of local training, and
the step of their program that counts a cosine above .9 as 1, are left out.

The cosines come from the Gram matrix of the changes, in product space of s B A: over all that is shared, or by layer
(`--gram-by`). Heads of different tasks have nothing in common.
"""

from typing import Annotated, Literal

import numpy as np

from atlas_fl.aggregation import rules
from atlas_fl.aggregation.distances import cosines, gram_of_changes
from atlas_fl.aggregation.matrices import Federation, Rows, Vector
from atlas_fl.methods.knobs import KNOB, Tried
from atlas_fl.methods.method import Method
from atlas_fl.params import ByClient, ServerState, params_by_client, shared_params, subtree
from atlas_fl.ranges import Range

INITIAL = "initial"
"""The entry of the server state: the models that the clients began with, as far as they are shared."""


def project_onto_simplex(point: Vector) -> Vector:
    """The nearest point whose entries are 0 or more and sum to 1. Duchi et al., 2008."""
    falling = np.sort(point)[::-1]
    excess = (np.cumsum(falling) - 1.0) / np.arange(1, len(point) + 1)
    inside = np.maximum(point - excess[np.flatnonzero(falling > excess)[-1]], 0.0)
    return np.asarray(inside / inside.sum())


class FromStart(Method):
    """A method that compares clients by what has changed in their models since the run began."""

    gram_by: Annotated[Literal["all", "layer"], KNOB] = "all"
    """Parameters of `pfedgraph` and of rules that compare halves with a mixing matrix of their own, by the Gram matrix
    of their own changes: none (but for `pfedgraph` heads have one), or each layer."""

    reads_within = True

    @property
    def granularity(self) -> str:
        """`--gram-by`."""
        return self.gram_by

    def group_of(self, key: str, federation: Federation) -> rules.ParameterGroup:
        """The parameters that this one shares a matrix with."""
        return rules.parameter_group(key, federation, granularity=self.gram_by)

    def init(self, client_models: ByClient) -> ServerState:
        """The shared part of the models that the clients begin with."""
        share = self.options.share
        return {INITIAL: {client: shared_params(params, share) for client, params in client_models.items()}}

    def extend_state(self, server_state: ServerState, newcomers: ByClient) -> ServerState:
        """The same with those of newcomers."""
        return {**server_state, INITIAL: {**subtree(server_state, INITIAL), **subtree(self.init(newcomers), INITIAL)}}


class PFedGraph(FromStart):
    """Everyone gets more of those whose changes point into its own direction (`--gram-by`, `--gram-alpha`)."""

    gram_alpha: Annotated[float, Range(above=0), Tried("pfedgraph", values=(0.8, 0.4, 1.6, 0.2))] = 0.8
    """Weight of the shares of the examples in the rows of `pfedgraph`; if small, similarity counts more."""

    name = "pfedgraph"
    differs = "whole models; the term of local training and the threshold of cosines are left out"

    def rule(self, step: rules.MixingContext) -> np.ndarray:
        """The rows m_k of those who are present; before there are updates, the shares of the examples."""
        matrix = np.asarray(self.arrival(step))
        groups = rules.groups_within(step, self.options.within)
        if step.models is None:
            return matrix
        initial, after = params_by_client(step.server_state, INITIAL), step.models.after
        # heads and the rest are compared apart unless all is
        selects = None if self.gram_by == "all" else lambda key: self.group_of(key, step.federation) == step.parameters
        for inside in rules.present_by_group(groups, step.present):
            if len(inside) > 1:
                tasks = {step.federation.clients[k]: step.federation.head_groups[k] for k in inside}
                similarities = cosines(gram_of_changes(initial, after, tasks, self.options, selects=selects))
                pull = matrix[inside[0], inside] + similarities / (2 * self.gram_alpha)
                matrix[np.ix_(inside, inside)] = [project_onto_simplex(row) for row in pull]
        return np.asarray(np.where(step.present[:, None], matrix, np.eye(len(matrix))))

    def arrival(self, step: rules.MixingContext) -> np.ndarray | Rows:
        """The shares of the examples."""
        return rules.weighted_average(self.options, step, within=self.options.within)
