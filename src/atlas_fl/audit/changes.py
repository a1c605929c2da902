"""Audit of changes between rounds: the initial models of clients that joined late, and models resized to other ranks.

A late client begins with the mean that the rule says of the others; a resized one is the best that its new ranks hold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from atlas_fl.audit.dense import TOLERANCE, arrays, rank_error, update
from atlas_fl.audit.recompute import recompute
from atlas_fl.audit.report import Finding
from atlas_fl.audit.rules import formula_of
from atlas_fl.audit.run_files import AuditPlan, AuditRecord, Flat, Models, Run, frozen_fault, models_in
from atlas_fl.audit.step import Step, compare_states
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
    state: Flat | None
    """Server state with them; None where it did not change."""


def read_joined(run: Run, round: int, plan: str, before: Models) -> JoinedClients | None:
    """Clients in the plan of this round that were not there before; None where there are none, or no record.

    Raises CheckpointError for a file that is missing or damaged.
    """
    folder = run.path / "audit" / f"joined-{round:04d}"
    if set(run.plan(plan).clients) <= before.keys() or not folder.is_dir():
        return None
    return JoinedClients(
        plan=run.plan(f"audit/{folder.name}/plan.json"),
        fresh=models_in(folder / "fresh.safetensors", within=run.path),
        start=models_in(folder / "start.safetensors", within=run.path),
        state=run.server_state(folder),
    )


def check_joined(run: Run, joined: JoinedClients, server_models: Models, state: Flat) -> Iterator[Finding]:
    """A finding for each newcomer, what it began with against the recomputation, and one for the state with them."""
    plan, formula = joined.plan, formula_of(run)
    if not formula.is_known:
        return
    names = [client for client in plan.clients if client not in server_models]
    faults = {client: _join_fault(joined, client) for client in names}
    if joined.fresh.keys() != set(names) or {*plan.clients} < server_models.keys():
        fault = f"the plan has {names} for newcomers, and the models are of {sorted(joined.fresh)}"
        faults = dict.fromkeys(names, fault)
    step = Step(
        run=run,
        plan=plan,
        round=0,
        present=tuple(client in server_models for client in plan.clients),
        before=server_models,
        trained={**server_models, **joined.fresh},
    )
    truth = recompute(formula, step, {**server_models, **joined.start}, joins=True)
    for client in names:
        fault, error = faults[client], None
        if not any(faults.values()):
            worst, found = truth.worst(plan.clients.index(client))
            error = found.error
            if error == float("inf"):
                fault = f"{worst} is not what it brought, and nobody's was to be mixed into it"
            elif not error <= TOLERANCE:
                fault = f"{worst} is {error:.2g} away from the recomputation (allowed: {TOLERANCE:g})"
            fault = fault or _moved_fault(run, server_models, joined.start[client])
        yield Finding("joined", client, fault, error)
    expected = {**arrays(state), **formula.initial(run, joined.start)}
    found_state = compare_states(expected, state if joined.state is None else joined.state, before=state)
    if found_state is not None:
        yield Finding("server", "", *found_state)


def _join_fault(joined: JoinedClients, client: str) -> str:
    """The fault of names, shapes and ranks, which are those of client and plan, or of a number that is none."""
    fresh, initial = joined.fresh.get(client, {}), joined.start.get(client, {})
    if {key: tensor.shape for key, tensor in fresh.items()} != {key: tensor.shape for key, tensor in initial.items()}:
        return "it began with other tensors than it brought"
    for key, tensor in initial.items():
        if not bool(tensor.isfinite().all() and fresh[key].isfinite().all()):
            return f"{key} holds NaN or infinity"
        if key.endswith(LORA_A) and tensor.shape[0] != joined.plan.rank(client, key):
            return f"{key} has rank {tensor.shape[0]}, the plan says {joined.plan.rank(client, key)}"
    return ""


def _moved_fault(run: Run, server_models: Models, initial: Mapping[str, Tensor]) -> str:
    """The fault of what a mask freezes of the body, which is to the last bit what the others have there."""
    if run.mask is None:
        return ""
    other = next(iter(server_models.values()))
    return frozen_fault(run.mask, {key: tensor for key, tensor in other.items() if not key.startswith(HEAD)}, initial)


def is_reranked(run: Run, record: AuditRecord, round: int) -> bool:
    """Return whether ranks were chosen again before this round: with `rerank`, whenever clients are clustered."""
    every = run.settings.clustering.recluster_every
    is_due = run.settings.ranks.rerank and every > 0 and (round - 1) % every == 0
    return is_due and record.plan == f"plan-{round:04d}.json"


def check_ranks(plan: AuditPlan, initial: Models, resized: Models) -> Iterator[Finding]:
    """A finding for each client: what it begins the round with against what it held, at the ranks of the new plan."""
    for client in plan.clients:
        fault, error = _rank_fault(plan, client, initial.get(client, {}), resized.get(client, {}))
        yield Finding("realigned", client, fault, error)


def _rank_fault(
    plan: AuditPlan, client: str, initial: Mapping[str, Tensor], resized: Mapping[str, Tensor]
) -> tuple[str, float | None]:
    if initial.keys() != resized.keys():
        return f"other tensors than before: {sorted(initial.keys() ^ resized.keys())[:3]}", None
    worst = 0.0
    for key in initial:
        if not bool(initial[key].isfinite().all() and resized[key].isfinite().all()):
            return f"{key} holds NaN or infinity", None
        if key.endswith(LORA_A):
            rank = plan.rank(client, key)
            if rank is None or resized[key].shape[0] != rank:
                return f"{key} has rank {resized[key].shape[0]}, the plan says {rank}", None
            before, after = (update(plan, params, key.removesuffix(LORA_A)) for params in (initial, resized))
            worst = max(worst, rank_error(before, after, rank, size=float(np.linalg.norm(before)) or 1.0))
        elif not key.endswith(LORA_B) and not initial[key].equal(resized[key]):
            return f"{key} changed, but has no rank", None
    far = f"{worst:.2g} away from the best of these ranks (allowed: {TOLERANCE:g})"
    return far if not worst <= TOLERANCE else "", worst
