"""make_clients: every task's rows dealt out to clients, disjoint; statistics of their sizes and label distributions."""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import repeat
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np

from atlas_fl.data.cleaning import bin_edges, check_no_leak, strata, stratified_order
from atlas_fl.data.partition import PARTITIONS, actual_mixes, assign_classes, deal, deal_balanced, deal_classes
from atlas_fl.data.task import Examples, Images, Labels, Source, Splits, Task, TaskData, as_texts, load_task
from atlas_fl.errors import ConfigError, DataError, first_of
from atlas_fl.frozen import Frozen
from atlas_fl.params import Split
from atlas_fl.rng import Seed, derive_secret, generator

BY_CLASSES = "classes"
"""The partition in which every client has rows of exactly so many classes (`partition.assign_classes`)."""
OWN, BALANCED = "own", "balanced"
"""Mixes of test rows: the client's own, and equal numbers of every class."""
Sizes: TypeAlias = Mapping[Split, int | None]
"""Rows of a client by split; None deals a split out whole."""
_FLAGS: dict[Split, str] = {"train": "--samples", "validation": "--validation-samples", "test": "--test-samples"}
LEAST: dict[Split, int] = {"train": 2, "validation": 1, "test": 1}
"""Fewest rows of a client by split."""
PART = ".part"
"""Between the name of a client and the number of its part (`data.client_parts`)."""
Member = TypeVar("Member")
Key = TypeVar("Key", bound=Hashable)


class Concept(Frozen):
    """Labels that a client gives the examples of its task, p(y given x) where the labels are exact."""

    cut: float | None = None
    """Values above it are positive; None where the task has classes."""
    flipped: bool = False
    """True if class c of C is called C - 1 - c."""

    def judge(self, labels: Labels, num_labels: int) -> Labels:
        """Its classes, int64, for the task's values or classes; `num_labels` are the classes that come out."""
        classes = labels if self.cut is None else (labels > self.cut).astype(np.int64)
        return num_labels - 1 - classes if self.flipped else classes


class ClientData(Splits, eq=False):
    """Data of one client."""

    name: str
    """`<task>-<number>`, or the name that the data have for it."""
    task: Task
    notes: tuple[str, ...] = ()
    """Lines on the data of its task."""
    concept: Concept = Concept()
    """Concept that made its labels of those that its task has (`data.heterogeneity`)."""
    given: Labels | None = None
    """The labels of its training rows before that; None where nobody's were changed."""
    own_rows: int | None = None
    """Training rows of its own source, where its task has several."""
    source: str = ""
    """The task, or the source of one, that its rows come from."""
    number: int = 0
    """Its number among the clients of that."""

    def digest(self) -> str:
        """SHA-256 of all rows of all splits, in their order."""
        sha = sha256()
        for split, examples in self.splits.items():
            sha.update(f"{split} {len(examples)}".encode())
            labels = examples.label.tolist()
            if isinstance(examples, Images):
                sha.update(json.dumps([examples.size, labels]).encode())
                sha.update(np.ascontiguousarray(examples.pixels).data)
                continue
            for row in zip(examples.text, examples.pair or repeat(None), labels):
                sha.update(json.dumps(row).encode())
        return sha.hexdigest()


