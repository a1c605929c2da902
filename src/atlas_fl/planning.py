"""Making a plan: phases 1 to 3 and the graph of phase 4, before anything is trained federally."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from atlas_fl.assemble import Assembly, assemble, without_private
from atlas_fl.clustering import Clustering
from atlas_fl.config import Config
from atlas_fl.engines.base import Engine
from atlas_fl.engines.local import LocalEngine
from atlas_fl.engines.tally import Tally
from atlas_fl.errors import ConfigError
from atlas_fl.events import Note, OnEvent, PhaseStarted, Progress, ignore
from atlas_fl.hosting import with_hosts
from atlas_fl.io.ledger import LedgerRow
from atlas_fl.mixing.graph import effective_neighbours
from atlas_fl.mixing.matrices import eta_warnings
from atlas_fl.mixing.mix import realign
from atlas_fl.mixing.shared import begun
from atlas_fl.options import cut_of, strategy_of
from atlas_fl.phases import (
    CutLeakage,
    Fitted,
    Identified,
    connect,
    cuts_while_planning,
    every_cut,
    fit_ranks,
    identify,
    leakage_of,
    measure_layers,
    warm_start,
)
from atlas_fl.plan import ClientPlan, Plan
from atlas_fl.sparse.choose import Mask
from atlas_fl.split.model import on_client
from atlas_fl.split.step import Cut
from atlas_fl.tasks import find_tasks
from atlas_fl.tasks.clients import left_out_notes
from atlas_fl.tasks.heterogeneity import label_statistics, shard_notes
from atlas_fl.types import ByClient, Params


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with what only a run needs of it."""

    plan: Plan
    start: Mapping[str, Params]
    """The model that every client begins round one with."""
    sketches: np.ndarray | None
    """(2, n, dim) float32: both sketches of every client."""
    clustering: Clustering | None
    """The `Clustering` itself, or None for a rule that uses no clusters."""
    mask: Mask | None = None
    """Which weights of a whole model may move; None for all, and for adapters."""
    messages: tuple[LedgerRow, ...] = ()
    """What fitting heads and bringing the mask sent, at first or of those who have just joined."""
    crossed: tuple[LedgerRow, ...] = ()
    """What went through the cuts of clients while they were planned."""


def measure_leakage(
    config: Config, *, cuts: Sequence[int] | None = None, on_event: OnEvent = ignore
) -> tuple[CutLeakage, ...]:
    """What these cuts of the config's model, or all of them, give away of every task's texts over its wire.

    Nothing is trained. Raises `ConfigError` for a cut that the model does not have.
    """
    if with_images := [task.name for task in find_tasks(config.data.tasks, config.data.task) if task.images]:
        raise ConfigError(
            f"{', '.join(with_images)} has images, whose models are not cut; leakage is measured on texts"
        )
    on_event(PhaseStarted("loading"))
    assembly = assemble(config)
    on_event(PhaseStarted("leakage"))
    blocks = every_cut(assembly) if cuts is None else cuts
    return leakage_of(assembly, {client.task.name: blocks for client in assembly.clients})


def local_engine(assembly: Assembly, on_event: OnEvent) -> LocalEngine:
    """The engine that holds every client in this process and tells its progress."""
    return LocalEngine(
        site=assembly.site, on_progress=lambda action, done, total: on_event(Progress(action, done, total))
    )


def plan_for(assembly: Assembly, engine: Engine, *, on_event: OnEvent = ignore) -> Planned:
    """Phases 1 and 2 and the graph, over any engine."""
    config = assembly.config
    strategy = strategy_of(config)
    cuts, tally = cuts_while_planning(assembly), Tally(engine=engine)
    on_event(PhaseStarted("fingerprints"))
    found = identify(assembly, tally, clustered=strategy.clustered, cuts=cuts)
    on_event(PhaseStarted("ranks"))
    layers = measure_layers(assembly, tally, found, cuts=cuts)
    fitted = fit_ranks(assembly, found, layers, communicates=strategy.communicates)
    graph = connect(assembly, tally, found, cuts=cuts)
    clients = with_hosts(assembly, _client_plans(assembly, found, fitted))
    data = label_statistics(assembly.clients)
    plan = Plan(
        clients=clients,
        adjacency=graph.adjacency,
        importance=layers,
        layer_of=assembly.layer_of,
        lora={"alpha": config.model.lora_alpha, "rslora": config.model.rslora},
        clustering=found.report,
        warmup=found.warmup,
        graph={"effective_neighbours": effective_neighbours(graph.adjacency).tolist()},
        data=data,
        leakage=_leakage(assembly, clients, on_event) if config.split.leakage else (),
        notes=(*left_out_notes(assembly.clients), *shard_notes(data), *found.notes, *fitted.notes, *graph.warnings),
    )
    if strategy.eta(1) > 0:
        warned = eta_warnings(plan.federation(), kind=config.mixing.laplacian, eta=strategy.eta(1))
        plan = replace(plan, notes=(*plan.notes, *warned))
    for note in plan.notes:
        on_event(Note(note))
    start = begun(warm_start(assembly, found, [client.ranks for client in plan.clients]), plan.federation())
    cuts = cuts_of(assembly, plan)
    start = {name: without_private(assembly, params, cuts.get(name)) for name, params in start.items()}
    return Planned(
        plan=plan,
        start=start,
        sketches=found.sketches,
        clustering=found.clustering,
        crossed=tuple(tally.rows(round=0)),
    )


