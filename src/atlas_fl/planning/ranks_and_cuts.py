"""Phases 2 and 3: the importance of layers, the ranks of every client, and where its model is cut.

Ranks are chosen by measured importance under each device's memory and upload. Of the cuts that fit a device, the one
with the best weighted score is taken, or the one with the smallest predicted round time:

    score = 0.35 memory + 0.30 communication + 0.25 importance + 0.10 balance, each from 0 to 1

| part | what it is |
|---|---|
| memory | share of the device's memory that the client's half leaves free |
| communication | share of the round that the link does not take: 1 - link seconds / all seconds |
| importance | share of the utility sum I * r above the cut, where the gradient has crossed no wire |
| balance | lesser of the two sides' computing seconds over the greater |

The weights are those of the first ATLAS; its communication term counted layers, this one counts seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atlas_fl.client.importance import IMPORTANCE
from atlas_fl.client.job import Job
from atlas_fl.client.options import ImportanceOptions
from atlas_fl.config.schema import AUTO, NONE, cut_setting
from atlas_fl.data.clients import ClientData, majority
from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.params import ByClient
from atlas_fl.planning.planning_costs import IMPORTANCE_BATCHES, planning_bytes, predict_planning
from atlas_fl.planning.round_costs import (
    assign_client_ranks,
    check_costs,
    crossing_bytes,
    evaluation_bytes,
    predict_client_round,
    server_memory,
)
from atlas_fl.planning.task_discovery import TaskDiscovery
from atlas_fl.ranks.allocation import RankAssignment, cluster_importance, complexity_factors
from atlas_fl.ranks.cost_model import RoundPrediction, cut_utilities
from atlas_fl.ranks.devices import Device
from atlas_fl.runtime.engine import Engine, run_on_all_clients
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import cut_of, warmup_options
from atlas_fl.split.channel import NO_CUTS, Cut

SCORE_WEIGHTS: Mapping[str, float] = {"memory": 0.35, "communication": 0.30, "importance": 0.25, "balance": 0.10}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A cut that fits, with what it costs in a round."""

    blocks: int
    """Blocks on the client."""
    memory: float
    """Share of the device's memory that is used, 0 to 1."""
    importance: float
    """Share of the utility above the cut, 0 to 1."""
    client_seconds: float
    server_seconds: float
    link_seconds: float

    @property
    def seconds(self) -> float:
        """The whole round; no two parts of it run at once."""
        return self.client_seconds + self.server_seconds + self.link_seconds


def score_terms(candidate: Candidate) -> dict[str, float]:
    """The four parts of the score before they are weighed, each from 0 to 1."""
    sides = (candidate.client_seconds, candidate.server_seconds)
    return {
        "memory": 1 - candidate.memory,
        "communication": 1 - candidate.link_seconds / candidate.seconds if candidate.seconds else 1.0,
        "importance": candidate.importance,
        "balance": min(sides) / max(sides) if max(sides) else 1.0,
    }


def score_cut(candidate: Candidate) -> float:
    """The weighted sum of `score_terms`, 0 to 1."""
    return sum(SCORE_WEIGHTS[name] * value for name, value in score_terms(candidate).items())


