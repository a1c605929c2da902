"""Client metadata that a site reports: counts, label statistics and lengths, no example; placeholder clients.

Planning needs to know how many examples a client has, how long they are and how its labels are spread. The server puts
placeholders with these properties in the place of the data, so that planning and records are the same code as in a
simulation.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from atlas_fl.client.job import ClientTokens
from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import METRICS, Labels, Rows, Source, Task, TaskData
from atlas_fl.errors import ConfigError, ProtocolError, short_repr
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Split
from atlas_fl.ranks.devices import Device, find_devices
from atlas_fl.storage.json_shapes import Bounds, Shape, fields, flag

SPLITS: tuple[Split, ...] = get_args(Split)
SHOWN = 6
MOST_EXAMPLES, MOST_TOKENS = 2 * 10**6, 10**9
MOST_LENGTHS, LONGEST_NAME = 10**5, 200
"""Different lengths in a split, and signs in a label's name."""
BOUNDS: Mapping[str, Bounds] = {
    "num_labels": Bounds(least=0, most=10**4, whole=True),
    "max_length": Bounds(least=1, most=2**20, whole=True),
    "examples": Bounds(least=1, most=MOST_EXAMPLES, whole=True),
    "left_out": Bounds(least=0, most=MOST_EXAMPLES, whole=True),
    "examples of a class": Bounds(least=0, most=MOST_EXAMPLES, whole=True),
    "mean label": Bounds(least=-1e12, most=1e12),
    "deviation of labels": Bounds(least=0, most=1e12),
    "tokens": Bounds(least=1, most=2**20, whole=True),
    "tokens to be predicted": Bounds(least=0, most=2**20, whole=True),
    "examples of a length": Bounds(least=1, most=MOST_EXAMPLES, whole=True),
}
"""The range of each number of a registration; a device's are `ranks.devices.BOUNDS`.

Beyond these metadata are a mistake, or an attempt to make the server allocate (a few numbers an example) or plan with
numbers that no file of a run may hold (`storage.json_shapes`).
"""


@dataclass(frozen=True, kw_only=True)
class TaskLabels:
    """The labels that all clients of one task must have in common."""

    num_labels: int
    metric: str
    label_names: tuple[str, ...]
    images: bool

    def __str__(self) -> str:
        """The labels, as a line names them."""
        names = self.label_names[:SHOWN]
        shown = f"({', '.join(names)}{', ...' if len(self.label_names) > SHOWN else ''})" if names else "without names"
        return f"{shown} judged by {self.metric}"


def labels_of_task(task: "Task | ClientMetadata") -> TaskLabels:
    """The labels of this task, or of the task of a client with this metadata."""
    return TaskLabels(num_labels=task.num_labels, metric=task.metric, label_names=task.label_names, images=task.images)


@dataclass(frozen=True, kw_only=True)
class ClientMetadata:
    """The server's knowledge of one client's data."""

    task: str
    num_labels: int
    metric: str
    label_names: tuple[str, ...]
    max_length: int
    examples: Mapping[str, int]
    """Numbers of examples by split."""
    labels: Mapping[str, list[float]]
    """By split: examples of every class, or mean and standard deviation of values or of words."""
    lengths: Mapping[str, tuple[tuple[int, int, int], ...]]
    """By split: (tokens, tokens to be predicted, examples that have so many)."""
    images: bool = False
    """The examples are images."""
    left_out: int = 0
    """Rows that its task was given and the client has not."""

    @property
    def task_labels(self) -> TaskLabels:
        """The labels that clients of its task must have in common with it."""
        return labels_of_task(self)


def metadata_of(client: ClientData, tokens: ClientTokens) -> dict[str, Any]:
    """The metadata that this client sends to the server: plain data for strict JSON."""
    task = client.task
    rows = {"train": client.train, "validation": client.validation, "test": client.test}
    return {
        "task": task.name,
        "num_labels": task.num_labels,
        "metric": task.metric,
        "label_names": list(task.label_names),
        "max_length": task.max_length,
        "examples": {split: len(split_rows) for split, split_rows in rows.items()},
        "labels": {split: _spread(split_rows.label, task) for split, split_rows in rows.items()},
        "lengths": {split: _lengths(split_rows) for split, split_rows in tokens.splits.items()},
        **({"images": True} if task.images else {}),
        **({"left_out": client.left_out} if client.left_out else {}),
    }


def _lengths(data: EncodedExamples) -> list[list[int]]:
    pairs, counts = np.unique(np.stack([data.lengths, data.num_targets]), axis=1, return_counts=True)
    triples: list[list[int]] = np.concatenate([pairs, counts[None]]).T.tolist()
    return triples


