"""Client metadata that a site reports: counts, label statistics and lengths, no example; placeholder clients.

Planning needs to know how many examples a client has, how long they are and how its labels are spread. The server puts
placeholders with these properties in the place of the data, so that planning and records are the same code as in a
simulation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from atlas_fl.client.job import ClientTokens
from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import METRICS, Labels, Rows, Source, Task, TaskData
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Split
from atlas_fl.ranks.devices import Device, find_devices

SPLITS: tuple[Split, ...] = get_args(Split)
SHOWN = 6
MOST_EXAMPLES, MOST_TOKENS, MOST_LABELS = 2 * 10**6, 10**9, 10**4
"""Beyond these a census is a mistake, or an attempt to make the server allocate: it holds a few numbers an example."""
MOST_LENGTHS, LONGEST, LONGEST_NAME = 10**5, 2**20, 200
"""Different lengths in a split, tokens in an example, and signs in a label's name."""
LARGEST_VALUE = 1e30
"""Mean and deviation of a regression's labels, which are of float32."""


@dataclass(frozen=True, kw_only=True)
class ClientMetadata:
    """What the server knows of one client's data."""

    task: str
    num_labels: int
    metric: str
    label_names: tuple[str, ...]
    max_length: int
    examples: Mapping[str, int]
    """By split."""
    labels: Mapping[str, list[float]]
    """By split: examples of every class, or mean and standard deviation of values or of words."""
    lengths: Mapping[str, tuple[tuple[int, int, int], ...]]
    """By split: (tokens, tokens to be predicted, examples that have so many)."""
    images: bool = False
    """Whether the examples are images."""
    left_out: int = 0
    """Rows that its task was given and the client has not."""

    def same_task(self, other: "ClientMetadata") -> bool:
        """Whether both have the same labels and are judged alike, as clients of one task must."""
        own_task, others = ((one.num_labels, one.metric, one.label_names, one.images) for one in (self, other))
        return own_task == others

    @property
    def shown(self) -> str:
        """The labels, as an error names them."""
        names = self.label_names[:SHOWN]
        return f"({', '.join(names)}{', ...' if len(self.label_names) > SHOWN else ''})" if names else "of another kind"


def metadata_of(client: ClientData, tokens: ClientTokens) -> dict[str, Any]:
    """What this client tells the server: plain data for strict JSON."""
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
    """The census that plain data holds.

    Raises `ProtocolError` where it does not hold together, or tells of more than fits any server.
    """
    try:
        metadata = ClientMetadata(
            task=str(data["task"]),
            num_labels=int(data["num_labels"]),
            metric=str(data["metric"]),
            label_names=tuple(str(name) for name in data["label_names"]),
            max_length=int(data["max_length"]),
            examples={split: int(data["examples"][split]) for split in SPLITS},
            labels={split: [float(value) for value in data["labels"][split]] for split in SPLITS},
            lengths={split: _triples(data["lengths"][split]) for split in SPLITS},
            images=data.get("images", False) is True,
            left_out=int(data.get("left_out", 0)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"what the client tells of its data cannot be read ({error!s:.80})") from None
    if not _holds_together(metadata):
        raise ProtocolError("what the client tells of its data does not hold together; install the server's version")
    return metadata


def read_device(text: str) -> Device:
    """The device that the client says it has; raises `ProtocolError` where there is no such thing."""
    try:
        return find_devices((), (text,))[0] if "=" in text else find_devices((text,))[0]
    except ConfigError as error:
        raise ProtocolError(str(error)) from None


def _triples(data: Any) -> tuple[tuple[int, int, int], ...]:
    if len(data) > MOST_LENGTHS:
        raise ValueError(f"{len(data)} different lengths; allowed: {MOST_LENGTHS}")
    return tuple((int(tokens), int(written), int(count)) for tokens, written, count in data)


def _fit(lengths: tuple[tuple[int, int, int], ...], examples: int) -> bool:
    return (
        all(0 <= written <= length and 0 < length <= LONGEST and count > 0 for length, written, count in lengths)
        and sum(count for _, _, count in lengths) == examples
        and sum(tokens * count for tokens, _, count in lengths) <= MOST_TOKENS
    )


def _holds_together(metadata: ClientMetadata) -> bool:
    width = metadata.num_labels if metadata.num_labels > 1 else 2
    return (
        re.fullmatch(r"[A-Za-z0-9_.\-]{1,100}", metadata.task) is not None
        and all(name.isprintable() and len(name) <= LONGEST_NAME for name in metadata.label_names)
        and 0 < metadata.max_length <= LONGEST
        and 0 <= metadata.num_labels <= MOST_LABELS
        and metadata.metric in METRICS
        and len(metadata.label_names) in (0, metadata.num_labels)
        and all(0 < count <= MOST_EXAMPLES for count in metadata.examples.values())
        and 0 <= metadata.left_out <= MOST_EXAMPLES
        and all(_fit(metadata.lengths[split], metadata.examples[split]) for split in SPLITS)
        and all(len(values) == width and np.isfinite(values).all() for values in metadata.labels.values())
        and all((_counts if metadata.num_labels > 1 else _values_can_be)(metadata, split) for split in SPLITS)
    )


def _counts(metadata: ClientMetadata, split: str) -> bool:
    values = metadata.labels[split]
    return all(value >= 0 and value == int(value) for value in values) and sum(values) == metadata.examples[split]


def _values_can_be(metadata: ClientMetadata, split: Split) -> bool:
    mean, deviation = metadata.labels[split]
    return abs(mean) <= LARGEST_VALUE and 0 <= deviation <= LARGEST_VALUE


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
    """What the host of this client's upper part needs of it: the numbers of examples and tokens, and no labels' spread.

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
    count, spread = metadata.examples[split], metadata.labels[split]
    if task.has_classes:
        label: Labels = np.repeat(np.arange(task.num_labels), np.asarray(spread, dtype=np.int64))
    else:
        label = _values(count, mean=spread[0], std=spread[1])
    return Rows(text=("",) * count, label=label)


def _values(count: int, *, mean: float, std: float) -> Labels:
    """So many values with this mean and standard deviation, half of them on either side."""
    half = count // 2
    away = std * np.sqrt(count / (2 * half)) if half else 0.0
    values = np.concatenate([np.full(half, mean - away), np.full(count - 2 * half, mean), np.full(half, mean + away)])
    return values.astype(np.float32)


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
