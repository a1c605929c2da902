"""A plan from a config: every step before round one, in order.

What round one starts from: the warmed-up model at each client's own ranks, or an imported adapter.

Making a plan: phases 1 to 3 and the graph of phase 4, before anything is trained federally.

Making a plan of a run on images: the head, which weights may move, and what a round costs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.aggregation.graph import effective_neighbours
from atlas_fl.aggregation.matrices import eta_warnings
from atlas_fl.aggregation.mixing import realign
from atlas_fl.aggregation.shared_adapters import begun
from atlas_fl.config import Config
from atlas_fl.config.schema import SparseConfig
from atlas_fl.config.training_checks import no_clusters
from atlas_fl.data.clients import label_statistics, left_out_notes, shard_notes
from atlas_fl.data.registry import find_tasks
from atlas_fl.errors import BudgetError, ConfigError, ModelError
from atlas_fl.events import Note, OnEvent, PhaseStarted, Progress, ignore
from atlas_fl.models.lora import expand_rank
from atlas_fl.models.peft_io import import_adapter
from atlas_fl.models.vision import count_params
from atlas_fl.params import LORA_A, LORA_B, ByClient, Params, lora_modules, num_bytes, num_values
from atlas_fl.planning.host_assignment import with_hosts
from atlas_fl.planning.leakage import CutLeakage, every_cut, leakage_of
from atlas_fl.planning.masks import HELD, Prepared, prepare_whole, sparse_report, whole_costs
from atlas_fl.planning.plan import ClientPlan, Plan, Planned
from atlas_fl.planning.ranks_and_cuts import Fitted, cuts_while_planning, fit_ranks, measure_layers
from atlas_fl.planning.task_discovery import Identified, connect, identify
from atlas_fl.runtime.engine import Engine, Tally
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import Assembly, ImageAssembly, assemble, without_private
from atlas_fl.setup.options import cut_of, strategy_of
from atlas_fl.sparse.masks import num_kept
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
        name: select_client_side(assembly.site.backbone, models[name], blocks=cut.blocks, head=cut.head == "client")
        for name, cut in cuts.items()
    }


def plan_whole(assembly: ImageAssembly, engine: Engine, *, on_event: OnEvent = ignore) -> Planned:
    """Head, mask and costs of a run on whole models."""
    config = assembly.config
    if strategy_of(config).clustered:
        raise no_clusters(config.mixing.strategy)
    _check_devices(assembly)
    on_event(PhaseStarted("head and mask" if config.sparse.masked else "head"))
    prepared = prepare_whole(assembly, engine)
    size, data = len(assembly.clients), label_statistics(assembly.clients)
    plan = Plan(
        clients=client_plans(assembly, prepared),
        adjacency=np.zeros((size, size)),
        importance=np.zeros((size, 0)),
        layer_of={},
        lora={"alpha": None, "rslora": False},
        clustering={"method": "none", "labels": [0] * size},
        data=data,
        sparse=sparse_report(prepared.mask, config.sparse),
        notes=(
            *left_out_notes(assembly.clients),
            *shard_notes(data),
            *_idle(config.sparse),
            *_counts(assembly),
            *_carried(assembly, prepared),
        ),
    )
    for note in plan.notes:
        on_event(Note(note))
    return Planned(
        plan=plan,
        start=prepared.start,
        sketches=None,
        clustering=None,
        mask=prepared.mask,
        messages=prepared.messages,
    )


def _check_devices(assembly: ImageAssembly) -> None:
    """Nothing where every client's device holds what training needs of its model; else a `BudgetError` names one.

    Activations are in no prediction, so a device that passes may still be too small.
    """
    start = assembly.start()
    for client, device in zip(assembly.clients, assembly.devices, strict=True):
        if (needed := HELD * num_bytes(start[client.name])) > device.memory_bytes:
            raise BudgetError(
                f"{device.name} has {device.memory_bytes / 1e6:,.1f} MB of memory; weights, gradients and momentum"
                f" of {client.name} take {needed / 1e6:,.1f} MB; take a larger device, a smaller model or --tune lora"
            )


def client_plans(assembly: ImageAssembly, prepared: Prepared) -> tuple[ClientPlan, ...]:
    """What a round costs every client; nobody is in a cluster of its own."""
    costs = whole_costs(assembly, prepared)
    return tuple(
        ClientPlan(
            name=client.name,
            task=client.task.name,
            device=device.name,
            examples=len(client.train),
            cluster=0,
            **cost,
        )
        for client, device, cost in zip(assembly.clients, assembly.devices, costs, strict=True)
    )


def _counts(assembly: ImageAssembly) -> Iterator[str]:
    """A line for each task: how many parameters its model has, and how many of them train where no mask holds them."""
    masked = " where no mask holds them" if assembly.config.sparse.masked else ""
    for task in {client.task.name: client.task for client in assembly.clients}.values():
        frozen = assembly.config.images.frozen_blocks
        found = count_params(assembly.site.vision, num_labels=task.num_labels, frozen_blocks=frozen)
        yield (
            f"{task.name}: {found.backbone + found.head:,} parameters, {found.head:,} of them in the head;"
            f" {found.trainable:,} train{masked}"
        )


def _idle(sparse: SparseConfig) -> Iterator[str]:
    """What is said of masks where there is none; a sweep may try `none` beside masks of one sparsity."""
    if not sparse.masked and (changed := [one for one in fields(sparse) if getattr(sparse, one.name) != one.default]):
        flags = ", ".join(f"--{one.name.replace('_', '-')} {getattr(sparse, one.name)}" for one in changed)
        yield f"without --mask there is no mask, and {flags} does nothing"


def _carried(assembly: ImageAssembly, prepared: Prepared) -> Iterator[str]:
    """What is held of momentum between rounds, where it is."""
    if not assembly.config.images.carry_momentum:
        return
    mask, models = prepared.mask, prepared.start.values()
    values = [num_values(model) if mask is None else num_kept({key: mask[key] for key in model}) for model in models]
    yield f"{len(values)} clients keep their momentum between rounds: {4 * sum(values):,} bytes, in checkpoints too"
