"""Late clients: fingerprint, cluster, ranks, cut and edges of those that join between two rounds.

The clusters, ranks, cuts and edges of the other clients do not change. A client that trains the whole model has no
ranks and no cut: it starts from the weights that the rule gives it, under FedAvg the average of all with the head of
its task. Where no client has that task, an image head is fitted on the newcomer's own images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from atlas_fl.aggregation.graph import effective_neighbours
from atlas_fl.aggregation.mixing import reuse_equal_tensors
from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.clustering.result import append_client, assign_client
from atlas_fl.data.clients import label_statistics
from atlas_fl.errors import AtlasError, CheckpointError, ConfigError
from atlas_fl.events import Note, OnEvent, PhaseStarted
from atlas_fl.experiment.state import FederationState, JoinResult
from atlas_fl.methods.method import Method
from atlas_fl.params import HEAD, ByClient, Params
from atlas_fl.planning.host_assignment import assign_hosts
from atlas_fl.planning.leakage import every_cut, leakage_of
from atlas_fl.planning.masks import MaskPlan, check_heads, fit_heads, full_client_plans, mask_messages, should_fit_heads
from atlas_fl.planning.plan import ClientPlan, Plan, PlanResult
from atlas_fl.planning.planner import initial_models
from atlas_fl.planning.ranks_and_cuts import cuts_for_planning, fit_ranks, importance_by_client
from atlas_fl.planning.task_discovery import (
    TaskDiscovery,
    clustering_report,
    collect_fingerprints,
    discover_tasks,
    make_client_graph,
    models_after_fingerprints,
)
from atlas_fl.runtime.engine import Engine, TrafficMeter, run_on_all_clients
from atlas_fl.setup.assembly import Assembly, Newcomer, truncation_notes, with_newcomer, without_private
from atlas_fl.setup.options import cut_of, fingerprint_options, is_reclustered, strategy_of
from atlas_fl.split.channel import Cut
from atlas_fl.storage.jsonl import to_json
from atlas_fl.storage.ledger import LedgerRow


def add_late_clients(
    assembly: Assembly, planned: PlanResult, engine: Engine, state: FederationState, *, on_event: OnEvent
) -> JoinResult | None:
    """The federation with all waiting clients that can take part; None where no client waits.

    A client that cannot (it does not answer, nothing fits its device) is rejected with the reason.
    """
    config, extended, newcomer_models, tally = (
        assembly.config,
        assembly,
        dict[str, Params](),
        TrafficMeter(engine=engine),
    )
    strategy = strategy_of(config)
    if (
        state.round % config.mixing.aggregate_every
        or state.round > config.training.rounds - config.mixing.personal_rounds
    ):
        return None  # who trains also sends, so who trains stays the same up to the next aggregation
    for newcomer in assembly.join_queue.waiting_clients(state.round + 1):
        name = newcomer.client.name
        if name in extended.names:
            continue
        if not newcomer_models:
            planned = replace(planned, plan=replace(planned.plan, notes=()), messages=())
        on_event(PhaseStarted(f"{name} joins"))
        try:
            addition = _add_client(newcomer, extended, planned, tally, state)
            models = {**state.server_models, **newcomer_models, name: addition[2]}
            strategy.check(models, addition[1].plan.federation())
        except AtlasError as error:
            on_event(Note(f"{name} does not join: {error}"))
            assembly.join_queue.reject_client(name, error)
            continue
        extended, planned, newcomer_models[name] = addition
        on_event(Note(planned.plan.notes[-1]))
        assembly.join_queue.accept_client(name)
    if not newcomer_models:
        return None
    rows = tally.rows(round=state.round + 1)
    planned = replace(planned, cut_traffic=tuple(row for row in rows if row.client in newcomer_models))
    return _join_result(extended, planned, state, newcomer_models, strategy=strategy)


def _join_result(
    assembly: Assembly, planned: PlanResult, state: FederationState, newcomer_models: ByClient, *, strategy: Method
) -> JoinResult:
    """The federation with the newcomers; the strategy makes their models and their entries in the server state."""
    federation = planned.plan.federation()
    models = strategy.initial_models(state.server_state, state.server_models, newcomer_models, federation)
    if strategy.communicates:
        models = reuse_equal_tensors(models, state.server_models, federation)
    server_state = strategy.extend_state(state.server_state, models)
    return JoinResult(
        assembly=assembly,
        planned=planned,
        state=replace(
            state,
            server_models={**state.server_models, **models},
            server_state=server_state,
            client_models={**state.client_models, **models},
            outdated=state.outdated | (models.keys() if strategy.communicates else set()),
        ),
        newcomer_models=newcomer_models,
        communicates=strategy.communicates,
        state_changed=server_state is not state.server_state,
    )


def _add_client(
    newcomer: Newcomer, assembly: Assembly, planned: PlanResult, engine: Engine, state: FederationState
) -> tuple[Assembly, PlanResult, Params]:
    """(the assembly and the plan with this client, its own model before its first round).

    Raises `ConfigError` where it cannot take part, for example where its head does not fit the run's mask.
    """
    _check_task(newcomer, assembly)
    extended, number = with_newcomer(assembly, newcomer), state.round + 1
    newcomer_only = replace(extended, clients=extended.clients[-1:], devices=extended.devices[-1:])
    if assembly.is_full:
        check_heads(extended)
    cuts = {} if assembly.is_full else cuts_for_planning(newcomer_only)
    discovery = _discover_task(extended, newcomer_only, planned, engine, number=number, cuts=cuts)
    edges, warnings = _edges(extended, engine, discovery, state, cuts)
    adjacency = np.block([[planned.plan.adjacency, edges[:, None]], [edges[None, :], np.zeros((1, 1))]])
    addition = (_join_full if assembly.is_full else _join_lora)(
        newcomer, assembly, newcomer_only, planned, engine, discovery, cuts
    )
    client = addition.clients[-1]
    plan = replace(
        planned.plan,
        clients=assign_hosts(extended, addition.clients),
        adjacency=adjacency,
        importance=addition.importance,
        clustering=discovery.report,
        warmup=discovery.warmup,
        graph={"effective_neighbours": effective_neighbours(adjacency).tolist()} if planned.plan.graph else {},
        data=label_statistics(extended.clients),
        leakage=(*planned.plan.leakage, *_leakage(extended, planned.plan, client)),
        notes=(
            *planned.plan.notes,
            *truncation_notes({newcomer.client.name: newcomer.tokens}, extended.site.backbone),
            *warnings,
            _join_note(client, edges, extended.names, number=number),
        ),
    )
    # the plan of all is never at stake: a newcomer whose numbers it could not hold is turned away before it is written
    to_json(plan.to_json())  # refuses NaN and infinity
    messages = (*planned.messages, *(replace(row, round=number) for row in addition.messages))
    planned = replace(
        planned, plan=plan, sketches=discovery.sketches, clustering=discovery.clustering, messages=messages
    )
    return extended, planned, addition.initial_model


@dataclass(frozen=True, kw_only=True)
class _PlanAddition:
    """Addition of a newcomer to a plan beside its cluster and its edges."""

    clients: tuple[ClientPlan, ...]
    """Plans of all clients, the newcomer last."""
    importance: np.ndarray
    """(n, layers)."""
    initial_model: Params
    messages: Sequence[LedgerRow] = ()


def _join_lora(
    newcomer: Newcomer,
    assembly: Assembly,
    newcomer_only: Assembly,
    planned: PlanResult,
    engine: Engine,
    discovery: TaskDiscovery,
    cuts: Mapping[str, Cut],
) -> _PlanAddition:
    """Ranks and cut of the newcomer, and its adapters after the warm-up at these ranks."""
    extended = with_newcomer(assembly, newcomer)
    layers = np.concatenate(
        [planned.plan.importance, _layer_importance(newcomer_only, planned.plan, engine, discovery, cuts)]
    )
    fitted = fit_ranks(extended, discovery, layers, communicates=strategy_of(extended.config).communicates)
    client = ClientPlan(
        name=newcomer.client.name,
        task=newcomer.client.task.name,
        device=newcomer.device.name,
        examples=newcomer_only.site.data[newcomer.client.name].examples,
        cluster=discovery.labels[-1],
        **fitted.by_client[-1],
    )
    (warmed_model,) = initial_models(newcomer_only, discovery, [client.ranks]).values()
    initial_model = without_private(extended, warmed_model, cut_of(extended.config, client.cut))
    return _PlanAddition(clients=(*planned.plan.clients, client), importance=layers, initial_model=initial_model)


def _join_full(
    newcomer: Newcomer,
    assembly: Assembly,
    newcomer_only: Assembly,
    planned: PlanResult,
    engine: Engine,
    discovery: TaskDiscovery,
    _: Mapping[str, Cut],
) -> _PlanAddition:
    """The initial model of the newcomer, with a fitted head where no client has its task, and the messages for it."""
    models, messages = discovery.warmed_models, list[LedgerRow]()
    if should_fit_heads(assembly) and not _inherits_head(newcomer, assembly):
        models, messages = fit_heads(newcomer_only, engine, models)
    if planned.mask is not None:
        body = {key: values for key, values in planned.mask.items() if not key.startswith(HEAD)}
        messages += mask_messages(newcomer_only, body)
    prepared = MaskPlan(initial_models=models, mask=planned.mask, messages=())
    clients = (*planned.plan.clients, *full_client_plans(newcomer_only, prepared, discovery.labels[-1:]))
    return _PlanAddition(
        clients=clients,
        importance=np.zeros((len(clients), 0)),
        initial_model=models[newcomer.client.name],
        messages=messages,
    )


def _inherits_head(newcomer: Newcomer, assembly: Assembly) -> bool:
    """Return whether it gets the head of the clients with its task from the rule."""
    config = assembly.config
    has_task_peers = any(client.task.name == newcomer.client.task.name for client in assembly.clients)
    return has_task_peers and strategy_of(config).communicates and "head" in config.mixing.share


def _check_task(newcomer: Newcomer, assembly: Assembly) -> None:
    if newcomer.client.task.writes and assembly.site.backbone.vocabulary is None:
        raise ConfigError(
            f"task {newcomer.client.task.name!r} is to write text, and no client was to when this run began; join a"
            " run of your own"
        )


def _discover_task(
    assembly: Assembly,
    newcomer_only: Assembly,
    planned: PlanResult,
    engine: Engine,
    *,
    number: int,
    cuts: Mapping[str, Cut],
) -> TaskDiscovery:
    """Fingerprints and clusters of all, the newcomer last: its fingerprint has the options of the newest clustering."""
    config, plan, labels = assembly.config, planned.plan, tuple(client.cluster for client in planned.plan.clients)
    if planned.clustering is None:
        discovery, labels = discover_tasks(newcomer_only, engine, clustered=False, cuts=cuts), (*labels, 0)
        report = {"method": "none", "labels": list(labels)}
        return replace(discovery, labels=labels, report=report, warmup=_extend_warmup(plan, discovery.warmup))
    if planned.sketches is None:
        raise CheckpointError("the sketches of this run are not beside its plan; restore them, or begin another run")
    clustering_round = max((n for n in range(1, number) if is_reclustered(config, n)), default=0)
    (update,) = collect_fingerprints(
        newcomer_only, engine, fingerprint_options(config, round=clustering_round), round=clustering_round, cuts=cuts
    )
    name = update.client
    warmup = {"steps": {name: int(update.metrics["steps"])}, "agreement": {name: update.metrics["agreement"]}}
    first, second = (update.params[half].numpy() for half in (FIRST, SECOND))
    tasks = [client.task.name for client in assembly.clients]
    if config.clustering.clusters == "oracle":
        label = dict(zip(tasks, labels)).get(tasks[-1], max(labels) + 1)
    else:
        label = assign_client(planned.clustering, first, second).cluster
    sketches = np.concatenate([planned.sketches, np.stack([first, second])[:, None]], axis=1)
    clustering = append_client(planned.clustering, sketches, label=label)
    losses = {member: group["difficulty"] for group in plan.clustering["clusters"] for member in group["clients"]}
    return TaskDiscovery(
        labels=clustering.labels,
        clustering=clustering,
        report=clustering_report(clustering, assembly.names, tasks, {**losses, name: update.metrics["loss"]}),
        warmed_models=models_after_fingerprints(newcomer_only, [update], cuts),
        sketches=sketches,
        warmup=_extend_warmup(plan, warmup),
        notes=(),
    )


def _extend_warmup(plan: Plan, newcomer: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's report of the warm-up with the newcomer's; empty where no fingerprints are taken."""
    return {**plan.warmup, **{key: {**plan.warmup[key], **newcomer[key]} for key in ("steps", "agreement") if newcomer}}