def choose_cut(candidates: Sequence[Candidate], objective: str) -> tuple[Candidate, str]:
    """The best of at least one candidate by `score` or `time`, and the reason in words, with the other's choice.

    Of equal candidates it is the one with fewer blocks.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.blocks)
    among = f"{len(ordered)} cut{'s' if len(ordered) > 1 else ''} that fit{'' if len(ordered) > 1 else 's'}"
    quickest, best = min(ordered, key=lambda candidate: candidate.seconds), max(ordered, key=score_cut)
    time, worth = f"smallest round time, {quickest.seconds:.1f} s", f"best score, {score_cut(best):.2f}"
    if objective == "time":
        return quickest, f"{time}, of {among}; {_other_choice(worth, best, quickest)}"
    parts = ", ".join(f"{name} {value:.2f}" for name, value in score_terms(best).items())
    return best, f"{worth}, of {among} ({parts}); {_other_choice(time, quickest, best)}"


def _other_choice(text: str, other: Candidate, chosen: Candidate) -> str:
    return f"{text}, {'as well' if other is chosen else f'at block {other.blocks}'}"


@dataclass(frozen=True, kw_only=True)
class ClientFit:
    """Ranks, cut and predicted round of one client on its device."""

    assignment: RankAssignment
    prediction: RoundPrediction
    cut: Cut | None
    reason: str
    """The reason for this cut, or for none; empty where splitting was not asked for."""


def fit_client(
    assembly: Assembly,
    client: ClientData,
    device: Device,
    importance: np.ndarray,
    *,
    communicates: bool,
    factor: float = 1.0,
) -> ClientFit:
    """Ranks and cut of one client, from its importance (layers,) by layer; `factor` scales the budget of the ranks.

    With `auto` a device that can hold the model gets no cut. Raises `BudgetError` where nothing fits, `ConfigError`
    for a cut beyond the model.
    """
    setting = _client_cut_setting(assembly, client, device)

    def fit(blocks: int | None, reason: str = "") -> ClientFit:
        cut = cut_of(assembly.config, blocks)
        assignment = assign_client_ranks(assembly, client, device, importance, factor=factor, cut=cut)
        prediction = predict_client_round(
            assembly, client, device, assignment.ranks, cut=cut, communicates=communicates
        )
        check_costs(client, device, {"a round": _predicted_costs(prediction)})
        return ClientFit(assignment=assignment, prediction=prediction, cut=cut, reason=reason)

    if setting not in (NONE, AUTO):
        return fit(_check_block(int(setting), assembly), "set by --split")
    reason = "the device holds the whole model"
    if setting == NONE:
        reason = "" if assembly.config.split.split == NONE else "left whole by --split"
    try:
        return fit(None, reason)
    except BudgetError as error:
        fits, refusals = _fit_every_cut(fit, assembly)
        if setting == NONE and fits:
            raise BudgetError(f"{error}; or cut the model with --split auto, which fits") from error
        if setting == NONE:
            raise
        if not fits:
            raise BudgetError(
                f"{device.name} fits no cut of {assembly.site.backbone.name}; with one block on it:"
                f" {[*refusals, error][0]}"
            ) from error
    best, reason = choose_cut(
        [_candidate(client_fit, importance) for client_fit in fits], assembly.config.split.split_objective
    )
    return fit(best.blocks, reason)


def _fit_every_cut(fit: Callable[[int], ClientFit], assembly: Assembly) -> tuple[list[ClientFit], list[BudgetError]]:
    """The fit of every cut that the device can hold, and the errors of the others."""
    fits = list[ClientFit]()
    refusals = list[BudgetError]()
    # models of images are not cut, nor those whose lower blocks have no adapters
    is_cuttable = assembly.site.backbone.vision is None and assembly.config.model.adapted_blocks is None
    for blocks in range(1, assembly.shape.num_layers if is_cuttable else 1):
        try:
            fits.append(fit(blocks))
        except BudgetError as error:
            refusals.append(error)
    return fits, refusals


def cuts_for_planning(assembly: Assembly) -> dict[str, Cut]:
    """The cuts of clients while they are planned, by name; without clients whose model is whole then.

    As `--split` says; with `auto`, which decides by what is measured, a device that cannot hold the model has one block
    until then. Raises `BudgetError` for a device that not even the smallest ranks fit, before anything is measured.
    """
    cuts, uniform = {}, np.full(assembly.shape.num_layers, 1.0 / assembly.shape.num_layers)
    for client, device in zip(assembly.clients, assembly.devices, strict=True):
        fit = fit_client(assembly, client, device, uniform, communicates=True)
        if fit.cut is not None:
            is_auto = _client_cut_setting(assembly, client, device) == AUTO
            cuts[client.name] = replace(fit.cut, blocks=1) if is_auto else fit.cut
        check_costs(client, device, predict_planning(assembly, client, device, cuts.get(client.name)))
    return cuts


def _client_cut_setting(assembly: Assembly, client: ClientData, device: Device) -> str:
    return cut_setting(assembly.config.split.split, client=client.name, task=client.task.name, device=device.name)


def share_server_adapters(
    assembly: Assembly, fits: Sequence[ClientFit], clusters: Sequence[int], *, communicates: bool
) -> list[ClientFit]:
    """The fits when the cut clients of a cluster share the adapters above their cuts.

    A shared block has the largest rank that one of those who share it was given there: no device holds it or sends it,
    so no device's budget is in its way. Who is in no cluster (-1) shares with nobody.
    """
    shared_fits = list(fits)
    for index, client_fit in enumerate(fits):
        if client_fit.cut is None or clusters[index] < 0:
            continue
        sharing = [fit for fit, cluster in zip(fits, clusters, strict=True) if cluster == clusters[index] and fit.cut]
        ranks = tuple(
            rank if layer < client_fit.cut.blocks else _largest_rank(sharing, layer)
            for layer, rank in enumerate(client_fit.assignment.ranks)
        )
        client, device = assembly.clients[index], assembly.devices[index]
        cut = replace(client_fit.cut, shared=clusters[index])
        prediction = predict_client_round(assembly, client, device, ranks, cut=cut, communicates=communicates)
        shared_fits[index] = replace(
            client_fit, assignment=replace(client_fit.assignment, ranks=ranks), prediction=prediction, cut=cut
        )
    return shared_fits


def _largest_rank(sharing: Sequence[ClientFit], layer: int) -> int:
    return max(fit.assignment.ranks[layer] for fit in sharing if fit.cut is not None and fit.cut.blocks <= layer)


def num_owners(fits: Sequence[ClientFit], cut: Cut, layers: int) -> tuple[int, ...]:
    """By block, how many clients share the adapters that the server has there for this one; 1 where it shares none."""
    sharing = [fit.cut for fit in fits if fit.cut is not None and fit.cut.shared == cut.shared is not None]
    return tuple(max(1, sum(shared_cut.blocks <= layer for shared_cut in sharing)) for layer in range(layers))


def _candidate(fit: ClientFit, importance: np.ndarray) -> Candidate:
    assert fit.cut is not None
    prediction, blocks = fit.prediction, fit.cut.blocks
    below, above = cut_utilities(importance, fit.assignment.ranks)[blocks]
    return Candidate(
        blocks=blocks,
        memory=prediction.memory.used_bytes / prediction.memory.total_bytes,
        importance=float(above / (below + above)) if below + above else 0.0,
        client_seconds=prediction.compute_seconds,
        server_seconds=prediction.server_seconds,
        link_seconds=prediction.transfer_seconds,
    )


def _check_block(blocks: int, assembly: Assembly) -> int:
    last_block = assembly.shape.num_layers - 1
    if not 1 <= blocks <= last_block:
        allowed = f"none, auto, or 1 to {last_block}" if last_block else "none"
        raise ConfigError(
            f"--split cuts at block {blocks}, and {assembly.site.backbone.name} has {last_block + 1} blocks with at"
            f" least one on each side; allowed: {allowed}"
        )
    return blocks


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The ranks of all clients with what they were chosen from."""

    by_client: tuple[dict[str, Any], ...]
    """`ranks`, `budget_bytes`, `largest_rank`, `memory`, `predicted`, `cut`, `split` and `planning` of each client."""
    notes: tuple[str, ...]


