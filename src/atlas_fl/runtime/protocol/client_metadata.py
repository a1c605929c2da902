"""Client metadata that a site reports: counts, label statistics and lengths, no example; placeholder clients.

Planning needs to know how many examples a client has, how long they are and how its labels are spread. The server puts
placeholders with these properties in the place of the data, so that planning and records are the same code as in a
simulation.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, TypeAlias, get_args

import numpy as np

from atlas_fl.client.job import ClientTokens
from atlas_fl.config.values import Form
from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import Labels, Metric, Rows, Source, Task, TaskData
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.frozen import Frozen
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Split
from atlas_fl.ranges import Range
from atlas_fl.ranks.devices import Device, find_devices
from atlas_fl.runtime.protocol.messages import read_fields

SPLITS: tuple[Split, ...] = get_args(Split)
SHOWN = 6
MOST_EXAMPLES, MOST_TOKENS = 2 * 10**6, 10**9
MOST_MULTILABELS = 2 * 10**7
"""Most zeros and ones of the labels of a split, examples times labels, for which a placeholder has memory."""
REFUSED = "what the client tells of its data is refused: "
Examples: TypeAlias = Annotated[int, Range(least=1, most=MOST_EXAMPLES)]
TaskName: TypeAlias = Annotated[
    str,
    Form(
        lambda text: re.fullmatch(r"[A-Za-z0-9_.\-]{1,100}", text) is not None,
        "1 to 100 letters, digits, dots, hyphens and underscores",
    ),
]
LabelName: TypeAlias = Annotated[
    str, Form(lambda text: text.isprintable() and len(text) <= 200, "up to 200 printable characters")
]
LabelNumber: TypeAlias = Annotated[float, Range(least=-1e12, most=1e12)]
"""Examples of a class, or the mean or the deviation of labels."""
Length: TypeAlias = tuple[
    Annotated[int, Range(least=1, most=2**20)], Annotated[int, Range(least=0, most=2**20)], Examples
]
"""(tokens, tokens to be predicted, examples that have so many); with those of rejected answers that are learned"""


class TaskLabels(Frozen):
    """The labels that all clients of one task must have in common."""

    num_labels: Annotated[int, Range(least=0, most=10**4)]
    metric: Metric
    label_names: tuple[LabelName, ...]
    images: bool = False
    """The examples are images."""
    positive: Annotated[int, Range(least=0, most=10**4)] | None = None
    """The class that f1 is of."""
    multilabel: bool = False
    """An example has any number of the labels."""

    def __str__(self) -> str:
        """The labels, as a line names them."""
        names = self.label_names[:SHOWN]
        shown = f"({', '.join(names)}{', ...' if len(self.label_names) > SHOWN else ''})" if names else "without names"
        positive = "" if self.positive is None else f" of class {self.positive}"
        return f"{'of which a row has several ' * self.multilabel}{shown} judged by {self.metric}{positive}"


def labels_of_task(task: "Task | ClientMetadata") -> TaskLabels:
    """The labels of this task, or of the task of a client with this metadata."""
    return TaskLabels(**{field.name: getattr(task, field.name) for field in fields(TaskLabels)})


class ClientMetadata(TaskLabels):
    """The server's knowledge of one client's data, each number in the range that a registration may have.

    Beyond these metadata are a mistake, or an attempt to make the server allocate (a few numbers an example) or plan
    with numbers that no file of a run may hold.
    """

    task: TaskName
    max_length: Annotated[int, Range(least=1, most=2**20)]
    examples: Mapping[Split, Examples]
    """Numbers of examples by split."""
    labels: Mapping[Split, tuple[LabelNumber, ...]]
    """By split: examples of every class or label, or mean and standard deviation of values or of words."""
    lengths: Mapping[Split, tuple[Length, ...]]
    left_out: Annotated[int, Range(least=0, most=MOST_EXAMPLES)] = 0
    """Rows that its task was given and the client has not."""

    @property
    def task_labels(self) -> TaskLabels:
        """The labels that clients of its task must have in common with it."""
        return labels_of_task(self)


def metadata_of(client: ClientData, tokens: ClientTokens) -> dict[str, Any]:
    """The metadata that this client sends to the server: plain data for strict JSON."""
    task = client.task
    metadata = ClientMetadata(
        **asdict(labels_of_task(task)),
        task=task.name,
        max_length=task.max_length,
        examples={split: len(rows) for split, rows in client.splits.items()},
        labels={split: _spread(rows.label, task) for split, rows in client.splits.items()},
        lengths={split: _lengths(rows) for split, rows in tokens.splits.items()},
        left_out=client.left_out,
    )
    return asdict(metadata)


def _lengths(data: EncodedExamples) -> tuple[Length, ...]:
    pairs, counts = np.unique(np.stack([data.step_lengths, data.step_targets]), axis=1, return_counts=True)
    return tuple(map(tuple, np.concatenate([pairs, counts[None]]).T.tolist()))


def _spread(label: Labels, task: Task) -> tuple[float, ...]:
    if task.multilabel:
        return tuple(label.sum(axis=0).tolist())
    if task.has_classes:
        return tuple(np.bincount(label, minlength=task.num_labels).tolist())
    return float(label.mean()), float(label.std())


def read_metadata(data: Mapping[str, Any]) -> ClientMetadata:
    """The metadata that plain data holds; raises `ProtocolError` for a number out of range, or two that differ."""
    metadata: ClientMetadata = read_fields(ClientMetadata, data, REFUSED)
    if len(metadata.label_names) not in (0, metadata.num_labels):
        names = len(metadata.label_names)
        raise ProtocolError(f"{REFUSED}label_names has {names}; allowed: as many as num_labels, {metadata.num_labels}")
    if metadata.positive is not None and metadata.positive >= metadata.num_labels:
        raise ProtocolError(f"{REFUSED}positive is {metadata.positive}; allowed: one of {metadata.num_labels} classes")
    if metadata.multilabel and (metadata.num_labels < 2 or metadata.images):
        raise ProtocolError(f"{REFUSED}multilabel is true; allowed: with texts and two labels or more")
    for split in SPLITS:
        if fault := _split_fault(metadata, split):
            raise ProtocolError(f"{REFUSED}{fault}")
    return metadata


def read_device(text: str) -> Device:
    """The device that the client says it has; raises `ProtocolError` where there is no such thing."""
    try:
        return find_devices((), (text,))[0] if "=" in text else find_devices((text,))[0]
    except ConfigError as error:
        raise ProtocolError(str(error)) from None


def _split_fault(metadata: ClientMetadata, split: Split) -> str:
    """The fault of numbers of this split that contradict each other; empty where they hold together."""
    labels = metadata.labels[split]
    lengths = metadata.lengths[split]
    examples = metadata.examples[split]
    counted = sum(count for _, _, count in lengths)
    tokens = sum(length * count for length, _, count in lengths)
    classes = metadata.num_labels
    if any(predicted > length for length, predicted, _ in lengths):
        return f"lengths.{split} has more tokens to be predicted than tokens"
    if tokens > MOST_TOKENS:
        return f"lengths.{split} sum to {tokens} tokens; allowed: {MOST_TOKENS}"
    if counted != examples:
        return f"lengths.{split} are of {counted} examples and there are {examples}"
    if metadata.multilabel and examples * classes > MOST_MULTILABELS:
        return f"labels.{split} are of {examples} times {classes}; allowed: {MOST_MULTILABELS}"
    if len(labels) != max(2, classes):
        return f"labels.{split} has {len(labels)} numbers; allowed: {max(2, classes)}"
    counts_all = max(labels) <= examples if metadata.multilabel else sum(labels) == examples
    if classes > 1 and (min(labels) < 0 or not all(map(float.is_integer, labels)) or not counts_all):
        return f"labels.{split} are no counts of {examples} examples"
    if classes <= 1 and labels[1] < 0:
        return f"labels.{split} has the deviation {labels[1]:g}"
    return ""


def placeholder_client(name: str, metadata: ClientMetadata) -> tuple[ClientData, ClientTokens]:
    """A client with these counts, labels and lengths, without a text, an image or a token in it."""
    task = Task(**asdict(metadata.task_labels), name=metadata.task, max_length=metadata.max_length, load=_at_the_site)
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


def _at_the_site(_: Source) -> TaskData:
    raise ProtocolError("the data of a federation across machines lies at its sites; the server has none")


def _rows(metadata: ClientMetadata, task: Task, split: Split) -> Rows:
    count = metadata.examples[split]
    spread = metadata.labels[split]
    if task.multilabel:
        return Rows(text=("",) * count, label=(np.arange(count)[:, None] < np.asarray(spread)).astype(np.float32))
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
