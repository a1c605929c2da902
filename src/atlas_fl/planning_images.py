"""Making a plan of a run on images: the head, which weights may move, and what a round costs."""

from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from atlas_fl.assemble_images import ImageAssembly
from atlas_fl.config.images import SparseConfig
from atlas_fl.config.names import no_clusters
from atlas_fl.engines.base import Engine
from atlas_fl.errors import BudgetError
from atlas_fl.events import Note, OnEvent, PhaseStarted, ignore
from atlas_fl.models.vision import count
from atlas_fl.options import strategy_of
from atlas_fl.phases.whole import Prepared, prepare_whole
from atlas_fl.phases.whole_costs import HELD, sparse_report, whole_costs
from atlas_fl.plan import ClientPlan, Plan
from atlas_fl.planning import Planned
from atlas_fl.sparse.algebra import num_kept
from atlas_fl.tasks.clients import left_out_notes
from atlas_fl.tasks.heterogeneity import label_statistics, shard_notes
from atlas_fl.tree import num_bytes, num_values


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
        found = count(assembly.site.vision, num_labels=task.num_labels, frozen_blocks=frozen)
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
