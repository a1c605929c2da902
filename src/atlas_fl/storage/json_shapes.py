"""What a JSON file of a run must look like before its numbers are used: it may be altered, or of another program.

A shape is a function `(value, place) -> fault`, empty where the value fits. Names that it does not know are allowed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from atlas_fl.errors import CheckpointError, shown
from atlas_fl.storage.ledger import DIRECTIONS, KINDS, LedgerRow

WRITTEN = ("perplexity", "rouge1", "rouge2", "rougeL")
"""Scores of written text; lower perplexity is better, but accuracy decides (`data.task.Metric`)."""
METRICS = (
    *("loss", "primary", "accuracy", "f1", "precision", "recall", "mcc", "pearson", "spearman", "majority"),
    *WRITTEN,
)
"""Scores in rows of evaluations."""

Shape: TypeAlias = Callable[[Any, str], str]

LARGEST = 1e18
"""No byte count or second comes near it, and its square is a number still."""
LARGEST_SCORE = 1e300
"""A loss or a perplexity of a model that diverged is as large as it is; a mean over clients is a number still."""


def fits(value: object, shape: Shape, *, file: Path) -> None:
    """Nothing where the content of this file has this shape.

    Raises:
        CheckpointError: it has not; the message says where and what stands there.
    """
    if fault := shape(value, ""):
        raise CheckpointError(f"damaged file {file}: {fault}; restore it from a copy, or run again")


def _is(kind: str, test: Callable[[Any], bool]) -> Shape:
    def shape(value: Any, place: str) -> str:
        return "" if test(value) else f"{place.lstrip('.') or 'it'} is {shown(value)} and no {kind}"

    return shape


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def _is_whole(value: Any) -> bool:
    return type(value) is int and _is_number(value)


number = _is("number", _is_number)
score = _is("number", lambda value: type(value) in (int, float) and -LARGEST_SCORE < value < LARGEST_SCORE)
whole = _is("whole number", _is_whole)
count = _is("whole number from 0", lambda value: _is_whole(value) and value >= 0)
amount = _is("number from 0", lambda value: _is_number(value) and value >= 0)
text = _is("text", lambda value: isinstance(value, str))
flag = _is("true or false", lambda value: type(value) is bool)
mapping = _is("mapping", lambda value: isinstance(value, dict))
plan_name = _is(
    "name of a plan's file",
    lambda value: isinstance(value, str) and re.fullmatch(r"plan(-\d{4,})?\.json", value) is not None,
)


def _anything(_value: Any, _place: str) -> str:
    return ""


def inside(value: Any, place: str) -> str:
    """The fault of the name of a file inside a run's folder."""
    path = Path(value) if isinstance(value, str) and "\0" not in value else None
    bad = path is None or not path.parts or path.is_absolute() or ".." in path.parts
    return f"{place.lstrip('.') or 'it'} names {shown(value)}, no file inside the folder" if bad else ""


def maybe(shape: Shape) -> Shape:
    """Null, or this."""
    return lambda value, place: "" if value is None else shape(value, place)


def either(*shapes: Shape) -> Shape:
    """One of these."""

    def either_shape(value: Any, place: str) -> str:
        faults = [shape(value, place) for shape in shapes]
        return "" if "" in faults else faults[0]

    return either_shape


def each(shape: Shape, *, least: int = 0) -> Shape:
    """A list of these."""

    def list_shape(value: Any, place: str) -> str:
        if not isinstance(value, list) or len(value) < least:
            return f"{place.lstrip('.') or 'it'} is {shown(value)} and no list{f' of {least} or more' * (least > 0)}"
        return _first(shape(entry, f"{place}[{index}]") for index, entry in enumerate(value))

    return list_shape


def table(shape: Shape, *, names: Shape = text) -> Shape:
    """A mapping of any names to these."""

    def table_shape(value: Any, place: str) -> str:
        if fault := mapping(value, place):
            return fault
        faults = (names(name, place) or shape(entry, f"{place}.{name}") for name, entry in value.items())
        return _first(faults)

    return table_shape


