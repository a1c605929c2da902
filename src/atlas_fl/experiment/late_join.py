"""Clients that join between two rounds: fingerprint, cluster, ranks, cut, edges and a start, as the others got theirs.

Nothing that was decided for the others changes: their clusters, ranks, cuts and edges are what they were. A client that
trains the whole model has no ranks and no cut: it begins with what the rule gives it, under FedAvg the weights that all
hold with the head of its task. Where nobody has that task a head of images is fitted, by its own images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from atlas_fl.aggregation.graph import effective_neighbours
from atlas_fl.aggregation.mixing import as_all_hold
from atlas_fl.aggregation.strategies import Strategy
from atlas_fl.client.evaluation import EvaluateOptions
from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.client.job import Job
from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.clustering.result import append_client, assign_client
from atlas_fl.data.clients import label_statistics
from atlas_fl.errors import AtlasError, CheckpointError, ConfigError
from atlas_fl.events import Note, OnEvent, PhaseStarted
from atlas_fl.experiment.state import Admitted, State
from atlas_fl.params import HEAD, ByClient, Params
from atlas_fl.planning.host_assignment import with_hosts
from atlas_fl.planning.leakage import every_cut, leakage_of
from atlas_fl.planning.masks import Prepared, check_heads, fits_heads, full_client_plans, mask_brought, with_heads
from atlas_fl.planning.plan import ClientPlan, Plan, Planned
from atlas_fl.planning.planner import warm_start
from atlas_fl.planning.ranks_and_cuts import cuts_while_planning, fit_ranks, own_importance
from atlas_fl.planning.task_discovery import Identified, connect, fingerprints, identify, report_of, warmed_models
from atlas_fl.runtime.engine import Engine, Tally, run_all
from atlas_fl.setup.assembly import Assembly, Newcomer, with_newcomer, without_private
from atlas_fl.setup.options import cut_of, fingerprint_options, is_reclustered, strategy_of
from atlas_fl.split.channel import Cut
from atlas_fl.storage.ledger import LedgerRow


def admit(assembly: Assembly, planned: Planned, engine: Engine, state: State, *, on_event: OnEvent) -> Admitted | None:
    """The federation with all who wait at its door and can take part; None where there is nobody.

    Who cannot (it does not answer, nothing fits its device) is told so, and the others go on.
    """
    config, grown, fresh, tally = assembly.config, assembly, dict[str, Params](), Tally(engine=engine)
    strategy = strategy_of(config)
    if state.round % config.mixing.aggregate_every:
        return None  # who trains also sends, so who trains stays the same up to the next aggregation
    for newcomer in assembly.door.waiting(state.round + 1):
        name = newcomer.client.name
        if name in grown.names:
            continue
        if not fresh:
            planned = replace(planned, plan=replace(planned.plan, notes=()), messages=())
        on_event(PhaseStarted(f"{name} joins"))
        try:
            joined = _joined(newcomer, grown, planned, tally, state)
            models = {**state.server_models, **fresh, name: joined[2]}
            strategy.check(models, joined[1].plan.federation())
        except AtlasError as error:
            on_event(Note(f"{name} does not join: {error}"))
            assembly.door.turn_away(name, error)
            continue
        grown, planned, fresh[name] = joined
        on_event(Note(planned.plan.notes[-1]))
        assembly.door.let_in(name)
    if not fresh:
        return None
    rows = tally.rows(round=state.round + 1)
    planned = replace(planned, crossed=tuple(row for row in rows if row.client in fresh))
    return _admitted(grown, planned, state, fresh, strategy=strategy)


def _admitted(assembly: Assembly, planned: Planned, state: State, fresh: ByClient, *, strategy: Strategy) -> Admitted:
    """The federation with the newcomers, whose models and entries in the server state the strategy makes."""
    federation = planned.plan.federation()
    models = strategy.welcome(state.server_state, state.server_models, fresh, federation)
    if strategy.communicates:
        models = as_all_hold(models, state.server_models, federation)
    server_state = strategy.extend_state(state.server_state, models)
    return Admitted(
        assembly=assembly,
        planned=planned,
        state=replace(
            state,
            server_models={**state.server_models, **models},
            server_state=server_state,
            start={**state.start, **models},
            stale=state.stale | (models.keys() if strategy.communicates else set()),
        ),
        fresh=fresh,
        communicates=strategy.communicates,
        state_changed=server_state is not state.server_state,
    )


def _joined(
    newcomer: Newcomer, assembly: Assembly, planned: Planned, engine: Engine, state: State
) -> tuple[Assembly, Planned, Params]:
    """(the assembly, the plan with this client, its own model before round one of its own).

    Raises `ConfigError` where it cannot take part, such as for the run's mask, which fits the heads of no other task.
    """
    _check(newcomer, assembly)
    grown, number = with_newcomer(assembly, newcomer), state.round + 1
    alone = replace(grown, clients=grown.clients[-1:], devices=grown.devices[-1:])
    if assembly.is_full:
        check_heads(grown)
    cuts = {} if assembly.is_full else cuts_while_planning(alone)
    found = _identified(grown, alone, planned, engine, number=number, cuts=cuts)
    edges, warnings = _edges(grown, engine, found, state, cuts)
    adjacency = np.block([[planned.plan.adjacency, edges[:, None]], [edges[None, :], np.zeros((1, 1))]])
    joined = (_join_full if assembly.is_full else _join_lora)(newcomer, assembly, alone, planned, engine, found, cuts)
    client = joined.clients[-1]
    plan = replace(
        planned.plan,
        clients=with_hosts(grown, joined.clients),
        adjacency=adjacency,
        importance=joined.importance,
        clustering=found.report,
        warmup=found.warmup,
        graph={"effective_neighbours": effective_neighbours(adjacency).tolist()} if planned.plan.graph else {},
        data=label_statistics(grown.clients),
        leakage=(*planned.plan.leakage, *_leakage(grown, planned.plan, client)),
        notes=(*planned.plan.notes, *warnings, _told(client, edges, grown.names, number=number)),
    )
    messages = (*planned.messages, *(replace(row, round=number) for row in joined.messages))
    planned = replace(planned, plan=plan, sketches=found.sketches, clustering=found.clustering, messages=messages)
    return grown, planned, joined.start


@dataclass(frozen=True, kw_only=True)
class _Join:
    """What a newcomer adds to a plan beside its cluster and its edges."""

    clients: tuple[ClientPlan, ...]
    """Of all clients, the newcomer last."""
    importance: np.ndarray
    """(n, layers)."""
    start: Params
    messages: Sequence[LedgerRow] = ()


def _join_lora(
    newcomer: Newcomer,
    assembly: Assembly,
    alone: Assembly,
    planned: Planned,
    engine: Engine,
    found: Identified,
    cuts: Mapping[str, Cut],
) -> _Join:
    """Ranks and cut of the newcomer, and its adapters after the warm-up at these ranks."""
    grown = with_newcomer(assembly, newcomer)
    layers = np.concatenate([planned.plan.importance, _importance(alone, planned.plan, engine, found, cuts)])
    fitted = fit_ranks(grown, found, layers, communicates=strategy_of(grown.config).communicates)
    client = ClientPlan(
        name=newcomer.client.name,
        task=newcomer.client.task.name,
        device=newcomer.device.name,
        examples=alone.site.data[newcomer.client.name].examples,
        cluster=found.labels[-1],
        **fitted.by_client[-1],
    )
    (fresh,) = warm_start(alone, found, [client.ranks]).values()
    start = without_private(grown, fresh, cut_of(grown.config, client.cut))
    return _Join(clients=(*planned.plan.clients, client), importance=layers, start=start)


def _join_full(
    newcomer: Newcomer,
    assembly: Assembly,
    alone: Assembly,
    planned: Planned,
    engine: Engine,
    found: Identified,
    _: Mapping[str, Cut],
) -> _Join:
    """The head of the newcomer and the messages that bring it and the run's mask."""
    start, sent = found.warmed, list[LedgerRow]()
    if fits_heads(assembly) and not _given_a_head(newcomer, assembly):
        start, sent = with_heads(alone, engine, start)
    if planned.mask is not None:
        body = {key: own for key, own in planned.mask.items() if not key.startswith(HEAD)}
        sent += mask_brought(alone, body)
    prepared = Prepared(start=start, mask=planned.mask, messages=())
    clients = (*planned.plan.clients, *full_client_plans(alone, prepared, found.labels[-1:]))
    return _Join(
        clients=clients, importance=np.zeros((len(clients), 0)), start=start[newcomer.client.name], messages=sent
    )


