"""make_plan: a plan from a config, every step before round one in order; the initial models.

Round one starts from the warmed-up model at each client's own ranks, or from an imported adapter. Adapters and whole
models are sent differently (`full_model_sender`, `full_model_receiver`); rounds, rules, records, resume and audit are
the same code for both (`Site.trainable`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from atlas_fl.aggregation.graph import effective_neighbours
from atlas_fl.aggregation.mixing import average_initial, resize_ranks
from atlas_fl.config import Config
from atlas_fl.config.presets import dial_note
from atlas_fl.data.clients import label_statistics, left_out_notes, shard_notes
from atlas_fl.data.heterogeneity import heterogeneity_notes
from atlas_fl.data.registry import find_tasks
from atlas_fl.errors import ConfigError
from atlas_fl.events import Note, OnEvent, PhaseStarted, Progress, ignore
from atlas_fl.methods.kriging import Kriging
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.lora import expand_rank
from atlas_fl.params import ByClient, Params, digest
from atlas_fl.planning.host_assignment import assign_hosts
from atlas_fl.planning.leakage import CutLeakage, every_cut, leakage_of
from atlas_fl.planning.masks import (
    check_heads,
    check_training_memory,
    fit_heads_and_mask,
    full_client_plans,
    full_notes,
    sparse_report,
)
from atlas_fl.planning.method_traffic import report_bytes_once
from atlas_fl.planning.plan import ClientPlan, Plan, PlanResult
from atlas_fl.planning.ranks_and_cuts import RankPlan, cuts_for_planning, fit_ranks, measure_importance
from atlas_fl.planning.round_costs import client_side
from atlas_fl.planning.start_adapter import StartAdapter, load_start_adapter, start_model, start_notes
from atlas_fl.planning.task_discovery import TaskDiscovery, discover_tasks, make_client_graph
from atlas_fl.ranks.cost_model import VALUE_BYTES
from atlas_fl.runtime.engine import Engine, TrafficMeter
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.runtime.protocol.model_sync import (
    AdapterReceiver,
    AdapterSender,
    FullModelReceiver,
    FullModelSender,
    NewSender,
    Receiver,
    SharedModelCache,
    split_body_and_head,
)
from atlas_fl.setup.assembly import (
    Assembly,
    assemble,
    defer_late_clients,
    trained_body,
    truncation_notes,
    without_private,
)
from atlas_fl.setup.options import cut_of, strategy_of
from atlas_fl.sparse.masks import Mask
from atlas_fl.split.channel import Cut


def initial_models(
    assembly: Assembly,
    discovery: TaskDiscovery,
    ranks: Sequence[Sequence[int]],
    *,
    start: StartAdapter | None = None,
) -> dict[str, Params]:
    """Every client's model before round one, at its ranks per layer, in the clients' order."""
    models: dict[str, Params] = {}
    for client, client_ranks in zip(assembly.clients, ranks, strict=True):
        fresh = assembly.initial_params(client, tuple(client_ranks))
        if start is None:
            models[client.name] = expand_rank(fresh, discovery.warmed_models[client.name], assembly.site.scale)
        else:
            models[client.name] = start_model(start, assembly, client.task, fresh, client_ranks)
    return models


def measure_leakage(
    config: Config, *, cuts: Sequence[int] | None = None, on_event: OnEvent = ignore
) -> tuple[CutLeakage, ...]:
    """Measure the leakage of every task's texts through these cuts of the config's model, or through all of them.

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
    """The engine that runs every client in this process and reports its progress."""
    return LocalEngine(
        site=assembly.site, on_progress=lambda action, done, total: on_event(Progress(action, done, total))
    )


def plan_run(assembly: Assembly, engine: Engine, *, on_event: OnEvent = ignore) -> PlanResult:
    """Plan a run over any engine: phases 1 and 2 and the graph; for whole models heads and mask instead of phase 2."""
    return (_plan_full if assembly.is_full else _plan_lora)(assembly, engine, on_event=on_event)