def fields(required: Mapping[str, Shape] | None = None, **optional: Shape) -> Shape:
    """A mapping that has all the required names, and others of these perhaps."""
    needed = required or {}

    def fields_shape(value: Any, place: str) -> str:
        if fault := mapping(value, place):
            return fault
        if missing := [name for name in needed if name not in value]:
            return f"{place.lstrip('.') or 'it'} lacks {missing[0]!r}"
        known = {**optional, **needed}
        return _first(known[name](entry, f"{place}.{name}") for name, entry in value.items() if name in known)

    return fields_shape


def both(first: Shape, then: Shape) -> Shape:
    """This, and what can be looked at once it is so."""
    return lambda value, place: first(value, place) or then(value, place)


def _first(faults: Iterator[str]) -> str:
    return next((fault for fault in faults if fault), "")


matrix = each(each(number))

_CLIENT = fields(
    {"name": text, "task": text},
    device=text,
    examples=amount,
    cluster=whole,
    ranks=each(count),
    cut=maybe(count),
    budget_bytes=number,
    largest_rank=number,
    memory=table(number),
    predicted=table(number),
    split=fields(shared=maybe(whole)),
    planning=table(table(number)),
)
_CLUSTERING = fields(
    labels=each(whole),
    method=text,
    similarity=matrix,
    reliability=each(number),
    structure=fields(reason=text),
    k_table=each(table(maybe(either(number, flag, text, each(number))))),
    settings=maybe(fields({"k_range": each(whole)})),
    explained_variance=number,
    components=whole,
    warnings=each(text),
    points=matrix,
    centroids=each(matrix),
    offsets=matrix,
)
_DATA = fields(
    {"client": text, "task": text},
    examples=table(count),
    labels=either(table(number), each(text)),
    majority=table(number),
    distance=number,
)
_LEAKAGE = fields({"task": text, "blocks": count, "read": number, "commonest": number})
_SPARSE = fields(mask=maybe(text), layers=table(number), sparsity=number)


def _in_one_piece(plan: Mapping[str, Any], _place: str) -> str:
    """The fault of a plan whose parts do not fit each other."""
    clients, n = plan["clients"], len(plan["clients"])
    if len({client["name"] for client in clients}) < n:
        return "two clients have one name"
    ranks = {len(client["ranks"]) for client in clients if "ranks" in client}
    if len(ranks) > 1:
        return "clients have ranks of different numbers of layers"
    square = plan.get("adjacency")
    if square is not None and (len(square) != n or any(len(row) != n for row in square)):
        return f"adjacency is no matrix of {n} x {n}"
    rows = plan.get("importance")
    if rows and (len(rows) != n or len({len(row) for row in rows}) > 1):
        return f"importance has not a row of every layer for {n} clients"
    if any(layer >= max(ranks, default=0) for layer in plan.get("layer_of", {}).values()):
        return "layer_of names a layer without ranks"
    return _labels_fault(plan)


def _labels_fault(plan: Mapping[str, Any]) -> str:
    counts = {
        (row["task"], len(row["labels"])) for row in plan.get("data", ()) if "distance" in row and "labels" in row
    }
    if any("distance" in row and not isinstance(row.get("labels"), dict) for row in plan.get("data", ())):
        return "data has a distance without labels"
    return "data has other labels for clients of one task" if len(counts) > len({task for task, _ in counts}) else ""


PLAN = both(
    fields(
        {"clients": each(_CLIENT, least=1)},
        adjacency=maybe(matrix),
        importance=matrix,
        layer_of=table(count),
        lora=fields(alpha=maybe(number), rslora=flag),
        clustering=_CLUSTERING,
        warmup=mapping,
        graph=fields(effective_neighbours=each(number)),
        data=each(_DATA),
        leakage=each(_LEAKAGE),
        notes=each(text),
        sparse=_SPARSE,
    ),
    _in_one_piece,
)
"""`plan.json`; older ones lack parts."""