def _given_a_head(newcomer: Newcomer, assembly: Assembly) -> bool:
    """Whether the rule gives it the head of others, who have its task."""
    config = assembly.config
    fellows = any(client.task.name == newcomer.client.task.name for client in assembly.clients)
    return fellows and strategy_of(config).communicates and "head" in config.mixing.share


def _check(newcomer: Newcomer, assembly: Assembly) -> None:
    if newcomer.client.task.writes and assembly.site.backbone.vocabulary is None:
        raise ConfigError(
            f"task {newcomer.client.task.name!r} is to write text, and no client was to when this run began; join a"
            " run of your own"
        )


def _identified(
    assembly: Assembly,
    alone: Assembly,
    planned: Planned,
    engine: Engine,
    *,
    number: int,
    cuts: Mapping[str, Cut],
) -> Identified:
    """The newcomer's fingerprint, taken as those of the others were when they were last clustered, and its place."""
    config, plan = assembly.config, planned.plan
    labels = tuple(client.cluster for client in plan.clients)
    if planned.clustering is None:
        own, labels = identify(alone, engine, clustered=False, cuts=cuts), (*labels, 0)
        report = {"method": "none", "labels": list(labels)}
        return replace(own, labels=labels, report=report, warmup=_warmup(plan, own.warmup))
    if planned.sketches is None:
        raise CheckpointError("the sketches of this run are not beside its plan; restore them, or begin another run")
    at = max((n for n in range(1, number) if is_reclustered(config, n)), default=0)
    (update,) = fingerprints(alone, engine, fingerprint_options(config, round=at), round=at, cuts=cuts)
    name = update.client
    warmed = warmed_models(alone, [update], cuts)
    warmup = {"steps": {name: int(update.metrics["steps"])}, "agreement": {name: update.metrics["agreement"]}}
    first, second = (update.params[half].numpy() for half in (FIRST, SECOND))
    tasks = [client.task.name for client in assembly.clients]
    if config.clustering.clusters == "oracle":
        label = dict(zip(tasks, labels)).get(tasks[-1], max(labels) + 1)
    else:
        label = assign_client(planned.clustering, first, second).cluster
    sketches = np.concatenate([planned.sketches, np.stack([first, second])[:, None]], axis=1)
    clustering = append_client(planned.clustering, sketches, label=label)
    losses = {one: group["difficulty"] for group in plan.clustering["clusters"] for one in group["clients"]}
    return Identified(
        labels=clustering.labels,
        clustering=clustering,
        report=report_of(clustering, assembly.names, tasks, {**losses, name: update.metrics["loss"]}),
        warmed=warmed,
        sketches=sketches,
        warmup=_warmup(plan, warmup),
        notes=(),
    )


