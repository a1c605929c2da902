"""Audit of the norm bound: every change measured again, dense, against the median of the round.

A run keeps the updates that the bound refused or scaled down as they came (`out_of_bound.safetensors`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from atlas_fl.audit.recompute import TOLERANCE, decompose, is_best, is_mixed
from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rule_weights import run_kind
from atlas_fl.audit.run_files import AuditPlan, AuditRecord, Models, Run, read_json, read_models, round_folder
from atlas_fl.errors import CheckpointError
from atlas_fl.params import HEAD, LORA_A, LORA_B

BORDER = 1e-4
"""Relative distance from the bound within which either decision is right."""
LEAST = 3
"""Clients from which on there is a bound."""
FAR = 1e15
"""No mixed model is unusable unless an update, dense, holds a value of this size."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of one round as the run has recorded them."""

    mode: str
    """`refuse`, `clip` or `off`."""
    ratio: float
    """Largest norm over the median."""
    clipped: tuple[str, ...]
    """Clients whose update was scaled down."""
    restored: tuple[str, ...]
    """Clients that kept the model that they began with, because the mixed one was none."""
    sent: Models
    """The updates as they came of those beyond the bound."""


def read_bounds(run: Run, round: int) -> Bounds:
    """The bounds of this round; raises CheckpointError where its files are damaged."""
    folder = round_folder(run, round)
    robust = run.config.get("robust", {})
    try:
        record = read_json(folder / "record.json", within=run.path)
        clipped, restored = (tuple(dict(record[name])) for name in ("clipped", "restored"))
        mode, ratio = str(robust.get("norm_bound", "off")), float(robust.get("max_norm_ratio", 10.0))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'record.json'} is no record of a round: {error!r}") from error
    there = (folder / "out_of_bound.safetensors").exists()
    sent = read_models(run, round, "out_of_bound") if there else {}
    return Bounds(mode=mode, ratio=ratio, clipped=clipped, restored=restored, sent=sent)


def check_bounds(
    run: Run, round: int, bounds: Bounds, *, plan: AuditPlan, record: AuditRecord, initial: Models, trained: Models
) -> Iterator[AuditRow]:
    """A row for each client whose update came: whether it was to be mixed as it came, refused or scaled down."""
    accepted = {
        client: trained[client] for client in plan.clients if client in record.accepted_clients and client in trained
    }
    came = {**accepted, **bounds.sent}
    bounded = bounds.mode != "off" and run_kind(run) != "own"
    if not bounded and not bounds.sent:
        return
    ratios = _ratios(plan, run, initial, came) if bounded else {}
    for client in came:
        fault = _fault(bounds, client, ratios.get(client, 0.0), refused=client in record.refused)
        if not fault and client in bounds.clipped:
            limits = _limits(plan, run, initial, came, bounds.ratio)
            fault = _clip_fault(plan, run, initial[client], came[client], accepted[client], limits=limits[client])
        yield AuditRow(
            run=run.path.name, round=round, client=client, check="bounded", ok=not fault, error=None, detail=fault
        )


def _fault(bounds: Bounds, client: str, ratio: float, *, refused: bool) -> str:
    problem = f"its change is {ratio:.3g} times the median, and {bounds.ratio:g} are allowed"
    if client not in bounds.sent:
        return f"{problem}, but it was mixed as it came" if ratio > bounds.ratio * (1 + BORDER) else ""
    if ratio < bounds.ratio * (1 - BORDER):
        return f"{problem}, but it was not mixed as it came"
    if refused == (bounds.mode == "clip") or refused == (client in bounds.clipped):
        return f"{problem}; it was {'refused' if refused else 'mixed'}, and the settings say {bounds.mode}"
    return ""


def restored_fault(
    run: Run, plan: AuditPlan, initial: Mapping[str, Tensor], after: Mapping[str, Tensor], *, trained: Models
) -> str:
    """Return whether someone who kept the model that it began with did so, and had to."""
    if not all(after[key].equal(tensor) for key, tensor in initial.items()):
        return "it was to keep the model that it began with, but it changed"
    largest = max((_largest(plan, run, params) for params in trained.values()), default=0.0)
    return "" if largest > FAR else f"no update explains why it keeps its model: the largest value is {largest:.3g}"


