"""Shapes of a run's JSON files, checked before their numbers are used: a file may be altered, or another program's.

A shape is a function `(value, location) -> fault`, empty where the value fits. Names that it does not know are allowed.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from atlas_fl.errors import CheckpointError, DataError, short_repr
from atlas_fl.storage.ledger import DIRECTIONS, KINDS, LedgerRow

GENERATION_METRICS = ("perplexity", "rouge1", "rouge2", "rougeL")
"""Scores of written text; lower perplexity is better, but accuracy decides (`data.task.Metric`)."""
METRICS = (
    *("loss", "ece", "primary", "accuracy", "f1", "precision", "recall", "mcc", "pearson", "spearman", "majority"),
    *GENERATION_METRICS,
)
"""Scores in rows of evaluations."""
ROW_NAMES = (
    *("round", "client", "task", "split", "classes", "examples", "seconds", "steps", "skipped", "gain_over_majority"),
    *METRICS,
)
"""Names in rows of training and evaluations and in their summaries; each other number there is a plug-in's score."""

SHARING = ("own_share", "effective_clients", "variance_over_noise")
"""Measures of a client's row under `kriging` (`methods.kriging.MeasuredSharing`)."""

Shape: TypeAlias = Callable[[Any, str], str]

LARGEST_MESSAGE = 10**12
"""Bytes of what one row of a ledger counts: sums over a million of them are numbers still."""
LARGEST = 1e18
"""No byte count or second comes near it, and its square is a number still."""
LARGEST_SCORE = 1e300
"""A loss or a perplexity of a model that diverged is as large as it is; a mean over clients is a number still."""


def check_shape(value: object, shape: Shape, *, file: Path) -> None:
    """Check that the content of this file has this shape.

    Raises:
        CheckpointError: it has not; the message says where and what stands there.
    """
    if fault := shape(value, ""):
        raise CheckpointError(f"damaged file {file}: {fault}; restore it from a copy, or run again")


def check_written(value: object, shape: Shape, *, file: Path) -> None:
    """Raise `DataError` where this content of a file does not have the shape that its readers ask for.

    Such a file would be called damaged once it is read.
    """
    if fault := shape(value, ""):
        raise DataError(f"{file} is not written: {fault}; nothing could read it again")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The numbers from `least` to `most`, both included."""

    least: float
    most: float
    whole: bool = False

    def __str__(self) -> str:
        """The range in words.

        >>> str(Bounds(least=1, most=2**20, whole=True))
        'whole number from 1 to 1048576'
        """
        kind = "whole number" if self.whole else "number"
        return f"{kind} from {_digits(self.least)} to {_digits(self.most)}"

    def __contains__(self, value: object) -> bool:
        """Return whether this is such a number; truth values are none."""
        return (
            isinstance(value, int | float)
            and type(value) is not bool
            and self.least <= value <= self.most
            and (not self.whole or value == math.floor(value))
        )

    @property
    def shape(self) -> "Shape":
        """The shape of one of these numbers."""
        return scalar(str(self), self.__contains__)


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) and abs(value) < 10**8 else f"{value:g}"


def _place(location: str) -> str:
    return location.lstrip(".") or "it"


def scalar(kind: str, test: Callable[[Any], bool]) -> Shape:
    """A value that passes this test; `kind` names such values in a message."""

    def shape(value: Any, location: str) -> str:
        return "" if test(value) else f"{_place(location)} is {short_repr(value)} and no {kind}"

    return shape


def _number(kind: str, least: float, most: float, *, types: tuple[type, ...] = (int, float)) -> Shape:
    return scalar(kind, lambda value: type(value) in types and least <= value <= most)


def _matching(kind: str, pattern: str) -> Shape:
    return scalar(kind, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


number = _number("number", -LARGEST, LARGEST)
non_negative = _number("number from 0", 0, LARGEST)
integer = _number("whole number", -LARGEST, LARGEST, types=(int,))
count = _number("whole number from 0", 0, LARGEST, types=(int,))
message_bytes = _number(f"whole number from 0 to {LARGEST_MESSAGE:g}", 0, LARGEST_MESSAGE, types=(int,))
score = _number("number", -LARGEST_SCORE, LARGEST_SCORE)
score_from_zero = _number("number from 0", 0, LARGEST_SCORE)
text = scalar("text", lambda value: isinstance(value, str))
word = _matching("word", r"[^\W\d]\w{,98}")
round_name = _matching("number of a round", r"\d{1,9}")
plan_name = _matching("name of a plan's file", r"plan(-\d{4,})?\.json")
flag = scalar("true or false", lambda value: type(value) is bool)
mapping = scalar("mapping", lambda value: isinstance(value, dict))


def relative_path(value: Any, location: str) -> str:
    """The fault of the name of a file inside a run's folder."""
    path = Path(value) if isinstance(value, str) and "\0" not in value else None
    is_outside = path is None or not path.parts or path.is_absolute() or ".." in path.parts
    return f"{_place(location)} names {short_repr(value)}, no file inside the folder" if is_outside else ""