def _plan_full(assembly: Assembly, engine: Engine, *, on_event: OnEvent) -> PlanResult:
    config, strategy = assembly.config, strategy_of(assembly.config)
    check_training_memory(assembly)
    if strategy.clustered:
        on_event(PhaseStarted("fingerprints"))
    discovery = discover_tasks(assembly, engine, clustered=strategy.clustered)
    graph = make_client_graph(assembly, engine, discovery)
    on_event(PhaseStarted("head and mask" if config.sparse.has_mask else "head"))
    mask_plan = fit_heads_and_mask(assembly, engine, discovery.warmed_models)
    data = label_statistics(assembly.clients)
    plan = Plan(
        clients=full_client_plans(assembly, mask_plan, discovery.labels),
        adjacency=graph.adjacency,
        importance=np.zeros((len(assembly.clients), 0)),
        layer_of={},
        lora={"alpha": None, "rslora": False},
        clustering=discovery.report,
        warmup=discovery.warmup,
        graph=_graph_entry(graph.adjacency) if strategy.clustered else {},
        data=data,
        sparse=sparse_report(mask_plan.mask, config.sparse),
        notes=(*_data_notes(assembly, data), *discovery.notes, *graph.warnings, *full_notes(assembly, mask_plan)),
    )
    return PlanResult(
        plan=_announce(plan, on_event),
        initial_models=mask_plan.initial_models,
        sketches=discovery.sketches,
        clustering=discovery.clustering,
        mask=mask_plan.mask,
        messages=mask_plan.messages,
    )


def _graph_entry(adjacency: np.ndarray) -> dict[str, Any]:
    return {"effective_neighbours": effective_neighbours(adjacency).tolist()}


def _announce(plan: Plan, on_event: OnEvent) -> Plan:
    """The plan, whose notes are told."""
    for note in plan.notes:
        on_event(Note(note))
    return plan


def _plan_lora(assembly: Assembly, engine: Engine, *, on_event: OnEvent) -> PlanResult:
    config, strategy = assembly.config, strategy_of(assembly.config)
    start = load_start_adapter(assembly)  # refused before anything is measured
    cuts, meter = cuts_for_planning(assembly), TrafficMeter(engine=engine)
    on_event(PhaseStarted("fingerprints"))
    discovery = discover_tasks(assembly, meter, clustered=strategy.clustered, cuts=cuts)
    on_event(PhaseStarted("ranks"))
    layers = measure_importance(assembly, meter, discovery, cuts=cuts)
    rank_plan = fit_ranks(assembly, discovery, layers, communicates=strategy.communicates)
    graph = make_client_graph(assembly, meter, discovery, cuts=cuts)
    clients = assign_hosts(assembly, _client_plans(assembly, discovery, rank_plan))
    data = label_statistics(assembly.clients)
    plan = Plan(
        clients=clients,
        adjacency=graph.adjacency,
        importance=layers,
        layer_of=assembly.layer_of,
        lora={"alpha": config.model.lora_alpha, "rslora": config.model.rslora},
        clustering=discovery.report,
        warmup=discovery.warmup,
        graph=_graph_entry(graph.adjacency),
        data=data,
        leakage=_measure_plan_leakage(assembly, clients, on_event) if config.split.leakage else (),
        notes=(
            *_data_notes(assembly, data),
            *discovery.notes,
            *rank_plan.notes,
            *(start_notes(start, assembly, [client.ranks for client in clients]) if start is not None else ()),
            *_prefix_notes(assembly),
            *_halves_notes(assembly, clients),
            *graph.warnings,
        ),
    )
    plan = _announce(plan, on_event)
    models = initial_models(assembly, discovery, [client.ranks for client in clients], start=start)
    plan_cuts = cuts_of(assembly, plan)
    return PlanResult(
        plan=plan,
        # equal where server adapters are shared, and without what stays at the clients
        initial_models={
            name: without_private(assembly, params, plan_cuts.get(name))
            for name, params in average_initial(models, plan.federation()).items()
        },
        sketches=discovery.sketches,
        clustering=discovery.clustering,
        cut_traffic=tuple(meter.rows(round=0)),
    )