def _dense(plan: AuditPlan, run: Run, params: Mapping[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Measured parts of a model: the updates s B A where they are mixed as such, and every other shared tensor."""
    for key, tensor in params.items():
        value = tensor.double().numpy()
        if not is_mixed(key, run.mixing.share) or not value.size:
            continue
        if run.mixing.space == "factors" or not key.endswith((LORA_A, LORA_B)):
            yield key, value
        elif key.endswith(LORA_A):
            other = params[key.removesuffix(LORA_A) + LORA_B].double().numpy()
            yield key, plan.scale(len(value)) * (other @ value)


def _largest(plan: AuditPlan, run: Run, params: Mapping[str, Tensor]) -> float:
    return max((float(np.abs(value).max()) for _, value in _dense(plan, run, params)), default=0.0)


def _norms(plan: AuditPlan, run: Run, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[bool, float]:
    """By whether it is of the head, the norm of the change."""
    start, squares = dict(_dense(plan, run, before)), {False: 0.0, True: 0.0}
    for key, value in _dense(plan, run, after):
        squares[key.startswith(HEAD)] += float(np.square(value - start[key]).sum())
    return {head: square**0.5 for head, square in squares.items()}


def _medians(plan: AuditPlan, run: Run, initial: Models, came: Models) -> dict[str, dict[bool, tuple[float, float]]]:
    """By client and part, its norm and the median of its cohort; parts without a measure are left out."""
    norms = {client: _norms(plan, run, initial[client], params) for client, params in came.items()}
    task = dict(zip(plan.clients, plan.tasks, strict=True))
    medians: dict[str, dict[bool, tuple[float, float]]] = {client: {} for client in came}
    for client in came:
        for head in (False, True):
            cohort = [one for one in came if not head or task[one] == task[client]]
            middle = float(np.median([norms[one][head] for one in cohort]))
            if len(cohort) >= LEAST and 0 < middle < float("inf"):
                medians[client][head] = (norms[client][head], middle)
    return medians


def _ratios(plan: AuditPlan, run: Run, initial: Models, came: Models) -> dict[str, float]:
    medians = _medians(plan, run, initial, came) if len(came) >= LEAST else {}
    return {
        client: max((norm / middle for norm, middle in norms.values()), default=0.0)
        for client, norms in medians.items()
    }


def _limits(plan: AuditPlan, run: Run, initial: Models, came: Models, ratio: float) -> dict[str, dict[bool, float]]:
    """By client and part, what its change is to be scaled by."""
    return {
        client: {head: min(1.0, ratio * middle / norm) if norm > 0 else 1.0 for head, (norm, middle) in norms.items()}
        for client, norms in _medians(plan, run, initial, came).items()
    }


def _clip_fault(
    plan: AuditPlan,
    run: Run,
    before: Mapping[str, Tensor],
    sent: Mapping[str, Tensor],
    mixed: Mapping[str, Tensor],
    *,
    limits: Mapping[bool, float],
) -> str:
    """Return whether what was mixed is what was sent, scaled down."""
    start, got = dict(_dense(plan, run, before)), dict(_dense(plan, run, mixed))
    for key, value in _dense(plan, run, sent):
        factor = limits.get(key.startswith(HEAD), 1.0)
        expected = start[key] + factor * (value - start[key])
        size = float(np.linalg.norm(start[key]) + factor * np.linalg.norm(value)) or 1.0
        if run.mixing.space == "product" and key.endswith(LORA_A):
            rank = len(mixed[key])
            left, values, right = decompose(expected)
            best = (left[:, :rank] * values[:rank]) @ right[:rank]
            if np.linalg.norm(got[key] - best) <= TOLERANCE * size or is_best(expected, got[key], rank, size=size):
                continue
            return f"{key} was not scaled by {factor:.3g}"
        if np.linalg.norm(got[key] - expected) > TOLERANCE * size:
            return f"{key} was not scaled by {factor:.3g}"
    return ""
