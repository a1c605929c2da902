"""make_clients: every task's rows dealt out to clients, disjoint; statistics of their sizes and label distributions."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np

from atlas_fl.data.cache import load_task
from atlas_fl.data.cleaning import bin_edges, check_no_leak, strata
from atlas_fl.data.partition import PARTITIONS, actual_mixes, assign_classes, deal, deal_balanced, deal_classes
from atlas_fl.data.task import Examples, Images, Labels, Source, Task, TaskData, as_texts
from atlas_fl.errors import ConfigError, DataError, unknown_name
from atlas_fl.params import Split
from atlas_fl.rng import Seed, generator

MOST_ALPHA = 1e6
MOST_NAMED = 3
"""Skipped files that a note names."""
BY_CLASSES = "classes"
"""The partition in which every client has rows of exactly so many classes (`partition.assign_classes`)."""
OWN, BALANCED = "own", "balanced"
"""Mixes of test rows: the client's own, and equal numbers of every class."""
Mix: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Sizes: TypeAlias = Mapping[Split, int | None]
"""Rows of a client by split; None deals a split out whole."""
_FLAGS: dict[Split, str] = {
    "train": "--samples",
    "validation": "--validation-samples",
    "test": "--test-samples",
}
_PIECE = 1 << 14
"""Rows that are written at once."""
_LEAST: dict[Split, int] = {"train": 2, "validation": 1, "test": 1}


@dataclass(frozen=True, kw_only=True)
class Concept:
    """Labels that a client gives the examples of its task, p(y given x) where the labels are exact."""

    cut: float | None = None
    """Values above it are positive; None where the task has classes."""
    flipped: bool = False
    """True if class c of C is called C - 1 - c."""

    def judge(self, labels: Labels, num_labels: int) -> Labels:
        """Its classes, int64, for the task's values or classes; `num_labels` are the classes that come out."""
        classes = labels if self.cut is None else (labels > self.cut).astype(np.int64)
        return num_labels - 1 - classes if self.flipped else classes


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientData:
    """Data of one client."""

    name: str
    """`<task>-<number>`."""
    task: Task
    train: Examples
    validation: Examples
    test: Examples
    left_out: int = 0
    """Rows that its task was given and nobody has (`TaskData.left_out`)."""
    unread: tuple[str, ...] = ()
    """Files of its task that were skipped (`TaskData.unread`)."""
    concept: Concept = Concept()
    """Concept that made its labels of those that its task has (`data.heterogeneity`)."""
    given: Labels | None = None
    """The labels of its training rows before that; None where nobody's were changed."""
    own_rows: int | None = None
    """Training rows of its own source, where its task has several."""

    def digest(self) -> str:
        """SHA-256 of all rows of all splits, in their order."""
        sha = sha256()
        for rows in (self.train, self.validation, self.test):
            if isinstance(rows, Images):
                sha.update(json.dumps([*rows.pixels.shape, rows.label.tolist()]).encode())
                sha.update(np.ascontiguousarray(rows.pixels).data)
            else:
                for part in _row_lists(rows.text, rows.pair, rows.label):
                    sha.update(part.encode())
        return sha.hexdigest()


def _row_lists(*columns: Sequence[str] | Labels | None) -> Iterator[str]:
    """The JSON of the list of these columns, piece by piece: millions of rows are never one text."""
    for k, column in enumerate(columns):
        yield ", " if k else "["
        if column is None:
            yield "null"
            continue
        yield "["
        for start in range(0, len(column), _PIECE):
            piece = column[start : start + _PIECE]
            values = piece.tolist() if isinstance(piece, np.ndarray) else list(piece)
            yield (", " if start else "") + json.dumps(values)[1:-1]
        yield "]"
    yield "]"


def majority(rows: Examples) -> float | None:
    """The accuracy of always saying the most frequent class of these rows; None where there are no classes."""
    if not np.issubdtype(rows.label.dtype, np.integer):
        return None
    return float(np.bincount(rows.label).max() / len(rows))


def left_out_notes(clients: Sequence[ClientData]) -> tuple[str, ...]:
    """A line for each task of which files were skipped, and for each of which rows were left out by cleaning."""
    counts: dict[str, int] = {}
    unread = {client.task.name: client.unread for client in clients if client.unread}
    for client in clients:
        counts[client.task.name] = max(counts.get(client.task.name, 0), client.left_out)
    skipped = (
        f"{name}: {len(files):,} files are left out, since they cannot be read or have the name of no split:"
        f" {', '.join(files[:MOST_NAMED])}"
        f"{', ..' if len(files) > MOST_NAMED else ''}"
        for name, files in unread.items()
    )
    return *skipped, *(
        f"{name}: {count:,} rows left out: they repeat or contradict others, or lie in two splits"
        for name, count in counts.items()
        if count
    )


