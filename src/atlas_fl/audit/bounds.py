"""Audit of the norm bound: every change measured again, dense, against the median of the round.

A run keeps the updates that the bound refused or scaled down as they came (`out_of_bound.safetensors`).
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from torch import Tensor

from atlas_fl.audit.dense import TOLERANCE, is_compared, rank_error, value
from atlas_fl.audit.report import Finding
from atlas_fl.audit.rules import formula_of
from atlas_fl.audit.run_files import AuditPlan, AuditRecord, Models, Run
from atlas_fl.params import HEAD, LORA_A

BORDER = 1e-4
"""Relative distance from the bound within which either decision is right."""
LEAST = 3
"""Clients from which on there is a bound."""
FAR = 1e15
"""No mixed model is unusable unless an update, dense, holds a value of this size."""

Measured = dict[str, dict[bool, tuple[float, float]]]
"""By client, then by whether it is of the head: the norm of its change, and the median of its cohort."""


def check_bounds(
    run: Run, plan: AuditPlan, record: AuditRecord, *, initial: Models, trained: Models, sent: Models
) -> Iterator[Finding]:
    """A finding for each client whose update came: whether it was to be mixed as it came, refused or scaled down.

    `trained` are the updates that were mixed, `sent` those beyond the bound as they came.
    """
    came = {**trained, **sent}
    robust = run.settings.robust
    is_bounded = robust.norm_bound != "off" and formula_of(run).mixes
    if not is_bounded and not sent:
        return
    measured = _measure(run, plan, initial, came) if is_bounded and len(came) >= LEAST else {}
    for client in came:
        norms = measured.get(client, {})
        ratio = max((norm / middle for norm, middle in norms.values()), default=0.0)
        fault = _decision_fault(run, record, client, ratio, sent)
        if not fault and client in record.clipped:
            limits = {head: min(1.0, robust.max_norm_ratio * middle / norm) for head, (norm, middle) in norms.items()}
            fault = _clip_fault(run, plan, initial[client], came[client], trained[client], limits=limits)
        yield Finding("bounded", client, fault)


def _decision_fault(run: Run, record: AuditRecord, client: str, ratio: float, sent: Collection[str]) -> str:
    mode, most = run.settings.robust.norm_bound, run.settings.robust.max_norm_ratio
    problem = f"its change is {ratio:.3g} times the median, and {most:g} are allowed"
    is_refused = client in record.refused
    if client not in sent:
        return f"{problem}, but it was mixed as it came" if ratio > most * (1 + BORDER) else ""
    if ratio < most * (1 - BORDER):
        return f"{problem}, but it was not mixed as it came"
    if is_refused == (mode == "clip") or is_refused == (client in record.clipped):
        return f"{problem}; it was {'refused' if is_refused else 'mixed'}, and the settings say {mode}"
    return ""


def restored_fault(
    run: Run, plan: AuditPlan, initial: Mapping[str, Tensor], after: Mapping[str, Tensor], *, trained: Models
) -> str:
    """The fault of someone who was to keep the model that it began with: it did not, or had no reason to."""
    if not all(after[key].equal(tensor) for key, tensor in initial.items()):
        return "it was to keep the model that it began with, but it changed"
    sizes = [np.abs(dense).max(initial=0.0) for params in trained.values() for _, dense in _dense(run, plan, params)]
    largest = max(sizes, default=0.0)
    return "" if largest > FAR else f"no update explains why it keeps its model: the largest value is {largest:.3g}"


def _dense(run: Run, plan: AuditPlan, params: Mapping[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Measured parts of a model."""
    mixing = run.mixing
    for key, tensor in params.items():
        if is_compared(key, mixing.share, mixing.space) and tensor.numel():
            yield key, value(plan, params, key, mixing.space)


def _measure(run: Run, plan: AuditPlan, initial: Models, came: Models) -> Measured:
    """Norms and medians; parts without a measure are left out."""
    norms = {client: _norms(run, plan, initial[client], params) for client, params in came.items()}
    task = dict(zip(plan.clients, plan.tasks, strict=True))
    measured: Measured = {client: {} for client in came}
    for client in came:
        for head in (False, True):
            cohort = [norms[one][head] for one in came if not head or task[one] == task[client]]
            middle = float(np.median(cohort))
            if len(cohort) >= LEAST and 0 < middle < float("inf") and norms[client][head] > 0:
                measured[client][head] = (norms[client][head], middle)
    return measured


def _norms(run: Run, plan: AuditPlan, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[bool, float]:
    """By whether it is of the head, the norm of the change."""
    start, squares = dict(_dense(run, plan, before)), {False: 0.0, True: 0.0}
    for key, dense in _dense(run, plan, after):
        squares[key.startswith(HEAD)] += float(np.square(dense - start[key]).sum())
    return {head: square**0.5 for head, square in squares.items()}


def _clip_fault(
    run: Run,
    plan: AuditPlan,
    before: Mapping[str, Tensor],
    sent: Mapping[str, Tensor],
    mixed: Mapping[str, Tensor],
    *,
    limits: Mapping[bool, float],
) -> str:
    """The first part of what was mixed that is not what was sent, scaled down."""
    start, got = dict(_dense(run, plan, before)), dict(_dense(run, plan, mixed))
    for key, dense in _dense(run, plan, sent):
        factor = limits.get(key.startswith(HEAD), 1.0)
        expected = start[key] + factor * (dense - start[key])
        size = float(np.linalg.norm(start[key]) + factor * np.linalg.norm(dense)) or 1.0
        if run.mixing.space == "product" and key.endswith(LORA_A):
            error = rank_error(expected, got[key], len(mixed[key]), size=size)
        else:
            error = float(np.linalg.norm(got[key] - expected)) / size
        if error > TOLERANCE:
            return f"{key} was not scaled by {factor:.3g}"
    return ""