_NUMBERS = dict.fromkeys((*METRICS, "seconds", "examples", "best_round", "validation"), score)
_COUNTS = both(
    fields({"hits": each(count), "examples": each(count)}),
    lambda value, place: "" if len(value["hits"]) == len(value["examples"]) else f"{place} has unequal lists",
)
_SCORED = fields({"round": count, "client": text, "task": text, "split": text}, classes=_COUNTS, **_NUMBERS)
_EVENT = fields(
    {"round": count, "event": text}, client=text, reason=text, host=text, work=text, discarded=table(number), **_NUMBERS
)
_BY_EVENT = {
    "refused": fields({"client": text, "reason": text}),
    "hosted": fields({"client": text, "host": text, "work": text}),
}


def metrics_row(value: Any, place: str) -> str:
    """The fault of a row of `metrics.jsonl`."""
    if isinstance(value, dict) and "split" not in value:
        return _EVENT(value, place) or _BY_EVENT.get(value["event"], mapping)(value, place)
    return _SCORED(value, place)


_LEDGER = fields(
    {
        "round": count,
        "client": text,
        "direction": _is("direction", lambda value: value in DIRECTIONS),
        "kind": _is("kind of message", lambda value: value in KINDS),
        "bytes": count,
    },
    peer=text,
    guest=text,
    relayed=flag,
    phase=text,
)


def ledger_row(value: Any, place: str) -> str:
    """The fault of a row of `ledger.jsonl`."""
    known = LedgerRow.__dataclass_fields__
    return _LEDGER(value, place) or _first(f"{place} has {shown(name)}" for name in value if name not in known)


_SPLITS = fields(
    round=count,
    train=table(score),
    validation=table(score),
    test=table(score),
    worst_client=fields({"client": text}, primary=score),
    worst_gain=fields({"client": text}),
    spread=table(score),
)
_GROUP = fields(
    clients=count, final=_SPLITS, best=_SPLITS, rounds_to=table(maybe(number)), classes=table(table(number))
)
_OF_CLIENT = fields(
    final=_SPLITS, best=_SPLITS, bytes=table(number), utilisation=table(number), memory=table(number), task=text
)
SUMMARY = fields(
    run=fields({"rounds": count}, seed=either(number, text)),
    best=fields({"round": count, "validation": score}),
    stopped=fields({"round": count}),
    overall=_GROUP,
    tasks=table(_GROUP),
    clients=table(_OF_CLIENT),
    bytes=fields(
        {"up": number, "down": number},
        total=number,
        between_clients=number,
        relayed=number,
        by_kind=table(table(number)),
        full_model=fields(reduction=number),
    ),
    seconds=fields(total=number, phases=table(number)),
    memory=table(number),
    events=fields(
        count=table(count), refused=each(fields({"round": count, "client": text, "reason": text}))
    ),
)  # fmt: skip
"""`summary.json`; what a reader cannot do without it says itself (`needs`)."""

_numeral = _is("number of a round", lambda value: isinstance(value, str) and value.isdecimal() and len(value) < 10)
STATE = fields(
    {
        "origin": fields({"settings": mapping, "data": table(text)}),
        "same": table(text),
        "metrics_bytes": count,
        "ledger_bytes": count,
        "stale": each(text),
        "validation": table(score),
        "plan": plan_name,
        "seconds": table(number),
        "peak": table(number),
        "round_seconds": table(number, names=_numeral),
    },
    history=table(score, names=_numeral),
    over=flag,
)
"""The state of a checkpoint of a run."""

DIGESTS = table(text, names=inside)
"""SHA-256 by the path inside a folder."""


def needs(content: Mapping[str, Any], *names: str, file: Path) -> None:
    """Nothing where the content of this file has these names; raises `CheckpointError` where one is missing."""
    fits(content, fields(dict.fromkeys(names, _anything)), file=file)