def make_clients(  # noqa: PLR0913 - one name for each setting of the data
    tasks: Sequence[Task],
    source: Source,
    *,
    clients_per_task: int,
    samples: int | None,
    validation_samples: int | None,
    test_samples: int | None,
    partition: str,
    dirichlet_alpha: float,
    seed: Seed,
    shuffle_labels: bool,
    classes_per_client: int | None = None,
    client_sizes: Sequence[int] = (),
    test_mix: str = OWN,
) -> tuple[ClientData, ...]:
    """`clients_per_task` clients of every task, in the order of the tasks; no row is given to two of them.

    A split without a number of samples is dealt out whole, in parts of the same size or one more. A client's validation
    and test rows come in the class mix of its training rows; with the partition `classes` it has rows of exactly
    `classes_per_client` classes, in all its splits. `client_sizes` are the training rows of the clients of a task in
    turn, in the place of `samples`; with `test_mix` as `task` test rows come in the mix of the task, as `balanced` in
    equal numbers of every class (`partition.deal_balanced`). `shuffle_labels` permutes the training labels, or what is
    to be written after the prompts, inside each client and nothing else. A `ConfigError` names a setting that is out of
    range, a `DataError` a task whose rows do not suffice.
    """
    sizes: Sizes = {"train": samples, "validation": validation_samples, "test": test_samples}
    _check_settings(clients_per_task, sizes, partition, dirichlet_alpha, client_sizes=client_sizes)
    deal_rows: Callable[..., dict[Split, list[Labels]]]
    deal_rows = partial(_deal_by_classes, classes_per_client=classes_per_client)
    if partition != BY_CLASSES:
        deal_rows = partial(_deal_by_partition, partition=partition, alpha=dirichlet_alpha, client_sizes=client_sizes)
    clients: list[ClientData] = []
    for task in tasks:
        data = load_task(task, source)
        _check_room(task, data, clients_per_task, sizes, client_sizes=client_sizes)
        parts = deal_rows(task, data, clients_per_task, sizes, seed=seed, test_mix=test_mix)
        clients += [_client(task, data, parts, number) for number in range(clients_per_task)]
        check_no_leak(*(_together(data, parts, split) for split in sizes))
    return tuple(_with_shuffled_labels(client, seed) for client in clients) if shuffle_labels else tuple(clients)


def _client(task: Task, data: TaskData, parts: Mapping[Split, Sequence[Labels]], number: int) -> ClientData:
    return ClientData(
        name=f"{task.name}-{number}",
        task=task,
        train=data.train.take(parts["train"][number]),
        validation=data.validation.take(parts["validation"][number]),
        test=data.test.take(parts["test"][number]),
        left_out=data.left_out,
        unread=data.unread,
    )


def _deal_by_partition(
    task: Task,
    data: TaskData,
    num_clients: int,
    sizes: Sizes,
    *,
    partition: str,
    alpha: float,
    seed: Seed,
    client_sizes: Sequence[int],
    test_mix: str,
) -> dict[Split, list[Labels]]:
    edges = None if task.has_classes else bin_edges(data.train.label)
    classes = {split: strata(_rows(data, split).label, edges=edges) for split in sizes}
    num_classes = task.num_labels if edges is None else len(edges) + 1
    prior = np.bincount(classes["train"], minlength=num_classes) / len(data.train)
    rng = generator(seed, "partition", task.name)
    mean = len(data.train) // num_clients if sizes["train"] is None else sizes["train"]
    mixes, train_sizes = PARTITIONS[partition](prior, num_clients, mean, alpha, rng)
    if client_sizes:
        train_sizes = np.resize(np.asarray(client_sizes, np.int64), num_clients)
    elif sizes["train"] is None:
        train_sizes = train_sizes + _spread(len(data.train) - int(train_sizes.sum()), num_clients)
    rngs = {split: generator(seed, "deal", task.name, split) for split in sizes}
    try:
        train = deal(classes["train"], mixes, train_sizes, rng=rngs["train"], two_classes=task.has_classes)
    except DataError as error:
        raise DataError(f"task {task.name!r}: {error}") from error
    # Where a class ran out, the held-out rows follow what the client got and not what it was meant to get.
    mixes = actual_mixes(classes["train"], train, mixes)
    dealt: dict[Split, list[Labels]] = {"train": train}
    held_out: tuple[Split, Split] = ("validation", "test")
    for split in held_out:
        each = _sizes(sizes[split], len(classes[split]), num_clients)
        if split == "test" and test_mix != OWN:
            dealt[split] = _deal_test(classes[split], each, prior, test_mix, rng=rngs[split])
        else:
            dealt[split] = deal(classes[split], mixes, each, rng=rngs[split])
    return dealt