def group_by(values: Iterable[Member], key: Callable[[Member], Key]) -> dict[Key, list[Member]]:
    """The values by key, in their order."""
    groups: dict[Key, list[Member]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def majority(rows: Examples) -> float | None:
    """The accuracy of always saying the most frequent class of these rows; None where there are no classes."""
    if not np.issubdtype(rows.label.dtype, np.integer):
        return None
    return float(np.bincount(rows.label).max() / len(rows))


def data_notes(clients: Sequence[ClientData]) -> tuple[str, ...]:
    """Lines on the data of each task, such as files and rows that were left out."""
    lines: list[str] = []
    for name, members in group_by(clients, lambda client: client.task.name).items():
        lines += [f"{name}: {note}" for note in dict.fromkeys(note for client in members for note in client.notes)]
        counts = [client.left_out for client in members]  # of clients of the data's own, or of all that was dealt out
        count = sum(counts) if members[0].task.clients else max(counts)
        if count:
            lines.append(f"{name}: rows left out: {count:,}, which repeat or contradict others, or lie in two splits")
    return tuple(lines)


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
    secrets: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[ClientData, ...]:
    """`clients_per_task` clients of every task, in the order of the tasks; no row is given to two of them.

    A task whose data name their clients has these, each with its own rows in their order; where there are more than the
    number of samples, these are drawn, by the client's secret where there is one.
    Otherwise a split without a number of samples, or with too few rows for it, is dealt out whole, in parts of the same
    size or one more. A client's validation
    and test rows come in the class mix of its training rows; with the partition `classes` it has rows of exactly
    `classes_per_client` classes, in all its splits. `client_sizes` are the training rows of the clients of a task in
    turn, in the place of `samples`; with `test_mix` as `task` test rows come in the mix of the task, as `balanced` in
    equal numbers of every class (`partition.deal_balanced`). `shuffle_labels` permutes the training labels, or what is
    to be written after the prompts, inside each client and nothing else. A `DataError` names a task whose rows do not
    suffice.
    """
    sizes: Sizes = {"train": samples, "validation": validation_samples, "test": test_samples}
    deal_rows: Callable[..., dict[Split, list[Labels]]]
    deal_rows = partial(_deal_by_classes, classes_per_client=classes_per_client)
    if partition != BY_CLASSES:
        deal_rows = partial(_deal_by_partition, partition=partition, alpha=dirichlet_alpha, client_sizes=client_sizes)
    clients: list[ClientData] = []
    for task, names in zip(tasks, client_names(tasks, clients_per_task), strict=True):
        data = load_task(task, source)
        if data.clients:
            own = {name: derive_secret(secrets[name], "rows") if name in secrets else seed for name in names}
            clients += own_clients(task, data.clients, sizes, seeds=own, notes=data.notes)
            continue
        _check_room(task, data, clients_per_task, client_sizes=client_sizes)
        task_sizes, notes = _sizes_at_most(data, clients_per_task, sizes, sized=bool(client_sizes))
        own_mix: Sizes = {split: size for split, size in task_sizes.items() if split != "test" or test_mix == OWN}
        parts = deal_rows(task, data, clients_per_task, own_mix, seed=seed)
        if test_mix != OWN:
            each = _sizes(task_sizes["test"], len(data.test), clients_per_task)
            parts["test"] = _deal_test(task, data, each, test_mix, rng=generator(seed, "deal", task.name, "test"))
        for number in range(clients_per_task):
            dealt = {split: rows.take(parts[split][number]) for split, rows in data.splits.items()}
            clients.append(_client(task, data, dealt, name=names[number], number=number, notes=(*data.notes, *notes)))
        check_no_leak({split: rows.take(np.concatenate(parts[split])) for split, rows in data.splits.items()})
    return tuple(_with_shuffled_labels(client, seed) for client in clients) if shuffle_labels else tuple(clients)


def client_names(tasks: Sequence[Task], clients_per_task: int) -> tuple[tuple[str, ...], ...]:
    """The names of the clients of each task; those that the data name get the task's name before theirs where two
    tasks have one name.
    """
    names = [task.clients or tuple(f"{task.name}-{index}" for index in range(clients_per_task)) for task in tasks]
    count = Counter(name.casefold() for of_task in names for name in of_task)
    if max(count.values(), default=1) == 1:
        return tuple(names)
    return tuple(
        tuple(f"{task.name}-{name}" for name in of_task) if task.clients else of_task
        for task, of_task in zip(tasks, names, strict=True)
    )


ALL = "all"
"""The one client of a task whose rows lie in one place is called `<task>-all` (`heterogeneity.centralize`)."""


def site_of(name: str, task: str) -> str:
    """The site of a client of this task: what its name has behind the task's where the data name it, else its name.

    Clients of several tasks, and parts of a client, are of one site where it is the same, and that site has one device.

    >>> site_of("notes-triage-Nord", "notes-triage"), site_of("Nord", "notes-triage"), site_of("movie-0.part2", "movie")
    ('Nord', 'Nord', 'movie-0')
    """
    name = whole_of(name)
    site = name.removeprefix(f"{task}-")
    return name if site.isdecimal() or site == ALL else site


def whole_of(name: str) -> str:
    """The name of the client whose part is called so; that of a whole client as it is."""
    whole, part, number = name.rpartition(PART)
    return whole if part and number.isdecimal() else name


def task_of_client(tasks: Sequence[Task], name: str) -> Task:
    """The one of these tasks that a client of this name has.

    Raises:
        DataError: there are several, and none has a client called so.
    """
    if len(tasks) == 1:
        return tasks[0]
    names = zip(tasks, client_names(tasks, 1), strict=True)
    own = [
        task for task, of_task in names if name in of_task or (not task.clients and site_of(name, task.name) != name)
    ]
    if not own:
        raise DataError(
            f"the data have the tasks {first_of([task.name for task in tasks])}, and none has a client called {name!r},"
            " as this site is; name one task of the column, as in task=kind:triage, or use its client's certificate"
        )
    return max(own, key=lambda task: len(task.name))


def own_clients(
    task: Task, datas: Sequence[TaskData], sizes: Sizes, *, seeds: Mapping[str, Seed], notes: Sequence[str]
) -> list[ClientData]:
    """Clients with these rows each, in the order of their seeds; of more than `sizes` say, so many are drawn."""
    clients = []
    notes = [*notes, *_limit_notes(datas, sizes)]
    for number, ((name, seed), data) in enumerate(zip(seeds.items(), datas, strict=True)):
        rows = {
            split: _at_most(given, sizes[split], rng=generator(seed, "deal", task.name, name, split))
            for split, given in data.splits.items()
        }
        clients.append(_client(task, data, rows, name=name, number=number, notes=notes))
    return clients


def _client(
    task: Task, data: TaskData, rows: Mapping[Split, Examples], *, name: str, number: int, notes: Sequence[str]
) -> ClientData:
    """The client with these rows by split, of a task or source with these data."""
    return ClientData(
        name=name,
        task=task,
        train=rows["train"],
        validation=rows["validation"],
        test=rows["test"],
        left_out=data.left_out,
        source=task.name,
        number=number,
        notes=tuple(notes),
    )


def site_client(
    task: Task, source: Source, sizes: Sizes, *, name: str, secret: bytes, shuffle_labels: bool
) -> ClientData:
    """The client that a site is: all rows of its task, or those that the data have for a client of its name.

    Of more than `sizes` say, its secret draws so many.

    Raises:
        DataError: the data name clients, and none of them so.
    """
    data = load_task(task, source)
    place = name if name in task.clients else site_of(name, task.name)
    if data.clients and place not in task.clients:
        raise DataError(
            f"task {task.name!r} has the clients {first_of(task.clients)} and none called {name!r}, as this site is;"
            " leave client= out where all rows are its own, or use that client's certificate"
        )
    own = data.clients[task.clients.index(place)] if data.clients else data
    seed = derive_secret(secret, "rows")
    (client,) = own_clients(task, [own], sizes, seeds={name: seed}, notes=data.notes)
    return _with_shuffled_labels(client, seed) if shuffle_labels else client


def _at_most(rows: Examples, size: int | None, *, rng: np.random.Generator) -> Examples:
    """So many rows, or all that there are, in their order, of every class about its share."""
    return rows if size is None or len(rows) <= size else rows.take(np.sort(stratified_order(rows.label, rng)[:size]))


def _limit_notes(datas: Sequence[TaskData], sizes: Sizes) -> list[str]:
    lines = []
    for split, size in sizes.items():
        more = sum(size is not None and len(data.splits[split]) > size for data in datas)
        if more:
            lines.append(
                f"{more} of {len(datas)} clients have more than {size:,} {split} examples, and this many"
                f" of them are taken; {_FLAGS[split]} none takes all"
            )
    return lines


def _sizes_at_most(data: TaskData, num_clients: int, sizes: Sizes, *, sized: bool) -> tuple[Sizes, tuple[str, ...]]:
    """The sizes that the rows suffice for, None where all are dealt out, and a note on each split with fewer."""
    at_most: dict[Split, int | None] = dict(sizes)
    notes = []
    for split, rows in data.splits.items():
        size = sizes[split]
        if size is not None and num_clients * size > len(rows) and not (split == "train" and sized):
            at_most[split] = None
            each = _span(_spread(len(rows), num_clients).tolist())
            notes.append(
                f"a client gets {each} {split} examples and not {size:,} ({_FLAGS[split]}), since there"
                f" are {len(rows):,} for {num_clients}"
            )
    return at_most, tuple(notes)


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
) -> dict[Split, list[Labels]]:
    classes, prior = _classes_and_prior(task, data)
    rng = generator(seed, "partition", task.name)
    mean = len(data.train) // num_clients if sizes["train"] is None else sizes["train"]
    mixes, train_sizes = PARTITIONS[partition](prior, num_clients, mean, alpha, rng)
    if client_sizes:
        train_sizes = np.resize(np.asarray(client_sizes, np.int64), num_clients)
    elif sizes["train"] is None:
        train_sizes = train_sizes + _spread(len(data.train) - int(train_sizes.sum()), num_clients)
    dealt: dict[Split, list[Labels]] = {}
    for split, size in sizes.items():
        each = train_sizes if split == "train" else _sizes(size, len(classes[split]), num_clients)
        rng = generator(seed, "deal", task.name, split)
        try:
            # who declares classes may have rows of one alone
            two_classes = task.has_classes and split == "train" and np.ptp(classes[split]) > 0
            dealt[split] = deal(classes[split], mixes, each, rng=rng, two_classes=bool(two_classes))
        except DataError as error:
            raise DataError(f"task {task.name!r}: {error}") from error
        if split == "train":
            # Where a class ran out, the held-out rows follow what the client got and not what it was meant to get.
            mixes = actual_mixes(classes["train"], dealt["train"], mixes)
    return dealt


