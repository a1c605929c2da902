from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_fl.data.cleaning import arrange
from atlas_fl.data.clients import ClientData, data_notes, majority, make_clients
from atlas_fl.data.task import Rows, Source, Task, TaskData
from atlas_fl.errors import DataError

NOWHERE = Source(cache_dir=Path("/nowhere"))


def rows(count: int, num_labels: int, name: str) -> Rows:
    values = np.arange(count)
    label = values.astype(np.float32) / 7 if num_labels == 1 else values % num_labels
    return Rows(text=tuple(f"{name} {i}" for i in range(count)), label=label)


def made_task(name: str = "toy", *, count: int = 430, num_labels: int = 2) -> Task:
    def load(source: Source) -> TaskData:
        assert source is NOWHERE
        return arrange({"all": rows(count, num_labels, name)}, name=name)

    names = tuple(map(str, range(num_labels))) if num_labels > 1 else ()
    metric: Any = "accuracy" if num_labels > 1 else "pearson"
    return Task(name=name, num_labels=num_labels, metric=metric, label_names=names, load=load)


Make = Callable[..., tuple[ClientData, ...]]
DEFAULTS: dict[str, Any] = {
    "clients_per_task": 4,
    "samples": 40,
    "validation_samples": 20,
    "test_samples": 30,
    "partition": "iid",
    "dirichlet_alpha": 0.5,
    "seed": 1,
    "shuffle_labels": False,
}


def make(*tasks: Task, **changes: Any) -> tuple[ClientData, ...]:
    return make_clients(tasks or (made_task(),), NOWHERE, **{**DEFAULTS, **changes})


def test_clients_are_named_by_task_and_number() -> None:
    clients = make(made_task("one"), made_task("two"), clients_per_task=2)
    assert [client.name for client in clients] == ["one-0", "one-1", "two-0", "two-1"]
    assert [len(rows) for rows in (clients[3].train, clients[3].validation, clients[3].test)] == [40, 20, 30]
    assert {text.split()[0] for text in clients[3].train.text} == {"two"}


def test_what_cleaning_left_out_is_told_once_for_a_task() -> None:
    def load(_: Source) -> TaskData:
        own = rows(430, 2, "twice")
        return arrange(
            {"all": Rows(text=own.text + own.text[:5], label=np.append(own.label, own.label[:5]))}, name="twice"
        )

    clients = make(made_task("once"), replace(made_task("twice"), load=load), clients_per_task=2, samples=20)
    assert data_notes(clients) == ("twice: rows left out: 5, which repeat or contradict others, or lie in two splits",)


def test_no_row_is_given_twice() -> None:
    for partition in ("iid", "dirichlet", "quantity"):
        clients = make(partition=partition, clients_per_task=4, samples=50, validation_samples=25, test_samples=32)
        given = [
            text for client in clients for part in (client.train, client.validation, client.test) for text in part.text
        ]
        assert len(set(given)) == len(given) == 4 * 107


def test_the_seed_decides_and_a_task_does_not_depend_on_its_neighbours() -> None:
    alone, other = make(seed=3)[1], make(made_task("else"), made_task(), seed=3)[5]
    assert alone.name == other.name
    assert alone.train.text == other.train.text
    assert alone.train.text != make(seed=4)[1].train.text


def test_held_out_rows_come_in_the_mix_of_the_training_rows() -> None:
    sizes = {"samples": 50, "validation_samples": 25, "test_samples": 32}  # every row of the 430 but two
    for client in make(made_task(num_labels=5), partition="dirichlet", dirichlet_alpha=0.2, **sizes):
        train, test = (np.bincount(part.label, minlength=5) / len(part) for part in (client.train, client.test))
        assert np.abs(train - test).max() < 0.1


def test_shuffling_permutes_training_labels_and_nothing_else() -> None:
    for before, after in zip(make(), make(shuffle_labels=True)):
        assert before.train.text == after.train.text
        assert before.train.label.tolist() != after.train.label.tolist()
        assert sorted(before.train.label) == sorted(after.train.label)
        for name in ("validation", "test"):
            assert getattr(before, name).text == getattr(after, name).text
            assert getattr(before, name).label.tolist() == getattr(after, name).label.tolist()


def test_a_regression_is_dealt_by_ranges_of_its_label() -> None:
    clients = make(made_task(num_labels=1), partition="dirichlet", dirichlet_alpha=0.1)
    means = [client.train.label.mean() for client in clients]
    assert np.ptp(means) > 10  # labels run from 0 to 61
    assert majority(clients[0].test) is None


def test_majority_by_hand() -> None:
    assert majority(Rows(text=("a",) * 5, label=np.asarray([2, 0, 2, 1, 2]))) == 0.6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 51}, "toy: a client gets 50 train examples and not 51 (--samples), since there are 200 for 4"),
        ({"test_samples": 33}, "toy: a client gets 32 to 33 test examples and not 33 (--test-samples), since there"),
        ({"validation_samples": 500}, "toy: a client gets 25 validation examples and not 500 (--validation-samples)"),
    ],
)
def test_samples_are_at_most_and_a_note_says_what_each_client_got(changes: dict[str, Any], message: str) -> None:
    clients = make(**changes)
    assert any(note.startswith(message) for note in data_notes(clients))
    assert not any("a client gets" in note for note in data_notes(make()))


def test_a_class_too_rare_for_all_clients_is_an_error_with_the_task() -> None:
    def rare(source: Source) -> TaskData:
        del source
        data = rows(430, 2, "rare")
        return arrange({"all": Rows(text=data.text, label=(np.arange(430) < 6).astype(np.int64))}, name="rare")

    task = Task(name="rare", num_labels=2, label_names=("0", "1"), load=rare)
    with pytest.raises(DataError, match=r"task 'rare': there are no rows of two classes for each of 4 clients"):
        make(task)


def test_a_leaky_task_is_stopped() -> None:
    def leaky(source: Source) -> TaskData:
        data = made_task().load(source)
        return TaskData(train=data.train, validation=data.validation, test=data.train)

    with pytest.raises(DataError, match="texts are in train and in test"):
        make(Task(name="leaky", num_labels=2, label_names=("0", "1"), load=partial(leaky)), samples=50, test_samples=50)


def test_the_digest_tells_every_row_label_split_and_order_apart() -> None:
    rows = Rows(text=("é", '"b'), pair=("c", "d"), label=np.asarray([0, 1]))
    others = [
        replace(rows, text=("é", "b")),
        replace(rows, pair=None),
        replace(rows, label=np.asarray([0, 0])),
        replace(rows, label=np.asarray([0.0, 1.0], np.float32)),
        rows.take([1, 0]),
        rows.take([0]),
    ]
    task = Task(name="t", num_labels=2, load=lambda _: pytest.fail("read"))
    client = ClientData(name="t-0", task=task, train=rows, validation=rows, test=rows)
    changed = [replace(client, **{split: other}) for split in client.splits for other in others]
    digests = {client.digest(), *(other.digest() for other in changed)}
    assert len(digests) == 1 + len(changed)
    assert client.digest() == replace(client, train=rows.take([0, 1])).digest()