def _layer_importance(
    newcomer_only: Assembly, plan: Plan, engine: Engine, discovery: TaskDiscovery, cuts: Mapping[str, Cut]
) -> np.ndarray:
    """(1, layers): that of its cluster, where all members have the same; its own without a cluster or other members."""
    label = discovery.labels[-1]
    members = [index for index, cluster in enumerate(discovery.labels[:-1]) if cluster == label != UNDECIDED]
    if discovery.clustering is not None and members:
        return plan.importance[members[:1]]
    return importance_by_client(newcomer_only, engine, discovery.warmed_models, cuts=cuts)


def _edges(
    assembly: Assembly, engine: Engine, discovery: TaskDiscovery, state: FederationState, cuts: Mapping[str, Cut]
) -> tuple[np.ndarray, list[str]]:
    """The newcomer's edges (n,) in the graph of all clients, and that graph's warnings about it."""
    performance = None
    if discovery.clustering is not None and assembly.config.mixing.graph == "adaptive":
        performance = _validation_scores(engine, discovery, state, assembly.names[:-1], cuts)
    graph = make_client_graph(assembly, engine, discovery, performance=performance)
    name = assembly.names[-1]
    return graph.adjacency[-1, :-1], [line for line in graph.warnings if line.startswith(f"{name} ")]