def _classes_and_prior(task: Task, data: TaskData) -> tuple[dict[Split, Labels], np.ndarray]:
    """(class of every row by split, shares of the classes in the training rows); of values their bin is the class."""
    edges = None if task.has_classes else bin_edges(data.train.label)
    classes = {split: strata(rows.label, edges=edges) for split, rows in data.splits.items()}
    num_classes = task.num_labels if edges is None else len(edges) + 1
    return classes, np.bincount(classes["train"], minlength=num_classes) / len(data.train)


def _deal_test(task: Task, data: TaskData, sizes: Labels, test_mix: str, *, rng: np.random.Generator) -> list[Labels]:
    """The test rows of every client in a mix that is not its own."""
    classes, prior = _classes_and_prior(task, data)
    if test_mix == BALANCED:
        return deal_balanced(classes["test"], sizes, num_classes=len(prior), rng=rng)
    return deal(classes["test"], np.tile(prior, (len(sizes), 1)), sizes, rng=rng)


def _sizes(size: int | None, total: int, num_clients: int) -> Labels:
    """Rows of every client, (clients,) int64: so many each, or all that there are."""
    return _spread(total, num_clients) if size is None else np.full(num_clients, size)


def _spread(total: int, num_clients: int) -> Labels:
    """So many rows for that many clients, the first ones having one more, (clients,) int64."""
    return total // num_clients + (np.arange(num_clients) < total % num_clients).astype(np.int64)


