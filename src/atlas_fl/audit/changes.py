"""Audit of changes between rounds: the initial models of clients that joined late, and models resized to other ranks.

A late client begins with the mean that the rule says of the others; a resized one is the best that its new ranks hold.
"""

from collections.abc import Iterator

import numpy as np

from atlas_fl.audit.dense import TOLERANCE, arrays, rank_error, update
from atlas_fl.audit.recompute import Recomputed, farthest
from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rules import formula_of
from atlas_fl.audit.run_files import AuditPlan, AuditRecord, Flat, Models, Run
from atlas_fl.audit.step import Step, compare_states
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE, Params


def names_fault(plan: AuditPlan, client: str, want: Params, have: Params, what: str) -> str:
    """The fault of names and shapes of a model, which are those of another one, and of ranks, which the plan says."""
    # what a client has kept to itself since is no longer here, and `mixed` holds that it was not to be shared
    emptied = {key for key in have if PRIVATE in have and not have[key].numel()}
    named = {PRIVATE} if {*emptied, PRIVATE} == have.keys() else set()  # all of it, which has that name since
    lost, new = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys() - named)
    if lost or new:
        return f"{what} lacks {lost[:2]} and has unknown {new[:2]} ({len(lost)} and {len(new)} in all)"
    wrong = [key for key in want if want[key].shape != have[key].shape and key not in emptied]
    if wrong:
        return f"{what} has {wrong[0]} of shape {tuple(have[wrong[0]].shape)}"
    return ranks_fault(plan, client, have)


def ranks_fault(plan: AuditPlan, client: str, params: Params) -> str:
    """The fault of the first A whose rank is not that of the plan."""
    for key in (key for key in params if key.endswith(LORA_A)):
        rank = plan.rank(client, key)
        if rank is None:
            return f"{key} is in no layer of the plan"
        if len(params[key]) != rank:
            return f"{key} has rank {len(params[key])}, the plan says {rank}"
    return ""


def number_fault(*models: Params) -> str:
    """The first tensor that holds a NaN or an infinity, with which every comparison would be lost."""
    tensors = (item for params in models for item in params.items())
    return next((f"{key} holds NaN or infinity" for key, tensor in tensors if not bool(tensor.isfinite().all())), "")


def frozen_fault(mask: Params, initial: Params, trained: Params) -> str:
    """The first tensor of which a frozen weight moved in training, or that has no mask; empty where there is none."""
    for key, before in initial.items():
        if key not in mask:
            return f"{key} has no mask"
        if moved := int(((before != trained[key]) & ~mask[key]).sum()):
            return f"{moved} frozen weights of {key} moved"
    return ""


def check_joined(
    run: Run, round: int, server_models: Models, state: Flat, start: Models, state_then: Flat
) -> Iterator[AuditRow]:
    """A row for each newcomer, what it began with against the recomputation, and one for the state with them.

    The plan is that which their starts followed from; clients may have been clustered again before the round.
    """
    formula, fresh = formula_of(run), run.models(round, "fresh", joined=True)
    plan = run.plan(run.file(round, "plan.json", joined=True).relative_to(run.path).as_posix())
    if not formula.is_known:
        return
    names = [client for client in plan.clients if client not in server_models]
    faults = {
        client: names_fault(plan, client, fresh.get(client, {}), start.get(client, {}), "what it began with")
        or number_fault(fresh.get(client, {}), start.get(client, {}))
        for client in names
    }
    if fresh.keys() != set(names) or {*plan.clients} < server_models.keys():
        faults = dict.fromkeys(names, f"the plan has {names} for newcomers, and the models are of {sorted(fresh)}")
    present = tuple(client in server_models for client in plan.clients)
    step = Step(run=run, plan=plan, round=0, present=present, before=server_models, trained={**server_models, **fresh})
    if any(faults.values()):
        yield from (AuditRow("joined", client, faults[client]) for client in names)
    else:
        found = Recomputed(step=step, formula=formula, after={**server_models, **start}, joins=True).comparisons()
        still = "is not what it brought, and nobody's was to be mixed into it"
        for client in names:
            fault, error = farthest(found[plan.clients.index(client)], still)
            if run.mask is not None and not fault:
                body = {key: one for key, one in next(iter(server_models.values())).items() if not key.startswith(HEAD)}
                fault = frozen_fault(run.mask, body, start[client])
            yield AuditRow("joined", client, fault, error)
    expected = arrays(state) | (formula.initial(run, start) if formula.initial else {})
    if (found_state := compare_states(expected, state_then, before=state)) is not None:
        yield AuditRow("server", "", *found_state)


def is_reranked(run: Run, record: AuditRecord, round: int) -> bool:
    """Return whether ranks were chosen again before this round: with `rerank`, whenever clients are clustered."""
    every = run.settings.clustering.recluster_every
    is_due = run.settings.ranks.rerank and every > 0 and (round - 1) % every == 0
    return is_due and record.plan == f"plan-{round:04d}.json"


def check_ranks(plan: AuditPlan, initial: Models, resized: Models) -> Iterator[AuditRow]:
    """A row for each client: what it begins the round with against what it held, at the ranks of the new plan."""
    for client in plan.clients:
        before, after = initial.get(client, {}), resized.get(client, {})
        fault, worst = f"other tensors than before: {sorted(before.keys() ^ after.keys())[:3]}", None
        if before.keys() == after.keys():
            fault = number_fault(before, after) or ranks_fault(plan, client, after)
        if not fault:
            fault, worst = _rank_fault(plan, before, after)
        yield AuditRow("realigned", client, fault, worst)


def _rank_fault(plan: AuditPlan, initial: Params, resized: Params) -> tuple[str, float]:
    worst = 0.0
    for key in initial:
        if key.endswith(LORA_A):
            before, after = (update(plan, params, key.removesuffix(LORA_A)) for params in (initial, resized))
            size = float(np.linalg.norm(before)) or 1.0
            worst = max(worst, rank_error(before, after, len(resized[key]), size=size)[0])
        elif not key.endswith(LORA_B) and not initial[key].equal(resized[key]):
            return f"{key} changed, but has no rank", worst
    far = f"{worst:.2g} away from the best of these ranks (allowed: {TOLERANCE:g})"
    return far if not worst <= TOLERANCE else "", worst
