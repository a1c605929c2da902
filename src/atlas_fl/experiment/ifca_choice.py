"""IFCA's choice at the begin of a round: each client takes the cluster whose model has the least loss on its examples.

    c_k = argmin over the clusters j of F_k(w_j)        on the training examples of client k

Ghosh et al. 2020, arXiv:2006.04088, algorithm 1. Adapters begin with B = 0, so that all cluster models would be one;
the first clusters are therefore drawn by the seed, as even as can be, and round one makes the models differ. A
cluster's model is what its members begin with: its adapters are one set, its head that of a member of the same task, or
the client's own where it has none. A cluster that nobody chooses is gone. Of equal losses a client's own cluster wins;
a loss that is NaN or infinite is left out, so that a model that has diverged at one client stops nobody else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import torch

from atlas_fl.aggregation.cfl import CLUSTERS, clusters_in
from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.config.methods import rule_of
from atlas_fl.experiment.state import FederationState
from atlas_fl.params import HEAD, ByClient, Params, ServerState
from atlas_fl.planning.plan import PlanResult
from atlas_fl.rng import generator
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import Assembly
from atlas_fl.storage.jsonl import to_json
from atlas_fl.storage.ledger import Kind, LedgerRow
from atlas_fl.storage.tensors import encoded_size

LOSSES = "losses"
"""The entry of the server state: of the clients that chose in this round the loss of every cluster's model."""


@dataclass(frozen=True, kw_only=True)
class ClusterChoice:
    """The federation after the choice of a round."""

    state: FederationState
    messages: tuple[LedgerRow, ...] = ()
    """The models of the other clusters, which went to everyone who chose, and the losses that came back."""
    moved: Mapping[str, int] = field(default_factory=dict)
    """The new cluster of each client that left its own."""


def draw_clusters(names: Sequence[str], *, count: int, seed: int) -> dict[str, int]:
    """The clusters of round one, as even as can be: a function of the seed."""
    order = generator(seed, "ifca").permutation(len(names))
    return {names[k]: place % count for place, k in enumerate(order.tolist())}


def choose_clusters(
    assembly: Assembly, planned: PlanResult, engine: Engine, state: FederationState, clients: Sequence[str]
) -> ClusterChoice:
    """The state with which these clients begin the next round; the same for rules without a choice."""
    config, number = assembly.config, state.round + 1
    if rule_of(config) != "ifca" or number > config.training.rounds - config.mixing.personal_rounds:
        return ClusterChoice(state=state)
    if CLUSTERS not in state.server_state:
        drawn = draw_clusters(assembly.names, count=config.server.ifca_clusters, seed=config.run.seed)
        return ClusterChoice(state=replace(state, server_state=_state_of(drawn, {})))
    tasks = {client.name: client.task.name for client in assembly.clients}
    own = dict(zip(assembly.names, clusters_in(state.server_state[CLUSTERS], planned.plan.federation()).tolist()))
    candidates = {
        label: {name: _cluster_model(label, name, state.client_models, own, tasks) for name in clients}
        for label in sorted(set(own.values()))
    }
    losses = _losses(engine, candidates, round=number, prior_correction=config.training.prior_correction)
    best = {name: _least(by_label, own[name]) for name, by_label in losses.items() if by_label}
    moved = {name: label for name, label in best.items() if label != own[name]}
    begun = {**state.client_models, **{name: candidates[label][name] for name, label in moved.items()}}
    held = {**state.server_models, **{name: candidates[label][name] for name, label in moved.items()}}
    after = replace(state, client_models=begun, server_models=held, server_state=_state_of({**own, **best}, losses))
    sent = {name: [candidates[j][name] for j in candidates if j != own[name]] for name in losses}
    return ClusterChoice(state=after, messages=tuple(_messages(sent, losses, round=number)), moved=moved)


def _least(losses: Mapping[int, float], own: int) -> int:
    """The cluster of the least loss; its own among equals."""
    return min(losses, key=lambda label: (losses[label], label != own))


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
    own_head = {key: tensor for key, tensor in models[name].items() if key.startswith(HEAD)}
    return {key: tensor for key, tensor in models[members[0]].items() if not key.startswith(HEAD)} | own_head


def _losses(
    engine: Engine, candidates: Mapping[int, ByClient], *, round: int, prior_correction: bool
) -> dict[str, dict[int, float]]:
    """The finite losses of the clusters' models on the training examples of each client that answered for all."""
    options = EvaluateOptions(split="train", prior_correction=prior_correction)
    losses: dict[str, dict[int, float]] = {}
    for label, models in candidates.items():
        jobs = [Job(client=name, params=params, round=round, options=options) for name, params in models.items()]
        for update in engine.run("evaluate", jobs):
            losses.setdefault(update.client, {})[label] = update.metrics["loss"]
    return {
        name: {label: loss for label, loss in by_label.items() if isfinite(loss)}
        for name, by_label in losses.items()
        if by_label.keys() == candidates.keys()
    }


def _messages(
    sent: Mapping[str, Sequence[Params]], losses: Mapping[str, Mapping[int, float]], *, round: int
) -> list[LedgerRow]:
    """The other clusters' models down, and each client's losses up."""
    rows = []
    for name, models in sent.items():
        kinds: tuple[tuple[bool, Kind], ...] = ((False, "adapter"), (True, "head"))
        for is_head, kind in kinds:
            size = sum(
                encoded_size({key: tensor for key, tensor in params.items() if key.startswith(HEAD) == is_head})
                for params in models
            )
            rows.append(LedgerRow(round=round, client=name, direction="down", kind=kind, bytes=size))
        told = len(to_json({str(label): loss for label, loss in losses[name].items()}).encode())
        rows.append(LedgerRow(round=round, client=name, direction="up", kind="control", bytes=told))
    return [row for row in rows if row.bytes]
