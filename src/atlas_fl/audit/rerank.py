"""Models that were brought to other ranks between two rounds: each must be the best that its new ranks can hold."""

from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from atlas_fl.audit.dense import TOLERANCE, decompose, is_best
from atlas_fl.audit.folder import Plan, Record, Run
from atlas_fl.audit.models import Models
from atlas_fl.audit.report import AuditRow
from atlas_fl.tree import LORA_A, LORA_B


def is_reranked(run: Run, record: Record, round: int) -> bool:
    """Whether the ranks were chosen again before this round: with `rerank`, whenever clients are clustered again."""
    every = run.config.get("clustering", {}).get("recluster_every", 0)
    due = bool(run.config.get("ranks", {}).get("rerank")) and every > 0 and (round - 1) % every == 0
    return due and record.plan == f"plan-{round:04d}.json"


def check_ranks(run: Run, plan: Plan, round: int, held: Models, begun: Models) -> Iterator[AuditRow]:
    """A row for each client: what it begins the round with against what it held, at the ranks of the new plan."""
    for k, client in enumerate(plan.clients):
        fault, error = _fault(plan, k, held.get(client, {}), begun.get(client, {}))
        yield AuditRow(
            run=run.path.name, round=round, client=client, check="realigned", ok=not fault, error=error, detail=fault
        )


def _fault(plan: Plan, k: int, held: Mapping[str, Tensor], begun: Mapping[str, Tensor]) -> tuple[str, float]:
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