def _deal_by_classes(
    task: Task, data: TaskData, num_clients: int, sizes: Sizes, *, classes_per_client: int | None, seed: Seed
) -> dict[Split, list[Labels]]:
    assert classes_per_client is not None, "who takes this partition says how many classes"
    if not task.has_classes:
        raise ConfigError(f"task {task.name!r} has no classes for --partition {BY_CLASSES}; choose another partition")
    has_class = assign_classes(num_clients, task.num_labels, classes_per_client, generator(seed, "classes", task.name))
    parts: dict[Split, list[Labels]] = {}
    for split, size in sizes.items():
        rng, labels = generator(seed, "deal", task.name, split), data.splits[split].label
        try:
            parts[split] = deal_classes(labels, has_class, size=size, rng=rng)
        except DataError as error:
            raise DataError(f"{split} of task {task.name!r}: {error} ({_FLAGS[split]})") from error
    return parts


def _check_room(task: Task, data: TaskData, num_clients: int, *, client_sizes: Sequence[int] = ()) -> None:
    for split, rows in data.splits.items():
        needed, flag = num_clients * LEAST[split], "--clients-per-task"
        if split == "train" and client_sizes:
            needed, flag = int(np.resize(np.asarray(client_sizes, np.int64), num_clients).sum()), "--client-sizes"
        if needed > len(rows):
            raise DataError(
                f"task {task.name!r} has {len(rows)} {split} rows and {num_clients} clients need {needed} ({flag});"
                f" lower --clients-per-task{' or --client-sizes' if client_sizes else ''}, or add rows"
            )


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
    return replace(client, train=replace(train, pair=tuple(train.pair[i] for i in order), label=train.label[order]))


