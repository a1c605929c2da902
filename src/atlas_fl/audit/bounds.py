"""Audit of the norm bound: every change measured again, dense, against the median of the round.

A run keeps the updates that the bound refused or scaled down as they came (`out_of_bound.safetensors`).
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from atlas_fl.audit.dense import TOLERANCE, is_compared, rank_error, value
from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rules import formula_of
from atlas_fl.audit.run_files import AuditPlan, AuditRecord, Models, Run
from atlas_fl.params import HEAD, LORA_A, Params

BORDER = 1e-4
"""Relative distance from the bound within which either decision is right."""
LEAST = 3
"""Clients from which on there is a bound."""
FAR = 1e15
"""No mixed model is unusable unless an update, dense, holds a value of this size."""

Values = dict[str, np.ndarray]
"""Measured values of a model, by parameter."""


def check_bounds(
    run: Run, plan: AuditPlan, record: AuditRecord, *, initial: Models, trained: Models, sent: Models
) -> Iterator[AuditRow]:
    """A row for each client whose update came: whether it was to be mixed as it came, refused or scaled down.

    `trained` are the updates that were mixed, `sent` those beyond the bound as they came.
    """
    came, robust = {**trained, **sent}, run.settings.robust
    is_bounded = robust.norm_bound != "off" and formula_of(run).mixes
    if not is_bounded and not sent:
        return
    starts = {client: _values(run, plan, initial[client]) for client in came}
    norms: dict[str, dict[bool, float]] = {}
    if is_bounded and len(came) >= LEAST:
        norms = {client: _norms(starts[client], _values(run, plan, params)) for client, params in came.items()}
    tasks = dict(zip(plan.clients, plan.tasks, strict=True))
    for client in came:
        ratios = {}
        for head, norm in norms.get(client, {}).items():
            cohort = [norms[one][head] for one in came if not head or tasks[one] == tasks[client]]
            middle = float(np.median(cohort))
            if len(cohort) >= LEAST and 0 < middle < float("inf") and norm > 0:
                ratios[head] = norm / middle
        fault = _decision_fault(run, record, client, max(ratios.values(), default=0.0), sent)
        if not fault and client in record.clipped:
            factors = {head: min(1.0, robust.max_norm_ratio / ratio) for head, ratio in ratios.items()}
            fault = _clip_fault(run, plan, starts[client], came[client], trained[client], factors=factors)
        yield AuditRow("bounded", client, fault)


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


def restored_fault(run: Run, plan: AuditPlan, initial: Params, after: Params, *, trained: Models) -> str:
    """The fault of someone who was to keep the model that it began with: it did not, or had no reason to."""
    if not all(after[key].equal(tensor) for key, tensor in initial.items()):
        return "it was to keep the model that it began with, but it changed"
    values = (dense for params in trained.values() for dense in _values(run, plan, params).values())
    largest = max((np.abs(dense).max() for dense in values), default=0.0)
    return "" if largest > FAR else f"no update explains why it keeps its model: the largest value is {largest:.3g}"


def _values(run: Run, plan: AuditPlan, params: Params) -> Values:
    share, space = run.mixing.share, run.mixing.space
    keys = (key for key, tensor in params.items() if is_compared(key, share, space) and tensor.numel())
    return {key: value(plan, params, key, space) for key in keys}


def _norms(before: Values, after: Values) -> dict[bool, float]:
    """By whether it is of the head, the norm of the change."""
    squares = {False: 0.0, True: 0.0}
    for key, dense in after.items():
        squares[key.startswith(HEAD)] += float(np.square(dense - before[key]).sum())
    return {head: square**0.5 for head, square in squares.items()}


def _clip_fault(
    run: Run, plan: AuditPlan, start: Values, sent: Params, mixed: Params, *, factors: Mapping[bool, float]
) -> str:
    """The first part of what was mixed that is not what was sent, scaled down."""
    got = _values(run, plan, mixed)
    for key, dense in _values(run, plan, sent).items():
        factor = factors.get(key.startswith(HEAD), 1.0)
        expected = start[key] + factor * (dense - start[key])
        size = float(np.linalg.norm(start[key]) + factor * np.linalg.norm(dense)) or 1.0
        if run.mixing.space == "product" and key.endswith(LORA_A):
            error, _ = rank_error(expected, got[key], len(mixed[key]), size=size)
        else:
            error = float(np.linalg.norm(got[key] - expected)) / size
        if error > TOLERANCE:
            return f"{key} was not scaled by {factor:.3g}"
    return ""