def measure_importance(
    assembly: Assembly,
    engine: Engine,
    discovery: TaskDiscovery,
    *,
    models: ByClient | None = None,
    round: int = 0,
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> np.ndarray:
    """Importance of every layer, (n, layers) float64; clients of one cluster get their mean.

    Measured at these models, or at the warmed-up ones, over the cuts of those that have one.
    A rule without clusters keeps every client's own: nothing may be shared that it does not share.
    """
    importance = importance_by_client(
        assembly, engine, discovery.warmed_models if models is None else models, round=round, cuts=cuts
    )
    return importance if discovery.clustering is None else cluster_importance(importance, discovery.labels)


def importance_by_client(
    assembly: Assembly, engine: Engine, models: ByClient, *, round: int = 0, cuts: Mapping[str, Cut] = NO_CUTS
) -> np.ndarray:
    """Importance of every layer as each client measures it at its model, (n, layers) float64; rows sum to one."""
    config = assembly.config
    options = ImportanceOptions(kind=config.ranks.importance, train=warmup_options(config), batches=IMPORTANCE_BATCHES)
    jobs = [
        Job(client=name, params=models[name], round=round, options=options, cut=cuts.get(name))
        for name in assembly.names
    ]
    return np.stack([update.params[IMPORTANCE].numpy() for update in run_on_all_clients(engine, "importance", jobs)])


def fit_ranks(assembly: Assembly, discovery: TaskDiscovery, layers: np.ndarray, *, communicates: bool) -> RankPlan:
    """Fit ranks and cuts of all clients to their devices' memory and upload, and predict a round's costs."""
    config = assembly.config.ranks
    factors = np.ones(len(assembly.clients))
    if config.complexity_scaling:
        # error of guessing: one less the share of the most frequent label; one without classes
        difficulty = np.array([1.0 - (majority(client.train) or 0.0) for client in assembly.clients])
        factors = complexity_factors(difficulty, discovery.labels)
    fits = [
        fit_client(assembly, client, device, importance, factor=float(factor), communicates=communicates)
        for client, device, importance, factor in zip(assembly.clients, assembly.devices, layers, factors, strict=True)
    ]
    notes = list(dict.fromkeys(note for fit in fits for note in fit.assignment.notes))
    if assembly.config.split.server_adapters == "per_cluster":
        fits = share_server_adapters(assembly, fits, discovery.labels, communicates=communicates)
    planning_cuts = cuts_for_planning(assembly) if any(fit.cut for fit in fits) else NO_CUTS
    entries = [
        _client_entry(assembly, client, device, fit, fits, planning_cuts)
        for client, device, fit in zip(assembly.clients, assembly.devices, fits, strict=True)
    ]
    return RankPlan(
        by_client=tuple(entries), notes=(*notes, *_cut_notes(assembly, entries), *_planning_notes(assembly, entries))
    )


def _cut_notes(assembly: Assembly, fits: Sequence[Mapping[str, Any]]) -> list[str]:
    cut = [client for client, fit in zip(assembly.clients, fits, strict=True) if fit["cut"] is not None]
    if not cut:
        return []
    notes = [f"{len(cut)} of {len(fits)} models are cut, and so they are while they are planned"]
    if any(client.task.writes for client in cut):
        notes.append("clients with a cut write no answers, so there is no ROUGE of theirs")
    return notes


def _planning_notes(assembly: Assembly, fits: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note on devices with too little memory for planning, which needs two models or whole gradients at once."""
    too_small = []
    for client, device, fit in zip(assembly.clients, assembly.devices, fits, strict=True):
        phase, memory_bytes = max(
            ((name, cost["memory_bytes"]) for name, cost in fit["planning"].items()), key=lambda item: item[1]
        )
        if memory_bytes > device.memory_bytes:
            too_small.append(
                f"{client.name} ({memory_bytes / 1e6:,.1f} MB for its {phase}, of {device.memory_bytes / 1e6:,.1f})"
            )
    if not too_small:
        return []
    shown = ", ".join(too_small[:3]) + (f" and {len(too_small) - 3} more" if len(too_small) > 3 else "")
    return [f"planning takes more memory than the device has of {shown}; lower --batch-size or --fingerprint-blocks"]


def _client_entry(
    assembly: Assembly,
    client: ClientData,
    device: Device,
    fit: ClientFit,
    fits: Sequence[ClientFit],
    planning_cuts: Mapping[str, Cut],
) -> dict[str, Any]:
    prediction, assignment, cut = fit.prediction, fit.assignment, fit.cut
    split: dict[str, Any] = {"reason": fit.reason} if fit.reason else {}
    if cut is not None and cut.shared is not None:
        split["shared"] = cut.shared
    if assembly.config.training.multitask:
        split["shared"] = 0  # `local` forms no clusters, so all are in cluster 0
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
        if client.name in planning_cuts:
            split["planning_bytes"] = planning_bytes(assembly, client, planning_cuts[client.name])
    return {
        "cut": None if cut is None else cut.blocks,
        "split": split,
        "planning": predict_planning(assembly, client, device, planning_cuts.get(client.name)),
        "ranks": assignment.ranks,
        "budget_bytes": assignment.budget_bytes,
        "largest_rank": min(assignment.largest_rank, device.max_rank),
        "memory": {"total": prediction.memory.total_bytes, **prediction.memory.parts},
        "predicted": _predicted_costs(prediction),
    }


def _predicted_costs(prediction: RoundPrediction) -> dict[str, Any]:
    return {
        "up_bytes": prediction.up_bytes,
        "down_bytes": prediction.down_bytes,
        "memory_bytes": prediction.memory.used_bytes,
        "seconds": prediction.seconds,
    }