def label_statistics(clients: Sequence[ClientData]) -> tuple[dict[str, Any], ...]:
    """One row of plain data per client, in their order.

    `examples` and `majority` per split, `labels` (training examples per class name, or mean and standard deviation of
    a regression's labels), and `distance`: half the L1 distance (total variation, 0 to 1) of the client's training
    mix to that of all clients of its task; absent for a regression, as `majority` is. Of several labels a row, `labels`
    are the examples that have each, and `cardinality` is the mean number of an example's labels. Of texts to be
    written, `words` (mean and standard deviation over texts) stand in the place of `labels`, and of conversations
    `chat` and `template` say so.
    """
    classified = [client for client in clients if client.task.has_classes and not client.task.multilabel]
    by_task = group_by(classified, lambda client: client.task.name)
    mixes = {name: np.sum([_counts(one) for one in peers], axis=0) for name, peers in by_task.items()}
    return tuple(_row(client, mixes) for client in clients)


def one_class_notes(clients: Sequence[ClientData]) -> tuple[str, ...]:
    """A line for each client and split without the AUROC that judges its task, since all labels are of one class."""
    return tuple(
        f"{client.name}: AUROC is undefined on its {split} split, whose {len(rows)} examples are of one class; it"
        " counts as .5 there, which is chance; judge such a task by another metric="
        for client in clients
        for split, rows in client.splits.items()
        if client.task.metric == "auroc" and split != "train" and (rows.label == rows.label[:1]).all()
    )


def shard_notes(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for each task with classes of these statistics: how many examples and classes its clients have, and how
    far their mixes are from the task's, or how many labels an example has.
    """
    with_classes = [row for row in rows if {"distance", "cardinality"} & row.keys()]
    tasks = group_by(with_classes, lambda row: str(row["task"]))
    return tuple(_note(task, task_rows) for task, task_rows in tasks.items())


def _note(task: str, rows: Sequence[Mapping[str, Any]]) -> str:
    sizes = [row["examples"]["train"] for row in rows]
    classes = [sum(count > 0 for count in row["labels"].values()) for row in rows]
    tests = [row["examples"]["test"] for row in rows]
    if "distance" in rows[0]:
        kind, apart = "classes", float(np.mean([row["distance"] for row in rows]))
        one_class = [row["client"] for row, number in zip(rows, classes, strict=True) if number == 1]
        little = f"; {first_of(one_class)}: one class alone, so that a score says little" if one_class else ""
        end = f"mixes of labels are {apart:.2f} from the task's on average (0 equal, 1 nothing in common){little}"
    else:
        kind, labels = "labels", sum(size * row["cardinality"] for size, row in zip(sizes, rows))
        end = f"{labels / sum(sizes):.2f} labels an example"
    return (
        f"{task}: {sum(sizes):,} training examples over {len(rows)} client{'s' * (len(rows) > 1)}, {_span(sizes)} each"
        f" ({_span(tests)} to test on), of {_span(classes)} of {len(rows[0]['labels'])} {kind}; {end}"
    )


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _row(client: ClientData, mixes: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "client": client.name,
        "task": client.task.name,
        "metric": client.task.metric_name,
        "examples": {split: len(rows) for split, rows in client.splits.items()},
    }
    label = client.train.label
    if client.task.multilabel:
        positives = label.sum(axis=0).astype(np.int64).tolist()
        labels = dict(zip(client.task.label_names, positives))
        return {**row, "labels": labels, "cardinality": sum(positives) / len(label)}
    if not client.task.has_classes:
        kind = "words" if client.task.writes else "labels"
        row |= {"chat": True, "template": client.task.template} if client.task.chat else {}
        return {**row, kind: {"mean": float(label.mean()), "std": float(label.std())}}
    label_counts, everyone = _counts(client), mixes[client.task.name]
    return {
        **row,
        "majority": {split: majority(rows) for split, rows in client.splits.items()},
        "labels": dict(zip(client.task.label_names, label_counts.tolist())),
        "distance": float(0.5 * np.abs(label_counts / label_counts.sum() - everyone / everyone.sum()).sum()),
    }


def _counts(client: ClientData) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.bincount(client.train.label, minlength=client.task.num_labels)
