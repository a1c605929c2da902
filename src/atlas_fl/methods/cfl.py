"""CFL: a cluster whose clients pull against each other is cut in two by the cosines of their updates.

    Delta_k = w'_k - w_k          the update of client k in this round, over all that is shared
    cut where || sum_k p_k Delta_k || < eps_1 and max_k || Delta_k || > eps_2
    into the two parts with the least of the largest cosine between them (single linkage)

Sattler, Müller and Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization under
Privacy Constraints", 2019, arXiv:1910.01991, algorithms 1 and 3: where the average hardly moves and single clients do,
nobody's optimum is the common one. As in their program (felisat/clustered-federated-learning) eps_1 = .4 and eps_2 =
1.6 are lengths, and clusters of more than two are cut after round 20 of 80, here a quarter of a shorter run: before,
and among the noise of alike clients, whose average is a root of n shorter than they are, a quotient alone cuts what
belongs together. Both lengths suit their network; those of another model and optimizer are to be tuned. Shares are by
examples. Clusters are averaged apart from the round in which they were cut. A cluster is cut only in a round in which
all of its clients took part.
"""

import math
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation.distances import cosines, gram_of_changes
from atlas_fl.aggregation.matrices import Chosen, Federation, Groups, Rows, Square, Vector, average, group_ids
from atlas_fl.aggregation.rules import MixingContext, StrategyOptions, weighted_average
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Method, StepInputs
from atlas_fl.params import ServerState, subtree, tensors
from atlas_fl.ranges import Range

LARGEST_WHOLE = 2
"""Largest cluster that is never cut."""
CLUSTERS = "clusters"
"""The entry of the server state: the cluster of every client, by name; absent before the first round."""


def clusters_by_client(federation: Federation, clusters: Groups) -> dict[str, Tensor]:
    """The clusters as a server state keeps them: a number by the client's name."""
    return {client: torch.tensor(int(k)) for client, k in zip(federation.clients, clusters, strict=True)}


def clusters_in(entry: ServerState, federation: Federation) -> Groups:
    """The clusters of the clients, in their order, by such an entry of a server state; one cluster by an empty one."""
    labels = tensors(entry)
    return np.array([int(labels[client]) if labels else 0 for client in federation.clients], np.int64)


def average_inside(clusters: Groups, step: MixingContext, options: StrategyOptions) -> np.ndarray | Rows:
    """The rows of averages inside these clusters and the step's groups."""
    groups = group_ids(list(zip(clusters.tolist(), step.groups.tolist())))
    return weighted_average(options, replace(step, groups=groups))


class AveragingInState(Method):
    """A method that averages inside the clusters of its server state."""

    def rule(self, step: MixingContext) -> np.ndarray | Rows:
        """The shares of the examples inside the clusters of the state, and the step's groups."""
        return average_inside(clusters_in(subtree(step.server_state, CLUSTERS), step.federation), step, self.options)


def bipartition(similarities: Square) -> Chosen:
    """Clients apart from the first one in the two parts whose largest similarity across is least.

    The most similar pair is joined until two parts are left (algorithm 3); of equal pairs the one of earlier clients.
    """
    part = np.arange(len(similarities))
    first, second = np.triu_indices(len(similarities), 1)
    for index in np.argsort(-similarities[first, second], kind="stable"):
        if len(np.unique(part)) == 2:
            break
        part[part == part[second[index]]] = part[first[index]]
    return np.asarray(part != part[0])


def pull_apart(gram: Square, shares: Vector, *, eps_1: float, eps_2: float) -> bool:
    """Return whether the average of updates with these inner products is below eps_1, and the longest above eps_2."""
    longest = float(np.sqrt(max(float(np.diag(gram).max()), 0.0)))
    return longest > eps_2 and float(np.sqrt(max(float(shares @ gram @ shares), 0.0))) < eps_1


class Cfl(AveragingInState):
    """Averages inside clusters that are cut in two where updates disagree (`--bipartition-norm`)."""

    bipartition_norm: Annotated[float, Range(above=0), Tried("cfl", values=(1.6, 8.0, 12.0, 4.0))] = 1.6
    """`cfl` cuts a cluster in two only where its longest update is longer than this, its authors' eps_2."""
    bipartition_ratio: Annotated[float, Range(above=0, most=1), Tried("cfl", values=(0.25, 0.5, 0.4, 0.6))] = 0.25
    """And only where the average of its updates is shorter than this share of `--bipartition-norm`, their eps_1."""
    bipartition_round: Annotated[int, Range(least=0)] = 20
    """And only after so many rounds, or after a quarter of a run in which these would be more."""

    name = "cfl"
    differs = "whole models; a cluster is cut in a round of all of its clients alone"
    takes_newcomers = False

    def next_state(self, inputs: StepInputs) -> ServerState:
        """The clusters, cut by these updates."""
        present, federation = np.array(inputs.present), inputs.federation
        clusters = clusters_in(subtree(inputs.server_state, CLUSTERS), federation)
        if inputs.round > min(self.bipartition_round, math.ceil(self.options.last_aggregation / 4)):
            eps_2 = self.bipartition_norm
            eps_1 = self.bipartition_ratio * eps_2
            result = clusters.copy()
            for label in sorted(set(clusters.tolist())):
                inside = np.flatnonzero(clusters == label)
                if len(inside) <= LARGEST_WHOLE or not present[inside].all():
                    continue
                tasks = {federation.clients[k]: federation.head_groups[k] for k in inside.tolist()}
                gram = gram_of_changes(inputs.client_models, inputs.after, tasks, self.options)
                rows = average(federation.weights, clusters, present, max_share=self.options.max_share)
                if pull_apart(gram, np.asarray(rows[inside[0]][inside]), eps_1=eps_1, eps_2=eps_2):
                    result[inside[bipartition(cosines(gram))]] = result.max() + 1
            clusters = result
        return {CLUSTERS: clusters_by_client(federation, clusters)}
