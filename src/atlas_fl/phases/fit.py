"""Phase 2: how much each layer matters to each client, and the ranks and the cut that fit its device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from atlas_fl.assemble import Assembly
from atlas_fl.clients.base import Job
from atlas_fl.clients.importance import IMPORTANCE, ImportanceOptions
from atlas_fl.engines.base import Engine, run_all
from atlas_fl.options import warmup_options
from atlas_fl.phases.cost import crossing_bytes, evaluation_bytes, server_memory
from atlas_fl.phases.cut import Fit, cuts_while_planning, decide, num_owners, shared_fits
from atlas_fl.phases.effort import planning_efforts
from atlas_fl.phases.identify import Identified
from atlas_fl.phases.measuring import BATCHES, planning_bytes
from atlas_fl.ranks.devices import Device
from atlas_fl.ranks.importance import cluster_importance, complexity_factors
from atlas_fl.split.step import NO_CUTS, Cut
from atlas_fl.tasks.clients import ClientData, majority
from atlas_fl.types import ByClient


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The ranks of all clients with what they were chosen from."""

    by_client: tuple[dict[str, Any], ...]
    """`ranks`, `budget_bytes`, `largest_rank`, `memory`, `predicted`, `cut`, `split` and `planning` of each client."""
    notes: tuple[str, ...]


def measure_layers(
    assembly: Assembly,
    engine: Engine,
    found: Identified,
    *,
    models: ByClient | None = None,
    round: int = 0,
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> np.ndarray:
    """Importance of every layer, (n, layers) float64; clients of one cluster get their mean.

    Measured at these models, or at the warmed-up ones, over the cuts of those that have one.
    A rule without clusters keeps every client's own: nothing may be shared that it does not share.
    """
    own = own_importance(assembly, engine, found.warmed if models is None else models, round=round, cuts=cuts)
    return own if found.clustering is None else cluster_importance(own, found.labels)


def own_importance(
    assembly: Assembly, engine: Engine, models: ByClient, *, round: int = 0, cuts: Mapping[str, Cut] = NO_CUTS
) -> np.ndarray:
    """Importance of every layer as each client measures it at its model, (n, layers) float64; rows sum to one."""
    config = assembly.config
    options = ImportanceOptions(kind=config.ranks.importance, train=warmup_options(config), batches=BATCHES)
    jobs = [
        Job(client=name, params=models[name], round=round, options=options, cut=cuts.get(name))
        for name in assembly.names
    ]
    return np.stack([update.params[IMPORTANCE].numpy() for update in run_all(engine, "importance", jobs)])


def fit_ranks(assembly: Assembly, found: Identified, layers: np.ndarray, *, communicates: bool) -> Fitted:
    """Ranks per layer and client under each device's memory and upload, cuts, and what a round will cost there."""
    config = assembly.config.ranks
    factors = np.ones(len(assembly.clients))
    if config.complexity_scaling:
        factors = complexity_factors(np.array([_difficulty(client) for client in assembly.clients]), found.labels)
    decided = [
        decide(assembly, client, device, importance, factor=float(factor), communicates=communicates)
        for client, device, importance, factor in zip(assembly.clients, assembly.devices, layers, factors, strict=True)
    ]
    notes = list(dict.fromkeys(note for fit in decided for note in fit.assignment.notes))
    if assembly.config.split.server_adapters == "per_cluster":
        decided = shared_fits(assembly, decided, found.labels, communicates=communicates)
    planned = cuts_while_planning(assembly) if any(fit.cut for fit in decided) else NO_CUTS
    fits = [
        _entry(*own, decided, planned) for own in zip(repeat(assembly), assembly.clients, assembly.devices, decided)
    ]
    return Fitted(by_client=tuple(fits), notes=(*notes, *_cut_notes(assembly, fits), *_planning_notes(assembly, fits)))


def _cut_notes(assembly: Assembly, fits: Sequence[Mapping[str, Any]]) -> list[str]:
    cut = [client for client, fit in zip(assembly.clients, fits, strict=True) if fit["cut"] is not None]
    if not cut:
        return []
    notes = [f"{len(cut)} of {len(fits)} models are cut, and so they are while they are planned"]
    if any(client.task.writes for client in cut):
        notes.append("clients with a cut write no answers, so there is no ROUGE of theirs")
    return notes


def _planning_notes(assembly: Assembly, fits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who may have too small a device for being planned, though not for training: two models, or whole gradients."""
    small = []
    for client, device, fit in zip(assembly.clients, assembly.devices, fits, strict=True):
        phase, most = max(
            ((phase, own["memory_bytes"]) for phase, own in fit["planning"].items()), key=lambda own: own[1]
        )
        if most > device.memory_bytes:
            small.append(f"{client.name} ({most / 1e6:,.1f} MB for its {phase}, of {device.memory_bytes / 1e6:,.1f})")
    if not small:
        return []
    shown = ", ".join(small[:3]) + (f" and {len(small) - 3} more" if len(small) > 3 else "")
    return [f"planning takes more memory than the device has of {shown}; lower --batch-size or --fingerprint-blocks"]


def _difficulty(client: ClientData) -> float:
    """How far guessing is from right: one less the share of the most frequent label; one without classes."""
    return 1.0 - (majority(client.train) or 0.0)


def _entry(
    assembly: Assembly,
    client: ClientData,
    device: Device,
    fit: Fit,
    fits: Sequence[Fit],
    planned: Mapping[str, Cut],
) -> dict[str, Any]:
    prediction, assignment, cut = fit.prediction, fit.assignment, fit.cut
    split: dict[str, Any] = {"reason": fit.reason} if fit.reason else {}
    if cut is not None and cut.shared is not None:
        split["shared"] = cut.shared
    if cut is not None:
        split |= {
            "crossing_bytes": crossing_bytes(assembly, client, cut),
            "evaluation_bytes": evaluation_bytes(assembly, client, cut),
            "client_seconds": prediction.compute_seconds,
            "server_seconds": prediction.server_seconds,
            "link_seconds": prediction.transfer_seconds,
            "server_memory": server_memory(
                assembly, client, cut, assignment.ranks, owners=num_owners(fits, cut, assembly.shape.num_layers)
            ),
        }
        if client.name in planned:
            split["planning_bytes"] = planning_bytes(assembly, client, planned[client.name])
    return {
        "cut": None if cut is None else cut.blocks,
        "split": split,
        "planning": planning_efforts(assembly, client, device, planned.get(client.name)),
        "ranks": assignment.ranks,
        "budget_bytes": assignment.budget_bytes,
        "largest_rank": min(assignment.largest_rank, device.max_rank),
        "memory": {"total": prediction.memory.total_bytes, **dict(prediction.memory.parts())},
        "predicted": {
            "up_bytes": prediction.up_bytes,
            "down_bytes": prediction.down_bytes,
            "memory_bytes": prediction.memory.used_bytes,
            "seconds": prediction.seconds,
        },
    }
