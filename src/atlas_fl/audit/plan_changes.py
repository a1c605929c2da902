"""Audit of changes between rounds: the initial models of clients that joined late, and models resized to other ranks.

A late client begins with the mean that the rule says of the others; a resized one is the best that its new ranks hold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from atlas_fl.audit.recompute import TOLERANCE, Recomputed, Round, decompose, is_best
from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rule_weights import Rule, arrival_weights, norms_of, points_of, reducer, robust_of, run_kind
from atlas_fl.audit.run_files import AuditPlan, AuditRecord, Models, Run, frozen_fault, models_in, read_plan
from atlas_fl.params import HEAD, LORA_A, LORA_B


@dataclass(frozen=True, kw_only=True)
class JoinedClients:
    """Newcomers as the run wrote them down."""

    plan: AuditPlan
    """That their starts followed from; clients may have been clustered again before the round."""
    fresh: Models
    """Models that they brought."""
    start: Models
    """Models that they began with."""


def read_joined(run: Run, round: int, plan: str, before: Models) -> JoinedClients | None:
    """Clients in the plan of this round that were not there before; None where there are none, or no record.

    Raises CheckpointError for a file that is missing or damaged.
    """
    folder = f"audit/joined-{round:04d}"
    if set(read_plan(run, plan).clients) <= before.keys() or not (run.path / folder).is_dir():
        return None
    models = [models_in(run.path / folder / f"{name}.safetensors", within=run.path) for name in ("fresh", "start")]
    return JoinedClients(plan=read_plan(run, f"{folder}/plan.json"), fresh=models[0], start=models[1])


def check_joined(run: Run, round: int, joined: JoinedClients, server_models: Models) -> Iterator[AuditRow]:
    """A row for each newcomer: what it began with against the recomputation from what the server held."""
    fresh, start = joined.fresh, joined.start
    names = [client for client in joined.plan.clients if client not in server_models]
    faults = {client: _fault(joined.plan, client, fresh, start) for client in names}
    if fresh.keys() != set(names) or {*joined.plan.clients} < server_models.keys():
        faults = dict.fromkeys(names, f"the plan has {names} for newcomers, and the models are of {sorted(fresh)}")
    truth = _recompute(run, joined, server_models)
    for client in names:
        fault, error = faults[client], None
        if not any(faults.values()):
            fault, error = _compare(truth, client)
            fault = fault or _frozen_fault(run, server_models, start[client])
        yield AuditRow(
            run=run.path.name, round=round, client=client, check="joined", ok=not fault, error=error, detail=fault
        )


def _fault(plan: AuditPlan, client: str, fresh: Models, start: Models) -> str:
    """Return whether names, shapes and ranks are those of client and plan, and all numbers finite."""
    fresh_params, initial = fresh.get(client, {}), start.get(client, {})
    if fresh_params.keys() != initial.keys() or any(
        fresh_params[key].shape != initial[key].shape for key in fresh_params
    ):
        return "it began with other tensors than it brought"
    for key, tensor in initial.items():
        if not bool(tensor.isfinite().all() and fresh_params[key].isfinite().all()):
            return f"{key} holds NaN or infinity"
        if key.endswith(LORA_A) and tensor.shape[0] != _rank(plan, client, key):
            return f"{key} has rank {tensor.shape[0]}, the plan says {_rank(plan, client, key)}"
    return ""


def _frozen_fault(run: Run, server_models: Models, initial: Mapping[str, Tensor]) -> str:
    """Return whether what a mask freezes of the body is to the last bit what the others have there."""
    if run.mask is None:
        return ""
    other = next(iter(server_models.values()))
    return frozen_fault(run.mask, {key: tensor for key, tensor in other.items() if not key.startswith(HEAD)}, initial)


def _rank(plan: AuditPlan, client: str, key: str) -> int | None:
    layer = plan.layer_of.get(key.removesuffix(LORA_A))
    return None if layer is None else plan.ranks[plan.clients.index(client)][layer]


def _recompute(run: Run, joined: JoinedClients, server_models: Models) -> Recomputed:
    plan, mixing = joined.plan, run.mixing
    kind, present = run_kind(run), tuple(client in server_models for client in plan.clients)
    before: dict[str, dict[str, Tensor]] = {**server_models, **joined.fresh}
    rule = Rule(
        kind=kind,
        laplacian=mixing.laplacian,
        eta=0.0,
        by_layer=False,
        present=present,
        robust=robust_of(run),
        points=lambda clients, head: points_of(before, plan, mixing.share, clients, head=head),
        norms=lambda clients: norms_of(before, plan, clients),
    )
    made: Mapping[bool, np.ndarray] = {head: arrival_weights(plan, rule, head=head) for head in (False, True)}
    return Recomputed(
        Round(
            plan=plan,
            before=before,
            after={**before, **joined.start},
            weights=lambda key: made[key.startswith(HEAD)],
            space=mixing.space,
            share=mixing.share if kind != "own" else (),
            align=mixing.align,
            reduce=reducer(kind, rule.robust),
        )
    )


def _compare(truth: Recomputed, client: str) -> tuple[str, float]:
    """Fault of the value that this client began with, and the largest error."""
    k = truth.round.plan.clients.index(client)
    comparisons = [one for key in truth.round.before[client] for one in truth.compare(k, key)]
    worst, finding = max(comparisons, key=lambda one: one[1].error)
    if finding.error == float("inf"):
        return f"{worst} is not what it brought, and nobody's was to be mixed into it", finding.error
    far = f"{worst} is {finding.error:.2g} away from the recomputation (allowed: {TOLERANCE:g})"
    return "" if finding.error <= TOLERANCE else far, finding.error


def is_reranked(run: Run, record: AuditRecord, round: int) -> bool:
    """Return whether ranks were chosen again before this round: with `rerank`, whenever clients are clustered."""
    every = run.config.get("clustering", {}).get("recluster_every", 0)
    due = bool(run.config.get("ranks", {}).get("rerank")) and every > 0 and (round - 1) % every == 0
    return due and record.plan == f"plan-{round:04d}.json"


def check_ranks(run: Run, plan: AuditPlan, round: int, initial: Models, resized: Models) -> Iterator[AuditRow]:
    """A row for each client: what it begins the round with against what it held, at the ranks of the new plan."""
    for k, client in enumerate(plan.clients):
        fault, error = _rank_fault(plan, k, initial.get(client, {}), resized.get(client, {}))
        yield AuditRow(
            run=run.path.name, round=round, client=client, check="realigned", ok=not fault, error=error, detail=fault
        )


def _rank_fault(
    plan: AuditPlan, k: int, initial: Mapping[str, Tensor], resized: Mapping[str, Tensor]
) -> tuple[str, float]:
    if initial.keys() != resized.keys():
        return f"other tensors than before: {sorted(initial.keys() ^ resized.keys())[:3]}", float("inf")
    worst = 0.0
    for key in initial:
        if not bool(initial[key].isfinite().all() and resized[key].isfinite().all()):
            return f"{key} holds NaN or infinity", float("inf")
        if key.endswith(LORA_A):
            module = key.removesuffix(LORA_A)
            rank = plan.ranks[k][plan.layer_of[module]]
            if resized[key].shape[0] != rank:
                return f"{key} has rank {resized[key].shape[0]}, the plan says {rank}", float("inf")
            worst = max(worst, _distance(plan, module, initial, resized, rank))
        elif not key.endswith(LORA_B) and not bool((initial[key] == resized[key]).all()):
            return f"{key} changed, but has no rank", float("inf")
    far = f"{worst:.2g} away from the best of these ranks (allowed: {TOLERANCE:g})"
    return far if not worst <= TOLERANCE else "", worst


def _distance(
    plan: AuditPlan, module: str, initial: Mapping[str, Tensor], resized: Mapping[str, Tensor], rank: int
) -> float:
    """Distance of the new update from the best approximation of the old one of this rank, over the old one's norm."""
    before, after = _dense(plan, module, initial), _dense(plan, module, resized)
    size = float(np.linalg.norm(before)) or 1.0
    left, values, right = decompose(before)
    error = float(np.linalg.norm((left[:, :rank] * values[:rank]) @ right[:rank] - after)) / size
    return 0.0 if error > TOLERANCE and is_best(before, after, rank, size=size) else error


def _dense(plan: AuditPlan, module: str, params: Mapping[str, Tensor]) -> np.ndarray:
    a, b = params[module + LORA_A].double().numpy(), params[module + LORA_B].double().numpy()
    return np.asarray(plan.scale(a.shape[0]) * (b @ a))