def _halves_notes(assembly: Assembly, clients: Sequence[ClientPlan]) -> tuple[str, ...]:
    """Note on the halves of clients that `kriging` measures once: their cost, and what they tell the server."""
    config = assembly.config
    size = sum(
        report_bytes_once(config, assembly.initial_params(client, tuple(planned.ranks)))
        for client, planned in zip(assembly.clients, clients, strict=True)
    )
    method = strategy_of(config)
    if not size or not isinstance(method, Kriging):
        return ()
    return (
        f"round {method.first_measured_round} measures how much each client is to keep of its own:"
        f" it trains twice more, on either half of its examples, and sends both models, {size / 1e6:.2g} MB in all,"
        " once; the server then knows two models of half the examples each",
    )


def _data_notes(assembly: Assembly, data: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Notes of the plan on the clients' data, of which `data` are the statistics."""
    return (
        *dial_note(assembly.config),
        *left_out_notes(assembly.clients),
        *truncation_notes(assembly.site.data, assembly.site.backbone),
        *shard_notes(data),
        *heterogeneity_notes(assembly.clients),
    )


def _prefix_notes(assembly: Assembly) -> tuple[str, ...]:
    """Note on what is computed once where the lowest blocks carry no adapters, and on its memory and disk."""
    shape, training = assembly.shape, assembly.config.training
    if not shape.first_adapted:
        return ()
    share = sum(shape.block_params[: shape.first_adapted]) / sum(shape.block_params)
    start = f"{shape.first_adapted} of {shape.num_layers} blocks carry no adapters, {share:.0%} of a forward pass, and"
    memory_gb = training.prefix_cache_gb
    disk_gb = 0.0 if assembly.site.prefix_cache.files is None else training.prefix_disk_gb
    if not memory_gb and not disk_gb:
        return (f"{start} run in every pass, because --prefix-cache-gb is 0",)
    images = assembly.config.images
    is_augmented = assembly.has_images and bool(images.crop or images.flip)
    tokens = sum(
        int(data.lengths.sum())
        for client in assembly.clients
        for split, data in assembly.site.data[client.name].splits.items()
        if not (is_augmented and split == "train")
    )
    size_gb, most_gb = tokens * shape.hidden * VALUE_BYTES / 2**30, max(memory_gb, disk_gb)
    kept = "once for each example" if size_gb <= most_gb else f"once for about {most_gb / size_gb:.0%} of the examples"
    on_disk = f", and on the disk, which later runs read, of --prefix-disk-gb {disk_gb:g}" if disk_gb else ""
    others = "; augmented training images always run through them" if is_augmented else ""
    return (f"{start} run {kept}: {size_gb:.2g} GB in all, of --prefix-cache-gb {memory_gb:g}{on_disk}{others}",)


def _client_plans(assembly: Assembly, discovery: TaskDiscovery, rank_plan: RankPlan) -> tuple[ClientPlan, ...]:
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
            assembly.clients, assembly.devices, discovery.labels, rank_plan.by_client, strict=True
        )
    )


def _measure_plan_leakage(
    assembly: Assembly, clients: Sequence[ClientPlan], on_event: OnEvent
) -> tuple[dict[str, Any], ...]:
    """The leakage of every cut, for tasks with a cut client, so that chosen cuts can be compared with the others."""
    on_event(PhaseStarted("leakage"))
    tasks = dict.fromkeys(client.task for client in clients if client.cut is not None)
    return tuple(asdict(leakage) for leakage in leakage_of(assembly, {task: every_cut(assembly) for task in tasks}))


