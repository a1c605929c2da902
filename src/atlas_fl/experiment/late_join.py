"""Late clients: fingerprint, cluster, ranks, cut and edges of those that join between two rounds.

The clusters, ranks, cuts and edges of the other clients do not change. A client that trains the whole model has no
ranks and no cut: it starts from the weights that the rule gives it, under FedAvg the average of all with the head of
its task. Where no client has that task, an image head is fitted on the newcomer's own images.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atlas_fl.aggregation.mixing import reuse_equal_tensors
from atlas_fl.clustering.blocks import grow
from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.data.clients import label_statistics
from atlas_fl.errors import AtlasError, ConfigError
from atlas_fl.events import Note, OnEvent, PhaseStarted
from atlas_fl.experiment.state import CurrentRun, FederationState, JoinResult
from atlas_fl.params import HEAD, ByClient, Params
from atlas_fl.planning import host_assignment, masks, planner, ranks_and_cuts, task_discovery
from atlas_fl.planning.plan import ClientPlan, PlanResult
from atlas_fl.runtime.engine import Engine, TrafficMeter
from atlas_fl.setup.assembly import Assembly, Newcomer, with_newcomer, without_private
from atlas_fl.setup.options import cut_of, strategy_of
from atlas_fl.storage.ledger import LedgerRow


def add_late_clients(run: CurrentRun, engine: Engine, *, on_event: OnEvent) -> JoinResult | None:
    """The run with all waiting clients that can take part; None where no client joins.

    A client that cannot (it does not answer, nothing fits its device) is rejected with the reason.
    """
    assembly, planned, state = run
    config, number = assembly.config, state.round + 1
    strategy = strategy_of(config)
    if (
        state.round % config.mixing.aggregate_every
        or number > config.training.rounds - config.mixing.personal_rounds + 1
    ):
        return None  # who trains also sends, so who trains stays the same up to the next aggregation
    extended, meter = assembly, TrafficMeter(engine=engine)
    newcomer_models: dict[str, Params] = {}
    for newcomer in assembly.join_queue.waiting_clients(number):
        name = newcomer.client.name
        if name in extended.names:
            continue
        if not newcomer_models:
            planned = replace(planned, plan=replace(planned.plan, notes=()), messages=())
        on_event(PhaseStarted(f"{name} joins"))
        try:
            joined, joined_plan, model = _plan_newcomer(newcomer, extended, planned, meter, state)
            strategy.check({**state.server_models, **newcomer_models, name: model}, joined_plan.plan.federation())
        except AtlasError as error:
            on_event(Note(f"{name} does not join: {error}"))
            assembly.join_queue.reject_client(name, error)
            continue
        extended, planned, newcomer_models[name] = joined, joined_plan, model
        on_event(Note(planned.plan.notes[-1]))
        assembly.join_queue.accept_client(name)
    if not newcomer_models:
        return None
    rows = tuple(row for row in meter.rows(round=number) if row.client in newcomer_models)
    return _join(extended, replace(planned, cut_traffic=rows), state, newcomer_models)


def _join(assembly: Assembly, planned: PlanResult, state: FederationState, newcomer_models: ByClient) -> JoinResult:
    """The federation with the newcomers; the strategy makes their models and their entries in the server state."""
    federation, strategy = planned.plan.federation(), strategy_of(assembly.config)
    models = strategy.initial_models(state.server_state, state.server_models, newcomer_models, federation)
    if strategy.communicates:
        models = reuse_equal_tensors(models, state.server_models, federation)
    server_state = strategy.extend_state(state.server_state, models)
    joined = replace(
        state,
        server_models={**state.server_models, **models},
        server_state=server_state,
        client_models={**state.client_models, **models},
        outdated=state.outdated | (models.keys() if strategy.communicates else set()),
    )
    return JoinResult(
        run=CurrentRun(assembly, planned, joined),
        newcomer_models=newcomer_models,
        state_changed=server_state is not state.server_state,
    )


def _plan_newcomer(
    newcomer: Newcomer, assembly: Assembly, planned: PlanResult, engine: Engine, state: FederationState
) -> tuple[Assembly, PlanResult, Params]:
    """(the assembly and the plan with this client, its own model before its first round).

    Raises `ConfigError` where it cannot take part, for example where its head does not fit the run's mask.
    """
    if newcomer.client.task.writes and assembly.site.backbone.vocabulary is None:
        raise ConfigError(
            f"task {newcomer.client.task.name!r} is to write text, and no client was to when this run began; join a"
            " run of your own"
        )
    extended, number = with_newcomer(assembly, newcomer), state.round + 1
    cuts = ranks_and_cuts.cuts_for_planning(extended)
    discovery = task_discovery.discover_newcomer(extended, planned, engine, number=number, cuts=cuts)
    performance = None
    if discovery.clustering is not None and assembly.config.mixing.graph == "adaptive":
        # the others by their last scores
        (own_score,) = task_discovery.validation_scores(extended.only_last(), engine, discovery.warmed_models, cuts)
        scores = state.validation_scores
        mean_score = float(np.mean(list(scores.values()))) if scores else own_score
        performance = np.array([*(scores.get(name, mean_score) for name in extended.names[:-1]), own_score])
    graph = task_discovery.make_client_graph(extended, engine, discovery, performance=performance).adjacency
    edges: np.ndarray = (graph[[-1]] + np.zeros((1, len(extended.names))))[0, :-1]  # an array of a sparse one, too
    messages: Sequence[LedgerRow] = ()
    if assembly.is_full:
        client, model, messages = _plan_whole_model(assembly, extended, planned, engine, discovery)
        importance = np.zeros((len(extended.clients), 0))
    else:
        cluster = UNDECIDED if discovery.clustering is None else discovery.labels[-1]
        own = ranks_and_cuts.newcomer_importance(
            extended.only_last(), planned.plan, cluster, engine, discovery.warmed_models, cuts=cuts
        )
        importance = np.concatenate([planned.plan.importance, own])
        client = ranks_and_cuts.fit_clients(extended, discovery.labels, importance)[0][-1]
        (warmed_model,) = planner.initial_models(extended.only_last(), discovery.warmed_models, [client.ranks]).values()
        model = without_private(extended, warmed_model, cut_of(extended.config, client.cut))
    where = "in no cluster, it trains alone" if client.cluster == UNDECIDED else f"cluster {client.cluster}"
    if neighbours := [name for name, weight in zip(extended.names, edges) if weight > 0]:
        where += f", beside {', '.join(neighbours)}"
    plan = replace(
        planned.plan,
        clients=host_assignment.assign_hosts(extended, (*planned.plan.clients, client)),
        adjacency=grow(planned.plan.adjacency, np.append(edges, 0.0)),
        importance=importance,
        clustering=discovery.report,
        data=label_statistics(extended.clients),
        notes=(*planned.plan.notes, f"{client.name} joins before round {number}: {where}"),
    )
    planned = replace(
        planned,
        plan=plan,
        sketches=discovery.sketches,
        clustering=discovery.clustering,
        messages=(*planned.messages, *(replace(row, round=number) for row in messages)),
    )
    return extended, planned, model


def _plan_whole_model(
    assembly: Assembly, extended: Assembly, planned: PlanResult, engine: Engine, discovery: task_discovery.TaskDiscovery
) -> tuple[ClientPlan, Params, list[LedgerRow]]:
    """(plan, initial model, messages) of a newcomer; its head is fitted where no other client's is to be had."""
    newcomer = extended.only_last()
    (client,) = newcomer.clients
    models, messages = discovery.warmed_models, list[LedgerRow]()
    has_peers = any(other.task.name == client.task.name for other in assembly.clients)
    inherits_head = has_peers and strategy_of(assembly.config).communicates and "head" in assembly.config.mixing.share
    if masks.should_fit_heads(assembly) and not inherits_head:
        models, messages = masks.fit_heads(newcomer, engine, models)
    if planned.mask is not None:
        body = {key: values for key, values in planned.mask.items() if not key.startswith(HEAD)}
        messages += masks.mask_messages(newcomer, body)
    (client_plan,) = masks.full_client_plans(newcomer, models, planned.mask, discovery.labels[-1:])
    return client_plan, models[client.name], messages