def optional(shape: Shape) -> Shape:
    """Null, or this."""
    return lambda value, location: "" if value is None else shape(value, location)


def one_of(*shapes: Shape) -> Shape:
    """One of these; the fault of the first where it is none."""

    def one_of_shape(value: Any, location: str) -> str:
        faults = [shape(value, location) for shape in shapes]
        return "" if "" in faults else faults[0]

    return one_of_shape


def both(first: Shape, then: Shape) -> Shape:
    """This, and what can be looked at once it is so."""
    return lambda value, location: first(value, location) or then(value, location)


def list_of(shape: Shape, *, least: int = 0) -> Shape:
    """A list of these."""
    size = f" of {least} or more" if least else ""
    lists = scalar(f"list{size}", lambda value: isinstance(value, list) and len(value) >= least)

    def entries(value: Any, location: str) -> str:
        return _first_fault(shape(entry, f"{location}[{index}]") for index, entry in enumerate(value))

    return both(lists, entries)


def mapping_of(shape: Shape, *, names: Shape = text) -> Shape:
    """A mapping of any names to these."""

    def entries(value: Any, location: str) -> str:
        return _first_fault(
            names(name, location) or shape(entry, f"{location}.{name}") for name, entry in value.items()
        )

    return both(mapping, entries)


def fields(required: Mapping[str, Shape] | None = None, /, **optional: Shape) -> Shape:
    """A mapping that has all the required names, and others of these perhaps."""
    needed = required or {}
    shapes = {**optional, **needed}

    def entries(value: Any, location: str) -> str:
        missing = next((f"{_place(location)} lacks {name!r}" for name in needed if name not in value), "")
        known = [name for name in value if name in shapes]
        return missing or _first_fault(shapes[name](value[name], f"{location}.{name}") for name in known)

    return both(mapping, entries)


def _first_fault(faults: Iterator[str]) -> str:
    return next((fault for fault in faults if fault), "")


matrix = list_of(list_of(number))

_CLIENT = fields(
    {"name": text, "task": text},
    device=text,
    examples=non_negative,
    cluster=integer,
    ranks=list_of(count),
    cut=optional(count),
    **dict.fromkeys(("budget_bytes", "largest_rank"), number),
    **dict.fromkeys(("memory", "predicted"), mapping_of(number)),
    split=fields(shared=optional(integer)),
    planning=mapping_of(mapping_of(number)),
)
_CLUSTERING = fields(
    labels=list_of(integer),
    method=text,
    reliability=list_of(number),
    structure=fields(reason=text),
    k_table=list_of(mapping_of(optional(one_of(number, flag, text, list_of(number))))),
    settings=optional(fields({"k_range": list_of(integer)})),
    explained_variance=number,
    components=integer,
    warnings=list_of(text),
    centroids=list_of(matrix),
    **dict.fromkeys(("similarity", "points", "offsets"), matrix),
)
_DATA = fields(
    {"client": text, "task": text},
    examples=mapping_of(count),
    labels=one_of(mapping_of(number), list_of(text)),
    majority=mapping_of(number),
    distance=number,
)
_LEAKAGE = fields({"task": text, "blocks": count, "read": number, "commonest": number})
_SPARSE = fields(mask=optional(text), layers=mapping_of(number), sparsity=number)


def _plan_fault(plan: Mapping[str, Any], _location: str) -> str:
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
        {"clients": list_of(_CLIENT, least=1)},
        adjacency=optional(matrix),
        importance=matrix,
        layer_of=mapping_of(count),
        lora=fields(alpha=optional(number), rslora=flag),
        clustering=_CLUSTERING,
        warmup=mapping,
        graph=fields(effective_neighbours=list_of(number)),
        data=list_of(_DATA),
        leakage=list_of(_LEAKAGE),
        notes=list_of(text),
        sparse=_SPARSE,
    ),
    _plan_fault,
)
"""`plan.json`."""

_NUMBERS = {
    **dict.fromkeys((*METRICS, "seconds", "examples", "best_round", "validation"), number),
    # those of a model that diverged
    **dict.fromkeys(("loss", "perplexity"), score),
}
_COUNTS = both(
    fields({"hits": list_of(count), "examples": list_of(count)}),
    lambda value, location: "" if len(value["hits"]) == len(value["examples"]) else f"{location} has unequal lists",
)
_SCORES_ROW = fields({"round": count, "client": text, "task": text, "split": text}, classes=_COUNTS, **_NUMBERS)
_EVENT_TEXTS = dict.fromkeys(("client", "reason", "host", "work"), text)
_EVENT_ROW = fields({"round": count, "event": text}, discarded=mapping_of(score), **_EVENT_TEXTS, **_NUMBERS)
_BY_EVENT = {
    "refused": fields({"client": text, "reason": text}),
    "hosted": fields({"client": text, "host": text, "work": text}),
    "sharing measured": fields({"client": text, "parameters": text}, **dict.fromkeys(SHARING, score_from_zero)),
}


