"""make_plan: a plan from a config, every step before round one in order; the initial models.

Round one starts from the warmed-up model at each client's own ranks, or from an imported adapter. How adapters and
whole models travel differs (`whole_sender`, `whole_receiver`); rounds, rules, records, resume and audit are the same
code for both (`Site.trainable`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.aggregation.graph import effective_neighbours
from atlas_fl.aggregation.matrices import eta_warnings
from atlas_fl.aggregation.mixing import realign
from atlas_fl.aggregation.shared_adapters import begun
from atlas_fl.config import Config
from atlas_fl.data.clients import label_statistics, left_out_notes, shard_notes
from atlas_fl.data.registry import find_tasks
from atlas_fl.errors import ConfigError, ModelError
from atlas_fl.events import Note, OnEvent, PhaseStarted, Progress, ignore
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.lora import expand_rank
from atlas_fl.models.peft_io import import_adapter
from atlas_fl.params import LORA_A, LORA_B, ByClient, Params, digest, lora_modules
from atlas_fl.planning.host_assignment import with_hosts
from atlas_fl.planning.leakage import CutLeakage, every_cut, leakage_of
from atlas_fl.planning.masks import (
    check_heads,
    check_memory,
    full_client_plans,
    full_notes,
    prepare_whole,
    sparse_report,
)
from atlas_fl.planning.plan import ClientPlan, Plan, Planned
from atlas_fl.planning.ranks_and_cuts import Fitted, cuts_while_planning, fit_ranks, measure_layers
from atlas_fl.planning.task_discovery import Identified, connect, identify
from atlas_fl.runtime.engine import Engine, Tally
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.runtime.protocol.model_sync import (
    AdapterReceiver,
    AdapterSender,
    Common,
    NewSender,
    Receiver,
    WholeReceiver,
    WholeSender,
    parted,
)
from atlas_fl.setup.assembly import Assembly, assemble, put_off, trained_body, without_private
from atlas_fl.setup.options import cut_of, drawn_of, strategy_of
from atlas_fl.sparse.masks import Mask
from atlas_fl.split.channel import Cut
from atlas_fl.split.model import select_client_side


def warm_start(assembly: Assembly, found: Identified, ranks: Sequence[Sequence[int]]) -> dict[str, Params]:
    """Every client's model before round one, at its ranks per layer, in the clients' order."""
    folder = assembly.config.model.init_adapter
    if folder is not None:
        return _imported(assembly, Path(folder), ranks)
    start: dict[str, Params] = {}
    for client, own in zip(assembly.clients, ranks, strict=True):
        fresh = assembly.start(client, tuple(own))
        start[client.name] = expand_rank(fresh, found.warmed[client.name], assembly.site.scale)
    return start


def _imported(assembly: Assembly, folder: Path, ranks: Sequence[Sequence[int]]) -> dict[str, Params]:
    """The adapter in this folder for every client, at its own ranks; its head where the labels are as many."""
    params, old_scale = import_adapter(folder, family=assembly.site.backbone.family)
    missing = [module for module in assembly.site.modules if module + LORA_A not in params]
    if missing:
        layers = sorted({name.rsplit(".", 1)[-1] for name in lora_modules(params)})
        remedy = f"it adapts {', '.join(layers)}: set --targets to these" if layers else "it is of another model"
        raise ModelError(f"the adapter in {folder} lacks {missing[0]} and {len(missing) - 1} more; {remedy}")
    scaled = _rescaled(params, old_scale=old_scale, assembly=assembly)
    start: dict[str, Params] = {}
    for client, own in zip(assembly.clients, ranks, strict=True):
        fresh = assembly.start(client, tuple(own))
        by_module = {module: own[assembly.layer_of[module]] for module in assembly.site.modules}
        adapted = realign(scaled, by_module, assembly.site.scale)
        # A head of other labels than the imported one's begins fresh.
        fits = {key for key in fresh if key in adapted and adapted[key].shape == fresh[key].shape}
        start[client.name] = {key: adapted[key] if key in fits else fresh[key] for key in fresh}
    return start


def _rescaled(params: Params, *, old_scale: Callable[[int], float], assembly: Assembly) -> Params:
    """The same function under this run's scale of a rank."""
    scaled = dict(params)
    for module in assembly.site.modules:
        rank = params[module + LORA_A].shape[0]
        ratio = old_scale(rank) / assembly.site.scale(rank)
        scaled[module + LORA_B] = params[module + LORA_B] * ratio
    return scaled


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
    """Phases 1 and 2 and the graph, over any engine; of whole models the head and the mask in the place of phase 2."""
    return (_plan_full if assembly.is_full else _plan_lora)(assembly, engine, on_event=on_event)


