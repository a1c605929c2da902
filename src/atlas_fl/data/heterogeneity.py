"""Heterogeneity of clients by a known amount: concept shift, contradiction, sources of one task.

Each function takes clients whose rows were dealt out alike and makes them differ in one way, by one number; rows stay
disjoint. Label skew, sizes and the mix of test rows belong to dealing itself (`data.clients`, `data.partition`). The
order is `merge_sources`, `shift_concepts`, `flip_classes`, and as a reference `centralize`, which takes it all back;
`heterogeneity_notes` says what came of it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np

from atlas_fl.data.cleaning import check_no_leak, without
from atlas_fl.data.clients import ALL, ClientData, Concept, group_by
from atlas_fl.data.task import Examples, Source, Task, TaskData, concatenate, load_task
from atlas_fl.errors import ConfigError
from atlas_fl.params import Split

NEGATIVE_POSITIVE = ("negative", "positive")


def shift_concepts(clients: Sequence[ClientData], cuts: Sequence[float]) -> tuple[ClientData, ...]:
    """Concept shift: what client i of a task, or of a source, calls positive is a value above `cuts[i % len(cuts)]`.

    The task, of values, becomes one of two classes; texts are untouched, so only p(y given x) differs.

    Raises:
        ConfigError: a cut leaves a client without rows of both classes to train on.
    """
    return tuple(_cut_values(client, cuts[client.number % len(cuts)]) for client in clients)


def _cut_values(client: ClientData, cut: float) -> ClientData:
    values, concept = client.train.label, Concept(cut=float(cut))
    if len(set(concept.judge(values, 2).tolist())) < 2:
        raise ConfigError(
            f"--rating-cuts {cut:g} leaves {client.name} with one class (values from {values.min():g} to"
            f" {values.max():g}); cut between these"
        )
    task = replace(client.task, num_labels=2, metric="accuracy", label_names=NEGATIVE_POSITIVE)
    return replace(_relabel(replace(client, task=task), concept), concept=concept, given=values)


def _relabel(client: ClientData, concept: Concept) -> ClientData:
    """The client with what this concept makes of its labels, in all splits."""
    num_labels, splits = client.task.num_labels, client.splits
    return client.with_splits(
        lambda split: replace(splits[split], label=concept.judge(splits[split].label, num_labels))
    )


def flip_classes(clients: Sequence[ClientData], share: float) -> tuple[ClientData, ...]:
    """Contradiction: the last `round(share * n)` of the n clients of a task, or source, call C - 1 - c what is c.

    All their splits are reversed: they are no attackers, they mean the opposite.
    """
    if share == 0:
        return tuple(clients)
    count = Counter(client.source for client in clients)
    flipped = []
    for client in clients:
        num_clients = count[client.source]
        is_flipped = client.number >= num_clients - _num_of(share, num_clients)
        given = client.train.label if client.given is None else client.given
        concept = replace(client.concept, flipped=is_flipped)
        flipped.append(replace(_relabel(client, Concept(flipped=is_flipped)), concept=concept, given=given))
    return tuple(flipped)


def _num_of(share: float, count: int) -> int:
    """The share of so many, rounded, halves up."""
    return int(share * count + 0.5)


def centralize(clients: Sequence[ClientData]) -> tuple[ClientData, ...]:
    """One client for each task, `<task>-all`, with the rows of all its clients as these judge them, in their order."""
    merged = []
    for name, members in group_by(clients, lambda client: client.task.name).items():
        first = replace(members[0], name=f"{name}-{ALL}", concept=Concept(), given=None, own_rows=None)
        merged.append(first.with_splits(partial(_together, members)))
    return tuple(merged)


def _together(clients: Sequence[ClientData], split: Split) -> Examples:
    return concatenate([client.splits[split] for client in clients])


def separate_sources(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """The tasks, each without the texts that another one keeps: in one task nobody may train on what others test on.

    A text of several sources stays where it is the most expensive to lose, in test before validation before train, and
    there with the first of them.
    """
    return tuple(
        replace(task, load=partial(_load_apart, tasks=tuple(tasks), own=own), files=None)
        for own, task in enumerate(tasks)
    )


def _load_apart(source: Source, *, tasks: Sequence[Task], own: int) -> TaskData:
    datas = [load_task(task, source) for task in tasks]
    data = datas[own]
    before = datas[:own]
    others = [*before, *datas[own + 1 :]]
    tests, validations = [other.test for other in others], [other.validation for other in others]
    test = without(data.test, *(other.test for other in before))
    validation = without(data.validation, *tests, *(other.validation for other in before))
    train = without(data.train, *tests, *validations, *(other.train for other in before))
    taken = sum(map(len, data.splits.values())) - len(train) - len(validation) - len(test)
    return replace(data, train=train, validation=validation, test=test, left_out=data.left_out + taken)


def merge_sources(clients: Sequence[ClientData], own_share: float) -> tuple[ClientData, ...]:
    """The tasks as sources of one task; of each client's rows `own_share` come from its own source, the rest evenly.

    Client i of a source gives the last rows of every split, in equal parts, to the clients i of the other sources and
    gets as many from them, so sizes stay and no row is held twice. The order of rows is random, so the last are any.

    Raises:
        ConfigError: the tasks have other classes than each other, or clients of other numbers or sizes.
        DataError: a text is in one split of a source and in another one of the next (`separate_sources`).
    """
    by_source = list(group_by(clients, lambda client: client.source).values())
    sources = [members[0].task for members in by_source]
    task, left_out = common_task(sources), sum(members[0].left_out for members in by_source)
    merged = [replace(client, task=task, left_out=left_out, own_rows=len(client.train)) for client in clients]
    if len(sources) > 1 and own_share != 1:
        if len({(client.number, *map(len, client.splits.values())) for client in clients}) * len(sources) != len(
            clients
        ):
            raise ConfigError(
                "--own-share exchanges rows one for one, and sources have other sizes; set --samples for all"
            )
        merged = [_exchange_rows(client, by_source, own_share) for client in merged]
    check_no_leak({split: _together(merged, split) for split in merged[0].splits})
    return tuple(merged)


def _exchange_rows(client: ClientData, by_source: Sequence[Sequence[ClientData]], own_share: float) -> ClientData:
    own = [members[0].source for members in by_source].index(client.source)
    peers = [next(peer for peer in members if peer.number == client.number) for members in by_source]
    exchanged = client.with_splits(lambda split: _exchange([peer.splits[split] for peer in peers], own, own_share))
    return replace(exchanged, own_rows=_num_of(own_share, len(client.train)))


def _exchange(rows: Sequence[Examples], source: int, own_share: float) -> Examples:
    """The rows of this source after the exchange between the clients of one number, a split of each source."""
    size, others = len(rows[source]), len(rows) - 1
    kept = _num_of(own_share, size)
    parts = np.array_split(np.arange(kept, size), others)
    # the part that goes d sources further has one size for all, so what comes is as much as what goes
    received = [rows[(source - distance) % len(rows)].take(parts[distance - 1]) for distance in range(1, len(rows))]
    return concatenate([rows[source].take(np.arange(kept)), *received])


def joint_name(names: Sequence[str]) -> str:
    """The name of the task that these sources are of."""
    return "+".join(names)


_ALIKE = ("num_labels", "label_names", "multilabel", "metric_name", "truncate")
"""Properties in which sources of one task agree."""


def common_task(sources: Sequence[Task]) -> Task:
    """The task that these are sources of; raises `ConfigError` for images, and where classes or metrics differ."""
    first = sources[0]
    for task in sources:
        if task.images or any(getattr(task, name) != getattr(first, name) for name in _ALIKE):
            raise ConfigError(
                f"--one-task takes tasks as sources of one, and {task.name!r} has other classes than {first.name!r};"
                " take texts with the same classes, metric and truncate="
            )
    return replace(
        first,
        name=joint_name([task.name for task in sources]),
        max_length=max(task.max_length for task in sources),
        note=f"one task from {len(sources)} sources",
    )


def heterogeneity_notes(clients: Sequence[ClientData]) -> tuple[str, ...]:
    """A line for each task of several sources, and one for each whose clients were made to judge in their own ways."""
    notes: list[str] = []
    for name, members in group_by(clients, lambda client: client.task.name).items():
        shares = [client.own_rows / len(client.train) for client in members if client.own_rows is not None]
        if shares:
            notes.append(f"{name}: {np.mean(shares):.2f} of a client's training examples are of its own source")
        if (apart := disagreement(members)) is not None:
            notes.append(f"{name}: two clients give {apart:.2f} of the same examples other labels, on average")
    return tuple(notes)


def disagreement(clients: Sequence[ClientData]) -> float | None:
    """Share of the training examples of all on which two concepts differ, the mean over pairs of these clients.

    They are of one task. None where nobody's labels were changed, and for one client alone.
    """
    given = [client.given for client in clients if client.given is not None]
    num_labels = clients[0].task.num_labels
    if not given or len(clients) < 2:
        return None
    values = np.concatenate(given)
    count = Counter(client.concept for client in clients)
    differing = [
        count[one] * count[other] * np.mean(one.judge(values, num_labels) != other.judge(values, num_labels))
        for one, other in combinations(count, 2)
    ]
    return float(sum(differing)) / math.comb(len(clients), 2)
