"""Audit of what clients have besides the shared model: corrections of SCAFFOLD and FedDyn, and second models at rest.

What was sent is computed again from the controls or changes of the round before, value by value in float64.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rule_weights import run_kind
from atlas_fl.audit.run_files import AuditPlan, AuditRecord, Models, Run, read_models, round_folder
from atlas_fl.audit.server_state import latest_state
from atlas_fl.params import HEAD

TOLERANCE = 1e-5
"""Tolerance of a value over the largest of its tensor."""


def check_corrections(run: Run, round: int, plan: AuditPlan, record: AuditRecord) -> Iterator[AuditRow]:
    """A row for each client that trained: what was added to its gradients; nothing in runs without controls."""
    training, is_dynamic = run.config.get("training", {}), run_kind(run) == "feddyn"
    if not training.get("control_variates") and not is_dynamic:
        return
    alpha, changes = float(training.get("proximal_mu", 0.0)), latest_state(run, round - 1) if is_dynamic else {}
    controls, now, sent = (
        _models(run, number, name)
        for number, name in ((round - 1, "control"), (round, "control"), (round, "correction"))
    )
    for k, client in enumerate(plan.clients):
        if _is_personal(run, round):
            fault = "it was corrected in a personal round" if sent.get(client) else ""
        elif client in record.participants:
            fault = _correction_fault(plan, k, controls, sent)
            fault = _dynamic_fault(client, alpha, changes, sent) if is_dynamic else fault
        else:
            is_same = _same(controls.get(client, {}), now.get(client, {}))
            fault = "" if is_same else "its control changed while it took no part"
        yield AuditRow(run=run.path.name, round=round, client=client, check="corrected", ok=not fault, detail=fault)


def check_second_models(run: Run, round: int, plan: AuditPlan, record: AuditRecord) -> Iterator[AuditRow]:
    """Rows on the clients' second models and gates, of runs that have them."""
    mixing = run.config.get("mixing", {})
    is_personal = bool(mixing.get("personal_models"))
    if mixing.get("second_model", "none") != "none" and not is_personal:
        yield from _check_kept(run, round, plan, set(record.participants), check="second", noun="model")
    if run.config.get("server", {}).get("second_gate", "none") != "none":
        trained = record.accepted_clients if is_personal else record.participants
        yield from _check_kept(run, round, plan, set(trained), check="gate", noun="gate")


def _check_kept(
    run: Run, round: int, plan: AuditPlan, trained: Collection[str], *, check: str, noun: str
) -> Iterator[AuditRow]:
    """A row for each client: whether what it alone keeps is there, and stayed as it was where it did not train."""
    before, now = _models(run, round - 1, check), _models(run, round, check)
    for client in plan.clients:
        fault = ""
        if client not in trained and not _same(before.get(client, {}), now.get(client, {})):
            fault = f"its own {noun} changed while it took no part"
        elif client in trained and not now.get(client):
            fault = f"it trained, and has no {noun} of its own"
        yield AuditRow(run=run.path.name, round=round, client=client, check=check, ok=not fault, detail=fault)


def _is_personal(run: Run, round: int) -> bool:
    return round > int(run.config["training"]["rounds"]) - run.mixing.personal_rounds


def _models(run: Run, round: int, name: str) -> Models:
    folder = round_folder(run, round)
    return read_models(run, round, name) if (folder / f"{name}.safetensors").is_file() else {}


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _correction_fault(plan: AuditPlan, k: int, controls: Models, sent: Models) -> str:
    client = plan.clients[k]
    keys = {key for name, one in controls.items() for key in one if _meets(plan, k, name, key)}
    own = sent.get(client, {})
    if own.keys() != keys:
        return f"it was sent corrections of {len(own)} tensors, and {len(keys)} have any"
    for key in sorted(keys):
        others = [name for name in plan.clients if _meets(plan, k, name, key)]
        total = sum(controls[name][key].double().numpy() for name in others if key in controls.get(name, {}))
        control = controls.get(client, {}).get(key)
        want = total / len(others) - (0.0 if control is None else control.double().numpy())
        got = own[key].double().numpy()
        error = float(np.abs(got - want).max(initial=0.0)) if got.shape == np.shape(want) else float("inf")
        if not error <= TOLERANCE * max(float(np.abs(want).max(initial=0.0)), float(np.abs(total).max(initial=0.0))):
            return f"the correction of {key} is {error:.2g} away from the recomputation"
    return ""


def _dynamic_fault(client: str, alpha: float, changes: Mapping[str, np.ndarray], sent: Models) -> str:
    """FedDyn: whether a client was sent alpha times the sum of its changes, of every tensor that it has one of."""
    start, own = f"changes/{client}/", sent.get(client, {})
    wanted = {path.removeprefix(start): alpha * value for path, value in changes.items() if path.startswith(start)}
    if own.keys() != wanted.keys():
        return f"it was sent corrections of {len(own)} tensors, and {len(wanted)} have any"
    for key, want in wanted.items():
        got = own[key].double().numpy()
        error = float(np.abs(got - want).max(initial=0.0)) if got.shape == want.shape else float("inf")
        if not error <= TOLERANCE * float(np.abs(want).max(initial=0.0)):
            return f"the correction of {key} is {error:.2g} away from the recomputation"
    return ""


def _meets(plan: AuditPlan, k: int, other: str, key: str) -> bool:
    return not key.startswith(HEAD) or plan.tasks[plan.clients.index(other)] == plan.tasks[k]
