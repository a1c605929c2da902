"""Heterogeneity of clients by a known amount: concept shift, contradiction, sources of one task.

Each function takes clients whose rows were dealt out alike and makes them differ in one way, by one number; rows stay
disjoint. Label skew, sizes and the mix of test rows belong to dealing itself (`data.clients`, `data.partition`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import Examples, Rows, Task, as_texts
from atlas_fl.errors import ConfigError

NEGATIVE_POSITIVE = ("negative", "positive")


def shift_concepts(clients: Sequence[ClientData], cuts: Sequence[float]) -> tuple[ClientData, ...]:
    """Concept shift: what client i of a task calls positive is a value above `cuts[i % len(cuts)]`.

    The task, of values, becomes one of two classes; texts are untouched, so only p(y given x) differs.

    Raises:
        ConfigError: a task has no values, or a cut leaves a client without rows of both classes to train on.
    """
    numbers = _numbers(clients)
    return tuple(_cut_values(client, cuts[numbers[client.name] % len(cuts)]) for client in clients)


def _cut_values(client: ClientData, cut: float) -> ClientData:
    if not client.task.is_regression:
        raise ConfigError(
            f"--rating-cuts turns values into classes, and task {client.task.name!r} has none; take movie_ratings or"
            " another task of numbers"
        )
    task = replace(client.task, num_labels=2, metric="accuracy", label_names=NEGATIVE_POSITIVE)

    def cut_rows(rows: Examples) -> Examples:
        return replace(rows, label=(rows.label > cut).astype(np.int64))

    train = cut_rows(client.train)
    if len(set(train.label.tolist())) < 2:
        raise ConfigError(
            f"--rating-cuts {cut:g} leaves {client.name} with one class (values from {client.train.label.min():g} to"
            f" {client.train.label.max():g}); cut between these"
        )
    return replace(client, task=task, train=train, validation=cut_rows(client.validation), test=cut_rows(client.test))


def flip_classes(clients: Sequence[ClientData], share: float) -> tuple[ClientData, ...]:
    """Contradiction: the last `round(share * n)` of the n clients of a task have class c where others have C - 1 - c.

    All their splits are reversed: they are no attackers, they mean the opposite.

    Raises:
        ConfigError: a task has no classes.
    """
    if share == 0:
        return tuple(clients)
    numbers, count = _numbers(clients), defaultdict[str, int](int)
    for client in clients:
        if not client.task.has_classes:
            raise ConfigError(
                f"--flipped-clients reverses classes, and task {client.task.name!r} has none; take a task with classes"
            )
        count[client.task.name] += 1
    return tuple(
        _reverse(client) if numbers[client.name] >= n - int(share * n + 0.5) else client
        for client in clients
        for n in (count[client.task.name],)
    )


def _reverse(client: ClientData) -> ClientData:
    def reverse_rows(rows: Examples) -> Examples:
        return replace(rows, label=client.task.num_labels - 1 - rows.label)

    return replace(
        client,
        train=reverse_rows(client.train),
        validation=reverse_rows(client.validation),
        test=reverse_rows(client.test),
    )


def merge_sources(clients: Sequence[ClientData], own_share: float) -> tuple[ClientData, ...]:
    """The tasks as sources of one task; of each client's rows `own_share` come from its own source, the rest evenly.

    Client i of a source gives the last rows of every split, in equal parts, to the clients i of the other sources and
    gets as many from them, so sizes stay and no row is held twice. The order of rows is random, so the last are any.

    Raises:
        ConfigError: the tasks have other classes than each other, or clients of other numbers or sizes.
    """
    sources = list(dict.fromkeys(client.task.name for client in clients))
    task, numbers = _common_task([client.task for client in clients], sources), _numbers(clients)
    merged = [replace(client, task=task) for client in clients]
    if len(sources) < 2 or own_share == 1:
        return tuple(merged)
    by_place = {(client.task.name, numbers[client.name]): client for client in clients}
    if len({(number, *map(len, _splits(client))) for (_, number), client in by_place.items()}) * len(sources) != len(
        clients
    ):
        raise ConfigError("--own-share exchanges rows one for one, and sources have other sizes; set --samples for all")

    def exchange(client: ClientData, one: ClientData) -> ClientData:
        peers = [by_place[source, numbers[client.name]] for source in sources]
        train, validation, test = (
            _exchange(rows, sources.index(client.task.name), own_share) for rows in zip(*map(_splits, peers))
        )
        return replace(one, train=train, validation=validation, test=test)

    return tuple(exchange(client, one) for client, one in zip(clients, merged, strict=True))


def _exchange(rows: Sequence[Examples], source: int, own_share: float) -> Examples:
    """The rows of this source after the exchange between the clients of one number, a split of each source."""
    size, others = len(rows[source]), len(rows) - 1
    kept = int(own_share * size + 0.5)
    parts = np.array_split(np.arange(kept, size), others)
    # the part that goes d sources further has one size for all, so what comes is as much as what goes
    received = [rows[(source - distance) % len(rows)].take(parts[distance - 1]) for distance in range(1, len(rows))]
    texts = [as_texts(part, task="sources") for part in (rows[source].take(np.arange(kept)), *received)]
    return Rows(
        text=tuple(text for part in texts for text in part.text),
        pair=None if texts[0].pair is None else tuple(text for part in texts for text in part.pair or ()),
        label=np.concatenate([part.label for part in texts]),
    )


def _common_task(tasks: Sequence[Task], sources: Sequence[str]) -> Task:
    first = tasks[0]
    for task in tasks:
        alike = task.num_labels == first.num_labels and task.label_names == first.label_names
        if not alike or task.metric != first.metric or task.images:
            raise ConfigError(
                f"--one-task takes tasks as sources of one, and {task.name!r} has other classes than {first.name!r};"
                " take texts with the same classes and metric"
            )
    return replace(first, name="+".join(sources), note=f"one task from {len(sources)} sources")


def _splits(client: ClientData) -> tuple[Examples, Examples, Examples]:
    return client.train, client.validation, client.test


def _numbers(clients: Sequence[ClientData]) -> dict[str, int]:
    """The number of every client among those of its task, in their order."""
    seen, numbers = defaultdict[str, int](int), dict[str, int]()
    for client in clients:
        numbers[client.name] = seen[client.task.name]
        seen[client.task.name] += 1
    return numbers
