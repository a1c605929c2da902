"""make_plan: a plan from a config, every step before round one in order; the initial models.

Round one starts from the warmed-up model at each client's own ranks, or from an imported adapter. Adapters and whole
models are sent differently (`setup.assembly.model_sender`, `model_receiver`); rounds, rules, records, resume and audit
are the same code for both (`Site.trainable`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atlas_fl.aggregation.mixing import resize_ranks
from atlas_fl.aggregation.secure_mean import secure_notes
from atlas_fl.client.privacy import privacy_note
from atlas_fl.config import Config
from atlas_fl.config.presets import dial_note
from atlas_fl.data.clients import data_notes, label_statistics, one_class_notes, shard_notes
from atlas_fl.data.heterogeneity import heterogeneity_notes
from atlas_fl.data.registry import find_tasks
from atlas_fl.errors import ConfigError
from atlas_fl.events import OnEvent, PhaseStarted, Progress, ignore, tell_notes
from atlas_fl.models.lora import expand_rank
from atlas_fl.models.registry import FAMILIES
from atlas_fl.params import ByClient, Params
from atlas_fl.planning.client_privacy import noise_notes
from atlas_fl.planning.host_assignment import assign_hosts
from atlas_fl.planning.leakage import CutLeakage, every_cut, leakage_of
from atlas_fl.planning.masks import fit_heads_and_mask, full_client_plans, full_notes, sparse_report
from atlas_fl.planning.plan import Plan, PlanResult
from atlas_fl.planning.ranks_and_cuts import cuts_for_planning, fit_clients, importance_by_client
from atlas_fl.planning.start_adapter import StartAdapter, load_start_adapter, start_model, start_notes
from atlas_fl.planning.task_discovery import discover_tasks, make_client_graph
from atlas_fl.runtime.engine import Engine, TrafficMeter
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import Assembly, assemble, defer_late_clients, truncation_notes, without_private
from atlas_fl.setup.options import cut_of, lora_of, paper_notes, strategy_of, train_options
from atlas_fl.split.channel import Cut
from atlas_fl.storage.ledger import LedgerRow


def initial_models(
    assembly: Assembly, warmed_models: ByClient, ranks: Sequence[Sequence[int]], *, start: StartAdapter | None = None
) -> dict[str, Params]:
    """Every client's model before round one, at its ranks per layer, in the clients' order."""
    models: dict[str, Params] = {}
    expanded: dict[tuple[int, tuple[int, ...]], Params] = {}  # of clients whose warm-up ended in one model
    for client, client_ranks in zip(assembly.clients, ranks, strict=True):
        fresh = assembly.initial_params(client, tuple(client_ranks))
        if start is None:
            warm = warmed_models[client.name]
            key = id(warm), tuple(client_ranks)
            if key not in expanded:
                expanded[key] = expand_rank(fresh, warm, assembly.site.scale)
            models[client.name] = expanded[key]
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
    if (family := assembly.site.backbone.family).stock:
        raise ConfigError(
            f"{config.model.model!r} ({family.model_type}) runs through the stock path and is not cut; leakage is"
            f" measured on models of {', '.join(sorted(FAMILIES))}"
        )
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
    config, strategy = assembly.config, strategy_of(assembly.config)
    start = load_start_adapter(assembly)  # refused before anything is measured
    private = privacy_note(
        [len(client.train) for client in assembly.clients], train_options(config, with_images=assembly.has_images)
    )
    cuts = cuts_for_planning(assembly)
    meter = TrafficMeter(engine=engine)
    if strategy.clustered or config.clustering.fingerprint == "delta":
        on_event(PhaseStarted("fingerprints"))
    discovery = discover_tasks(assembly, meter, clustered=strategy.clustered, cuts=cuts)
    graph = make_client_graph(assembly, meter, discovery, cuts=cuts)
    mask, messages = None, tuple[LedgerRow, ...]()
    if assembly.is_full:
        on_event(PhaseStarted("head and mask" if config.sparse.has_mask else "head"))
        models, mask, messages = fit_heads_and_mask(assembly, meter, discovery.warmed_models)
        importance = np.zeros((len(assembly.clients), 0))
        clients = full_client_plans(assembly, models, mask, discovery.labels)
        notes = full_notes(assembly, models)
    else:
        on_event(PhaseStarted("ranks"))
        importance = discovery.inside_clusters(
            importance_by_client(assembly, meter, discovery.warmed_models, cuts=cuts)
        )
        clients, notes = fit_clients(assembly, discovery.labels, importance)
        clients = assign_hosts(assembly, clients)
    data = label_statistics(assembly.clients)
    plan = Plan(
        clients=clients,
        adjacency=graph.adjacency,
        importance=importance,
        layer_of={} if assembly.is_full else assembly.layer_of,
        lora={**lora_of(config)},
        clustering=discovery.report,
        data=data,
        sparse=sparse_report(mask, config.sparse),
        notes=(
            *dial_note(config),
            *paper_notes(config, [client.task for client in assembly.clients], is_full=assembly.is_full),
            *private,
            *data_notes(assembly.clients),
            *truncation_notes(assembly.site.data, assembly.site.backbone),
            *shard_notes(data),
            *one_class_notes(assembly.clients),
            *heterogeneity_notes(assembly.clients),
            *discovery.notes,
            *notes,
            *(start_notes(start, assembly, [client.ranks for client in clients]) if start is not None else ()),
            *graph.warnings,
        ),
    )
    if not assembly.is_full:
        models = initial_models(assembly, discovery.warmed_models, [client.ranks for client in clients], start=start)
        plan_cuts = cuts_of(assembly, plan)
        models = {name: without_private(assembly, params, plan_cuts.get(name)) for name, params in models.items()}
    if config.needs_sums:
        groups = strategy.sum_groups(plan.federation(), models, round=1)
        seen = secure_notes(groups) if config.mixing.secure else ()
        noise = noise_notes(config, assembly.names, groups, models) if config.training.dp == "client" else ()
        plan = replace(plan, notes=(*plan.notes, *seen, *noise))
    tell_notes(on_event, *plan.notes)
    return PlanResult(
        plan=plan,
        initial_models=models,
        sketches=discovery.sketches,
        clustering=discovery.clustering,
        mask=mask,
        messages=messages,
        cut_traffic=tuple(meter.rows(round=0)),
    )


def recluster(
    planned: PlanResult,
    assembly: Assembly,
    engine: Engine,
    *,
    round: int,
    performance: np.ndarray,
    models: ByClient | None,
) -> PlanResult:
    """Cluster the clients and build the graph again before this round; labels keep their meaning.

    With `models`, the clients' current ones, ranks are chosen again by the importance measured there; else they stay.
    """
    cuts = cuts_of(assembly, planned.plan)
    meter = TrafficMeter(engine=engine)
    discovery = discover_tasks(assembly, meter, clustered=True, previous=planned.clustering, round=round, cuts=cuts)
    graph = make_client_graph(
        assembly, meter, discovery, previous=planned.plan.adjacency, performance=performance, cuts=cuts
    )
    notes: tuple[str, ...] = ()
    if models is None:
        labelled = zip(planned.plan.clients, discovery.labels, strict=True)
        clients = tuple(replace(client, cluster=cluster) for client, cluster in labelled)
        importance = planned.plan.importance
    else:
        importance = discovery.inside_clusters(importance_by_client(assembly, meter, models, round=round, cuts=cuts))
        clients, notes = fit_clients(assembly, discovery.labels, importance)
    plan = replace(
        planned.plan,
        clients=assign_hosts(assembly, clients),
        adjacency=graph.adjacency,
        importance=importance,
        clustering=discovery.report,
        notes=(*discovery.notes, *notes, *graph.warnings),
    )
    return replace(
        planned,
        plan=plan,
        sketches=discovery.sketches,
        clustering=discovery.clustering,
        cut_traffic=tuple(meter.rows(round=round)),
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
    cuts = {client.name: cut_of(assembly.config, client.cut) for client in plan.clients}
    return {name: cut for name, cut in cuts.items() if cut is not None}


def make_plan(config: Config, *, on_event: OnEvent = ignore) -> Plan:
    """Make the plan of this config: clients measure their data, and no federated round is trained."""
    on_event(PhaseStarted("loading"))
    assembly = defer_late_clients(assemble(config))
    return plan_run(assembly, local_engine(assembly, on_event), on_event=on_event).plan