def _validation_scores(
    engine: Engine, discovery: TaskDiscovery, state: FederationState, others: Sequence[str], cuts: Mapping[str, Cut]
) -> np.ndarray:
    """Validation scores: the last ones of the others, and that of the newcomer's own model."""
    options = EvaluateOptions(split="validation")
    jobs = [
        Job(client=name, params=params, round=0, options=options, cut=cuts.get(name))
        for name, params in discovery.warmed_models.items()
    ]
    newcomer_score = run_on_all_clients(engine, "evaluate", jobs)[0].metrics["primary"]
    mean_score = float(np.mean(list(state.validation_scores.values()))) if state.validation_scores else newcomer_score
    return np.array([*(state.validation_scores.get(name, mean_score) for name in others), newcomer_score])


def _leakage(assembly: Assembly, plan: Plan, client: ClientPlan) -> list[dict[str, Any]]:
    is_measured = client.cut is None or any(row["task"] == client.task for row in plan.leakage)
    if is_measured or not assembly.config.split.leakage:
        return []
    return [asdict(row) for row in leakage_of(assembly, {client.task: every_cut(assembly)})]


def _join_note(client: ClientPlan, edges: np.ndarray, names: Sequence[str], *, number: int) -> str:
    neighbours = [name for name, weight in zip(names, edges) if weight > 0]
    cluster = "in no cluster, it trains alone" if client.cluster == UNDECIDED else f"cluster {client.cluster}"
    suffix = f", beside {', '.join(neighbours)}" if neighbours else ""
    return f"{client.name} joins before round {number}: {cluster}{suffix}"
