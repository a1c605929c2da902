"""IFCA: every client takes the cluster whose model has the least loss on its examples, and is averaged inside it.

    c_k = argmin over the clusters j of F_k(w_j)        on the validation examples of client k

Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020,
arXiv:2006.04088, algorithm 1, with model averaging. Their analysis chooses by fresh examples (their resampling), their
experiments by those that were trained on. Here it is validation: on its training examples the model that a client has
trained alone has the least loss of all, so that a cluster of one would never end. Their models are drawn at random, and
drawn again where that fails (restarts); here one start is made, and tuning tries other numbers of clusters. Adapters
begin with B = 0, so that all cluster models would be one; the first clusters are therefore drawn by the seed, as even
as can be, and round one makes the models differ. A cluster's model is what its members begin with: its adapters are one
set, its head that of a member of the same task, or the client's own where it has none. A cluster that nobody chooses is
gone. Of equal losses a client's own cluster wins; a loss that is NaN or infinite is left out, so that a model that has
diverged at one client stops nobody else.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch

from atlas_fl.methods.cfl import CLUSTERS, AveragingInState
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Choice, Losses, RoundStart, tensors_of
from atlas_fl.params import ByClient, Params, ServerState, split_body_and_head
from atlas_fl.ranges import Range
from atlas_fl.rng import generator

LOSSES = "losses"
"""The entry of the server state: of the clients that chose in this round the loss of every cluster's model."""


class Ifca(AveragingInState):
    """Averages inside clusters whose models the clients choose by their losses (`--ifca-clusters`); equal ranks."""

    ifca_clusters: Annotated[int, Range(least=1), Tried("ifca", values=(3, 2, 4, 5))] = 3
    """Cluster models of `ifca`, of which each client takes the one with the least loss in every round."""

    name = "ifca"
    differs = "whole models; the seed draws the first clusters; validation loss chooses; an unchosen one is gone"
    needs = "equal ranks"
    extra_passes = "passes over the validation examples: k more"
    across_machines = "scores the models of all clusters at each client before a round, which no site does yet"

    def choose(self, round: RoundStart, losses: Losses) -> Choice | None:
        """The cluster of the least loss of every client of the round, and its model; at first clusters by the seed."""
        if round.is_personal:
            return None
        if CLUSTERS not in round.server_state:
            drawn = draw_clusters(list(round.tasks), count=self.ifca_clusters, seed=self.options.seed)
            return Choice(server_state=_state_of(drawn, {}))
        own = {name: int(label) for name, label in tensors_of(round.server_state, CLUSTERS).items()}
        candidates = {
            label: {name: _cluster_model(label, name, round.client_models, own, round.tasks) for name in round.clients}
            for label in sorted(set(own.values()))
        }
        found = losses(candidates)
        best = {  # of the least loss; its own among equals
            name: min(by_label, key=lambda label: (by_label[label], label != own[name]))
            for name, by_label in found.items()
            if by_label
        }
        return Choice(
            server_state=_state_of({**own, **best}, found),
            client_models={name: candidates[label][name] for name, label in best.items() if label != own[name]},
            sent={name: [candidates[j][name] for j in candidates if j != own[name]] for name in found},
            losses=found,
        )


def draw_clusters(names: Sequence[str], *, count: int, seed: int) -> dict[str, int]:
    """The clusters of round one, as even as can be: a function of the seed."""
    order = generator(seed, "ifca").permutation(len(names))
    return {names[k]: place % count for place, k in enumerate(order.tolist())}


def _state_of(clusters: Mapping[str, int], losses: Mapping[str, Mapping[int, float]]) -> ServerState:
    state: dict[str, ServerState] = {CLUSTERS: {name: torch.tensor(label) for name, label in clusters.items()}}
    if losses:
        state[LOSSES] = {
            name: {str(label): torch.tensor(loss, dtype=torch.float64) for label, loss in by_label.items()}
            for name, by_label in losses.items()
        }
    return state


def _cluster_model(
    label: int, name: str, models: ByClient, clusters: Mapping[str, int], tasks: Mapping[str, str]
) -> Params:
    """The model of this cluster for this client."""
    if clusters[name] == label:
        return models[name]
    members = [other for other in models if clusters[other] == label]
    if of_task := [other for other in members if tasks[other] == tasks[name]]:
        return models[of_task[0]]
    return split_body_and_head(models[members[0]])[0] | split_body_and_head(models[name])[1]
