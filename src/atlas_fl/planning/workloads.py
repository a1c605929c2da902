"""The two lines of work over one engine: adapters on texts or images, and whole weights on images.

A run's rounds, rules, records, resume and audit are the same code for both; what differs is here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atlas_fl.aggregation.diversity import Diversity, diversity
from atlas_fl.config import Config
from atlas_fl.config.schema import WHOLE
from atlas_fl.data.registry import check_one_kind, find_tasks
from atlas_fl.data.task import Task
from atlas_fl.events import OnEvent, PhaseStarted, Progress, ignore
from atlas_fl.models.vision import Vision, backbone_weights
from atlas_fl.params import ByClient, Params, digest
from atlas_fl.partial_sharing import hides_factors
from atlas_fl.planning.masks import check_heads
from atlas_fl.planning.plan import Plan, Planned
from atlas_fl.planning.planner import local_engine, plan_for, plan_whole
from atlas_fl.planning.ranks_and_cuts import cuts_while_planning
from atlas_fl.runtime.engine import Engine
from atlas_fl.runtime.local import WHOLE_ACTIONS, WholeEngine, whole_packs, within_memory
from atlas_fl.runtime.protocol.full_model_sync import Common, WholeReceiver, WholeSender, parted
from atlas_fl.runtime.protocol.model_sync import AdapterSender, NewSender
from atlas_fl.runtime.worker_pool import Bench, Bound, Packs, adapter_bench, adapter_packs
from atlas_fl.setup.assembly import (
    Assembly,
    ImageAssembly,
    assemble,
    assemble_images,
    backbone_of,
    body_of,
    put_off,
    vision_of,
)
from atlas_fl.setup.options import drawn_of, train_options, whole_options
from atlas_fl.sparse.masks import Mask
from atlas_fl.storage.ledger import payload_bytes


def whole_engine(assembly: ImageAssembly, on_event: OnEvent) -> WholeEngine:
    """The engine that holds every image client in this process and tells its progress."""
    return WholeEngine(
        site=assembly.site, on_progress=lambda action, done, total: on_event(Progress(action, done, total))
    )


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one line of work does its own way."""

    name: str
    assemble: Callable[..., Any]
    """(config, clients=, devices=, weights=, place=) -> data, model and devices of a config, or those that are given.
    """
    engine: Callable[[Any, OnEvent], Engine]
    """All clients in this process."""
    plan: Callable[..., Planned]
    """(assembly, engine, on_event=) -> what is decided before round one."""
    options: Callable[[Config, Planned], Any]
    """How clients train."""
    diversity: Callable[[Any, Planned, ByClient, ByClient], Diversity | None]
    """What a server step did to the differences between clients; None where that is not measured."""
    model_bytes: Callable[[Any], int]
    """Encoded size of the whole model."""
    frozen: Callable[[Any], Params]
    """The weights that workers share."""
    upon: Callable[[Any, Params], Any]
    """The assembly with such weights in the place of its own."""
    packs: Callable[[Any], Packs]
    """What of a round goes to one worker at once."""
    new_sender: Callable[[Any], NewSender]
    """How jobs are sent to the workers of an assembly."""
    bound: Bound
    """Where updates go that do not fit into memory."""
    bench: Callable[[Any], Bench]
    """What a worker works with that has assembled the run."""
    check: Callable[[Any], Any]
    """Raises an `AtlasError` where clients of an assembly cannot take part, as far as that can be told at once."""


def _upon_backbone(assembly: Assembly, weights: Params) -> Assembly:
    backbone = backbone_of(assembly.config, [client.task for client in assembly.clients], weights=weights)
    return replace(assembly, site=replace(assembly.site, backbone=backbone))


def _upon_vision(assembly: ImageAssembly, weights: Params) -> ImageAssembly:
    return replace(assembly, site=replace(assembly.site, vision=vision_of(assembly.config, weights=weights)))


def whole_sender(vision: Vision, config: Config, *, keeps: bool, mask: Mask | None = None) -> NewSender:
    """Senders of whole models to ends that keep what they trained last, or not; `mask` where there is one already."""
    known = None if mask is None else parted(mask)[0]
    common = Common(home=digest(body_of(vision, config)), mask=known, drawn=drawn_of(config))
    return lambda: WholeSender(common=common, counts_on_trained=keeps)


def _whole_bench(assembly: ImageAssembly) -> Bench:
    home = body_of(assembly.site.vision, assembly.config)
    return Bench(
        carry=lambda action, jobs: WHOLE_ACTIONS[action](jobs, assembly.site),
        receiver=WholeReceiver(home=home, keeps_trained=False),
    )


def _diversity(assembly: Assembly, planned: Planned, before: ByClient, after: ByClient) -> Diversity | None:
    """None where factors are at the clients alone: nobody has the updates of all."""
    if any(hides_factors(params) for params in before.values()):
        return None
    own = planned.plan.adjacency
    return diversity(before, after, clients=assembly.names, adjacency=own, scale=assembly.site.scale)


ADAPTERS = Line(
    name="adapters",
    assemble=assemble,
    engine=local_engine,
    plan=plan_for,
    options=lambda config, _: train_options(config),
    diversity=_diversity,
    model_bytes=lambda assembly: payload_bytes(assembly.site.backbone.frozen),
    frozen=lambda assembly: assembly.site.backbone.frozen,
    upon=_upon_backbone,
    packs=lambda assembly: adapter_packs(assembly.site),
    new_sender=lambda _: AdapterSender,
    bound=lambda _action, updates, _held: list(updates),
    bench=lambda assembly: adapter_bench(assembly.site),
    check=cuts_while_planning,
)
IMAGES = Line(
    name="images",
    assemble=assemble_images,
    engine=whole_engine,
    plan=plan_whole,
    options=lambda config, planned: whole_options(config, mask=planned.mask),
    # distances between all pairs of a hundred whole models would cost more than the round
    diversity=lambda *_: None,
    model_bytes=lambda assembly: payload_bytes(backbone_weights(assembly.site.vision)),
    frozen=lambda assembly: backbone_weights(assembly.site.vision),
    upon=_upon_vision,
    packs=lambda assembly: lambda action, jobs: whole_packs(action, jobs, assembly.site),
    new_sender=lambda assembly: whole_sender(assembly.site.vision, assembly.config, keeps=False),
    bound=within_memory,
    bench=_whole_bench,
    check=check_heads,
)


def line_of(tasks: Sequence[Task], *, tune: str) -> Line:
    """The line that these tasks belong to, with images as `--tune` says.

    Raises:
        ConfigError: some have images and others texts, which no one model reads.
    """
    check_one_kind(tasks)
    return IMAGES if any(task.images for task in tasks) and tune == WHOLE else ADAPTERS


def line_in(assembly: Any) -> Line:
    """The line of a run that is assembled."""
    return line_of([client.task for client in assembly.clients], tune=assembly.config.images.tune)


def line_for(config: Config) -> Line:
    """The line of the tasks that this config names."""
    return line_of(find_tasks(config.data.tasks, config.data.task), tune=config.images.tune)


def make_plan(config: Config, *, on_event: OnEvent = ignore) -> Plan:
    """The plan of this config: what takes passes over the clients' data is done, nothing is trained federally."""
    line = line_for(config)
    on_event(PhaseStarted("loading"))
    assembly = put_off(line.assemble(config))
    return line.plan(assembly, line.engine(assembly, on_event), on_event=on_event).plan
