"""Audit of what goes beside models, and of what clients keep: corrections, class means, second models.

What was sent is computed again from the state or the controls of the round before, value by value in float64.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np

from atlas_fl.audit import class_features, dense, report, rules, step
from atlas_fl.audit.run_files import AuditPlan, AuditRecord, Flat, Models, Run
from atlas_fl.params import PRIVATE

TOLERANCE = 1e-5
"""Tolerance of a value over the largest of its tensor."""

Expected: TypeAlias = Callable[[int], tuple[step.Values, step.Values]]
"""Expected tensors for client k, by name, and the sums that they were computed from."""


def check_sent(run: Run, round: int, plan: AuditPlan, record: AuditRecord, state: Flat) -> Iterator[report.AuditRow]:
    """A row for each client that trained and each kind of what it was sent; `state` is of before the round."""
    for check, kind, expected in _expected(run, round, plan, state):
        sent = run.models_if_any(round, kind)
        for k, client in enumerate(plan.clients):
            if run.is_personal(round):
                fault = f"it was sent {kind} in a personal round" if sent.get(client) else ""
            elif client in record.participants:
                wanted, sums = expected(k)
                sizes = {key: float(np.abs(total).max(initial=0.0)) for key, total in sums.items()}
                found = dense.arrays(sent.get(client, {}))
                fault, _ = step.compare_values(wanted, found, kind, tolerance=(0.0, TOLERANCE), sizes=sizes)
            else:
                continue
            yield report.AuditRow(check, client, fault)


def _expected(run: Run, round: int, plan: AuditPlan, state: Flat) -> Iterator[tuple[str, str, Expected]]:
    """(the check, the file's name, what was to be sent) of every kind that the settings ask for."""
    training, formula = run.settings.training, rules.formula_of(run)
    if training.control_variates:
        controls, bound = run.models_if_any(round - 1, "control"), run.settings.robust.max_share
        started = run.models_if_any(round - 1, "start")
        yield "corrected", "correction", partial(_control_correction, plan, controls, started, bound)
    if (correction := formula.correction) is not None:
        values = dense.arrays(state)
        yield "corrected", "correction", lambda k: (correction(run, plan.clients[k], values), {})
    if run.settings.server.feature_alignment:
        yield "aligned", "centroids", lambda k: (class_features.class_means(plan, k, state), {})


def _control_correction(
    plan: AuditPlan, controls: Models, started: Models, bound: float, k: int
) -> tuple[step.Values, step.Values]:
    """SCAFFOLD: the mean by examples of the controls that client k meets, less its own; and that mean.

    Both have the rows of the client's model: the control of a client without some of them is zero there.
    """
    wanted: dict[str, np.ndarray] = {}
    sums: dict[str, np.ndarray] = {}
    own = controls.get(plan.clients[k], {})
    for key in sorted({key for params in controls.values() for key in params}):
        met = [other for other in range(len(plan.clients)) if plan.may_meet(k, other, key)]
        shares = dense.bound_weights([plan.examples[other] for other in met], bound)
        known = [(share, controls.get(plan.clients[other], {})) for share, other in zip(shares, met, strict=True)]
        if values := [share * dense.numbers(control[key]) for share, control in known if key in control]:
            sums[key] = np.zeros(tuple(started[plan.clients[k]][key].shape))
            for value in values:
                there = tuple(map(slice, map(min, value.shape, sums[key].shape)))
                sums[key][there] += value[there]
            wanted[key] = sums[key] - (dense.numbers(own[key]) if key in own else 0.0)
    return wanted, sums


def check_kept(run: Run, round: int, plan: AuditPlan, record: AuditRecord) -> Iterator[report.AuditRow]:
    """A row for each client: what it alone keeps is there, and stayed as it was where it did not train."""
    mixing = run.settings.mixing
    kinds = {"control": "corrected"} if run.settings.training.control_variates else {}
    if mixing.second_model != "none" and not mixing.personal_models:
        kinds["second"] = "second"
    stays = any(PRIVATE in params for params in run.models_if_any(round, "start").values())
    if run.settings.server.second_gate != "none" and not stays:  # with its model, at its site
        kinds["gate"] = "gate"
    nouns = {"second": "model"}
    for kind, check in kinds.items():
        before, now = run.models_if_any(round - 1, kind), run.models_if_any(round, kind)
        trained = record.accepted_clients if kind == "gate" and mixing.personal_models else set(record.participants)
        for client in plan.clients:
            fault = ""
            if client not in trained and not dense.same_tensors(before.get(client, {}), now.get(client, {})):
                fault = f"its own {nouns.get(kind, kind)} changed while it took no part"
            elif client in trained and not now.get(client) and kind != "control":
                fault = f"it trained, and has no {nouns.get(kind, kind)} of its own"
            yield report.AuditRow(check, client, fault)