def _spread(label: Labels, task: Task) -> list[float]:
    if task.has_classes:
        return [int(count) for count in np.bincount(label, minlength=task.num_labels)]
    return [float(label.mean()), float(label.std())]


def read_metadata(data: Mapping[str, Any]) -> ClientMetadata:
    """The metadata that plain data holds.

    Raises `ProtocolError` where they do not hold together, or tell of more than fits any server (`BOUNDS`).
    """
    if fault := _REGISTRATION(dict(data), "") or _token_fault(data["lengths"]):
        raise ProtocolError(f"what the client tells of its data is refused: {fault}")
    metadata = ClientMetadata(
        task=data["task"],
        num_labels=int(data["num_labels"]),
        metric=data["metric"],
        label_names=tuple(data["label_names"]),
        max_length=int(data["max_length"]),
        examples={split: int(data["examples"][split]) for split in SPLITS},
        labels={split: [float(value) for value in data["labels"][split]] for split in SPLITS},
        lengths={split: tuple((int(a), int(b), int(n)) for a, b, n in data["lengths"][split]) for split in SPLITS},
        images=data.get("images", False),
        left_out=int(data.get("left_out", 0)),
    )
    if fault := _split_fault(metadata):
        raise ProtocolError(f"what the client tells of its data does not hold together: {fault}")
    return metadata


def read_device(text: str) -> Device:
    """The device that the client says it has; raises `ProtocolError` where there is no such thing."""
    try:
        return find_devices((), (text,))[0] if "=" in text else find_devices((text,))[0]
    except ConfigError as error:
        raise ProtocolError(str(error)) from None


def _scalar(kind: str, test: Callable[[Any], bool]) -> Shape:
    return lambda value, location: "" if test(value) else f"{location} is {short_repr(value)}; allowed: {kind}"


def _length_fault(value: Any, location: str) -> str:
    """The fault of a row of lengths: tokens, how many of them are to be predicted, examples that have so many."""
    if not isinstance(value, list | tuple) or len(value) != len(_LENGTH):
        return f"{location} is {short_repr(value)}; allowed: {', '.join(_LENGTH)}"
    for name, number in zip(_LENGTH, value, strict=True):
        if fault := BOUNDS[name].shape(number, f"{location}, {name},"):
            return fault
    return "" if value[1] <= value[0] else f"{location} has more tokens to be predicted than tokens"


def _rows_of(shape: Shape, *, most: int) -> Shape:
    """A list or a tuple of at most so many of these."""

    def rows_shape(value: Any, location: str) -> str:
        if not isinstance(value, list | tuple) or len(value) > most:
            return f"{location} is {short_repr(value)}; allowed: a list of up to {most} entries"
        faults = (shape(entry, f"{location}[{index}]") for index, entry in enumerate(value))
        return next((fault for fault in faults if fault), "")

    return rows_shape


_LENGTH = ("tokens", "tokens to be predicted", "examples of a length")
_TASK = re.compile(r"[A-Za-z0-9_.\-]{1,100}")
_task_name = _scalar(
    "1 to 100 letters, digits, dots, hyphens and underscores",
    lambda value: isinstance(value, str) and _TASK.fullmatch(value) is not None,
)
_metric = _scalar(", ".join(METRICS), lambda value: isinstance(value, str) and value in METRICS)
_label_name = _scalar(
    f"up to {LONGEST_NAME} printable characters",
    lambda value: isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_NAME,
)
_label_number = Bounds(least=-1e12, most=1e12).shape
_MOST_LABELS = int(BOUNDS["num_labels"].most)
_REGISTRATION = fields(
    {
        "task": _task_name,
        "num_labels": BOUNDS["num_labels"].shape,
        "metric": _metric,
        "label_names": _rows_of(_label_name, most=_MOST_LABELS),
        "max_length": BOUNDS["max_length"].shape,
        "examples": fields(dict.fromkeys(SPLITS, BOUNDS["examples"].shape)),
        "labels": fields(dict.fromkeys(SPLITS, _rows_of(_label_number, most=_MOST_LABELS))),
        "lengths": fields(dict.fromkeys(SPLITS, _rows_of(_length_fault, most=MOST_LENGTHS))),
    },
    images=flag,
    left_out=BOUNDS["left_out"].shape,
)