def _warmup(plan: Plan, own: Mapping[str, Any]) -> dict[str, Any]:
    """What the plan says of everyone's fingerprint, with the newcomer's; nothing where none is taken."""
    return {**plan.warmup, **{key: {**plan.warmup[key], **own[key]} for key in ("steps", "agreement") if own}}


def _importance(alone: Assembly, plan: Plan, engine: Engine, found: Identified, cuts: Mapping[str, Cut]) -> np.ndarray:
    """(1, layers): that of its cluster, which is equal in all of it, or its own where it is alone or there are none."""
    label = found.labels[-1]
    members = [k for k, own in enumerate(found.labels[:-1]) if own == label != UNDECIDED]
    if found.clustering is not None and members:
        return plan.importance[members[:1]]
    return own_importance(alone, engine, found.warmed, cuts=cuts)


def _edges(
    assembly: Assembly, engine: Engine, found: Identified, state: State, cuts: Mapping[str, Cut]
) -> tuple[np.ndarray, list[str]]:
    """The newcomer's edges (n,) in the graph of all, and what that graph warns of for it."""
    performance = None
    if found.clustering is not None and assembly.config.mixing.graph == "adaptive":
        performance = _performance(engine, found, state, assembly.names[:-1], cuts)
    graph = connect(assembly, engine, found, performance=performance)
    name = assembly.names[-1]
    return graph.adjacency[-1, :-1], [line for line in graph.warnings if line.startswith(f"{name} ")]


def _performance(
    engine: Engine, found: Identified, state: State, others: Sequence[str], cuts: Mapping[str, Cut]
) -> np.ndarray:
    """Validation scores: the last ones of the others, and that of the newcomer's own model."""
    options = EvaluateOptions(split="validation")
    jobs = [
        Job(client=name, params=params, round=0, options=options, cut=cuts.get(name))
        for name, params in found.warmed.items()
    ]
    own = run_all(engine, "evaluate", jobs)[0].metrics["primary"]
    usual = float(np.mean(list(state.validation.values()))) if state.validation else own
    return np.array([*(state.validation.get(name, usual) for name in others), own])


def _leakage(assembly: Assembly, plan: Plan, client: ClientPlan) -> list[dict[str, Any]]:
    known = client.cut is None or any(row["task"] == client.task for row in plan.leakage)
    if known or not assembly.config.split.leakage:
        return []
    return [asdict(row) for row in leakage_of(assembly, {client.task: every_cut(assembly)})]


def _told(client: ClientPlan, edges: np.ndarray, names: Sequence[str], *, number: int) -> str:
    near = [name for name, weight in zip(names, edges) if weight > 0]
    place = "in no cluster, it trains alone" if client.cluster == UNDECIDED else f"cluster {client.cluster}"
    beside = f", beside {', '.join(near)}" if near else ""
    return f"{client.name} joins before round {number}: {place}{beside}"
