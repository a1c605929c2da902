"""Audit of what goes beside models, and of what clients keep: corrections, class means, second models, bytes.

What was sent is computed again from the state or the controls of the round before, value by value in float64. Where
parts of a model do not train, every tensor that trained in a round, or changed at any client, goes up and down; the
others go nowhere, but to clients that missed a round, which are sent a whole model first.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TypeAlias

import numpy as np
from safetensors.torch import save
from torch import Tensor

from atlas_fl.audit.averages import MEAN
from atlas_fl.audit.class_features import class_means
from atlas_fl.audit.dense import arrays, bound_weights, numbers, same_tensors
from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rules import formula_of
from atlas_fl.audit.run_files import NO_ANSWER, AuditPlan, AuditRecord, Flat, Models, Run, reading
from atlas_fl.audit.step import Values, compare_values
from atlas_fl.params import HEAD, LORA_A, LORA_B
from atlas_fl.storage.jsonl import read_rows

TOLERANCE = 1e-5
"""Tolerance of a value over the largest of its tensor."""

Expected: TypeAlias = Callable[[int], tuple[Values, Values]]
"""Expected tensors for client k, by name, and the sums that they were computed from."""


def check_sent(run: Run, round: int, plan: AuditPlan, record: AuditRecord, state: Flat) -> Iterator[AuditRow]:
    """A row for each client that trained and each kind of what it was sent; `state` is of before the round."""
    for check, kind, expected in _expected(run, round, plan, state):
        sent = run.models_if_any(round, kind)
        for k, client in enumerate(plan.clients):
            if run.is_personal(round):
                fault = f"it was sent {kind} in a personal round" if sent.get(client) else ""
            elif client in record.participants:
                wanted, sums = expected(k)
                sizes = {key: float(np.abs(total).max(initial=0.0)) for key, total in sums.items()}
                found = arrays(sent.get(client, {}))
                fault, _ = compare_values(wanted, found, kind, tolerance=(0.0, TOLERANCE), sizes=sizes)
            else:
                continue
            yield AuditRow(check, client, fault)


def _expected(run: Run, round: int, plan: AuditPlan, state: Flat) -> Iterator[tuple[str, str, Expected]]:
    """(the check, the file's name, what was to be sent) of every kind that the settings ask for."""
    training, formula = run.settings.training, formula_of(run)
    if training.control_variates:
        controls, bound = run.models_if_any(round - 1, "control"), run.settings.robust.max_share
        yield "corrected", "correction", partial(_control_correction, plan, controls, bound)
    if (correction := formula.correction) is not None:
        values = arrays(state)
        yield "corrected", "correction", lambda k: (correction(run, plan.clients[k], values), {})
    if run.settings.server.feature_alignment:
        yield "aligned", "centroids", lambda k: (class_means(plan, k, state), {})


def _control_correction(plan: AuditPlan, controls: Models, bound: float, k: int) -> tuple[Values, Values]:
    """SCAFFOLD: the mean by examples of the controls that client k meets, less its own; and that mean."""
    wanted: dict[str, np.ndarray] = {}
    sums: dict[str, np.ndarray] = {}
    own = controls.get(plan.clients[k], {})
    for key in sorted({key for params in controls.values() for key in params}):
        met = [other for other in range(len(plan.clients)) if plan.may_meet(k, other, key)]
        shares = bound_weights([plan.examples[other] for other in met], bound)
        known = [(share, controls.get(plan.clients[other], {})) for share, other in zip(shares, met, strict=True)]
        if values := [share * numbers(control[key]) for share, control in known if key in control]:
            sums[key] = np.asarray(sum(values))
            wanted[key] = sums[key] - (numbers(own[key]) if key in own else 0.0)
    return wanted, sums


def check_kept(run: Run, round: int, plan: AuditPlan, record: AuditRecord) -> Iterator[AuditRow]:
    """A row for each client: what it alone keeps is there, and stayed as it was where it did not train."""
    mixing = run.settings.mixing
    kinds = {"control": "corrected"} if run.settings.training.control_variates else {}
    if mixing.second_model != "none" and not mixing.personal_models:
        kinds["second"] = "second"
    if run.settings.server.second_gate != "none":
        kinds["gate"] = "gate"
    nouns = {"second": "model"}
    for kind, check in kinds.items():
        before, now = run.models_if_any(round - 1, kind), run.models_if_any(round, kind)
        trained = record.accepted_clients if kind == "gate" and mixing.personal_models else set(record.participants)
        for client in plan.clients:
            fault = ""
            if client not in trained and not same_tensors(before.get(client, {}), now.get(client, {})):
                fault = f"its own {nouns.get(kind, kind)} changed while it took no part"
            elif client in trained and not now.get(client) and kind != "control":
                fault = f"it trained, and has no {nouns.get(kind, kind)} of its own"
            yield AuditRow(check, client, fault)


def check_bytes(run: Run) -> Iterator[AuditRow]:
    """A row for each round and client that took part; nothing in runs that send all that they share."""
    if not _is_partly_trained(run):
        return
    ledger: Counter[tuple[int, str, str]] = Counter()
    file = run.path / "ledger.jsonl"
    with reading(file, "ledger of a run"):
        for row in read_rows(file):
            if row["kind"] in ("adapter", "head", "weights"):
                ledger[row["round"], row["client"], row["direction"]] += row["bytes"]
    models, outdated = run.models(0, "start"), set[str]()
    for round in filter(run.is_aggregated, run.rounds):
        record, after = run.record(round), run.models(round, "start")
        joined = run.models_if_any(round, "start", joined=True)
        before = {**models, **joined}
        outdated |= joined.keys()
        changed = {
            client: {key for key, tensor in params.items() if not tensor.equal(before[client][key])}
            for client, params in after.items()
        }
        frozen = _frozen_keys(run, round, after)
        unsent = frozen - set().union(*changed.values())
        unsent_up = frozen if formula_of(run).moves_untrained else unsent
        present = {name for name in record.participants if record.refused.get(name) != NO_ANSWER}
        for name in sorted(present):
            whole, part = _size(after[name], ()), _size(after[name], unsent)
            up = 0 if name in record.refused else _size(after[name], unsent_up)
            expected = {"up": up, "down": part + whole * (name in outdated)}
            actual = {way: ledger[round, name, way] for way in expected}
            fault = "" if actual == expected else f"the ledger has {actual}, and what was to be sent is {expected}"
            yield AuditRow("sent", name, fault, round=round)
        models, outdated = after, (outdated | {name for name, keys in changed.items() if keys}) - present


def _is_partly_trained(run: Run) -> bool:
    """Return whether a part of what the run shares does not train, and all goes as whole tensors in every round."""
    settings, mixing = run.settings, run.mixing
    is_simple = run.mask is None and settings.split.split == "none" and not settings.ranks.rerank
    is_complete = run.rounds == tuple(range(1, len(run.rounds) + 1))
    is_whole = set(mixing.share) == {"A", "B", "head"} and mixing.aggregate_every == 1 and not mixing.personal_models
    is_mean = formula_of(run) == MEAN or formula_of(run).moves_untrained
    return settings.training.trained_parts != "all" and is_simple and is_complete and is_whole and is_mean


def _frozen_keys(run: Run, round: int, models: Models) -> set[str]:
    """The names of what does not train in this round."""
    parts = run.settings.training.trained_parts
    still = {"alternate": LORA_B if round % 2 == 0 else LORA_A, "B": LORA_A}.get(parts)
    names = {key for params in models.values() for key in params}
    if parts in ("head", "without_head"):
        return {key for key in names if key.startswith(HEAD) != (parts == "head")}
    return {key for key in names if still is not None and key.endswith(still)}


def _size(model: Mapping[str, Tensor], unsent: Collection[str]) -> int:
    """Bytes of adapters and head, a message each."""
    names = [key for key in sorted(model) if key not in unsent]
    parts = [[key for key in names if key.startswith(HEAD) == is_head] for is_head in (False, True)]
    return sum(len(save({key: model[key].contiguous() for key in part})) for part in parts if part)