def recluster(
    planned: PlanResult,
    assembly: Assembly,
    engine: Engine,
    *,
    round: int,
    performance: np.ndarray,
    models: ByClient | None = None,
) -> PlanResult:
    """Cluster the clients and build the graph again before this round; labels keep their meaning.

    With `models`, the clients' current ones, ranks are chosen again by the importance measured there; else they stay.
    """
    # A client is measured by itself, whatever it shares in training.
    cuts = {name: replace(cut, shared=None) for name, cut in cuts_of(assembly, planned.plan).items()}
    meter = TrafficMeter(engine=engine)
    discovery = discover_tasks(assembly, meter, clustered=True, previous=planned.clustering, round=round, cuts=cuts)
    graph = make_client_graph(
        assembly, meter, discovery, previous=planned.plan.adjacency, performance=performance, cuts=cuts
    )
    plan = replace(planned.plan, notes=())
    if models is not None:
        layers = measure_importance(assembly, meter, discovery, models=models, round=round, cuts=cuts)
        rank_plan = fit_ranks(assembly, discovery, layers, communicates=strategy_of(assembly.config).communicates)
        clients = _client_plans(assembly, discovery, rank_plan)
        plan = replace(plan, clients=clients, importance=layers, notes=rank_plan.notes)
    clients = tuple(
        replace(client, cluster=cluster) for client, cluster in zip(plan.clients, discovery.labels, strict=True)
    )
    plan = replace(
        plan,
        clients=assign_hosts(assembly, clients),
        adjacency=graph.adjacency,
        clustering=discovery.report,
        graph=_graph_entry(graph.adjacency),
        notes=(*discovery.notes, *plan.notes, *graph.warnings),
    )
    cut_traffic = tuple(meter.rows(round=round))
    return replace(
        planned, plan=plan, sketches=discovery.sketches, clustering=discovery.clustering, cut_traffic=cut_traffic
    )


def resize_adapters(models: ByClient, plan: Plan, assembly: Assembly) -> dict[str, Params]:
    """Resize every model to its client's ranks in this plan: the same function where they suffice, else the nearest."""
    layer_of, modules, scale = assembly.layer_of, assembly.site.modules, assembly.site.scale
    return {
        client.name: resize_ranks(models[client.name], {name: client.ranks[layer_of[name]] for name in modules}, scale)
        for client in plan.clients
    }


def cuts_of(assembly: Assembly, plan: Plan) -> dict[str, Cut]:
    """The cut of each cut client of this plan, by name."""
    cuts = {client.name: cut_of(assembly.config, client.cut, shared=client.sharing_cluster) for client in plan.clients}
    return {name: cut for name, cut in cuts.items() if cut is not None}


def client_side_names(assembly: Assembly, cuts: Mapping[str, Cut], models: ByClient) -> dict[str, frozenset[str]]:
    """The names of the trainable tensors on the client's side, for each client with a cut."""
    return {name: client_side(assembly, cut, models[name]) for name, cut in cuts.items()}


def full_model_sender(
    backbone: Backbone, config: Config, *, keeps_trained: bool, mask: Mask | None = None
) -> NewSender:
    """Make senders of whole models to receivers that keep what they trained last, or not; `mask` where there is one."""
    body_mask = None if mask is None else split_body_and_head(mask)[0]
    common = SharedModelCache(home=digest(trained_body(backbone, config)), mask=body_mask)
    return lambda: FullModelSender(common=common, counts_on_trained=keeps_trained)


def full_model_receiver(backbone: Backbone, config: Config, *, keeps_trained: bool) -> FullModelReceiver:
    """The receiver of whole models at a client or worker."""
    return FullModelReceiver(
        home=trained_body(backbone, config), keeps_trained=keeps_trained, trains_heads=backbone.vision is None
    )


def worker_sender(assembly: Assembly) -> NewSender:
    """Make senders of jobs to the workers of this assembly."""
    if not assembly.is_full:
        return AdapterSender
    return full_model_sender(assembly.site.backbone, assembly.config, keeps_trained=False)


def worker_receiver(assembly: Assembly) -> Receiver:
    """The receiver of jobs at a worker of this assembly."""
    if not assembly.is_full:
        return AdapterReceiver()
    return full_model_receiver(assembly.site.backbone, assembly.config, keeps_trained=False)


def check_clients(assembly: Assembly) -> None:
    """Raise an `AtlasError` where clients of an assembly cannot take part, as far as this is known without training."""
    if assembly.is_full:
        check_heads(assembly)
        check_training_memory(assembly)
    else:
        cuts_for_planning(assembly)


def make_plan(config: Config, *, on_event: OnEvent = ignore) -> Plan:
    """Make the plan of this config: clients measure their data, and no federated round is trained."""
    on_event(PhaseStarted("loading"))
    assembly = defer_late_clients(assemble(config))
    return plan_run(assembly, local_engine(assembly, on_event), on_event=on_event).plan
