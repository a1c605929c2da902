"""Audit of the ledger where parts of a model do not train: what was not sent has stayed what it was, and bytes agree.

Every tensor that trained in a round, or changed at any client, goes up and down; the others go nowhere, but to clients
that missed a round, which are sent a whole model first. Sizes are those of the tensors as safetensors writes them.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor

from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rule_weights import run_kind
from atlas_fl.audit.run_files import (
    NO_ANSWER,
    Models,
    Run,
    is_aggregated,
    models_in,
    read_audit_record,
    read_models,
    read_rows,
)
from atlas_fl.params import HEAD, LORA_A, LORA_B

Model = Mapping[str, Tensor]


def check_sent_bytes(run: Run) -> Iterator[AuditRow]:
    """A row for each client and round in which it took part; nothing in runs that send all that they share."""
    if not _is_partly_trained(run):
        return
    ledger = _sums(read_rows(run.path / "ledger.jsonl"))
    models, outdated = read_models(run, 0, "start"), set[str]()
    for round in (number for number in run.rounds if is_aggregated(run, number)):
        record, after = read_audit_record(run, round), read_models(run, round, "start")
        joined = _joiner_models(run, round)
        before, outdated = {**models, **joined}, outdated | joined.keys()
        unsent = {key for key in _frozen_keys(run, round, after) if not _is_changed(key, before, after)}
        present = {name for name in record.participants if record.refused.get(name) != NO_ANSWER}
        for name in sorted(present):
            whole, part = _size(after[name], ()), _size(after[name], unsent)
            expected = {"up": 0 if name in record.refused else part, "down": part + whole * (name in outdated)}
            actual = {way: ledger[round, name, way] for way in expected}
            fault = "" if actual == expected else f"the ledger has {actual}, and what was to be sent is {expected}"
            yield AuditRow(run=run.path.name, round=round, client=name, check="sent", ok=not fault, detail=fault)
        changed = {name for name in after if any(_is_changed(key, before, after, only=name) for key in after[name])}
        models, outdated = after, (outdated | changed) - present


def _is_partly_trained(run: Run) -> bool:
    """Return whether a part of what the run shares does not train, and all goes as whole tensors in every round."""
    training, mixing = run.config.get("training", {}), run.mixing
    is_simple = run.mask is None and run.config.get("split", {}).get("split", "none") == "none"
    is_complete = run.rounds == tuple(range(1, len(run.rounds) + 1))
    is_whole = set(mixing.share) == {"A", "B", "head"} and mixing.aggregate_every == 1 and not mixing.personal_models
    is_mean = run_kind(run) == "mean" and not run.config.get("ranks", {}).get("rerank")
    return training.get("trained_parts", "all") != "all" and is_simple and is_complete and is_whole and is_mean


def _joiner_models(run: Run, round: int) -> Models:
    """Initial models of clients that joined before this round."""
    path = run.path / "audit" / f"joined-{round:04d}" / "start.safetensors"
    return models_in(path, within=run.path) if path.is_file() else {}


def _frozen_keys(run: Run, round: int, models: Models) -> set[str]:
    """The names of what does not train in this round."""
    parts = run.config["training"]["trained_parts"]
    still = {"alternate": LORA_B if round % 2 == 0 else LORA_A, "B": LORA_A}.get(parts)
    names = {key for params in models.values() for key in params}
    if parts in ("head", "without_head"):
        return {key for key in names if key.startswith(HEAD) != (parts == "head")}
    return {key for key in names if still is not None and key.endswith(still)}


def _is_changed(key: str, before: Models, after: Models, *, only: str | None = None) -> bool:
    clients = after if only is None else (only,)
    pairs = [(before[name][key], after[name][key]) for name in clients if key in after[name]]
    return not all(left.equal(right) for left, right in pairs)


def _size(model: Model, unsent: Collection[str]) -> int:
    """Bytes of adapters and head, a message each."""
    names = [key for key in sorted(model) if key not in unsent]
    parts = [[key for key in names if key.startswith(HEAD) == is_head] for is_head in (False, True)]
    return sum(len(save({key: model[key].contiguous() for key in part})) for part in parts if part)


def _sums(rows: list[dict[str, Any]]) -> Counter[tuple[int, str, str]]:
    """Bytes of models by round, client and direction."""
    sums = Counter[tuple[int, str, str]]()
    for row in rows:
        if row["kind"] in ("adapter", "head", "weights"):
            sums[row["round"], row["client"], row["direction"]] += int(row["bytes"])
    return sums