def _token_fault(lengths: Mapping[str, Any]) -> str:
    """The fault of splits with more tokens than a server counts."""
    for split in SPLITS:
        total = sum(tokens * count for tokens, _, count in lengths[split])
        if total > MOST_TOKENS:
            return f"lengths.{split} sum to {total} tokens; allowed: {MOST_TOKENS}"
    return ""


def _split_fault(metadata: ClientMetadata) -> str:
    """The fault of numbers that contradict each other; empty where they hold together."""
    if len(metadata.label_names) not in (0, metadata.num_labels):
        return f"{len(metadata.label_names)} names of {metadata.num_labels} labels"
    for split in SPLITS:
        if fault := _label_fault(metadata, split):
            return fault
        counted = sum(count for _, _, count in metadata.lengths[split])
        if counted != metadata.examples[split]:
            return f"lengths.{split} are of {counted} examples and there are {metadata.examples[split]}"
    return ""


def _label_fault(metadata: ClientMetadata, split: Split) -> str:
    values = metadata.labels[split]
    classes = metadata.num_labels
    examples = metadata.examples[split]
    if classes > 1:
        bounds = [BOUNDS["examples of a class"]] * classes
    else:
        bounds = [BOUNDS["mean label"], BOUNDS["deviation of labels"]]
    if len(values) != len(bounds):
        return f"labels.{split} has {len(values)} numbers; allowed: {len(bounds)}"
    for value, bound in zip(values, bounds, strict=True):
        if fault := bound.shape(value, f"labels.{split}"):
            return fault
    if classes > 1 and sum(values) != examples:
        return f"labels.{split} are of {sum(values):g} examples and there are {examples}"
    return ""


def placeholder_client(name: str, metadata: ClientMetadata) -> tuple[ClientData, ClientTokens]:
    """A client with these counts, labels and lengths, without a text, an image or a token in it."""
    task = Task(
        name=metadata.task,
        num_labels=metadata.num_labels,
        metric=next(metric for metric in METRICS if metric == metadata.metric),
        max_length=metadata.max_length,
        label_names=metadata.label_names,
        images=metadata.images,
        load=_at_the_site,
    )
    rows = {split: _rows(metadata, task, split) for split in SPLITS}
    client = ClientData(
        name=name,
        task=task,
        train=rows["train"],
        validation=rows["validation"],
        test=rows["test"],
        left_out=metadata.left_out,
    )
    splits = {split: _placeholder_tokens(metadata, task, split, rows[split].label) for split in SPLITS}
    return client, ClientTokens(task=task, splits=splits)


def redacted_metadata(metadata: ClientMetadata) -> ClientMetadata:
    """The metadata that the host of this client's upper part needs: numbers of examples and tokens, no label counts.

    The host works on rows and on labels as they come, and asks how many there are, how long, and of which kind.
    """
    classes = metadata.num_labels
    labels = {
        split: [float(count), *[0.0] * (classes - 1)] if classes > 1 else [0.0, 0.0]
        for split, count in metadata.examples.items()
    }
    return replace(metadata, label_names=(), labels=labels, left_out=0)


def _at_the_site(_: Source) -> TaskData:
    raise ProtocolError("the data of a federation across machines lies at its sites; the server has none")


def _rows(metadata: ClientMetadata, task: Task, split: Split) -> Rows:
    count = metadata.examples[split]
    spread = metadata.labels[split]
    if task.has_classes:
        label: Labels = np.repeat(np.arange(task.num_labels), np.asarray(spread, dtype=np.int64))
        return Rows(text=("",) * count, label=label)
    mean, std = spread
    half = count // 2  # of the values lie on either side of the mean
    away = std * np.sqrt(count / (2 * half)) if half else 0.0
    values = np.concatenate([np.full(half, mean - away), np.full(count - 2 * half, mean), np.full(half, mean + away)])
    return Rows(text=("",) * count, label=values.astype(np.float32))


def _placeholder_tokens(metadata: ClientMetadata, task: Task, split: Split, label: Labels) -> EncodedExamples:
    tokens, predicted, counts = (np.array(column, dtype=np.int64) for column in zip(*metadata.lengths[split]))
    offsets = np.concatenate([[0], np.cumsum(np.repeat(tokens, counts))])
    # one number is seen at every place of a token: there are none, and memory for none
    shape = (int(offsets[-1]),)
    nothing = np.broadcast_to(np.int64(0), shape)
    return EncodedExamples(
        ids=nothing,
        types=nothing,
        offsets=offsets,
        labels=label,
        target_mask=np.broadcast_to(np.False_, shape) if task.writes else None,
        target_counts=np.repeat(predicted, counts) if task.writes else None,
    )