def _deal_test(classes: Labels, sizes: Labels, prior: Mix, test_mix: str, *, rng: np.random.Generator) -> list[Labels]:
    """The test rows of every client in a mix that is not its own."""
    if test_mix == BALANCED:
        return deal_balanced(classes, sizes, num_classes=len(prior), rng=rng)
    return deal(classes, np.tile(prior, (len(sizes), 1)), sizes, rng=rng)


def _sizes(size: int | None, total: int, num_clients: int) -> Labels:
    """Rows of every client, (clients,) int64: so many each, or all that there are."""
    return _spread(total, num_clients) if size is None else np.full(num_clients, size)


def _spread(total: int, num_clients: int) -> Labels:
    """So many rows for that many clients, the first ones having one more, (clients,) int64."""
    return total // num_clients + (np.arange(num_clients) < total % num_clients).astype(np.int64)


def _deal_by_classes(
    task: Task,
    data: TaskData,
    num_clients: int,
    sizes: Sizes,
    *,
    classes_per_client: int | None,
    seed: Seed,
    test_mix: str,
) -> dict[Split, list[Labels]]:
    if classes_per_client is None:
        raise ConfigError(f"--partition {BY_CLASSES} needs --nc, the number of classes that a client has")
    if not task.has_classes:
        raise ConfigError(f"task {task.name!r} has no classes for --partition {BY_CLASSES}; choose another partition")
    has_class = assign_classes(num_clients, task.num_labels, classes_per_client, generator(seed, "classes", task.name))
    parts: dict[Split, list[Labels]] = {}
    for split, size in sizes.items():
        rng, labels = generator(seed, "deal", task.name, split), _rows(data, split).label
        if split == "test" and test_mix != OWN:
            prior = np.bincount(data.train.label, minlength=task.num_labels) / len(data.train)
            parts[split] = _deal_test(labels, _sizes(size, len(labels), num_clients), prior, test_mix, rng=rng)
            continue
        try:
            parts[split] = deal_classes(labels, has_class, size=size, rng=rng)
        except DataError as error:
            raise DataError(f"{split} of task {task.name!r}: {error} ({_FLAGS[split]})") from error
    return parts


def _check_settings(
    num_clients: int, sizes: Sizes, partition: str, alpha: float, *, client_sizes: Sequence[int]
) -> None:
    if partition not in (*PARTITIONS, BY_CLASSES):
        raise unknown_name("partition", partition, (*PARTITIONS, BY_CLASSES))
    if client_sizes and partition in (BY_CLASSES, "quantity"):
        raise ConfigError(
            f"client_sizes and partition {partition} both say how much a client has; leave one of them out"
        )
    if num_clients < 1:
        raise ConfigError(f"clients_per_task is {num_clients}; it must be 1 or more")
    for split, size in sizes.items():
        if size is not None and size < _LEAST[split]:
            raise ConfigError(f"{_FLAGS[split]} is {size}; it must be {_LEAST[split]} or more")
    if not 0 < alpha <= MOST_ALPHA or math.isnan(alpha):
        raise ConfigError(f"dirichlet_alpha is {alpha}; it must be above 0 and at most {MOST_ALPHA:g}")


