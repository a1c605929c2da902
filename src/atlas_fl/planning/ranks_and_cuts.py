"""Phases 2 and 3: the importance of layers, and of every client ranks, cut and predicted costs.

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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from atlas_fl.client.importance import IMPORTANCE
from atlas_fl.client.job import make_jobs
from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.config.schema import AUTO, NONE, cut_setting
from atlas_fl.data.clients import ClientData, majority
from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.params import ByClient
from atlas_fl.planning import round_costs
from atlas_fl.planning.masks import check_heads, check_training_memory
from atlas_fl.planning.plan import ClientPlan, Plan
from atlas_fl.ranks import allocation, cost_model, devices
from atlas_fl.runtime.engine import Engine, run_on_all_clients
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import cut_of, importance_options
from atlas_fl.split.channel import NO_CUTS, Cut

SCORE_WEIGHTS: Mapping[str, float] = {"memory": 0.35, "communication": 0.30, "importance": 0.25, "balance": 0.10}


class ClientFit(Frozen):
    """Ranks, cut and predicted round of one client on its device."""

    assignment: allocation.RankAssignment
    prediction: cost_model.RoundPrediction
    cut: Cut | None
    reason: str
    """The reason for this cut, or for none; empty where splitting was not asked for."""


def score_terms(fit: ClientFit, importance: np.ndarray) -> dict[str, float]:
    """The four parts of the score of a cut before they are weighed, each from 0 to 1."""
    assert fit.cut is not None, "cuts are scored"
    prediction, memory = fit.prediction, fit.prediction.memory
    below, above = cost_model.cut_utilities(importance, fit.assignment.ranks)[fit.cut.blocks]
    sides = (prediction.compute_seconds, prediction.server_seconds)
    return {
        "memory": 1 - memory.used_bytes / memory.total_bytes,
        "communication": 1 - prediction.transfer_seconds / prediction.seconds if prediction.seconds else 1.0,
        "importance": float(above / (below + above)) if below + above else 0.0,
        "balance": min(sides) / max(sides) if max(sides) else 1.0,
    }


def score_cut(fit: ClientFit, importance: np.ndarray) -> float:
    """The weighted sum of `score_terms`, 0 to 1."""
    return sum(SCORE_WEIGHTS[name] * value for name, value in score_terms(fit, importance).items())


def choose_cut(fits: Sequence[ClientFit], importance: np.ndarray, objective: str) -> tuple[ClientFit, str]:
    """The best of at least one cut, with fewer blocks first, by `score` or `time`, and the reason in words.

    Of equal ones it is the first.
    """
    among = f"of {len(fits)} that fit"
    if objective == "time":
        quickest = min(fits, key=lambda fit: fit.prediction.seconds)
        return quickest, f"smallest round time, {quickest.prediction.seconds:.1f} s, {among}"
    best = max(fits, key=lambda fit: score_cut(fit, importance))
    parts = ", ".join(f"{name} {value:.2f}" for name, value in score_terms(best, importance).items())
    return best, f"best score, {score_cut(best, importance):.2f}, {among} ({parts})"


def fit_client(
    assembly: Assembly, client: ClientData, device: devices.Device, importance: np.ndarray, *, factor: float = 1.0
) -> ClientFit:
    """Ranks and cut of one client, from its importance (layers,) by layer; `factor` scales the budget of the ranks.

    With `auto` a device that can hold the model gets no cut. Raises `BudgetError` where nothing fits, `ConfigError`
    for a cut beyond the model.
    """
    config, setting = assembly.config, _client_cut_setting(assembly, client, device)
    memory_budget = None
    if config.ranks.budget == "fractions":
        memory_budget = cost_model.fraction_budget(
            device, base=config.ranks.alpha_base, activations=config.ranks.alpha_act, optimizer=config.ranks.alpha_opt
        )

    def fit(blocks: int | None, reason: str) -> ClientFit:
        cut = cut_of(config, blocks)
        assignment = allocation.assign_ranks(
            assembly.shape,
            device,
            importance=importance,
            rule=config.ranks.ranks,
            candidates=config.ranks.candidates,
            step=round_costs.heaviest_step(assembly, client, cut),
            allowance_bytes=config.ranks.adapter_bytes,
            memory_budget=memory_budget,
            factor=factor,
        )
        prediction = round_costs.predict_client_round(assembly, client, device, assignment.ranks, cut=cut)
        return ClientFit(assignment=assignment, prediction=prediction, cut=cut, reason=reason)

    if setting == NONE:
        return fit(None, "" if config.split.split == NONE else "left whole by --split")
    if setting != AUTO:
        return fit(_check_block(int(setting), assembly), "set by --split")
    try:
        return fit(None, "the device holds the whole model")
    except BudgetError as error:
        fits, refusals = list[ClientFit](), list[BudgetError]()
        # models of images are not cut, nor those whose lower blocks have no adapters
        is_cuttable = assembly.site.backbone.vision is None and config.model.adapted_blocks is None
        for blocks in range(1, assembly.shape.num_layers if is_cuttable else 1):
            try:
                fits.append(fit(blocks, ""))
            except BudgetError as refusal:
                refusals.append(refusal)
        if not fits:
            raise BudgetError(
                f"{device.name} fits no cut of {assembly.site.backbone.name}; with one block on it:"
                f" {(refusals or [error])[0]}"
            ) from error
    best, reason = choose_cut(fits, importance, config.split.split_objective)
    return replace(best, reason=reason)


def cuts_for_planning(assembly: Assembly) -> dict[str, Cut]:
    """The cuts of clients while they are planned, by name; without clients whose model is whole then.

    As `--split` says; with `auto`, which decides by what is measured, a device that cannot hold the model has one block
    until then. Raises `BudgetError` for a device that not even the smallest ranks fit, or a trained whole model,
    and `ConfigError` for heads that one mask cannot hold, before anything is measured.
    """
    if assembly.is_full:
        check_heads(assembly)
        check_training_memory(assembly)
        return {}
    cuts, uniform = {}, np.full(assembly.shape.num_layers, 1.0 / assembly.shape.num_layers)
    for client, device in zip(assembly.clients, assembly.devices, strict=True):
        cut = fit_client(assembly, client, device, uniform).cut
        if cut is not None:
            is_auto = _client_cut_setting(assembly, client, device) == AUTO
            cuts[client.name] = replace(cut, blocks=1) if is_auto else cut
    return cuts


def _client_cut_setting(assembly: Assembly, client: ClientData, device: devices.Device) -> str:
    return cut_setting(assembly.config.split.split, client=client.name, task=client.task.name, device=device.name)


def _check_block(blocks: int, assembly: Assembly) -> int:
    last_block = assembly.shape.num_layers - 1
    if not 1 <= blocks <= last_block:
        allowed = f"none, auto, or 1 to {last_block}" if last_block else "none"
        raise ConfigError(
            f"--split cuts at block {blocks}, and {assembly.site.backbone.name} has {last_block + 1} blocks with at"
            f" least one on each side; allowed: {allowed}"
        )
    return blocks


def importance_by_client(
    assembly: Assembly, engine: Engine, models: ByClient, *, round: int = 0, cuts: Mapping[str, Cut] = NO_CUTS
) -> np.ndarray:
    """Importance of every layer as each client measures it at its model, (n, layers) float64; rows sum to one.

    All layers count alike where no client measures: with ranks that do not follow it, or under differential privacy.
    """
    if not assembly.config.measures_importance:
        num_layers = len(assembly.site.backbone.blocks)
        return np.full((len(assembly.clients), num_layers), 1 / num_layers)
    jobs = make_jobs(models, importance_options(assembly.config), round=round, cuts=cuts, clients=assembly.names)
    return np.stack([update.params[IMPORTANCE].numpy() for update in run_on_all_clients(engine, "importance", jobs)])


def fit_clients(
    assembly: Assembly, clusters: Sequence[int], importance: np.ndarray
) -> tuple[tuple[ClientPlan, ...], tuple[str, ...]]:
    """(the plans of all clients in these clusters, with importance (n, layers) of theirs, notes)."""
    config = assembly.config
    factors = np.ones(len(assembly.clients))
    if config.ranks.complexity_scaling:
        # error of guessing: one less the share of the most frequent label; one without classes
        difficulty = np.array([1.0 - (majority(client.train) or 0.0) for client in assembly.clients])
        factors = allocation.complexity_factors(difficulty, clusters)
    fits = [
        fit_client(assembly, client, device, layers, factor=float(factor))
        for client, device, layers, factor in zip(assembly.clients, assembly.devices, importance, factors, strict=True)
    ]
    notes = list(dict.fromkeys(note for fit in fits for note in fit.assignment.notes))
    cut_clients = [client for client, fit in zip(assembly.clients, fits, strict=True) if fit.cut is not None]
    if cut_clients:
        notes.append(f"{len(cut_clients)} of {len(fits)} models are cut, and so they are while they are planned")
    if any(client.task.writes for client in cut_clients):
        notes.append("clients with a cut write no answers, so there is no ROUGE of theirs")
    plans = [
        ClientPlan(
            name=client.name,
            task=client.task.name,
            device=device.name,
            examples=assembly.site.data[client.name].examples,
            cluster=cluster,
            cut=None if fit.cut is None else fit.cut.blocks,
            split=_split_entry(assembly, client, fit),
            ranks=fit.assignment.ranks,
            budget_bytes=fit.assignment.budget_bytes,
            largest_rank=min(fit.assignment.largest_rank, device.max_rank),
            memory={"total": fit.prediction.memory.total_bytes, **fit.prediction.memory.parts},
            predicted={
                "up_bytes": fit.prediction.up_bytes,
                "down_bytes": fit.prediction.down_bytes,
                "memory_bytes": fit.prediction.memory.used_bytes,
                "seconds": fit.prediction.seconds,
            },
        )
        for client, device, cluster, fit in zip(assembly.clients, assembly.devices, clusters, fits, strict=True)
    ]
    return tuple(plans), tuple(notes)


def _split_entry(assembly: Assembly, client: ClientData, fit: ClientFit) -> dict[str, Any]:
    prediction, cut = fit.prediction, fit.cut
    entry: dict[str, Any] = {"reason": fit.reason} if fit.reason else {}
    if cut is None:
        return entry
    return entry | {
        "crossing_bytes": round_costs.crossing_bytes(assembly, client, cut),
        "client_seconds": prediction.compute_seconds,
        "server_seconds": prediction.server_seconds,
        "link_seconds": prediction.transfer_seconds,
        "server_memory": round_costs.server_memory(assembly, client, cut, fit.assignment.ranks),
    }


def newcomer_importance(
    assembly: Assembly, plan: Plan, cluster: int, engine: Engine, models: ByClient, *, cuts: Mapping[str, Cut] = NO_CUTS
) -> np.ndarray:
    """Importance (1, layers) for the one client of an assembly: that of its cluster, or its own where it is alone."""
    for index, member in enumerate(plan.clients):
        if member.cluster == cluster != UNDECIDED:
            return plan.importance[index : index + 1]
    return importance_by_client(assembly, engine, models, cuts=cuts)