def metrics_row(value: Any, location: str) -> str:
    """The fault of a row of `metrics.jsonl`."""
    if isinstance(value, dict) and "split" not in value:
        return _EVENT_ROW(value, location) or _BY_EVENT.get(value["event"], mapping)(value, location)
    return _SCORES_ROW(value, location) or _first_fault(
        score(value[name], f"{location}.{name}") for name in further_scores(value)
    )


def further_scores(row: Mapping[str, Any]) -> list[str]:
    """The scores of plug-ins in a row of an evaluation, by name."""
    return [name for name, value in row.items() if name not in ROW_NAMES and type(value) in (int, float)]


_LEDGER = fields(
    {
        "round": count,
        "client": text,
        "direction": scalar("direction", lambda value: value in DIRECTIONS),
        "kind": scalar("kind of message", lambda value: value in KINDS),
        "bytes": message_bytes,
    },
    relayed=flag,
    **dict.fromkeys(("peer", "guest", "phase"), text),
)


def ledger_row(value: Any, location: str) -> str:
    """The fault of a row of `ledger.jsonl`."""
    columns = LedgerRow.__dataclass_fields__
    return _LEDGER(value, location) or _first_fault(
        f"{location} has {short_repr(name)}" for name in value if name not in columns
    )


_SPLITS = fields(
    round=count,
    worst_client=fields({"client": text}, primary=score),
    worst_gain=fields({"client": text}),
    **dict.fromkeys(("train", "validation", "test", "spread"), mapping_of(score)),
)
_GROUP_SUMMARY = fields(
    clients=count,
    final=_SPLITS,
    best=_SPLITS,
    rounds_to=mapping_of(optional(number)),
    classes=mapping_of(mapping_of(number)),
)
_CLIENT_SUMMARY = fields(
    final=_SPLITS,
    best=_SPLITS,
    bytes=mapping_of(number),
    utilisation=mapping_of(score),
    memory=mapping_of(number),
    predicted=mapping_of(non_negative),
    task=text,
)
SUMMARY = fields(
    run=fields({"rounds": count}, seed=one_of(number, text)),
    best=fields({"round": count, "validation": score}),
    stopped=fields({"round": count}),
    overall=_GROUP_SUMMARY,
    tasks=mapping_of(_GROUP_SUMMARY),
    clients=mapping_of(_CLIENT_SUMMARY),
    bytes=fields(
        {"up": number, "down": number},
        **dict.fromkeys(("total", "between_clients", "relayed"), number),
        by_kind=mapping_of(mapping_of(number)),
        full_model=fields(reduction=number),
    ),
    seconds=fields(total=number, reused=number, phases=mapping_of(number)),
    memory=mapping_of(number),
    sharing=mapping_of(mapping_of(mapping_of(score_from_zero))),
    events=fields(
        count=mapping_of(count), refused=list_of(fields({"round": count, "client": text, "reason": text}))
    ),
)  # fmt: skip
"""`summary.json`; what a reader cannot do without it says itself (`require_fields`)."""

TUNING = fields(
    {
        "strategy": text,
        "seeds": list_of(integer, least=1),
        "trials": list_of(
            fields({"settings": mapping_of(one_of(number, word), names=word), "validation": score}), least=1
        ),
    }
)
"""`tuning.json`."""

STATE = fields(
    {
        "origin": fields({"settings": mapping, "data": mapping_of(text), "model": mapping_of(optional(text))}),
        "same": mapping_of(text),
        **dict.fromkeys(("metrics_bytes", "ledger_bytes"), count),
        "stale": list_of(text),
        "validation": mapping_of(score),
        "plan": plan_name,
        **dict.fromkeys(("seconds", "peak"), mapping_of(number)),
        "round_seconds": mapping_of(number, names=round_name),
        "reused_seconds": number,
        "history": mapping_of(score, names=round_name),
        "over": flag,
    }
)
"""The state of a checkpoint of a run."""

DIGESTS = mapping_of(text, names=relative_path)
"""SHA-256 by the path inside a folder."""


def require_fields(content: Mapping[str, Any], *names: str, file: Path) -> None:
    """Raise `CheckpointError` unless the content of this file has these names."""
    check_shape(content, fields(dict.fromkeys(names, lambda _value, _location: "")), file=file)