def _check_room(
    task: Task, data: TaskData, num_clients: int, sizes: Sizes, *, client_sizes: Sequence[int] = ()
) -> None:
    if client_sizes:
        needed_rows = int(np.resize(np.asarray(client_sizes, np.int64), num_clients).sum())
        if needed_rows > len(data.train):
            raise DataError(
                f"task {task.name!r} has {len(data.train)} train rows and --client-sizes say {needed_rows} together;"
                " lower them, or --clients-per-task"
            )
        sizes = {**sizes, "train": needed_rows // num_clients}
    have = {split: len(_rows(data, split)) for split in sizes}
    needed = {split: _LEAST[split] if size is None else size for split, size in sizes.items()}
    for split, size in needed.items():
        if num_clients * size > have[split]:
            possible = min(have[other] // needed[other] for other in sizes)
            remedy = f"lower --clients-per-task to {possible}" if possible else "add rows"
            if sizes[split] is not None and have[split] // num_clients >= _LEAST[split]:
                remedy = f"{remedy} or" if possible else "lower"
                remedy = f"{remedy} {_FLAGS[split]} to {have[split] // num_clients}"
            raise DataError(
                f"task {task.name!r} has {have[split]} {split} rows and {num_clients} clients of {size} need "
                f"{num_clients * size}; {remedy}"
            )


def _rows(data: TaskData, split: Split) -> Examples:
    return {"train": data.train, "validation": data.validation, "test": data.test}[split]


def _together(data: TaskData, parts: Mapping[Split, list[Labels]], split: Split) -> Examples:
    return _rows(data, split).take(np.concatenate(parts[split]))


def _with_shuffled_labels(client: ClientData, seed: Seed) -> ClientData:
    order = generator(seed, "shuffle", client.name).permutation(len(client.train))
    if not client.task.writes:
        return replace(client, train=replace(client.train, label=client.train.label[order]))
    train = as_texts(client.train, task=client.task.name)
    if train.pair is None:
        raise ConfigError(
            f"--shuffle-labels has nothing to shuffle in task {client.task.name!r}, whose text has no prompt; give it"
            " one (text= and target=), or leave the flag away"
        )
    written = tuple(train.pair[i] for i in order)
    return replace(client, train=replace(train, pair=written, label=train.label[order]))


def label_statistics(clients: Sequence[ClientData]) -> tuple[dict[str, Any], ...]:
    """One row of plain data per client, in their order.

    `examples` and `majority` per split, `labels` (training examples per class name, or mean and standard deviation of
    a regression's labels), and `distance`: half the L1 distance (total variation, 0 to 1) of the client's training
    mix to that of all clients of its task; absent for a regression, as `majority` is. Of texts to be written, `words`
    (mean and standard deviation over texts) stand in the place of `labels`.
    """
    peers: dict[str, list[ClientData]] = {}
    for client in clients:
        peers.setdefault(client.task.name, []).append(client)
    return tuple(_row(client, peers[client.task.name]) for client in clients)


def shard_notes(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for each task with classes of these statistics: how many examples and classes its clients have, and how
    far their mixes are from the task's.
    """
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "distance" in row:
            tasks.setdefault(row["task"], []).append(row)
    return tuple(_note(task, task_rows) for task, task_rows in tasks.items())


def balance_notes(clients: Sequence[ClientData], test_mix: str) -> tuple[str, ...]:
    """A line for each task of how many test examples of each class a client has, where these are balanced."""
    if test_mix != BALANCED:
        return ()
    tasks: dict[str, list[ClientData]] = {}
    for client in clients:
        tasks.setdefault(client.task.name, []).append(client)
    lines = []
    for name, members in tasks.items():
        counts = np.stack([np.bincount(one.test.label, minlength=one.task.num_labels) for one in members])
        each = (f"{word} {_span(column.tolist())}" for word, column in zip(members[0].task.label_names, counts.T))
        lines.append(f"{name}: balanced test examples of a client by class: {', '.join(each)}")
    return tuple(lines)


def _note(task: str, rows: Sequence[Mapping[str, Any]]) -> str:
    sizes = [row["examples"]["train"] for row in rows]
    classes = [sum(count > 0 for count in row["labels"].values()) for row in rows]
    apart = float(np.mean([row["distance"] for row in rows]))
    return (
        f"{task}: {sum(sizes):,} training examples over {len(rows)} client{'s' * (len(rows) > 1)}, {_span(sizes)} each,"
        f" of {_span(classes)} of {len(rows[0]['labels'])} classes; labels {apart:.2f} from the task's mix (0 to 1)"
    )


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _row(client: ClientData, same_task: Sequence[ClientData]) -> dict[str, Any]:
    splits = {"train": client.train, "validation": client.validation, "test": client.test}
    row: dict[str, Any] = {
        "client": client.name,
        "task": client.task.name,
        "examples": {split: len(rows) for split, rows in splits.items()},
    }
    if not client.task.has_classes:
        label = client.train.label
        kind = "words" if client.task.writes else "labels"
        return {**row, kind: {"mean": float(label.mean()), "std": float(label.std())}}
    label_counts = _counts(client)
    everyone = np.sum([_counts(other) for other in same_task], axis=0)
    return {
        **row,
        "majority": {split: majority(rows) for split, rows in splits.items()},
        "labels": dict(zip(client.task.label_names, label_counts.tolist())),
        "distance": float(0.5 * np.abs(label_counts / label_counts.sum() - everyone / everyone.sum()).sum()),
    }


def _counts(client: ClientData) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.bincount(client.train.label, minlength=client.task.num_labels)
