"""The clients of a federation: every task's rows, dealt out so that no two clients hold the same."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from atlas_fl.errors import ConfigError, DataError, unknown
from atlas_fl.rng import generator
from atlas_fl.tasks.clean import check_no_leak
from atlas_fl.tasks.partition import PARTITIONS, deal, realised
from atlas_fl.tasks.spec import Labels, Rows, Source, Task, TaskData
from atlas_fl.tasks.splits import bin_edges, strata
from atlas_fl.types import Split

MOST_ALPHA = 1e6
_FLAGS: dict[Split, str] = {
    "train": "--samples",
    "validation": "--validation-samples",
    "test": "--test-samples",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientData:
    """What one client holds."""

    name: str
    """`<task>-<number>`."""
    task: Task
    train: Rows
    validation: Rows
    test: Rows

    def digest(self) -> str:
        """SHA-256 of all rows of all splits, in their order."""
        found = sha256()
        for rows in (self.train, self.validation, self.test):
            found.update(json.dumps([rows.text, rows.pair, rows.label.tolist()]).encode())
        return found.hexdigest()


def majority(rows: Rows) -> float | None:
    """The accuracy of always saying the most frequent class of these rows; None where there are no classes."""
    if not np.issubdtype(rows.label.dtype, np.integer):
        return None
    return float(np.bincount(rows.label).max() / len(rows))


def make_clients(
    tasks: Sequence[Task],
    source: Source,
    *,
    clients_per_task: int,
    samples: int,
    validation_samples: int,
    test_samples: int,
    partition: str,
    dirichlet_alpha: float,
    seed: int,
    shuffle_labels: bool,
) -> tuple[ClientData, ...]:
    """`clients_per_task` clients of every task, in the order of the tasks; no row is given to two of them.

    A client's validation and test rows come in the class mix of its training rows. `shuffle_labels` permutes the
    training labels, or what is to be written after the prompts, inside each client and nothing else. A `ConfigError`
    names a setting that is out of range, a `DataError` a task whose rows do not suffice.
    """
    sizes: dict[Split, int] = {"train": samples, "validation": validation_samples, "test": test_samples}
    _check_settings(clients_per_task, sizes, partition, dirichlet_alpha)
    clients: list[ClientData] = []
    for task in tasks:
        data = task.load(source)
        _check_room(task, data, clients_per_task, sizes)
        parts = _partitioned(task, data, clients_per_task, sizes, partition=partition, alpha=dirichlet_alpha, seed=seed)
        clients += [
            ClientData(
                name=f"{task.name}-{number}",
                task=task,
                train=data.train.take(parts["train"][number]),
                validation=data.validation.take(parts["validation"][number]),
                test=data.test.take(parts["test"][number]),
            )
            for number in range(clients_per_task)
        ]
        check_no_leak(*(_together(data, parts, split) for split in sizes))
    return tuple(_with_shuffled_labels(client, seed) for client in clients) if shuffle_labels else tuple(clients)


def _partitioned(
    task: Task,
    data: TaskData,
    num_clients: int,
    sizes: Mapping[Split, int],
    *,
    partition: str,
    alpha: float,
    seed: int,
) -> dict[Split, list[Labels]]:
    edges = None if task.has_classes else bin_edges(data.train.label)
    classes = {split: strata(_rows(data, split).label, edges=edges) for split in sizes}
    num_classes = task.num_labels if edges is None else len(edges) + 1
    prior = np.bincount(classes["train"], minlength=num_classes) / len(data.train)
    rng = generator(seed, "partition", task.name)
    mixes, train_sizes = PARTITIONS[partition](prior, num_clients, sizes["train"], alpha, rng)
    rngs = {split: generator(seed, "deal", task.name, split) for split in sizes}
    try:
        train = deal(classes["train"], mixes, train_sizes, rng=rngs["train"], two_classes=task.has_classes)
    except DataError as error:
        raise DataError(f"task {task.name!r}: {error}") from error
    # Where a class ran out, the held-out rows follow what the client got and not what it was meant to get.
    mixes = realised(classes["train"], train, mixes)
    held_out: tuple[Split, Split] = ("validation", "test")
    dealt = {s: deal(classes[s], mixes, np.full(num_clients, sizes[s]), rng=rngs[s]) for s in held_out}
    return {"train": train, **dealt}


def _check_settings(num_clients: int, sizes: Mapping[Split, int], partition: str, alpha: float) -> None:
    if partition not in PARTITIONS:
        raise unknown("partition", partition, PARTITIONS)
    if num_clients < 1:
        raise ConfigError(f"clients_per_task is {num_clients}; it must be 1 or more")
    for split, size in sizes.items():
        least = 2 if split == "train" else 1
        if size < least:
            raise ConfigError(f"{_FLAGS[split]} is {size}; it must be {least} or more")
    if not 0 < alpha <= MOST_ALPHA or math.isnan(alpha):
        raise ConfigError(f"dirichlet_alpha is {alpha}; it must be above 0 and at most {MOST_ALPHA:g}")


def _check_room(task: Task, data: TaskData, num_clients: int, sizes: Mapping[Split, int]) -> None:
    have = {split: len(_rows(data, split)) for split in sizes}
    for split, size in sizes.items():
        if num_clients * size > have[split]:
            possible = min(have[other] // sizes[other] for other in sizes)
            remedy = f"lower --clients-per-task to {possible} or" if possible else "lower"
            raise DataError(
                f"task {task.name!r} has {have[split]} {split} rows and {num_clients} clients of {size} need "
                f"{num_clients * size}; {remedy} {_FLAGS[split]} to {have[split] // num_clients}"
            )


def _rows(data: TaskData, split: Split) -> Rows:
    return {"train": data.train, "validation": data.validation, "test": data.test}[split]


def _together(data: TaskData, parts: Mapping[Split, list[Labels]], split: Split) -> Rows:
    return _rows(data, split).take(np.concatenate(parts[split]))


def _with_shuffled_labels(client: ClientData, seed: int) -> ClientData:
    order = generator(seed, "shuffle", client.name).permutation(len(client.train))
    if not client.task.writes:
        return replace(client, train=replace(client.train, label=client.train.label[order]))
    if client.train.pair is None:
        raise ConfigError(
            f"--shuffle-labels has nothing to shuffle in task {client.task.name!r}, whose text has no prompt; give it"
            " one (text= and target=), or leave the flag away"
        )
    written = tuple(client.train.pair[i] for i in order)
    return replace(client, train=replace(client.train, pair=written, label=client.train.label[order]))