def _client_plans(assembly: Assembly, found: Identified, fitted: Fitted) -> tuple[ClientPlan, ...]:
    return tuple(
        ClientPlan(
            name=client.name,
            task=client.task.name,
            device=device.name,
            examples=assembly.site.data[client.name].examples,
            cluster=cluster,
            **fit,
        )
        for client, device, cluster, fit in zip(
            assembly.clients, assembly.devices, found.labels, fitted.by_client, strict=True
        )
    )


def _leakage(assembly: Assembly, clients: Sequence[ClientPlan], on_event: OnEvent) -> tuple[dict[str, Any], ...]:
    """Every cut of the tasks of which a client is cut, so that those that were taken stand beside the others."""
    on_event(PhaseStarted("leakage"))
    tasks = dict.fromkeys(client.task for client in clients if client.cut is not None)
    return tuple(asdict(found) for found in leakage_of(assembly, {task: every_cut(assembly) for task in tasks}))


def regraphed(
    planned: Planned,
    assembly: Assembly,
    engine: Engine,
    *,
    round: int,
    performance: np.ndarray,
    models: ByClient | None = None,
) -> Planned:
    """The plan with clusters and graph measured again before this round; labels keep their meaning.

    With `models`, what the clients hold, the ranks are chosen again by the importance measured there; else they stay.
    """
    cuts, tally = _apart(cuts_of(assembly, planned.plan)), Tally(engine=engine)
    found = identify(assembly, tally, clustered=True, previous=planned.clustering, round=round, cuts=cuts)
    graph = connect(assembly, tally, found, previous=planned.plan.adjacency, performance=performance, cuts=cuts)
    plan = replace(planned.plan, notes=())
    if models is not None:
        plan = _refitted(plan, assembly, tally, found, models, round=round)
    clients = tuple(
        replace(client, cluster=cluster) for client, cluster in zip(plan.clients, found.labels, strict=True)
    )
    plan = replace(
        plan,
        clients=with_hosts(assembly, clients),
        adjacency=graph.adjacency,
        clustering=found.report,
        graph={"effective_neighbours": effective_neighbours(graph.adjacency).tolist()},
        notes=(*found.notes, *plan.notes, *graph.warnings),
    )
    crossed = tuple(tally.rows(round=round))
    return replace(planned, plan=plan, sketches=found.sketches, clustering=found.clustering, crossed=crossed)


def _refitted(
    plan: Plan, assembly: Assembly, engine: Engine, found: Identified, models: ByClient, *, round: int
) -> Plan:
    cuts = _apart(cuts_of(assembly, plan))
    layers = measure_layers(assembly, engine, found, models=models, round=round, cuts=cuts)
    fitted = fit_ranks(assembly, found, layers, communicates=strategy_of(assembly.config).communicates)
    return replace(plan, clients=_client_plans(assembly, found, fitted), importance=layers, notes=fitted.notes)


def at_ranks(models: ByClient, plan: Plan, assembly: Assembly) -> dict[str, Params]:
    """Every model at its client's ranks in this plan: the same function where they suffice, else the nearest."""
    layer_of, modules, scale = assembly.layer_of, assembly.site.modules, assembly.site.scale
    return {
        client.name: realign(models[client.name], {name: client.ranks[layer_of[name]] for name in modules}, scale)
        for client in plan.clients
    }


def cuts_of(assembly: Assembly, plan: Plan) -> dict[str, Cut]:
    """How each client of this plan that is cut is cut, by its name."""
    found = {client.name: cut_of(assembly.config, client.cut, shared=client.shared) for client in plan.clients}
    return {name: cut for name, cut in found.items() if cut is not None}


def _apart(cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """The cuts of clients that are measured: what a client is like is its own, whatever it shares in training."""
    return {name: replace(cut, shared=None) for name, cut in cuts.items()}


def held_by(assembly: Assembly, cuts: Mapping[str, Cut], models: ByClient) -> dict[str, frozenset[str]]:
    """The names of the trainable tensors that are on each client with a cut."""
    return {
        name: on_client(assembly.site.backbone, models[name], blocks=cut.blocks, head=cut.head == "client")
        for name, cut in cuts.items()
    }
