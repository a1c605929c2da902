"""Clients that joined late, and models brought to other ranks.

Clients that joined between two rounds: what they began with must be the mean that the rule says of the others.

Models that were brought to other ranks between two rounds: each must be the best that its new ranks can hold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from atlas_fl.audit.recompute import (
    TOLERANCE,
    Round,
    Rule,
    Truth,
    arrival_weights,
    decompose,
    is_best,
    kind_of,
    points_of,
    reducer,
    robust_of,
)
from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.run_files import Models, Plan, Record, Run, frozen_fault, models_in, read_plan
from atlas_fl.params import HEAD, LORA_A, LORA_B


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Newcomers as the run wrote them down."""

    plan: Plan
    """That their starts followed from; clients may have been clustered again before the round."""
    fresh: Models
    """What they brought."""
    start: Models
    """What they began with."""


def read_joined(run: Run, round: int, plan: str, before: Models) -> Joined | None:
    """Those who are in the plan of this round and were not there before; None where there is nobody, or no word of it.

    Raises CheckpointError for a file that is missing or damaged.
    """
    folder = f"audit/joined-{round:04d}"
    if set(read_plan(run, plan).clients) <= before.keys() or not (run.path / folder).is_dir():
        return None
    models = [models_in(run.path / folder / f"{name}.safetensors") for name in ("fresh", "start")]
    return Joined(plan=read_plan(run, f"{folder}/plan.json"), fresh=models[0], start=models[1])


def check_joined(run: Run, round: int, joined: Joined, known: Models) -> Iterator[AuditRow]:
    """A row for each newcomer: what it began with against the recomputation from what the server held."""
    fresh, start = joined.fresh, joined.start
    names = [client for client in joined.plan.clients if client not in known]
    faults = {client: _fault(joined.plan, client, fresh, start) for client in names}
    if fresh.keys() != set(names) or {*joined.plan.clients} < known.keys():
        faults = dict.fromkeys(names, f"the plan has {names} for newcomers, and the models are of {sorted(fresh)}")
    truth = _truth(run, joined, known)
    for client in names:
        fault, error = faults[client], None
        if not any(faults.values()):
            fault, error = _compared(truth, client)
            fault = fault or _frozen_fault(run, known, start[client])
        yield AuditRow(
            run=run.path.name, round=round, client=client, check="joined", ok=not fault, error=error, detail=fault
        )


def _fault(plan: Plan, client: str, fresh: Models, start: Models) -> str:
    """Whether names, shapes and ranks are those that the client brought and the plan says, and all numbers finite."""
    own, begun = fresh.get(client, {}), start.get(client, {})
    if own.keys() != begun.keys() or any(own[key].shape != begun[key].shape for key in own):
        return "it began with other tensors than it brought"
    for key, tensor in begun.items():
        if not bool(tensor.isfinite().all() and own[key].isfinite().all()):
            return f"{key} holds NaN or infinity"
        if key.endswith(LORA_A) and tensor.shape[0] != _rank(plan, client, key):
            return f"{key} has rank {tensor.shape[0]}, the plan says {_rank(plan, client, key)}"
    return ""


def _frozen_fault(run: Run, known: Models, begun: Mapping[str, Tensor]) -> str:
    """Whether what a mask freezes of the body is to the last bit what the others have there."""
    if run.mask is None:
        return ""
    other = next(iter(known.values()))
    return frozen_fault(run.mask, {key: own for key, own in other.items() if not key.startswith(HEAD)}, begun)


def _rank(plan: Plan, client: str, key: str) -> int | None:
    layer = plan.layer_of.get(key.removesuffix(LORA_A))
    return None if layer is None else plan.ranks[plan.clients.index(client)][layer]