def _plan_full(assembly: Assembly, engine: Engine, *, on_event: OnEvent) -> Planned:
    config, strategy = assembly.config, strategy_of(assembly.config)
    check_memory(assembly)
    if strategy.clustered:
        on_event(PhaseStarted("fingerprints"))
    found = identify(assembly, engine, clustered=strategy.clustered)
    graph = connect(assembly, engine, found)
    on_event(PhaseStarted("head and mask" if config.sparse.has_mask else "head"))
    prepared = prepare_whole(assembly, engine, found.warmed)
    data = label_statistics(assembly.clients)
    plan = Plan(
        clients=full_client_plans(assembly, prepared, found.labels),
        adjacency=graph.adjacency,
        importance=np.zeros((len(assembly.clients), 0)),
        layer_of={},
        lora={"alpha": None, "rslora": False},
        clustering=found.report,
        warmup=found.warmup,
        graph=_neighbours(graph.adjacency) if strategy.clustered else {},
        data=data,
        sparse=sparse_report(prepared.mask, config.sparse),
        notes=(
            *left_out_notes(assembly.clients),
            *shard_notes(data),
            *found.notes,
            *graph.warnings,
            *full_notes(assembly, prepared),
        ),
    )
    return Planned(
        plan=_announced(_with_eta_warnings(plan, config), on_event),
        start=prepared.start,
        sketches=found.sketches,
        clustering=found.clustering,
        mask=prepared.mask,
        messages=prepared.messages,
    )


def _neighbours(adjacency: np.ndarray) -> dict[str, Any]:
    return {"effective_neighbours": effective_neighbours(adjacency).tolist()}


def _with_eta_warnings(plan: Plan, config: Config) -> Plan:
    eta = strategy_of(config).eta(1)
    if eta <= 0:
        return plan
    return replace(plan, notes=(*plan.notes, *eta_warnings(plan.federation(), kind=config.mixing.laplacian, eta=eta)))


def _announced(plan: Plan, on_event: OnEvent) -> Plan:
    for note in plan.notes:
        on_event(Note(note))
    return plan


def _plan_lora(assembly: Assembly, engine: Engine, *, on_event: OnEvent) -> Planned:
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
        graph=_neighbours(graph.adjacency),
        data=data,
        leakage=_leakage(assembly, clients, on_event) if config.split.leakage else (),
        notes=(*left_out_notes(assembly.clients), *shard_notes(data), *found.notes, *fitted.notes, *graph.warnings),
    )
    plan = _announced(_with_eta_warnings(plan, config), on_event)
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
        graph=_neighbours(graph.adjacency),
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
        name: select_client_side(assembly.site.backbone, models[name], blocks=cut.blocks, head=cut.head == "client")
        for name, cut in cuts.items()
    }


def whole_sender(backbone: Backbone, config: Config, *, keeps: bool, mask: Mask | None = None) -> NewSender:
    """Senders of whole models to ends that keep what they trained last, or not; `mask` where there is one already."""
    known = None if mask is None else parted(mask)[0]
    common = Common(home=digest(trained_body(backbone, config)), mask=known, drawn=drawn_of(config))
    return lambda: WholeSender(common=common, counts_on_trained=keeps)


def whole_receiver(backbone: Backbone, config: Config, *, keeps_trained: bool) -> WholeReceiver:
    """The end of a client or worker to which whole models are sent."""
    return WholeReceiver(
        home=trained_body(backbone, config), keeps_trained=keeps_trained, trains_heads=backbone.vision is None
    )


def worker_sender(assembly: Assembly) -> NewSender:
    """How jobs are sent to the workers of this assembly."""
    if not assembly.is_full:
        return AdapterSender
    return whole_sender(assembly.site.backbone, assembly.config, keeps=False)


def worker_receiver(assembly: Assembly) -> Receiver:
    """The end of a worker that has assembled the run."""
    if not assembly.is_full:
        return AdapterReceiver()
    return whole_receiver(assembly.site.backbone, assembly.config, keeps_trained=False)


def check_clients(assembly: Assembly) -> None:
    """Raise an `AtlasError` where clients of an assembly cannot take part, as far as that can be told at once."""
    if assembly.is_full:
        check_heads(assembly)
    else:
        cuts_while_planning(assembly)


def make_plan(config: Config, *, on_event: OnEvent = ignore) -> Plan:
    """The plan of this config: what takes passes over the clients' data is done, nothing is trained federally."""
    on_event(PhaseStarted("loading"))
    assembly = put_off(assemble(config))
    return plan_for(assembly, local_engine(assembly, on_event), on_event=on_event).plan