def _truth(run: Run, joined: Joined, known: Models) -> Truth:
    plan, mixing = joined.plan, run.mixing
    kind, present = kind_of(mixing.strategy), tuple(client in known for client in plan.clients)
    before: dict[str, dict[str, Tensor]] = {**known, **joined.fresh}
    rule = Rule(
        kind=kind,
        laplacian=mixing.laplacian,
        eta=0.0,
        by_layer=False,
        present=present,
        robust=robust_of(run),
        points=lambda clients, head: points_of(before, plan, mixing.share, clients, head=head),
    )
    made: Mapping[bool, np.ndarray] = {head: arrival_weights(plan, rule, head=head) for head in (False, True)}
    return Truth(
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


def _compared(truth: Truth, client: str) -> tuple[str, float]:
    """What is wrong with the value that this client began with, and the largest error."""
    k = truth.round.plan.clients.index(client)
    found = [one for key in truth.round.before[client] for one in truth.finding(k, key)]
    worst, finding = max(found, key=lambda one: one[1].error)
    if finding.error == float("inf"):
        return f"{worst} is not what it brought, and nobody's was to be mixed into it", finding.error
    far = f"{worst} is {finding.error:.2g} away from the recomputation (allowed: {TOLERANCE:g})"
    return "" if finding.error <= TOLERANCE else far, finding.error


def is_reranked(run: Run, record: Record, round: int) -> bool:
    """Whether the ranks were chosen again before this round: with `rerank`, whenever clients are clustered again."""
    every = run.config.get("clustering", {}).get("recluster_every", 0)
    due = bool(run.config.get("ranks", {}).get("rerank")) and every > 0 and (round - 1) % every == 0
    return due and record.plan == f"plan-{round:04d}.json"


def check_ranks(run: Run, plan: Plan, round: int, held: Models, begun: Models) -> Iterator[AuditRow]:
    """A row for each client: what it begins the round with against what it held, at the ranks of the new plan."""
    for k, client in enumerate(plan.clients):
        fault, error = _rank_fault(plan, k, held.get(client, {}), begun.get(client, {}))
        yield AuditRow(
            run=run.path.name, round=round, client=client, check="realigned", ok=not fault, error=error, detail=fault
        )


def _rank_fault(plan: Plan, k: int, held: Mapping[str, Tensor], begun: Mapping[str, Tensor]) -> tuple[str, float]:
    if held.keys() != begun.keys():
        return f"other tensors than before: {sorted(held.keys() ^ begun.keys())[:3]}", float("inf")
    worst = 0.0
    for key in held:
        if not bool(held[key].isfinite().all() and begun[key].isfinite().all()):
            return f"{key} holds NaN or infinity", float("inf")
        if key.endswith(LORA_A):
            module = key.removesuffix(LORA_A)
            rank = plan.ranks[k][plan.layer_of[module]]
            if begun[key].shape[0] != rank:
                return f"{key} has rank {begun[key].shape[0]}, the plan says {rank}", float("inf")
            worst = max(worst, _distance(plan, module, held, begun, rank))
        elif not key.endswith(LORA_B) and not bool((held[key] == begun[key]).all()):
            return f"{key} changed, but has no rank", float("inf")
    far = f"{worst:.2g} away from the best of these ranks (allowed: {TOLERANCE:g})"
    return far if not worst <= TOLERANCE else "", worst


def _distance(plan: Plan, module: str, held: Mapping[str, Tensor], begun: Mapping[str, Tensor], rank: int) -> float:
    """How far the new update is from the best approximation of the old one of this rank, over the old one's norm."""
    before, after = _dense(plan, module, held), _dense(plan, module, begun)
    size = float(np.linalg.norm(before)) or 1.0
    left, values, right = decompose(before)
    error = float(np.linalg.norm((left[:, :rank] * values[:rank]) @ right[:rank] - after)) / size
    return 0.0 if error > TOLERANCE and is_best(before, after, rank, size=size) else error


def _dense(plan: Plan, module: str, params: Mapping[str, Tensor]) -> np.ndarray:
    a, b = params[module + LORA_A].double().numpy(), params[module + LORA_B].double().numpy()
    return np.asarray(plan.scale(a.shape[0]) * (b @ a))
