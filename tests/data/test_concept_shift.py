"""Clients that differ by a known amount: worked out on rows whose text is their number."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atlas_fl.data.clients import ClientData, make_clients
from atlas_fl.data.heterogeneity import flip_classes, merge_sources, shift_concepts
from atlas_fl.data.task import Rows, Source, Task, TaskData
from atlas_fl.errors import AtlasError, ConfigError


def no_data(_: Source) -> TaskData:
    raise AssertionError("nothing is read")


def client(task: str, number: int, labels: list[float], *, num_labels: int) -> ClientData:
    kind = np.float32 if num_labels == 1 else np.int64
    own = Task(
        name=task,
        num_labels=num_labels,
        metric="pearson" if num_labels == 1 else "accuracy",
        label_names=tuple(map(str, range(num_labels))) if num_labels > 1 else (),
        load=no_data,
    )

    def rows(split: str) -> Rows:
        text = tuple(f"{task}-{number}-{split}-{row}" for row in range(len(labels)))
        return Rows(text=text, label=np.asarray(labels, kind))

    name = f"{task}-{number}"
    return ClientData(name=name, task=own, train=rows("train"), validation=rows("validation"), test=rows("test"))


def test_clients_in_turn_call_other_values_positive() -> None:
    """Values -1, 0, 1 above the cuts -0.5 and 0.5: (no, yes, yes) and (no, no, yes)."""
    clients = [client("stars", number, [-1.0, 0.0, 1.0], num_labels=1) for number in range(3)]
    shifted = shift_concepts(clients, (-0.5, 0.5))
    assert [one.test.label.tolist() for one in shifted] == [[0, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert {(one.task.num_labels, one.task.metric) for one in shifted} == {(2, "accuracy")}
    assert [one.train.text for one in shifted if isinstance(one.train, Rows)] == [
        one.train.text for one in clients if isinstance(one.train, Rows)
    ]


def test_a_cut_that_leaves_one_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--rating-cuts 3 leaves stars-0 with one class \(values from -1 to 1\)"):
        shift_concepts([client("stars", 0, [-1.0, 1.0], num_labels=1)], (3.0,))
    with pytest.raises(ConfigError, match="--rating-cuts turns values into classes, and task 'yes' has none"):
        shift_concepts([client("yes", 0, [0, 1], num_labels=2)], (0.0,))


@pytest.mark.parametrize(("share", "flipped"), [(0.0, 0), (0.25, 1), (0.3, 1), (0.375, 2), (1.0, 4)])
def test_so_many_clients_of_a_task_have_reversed_classes(share: float, flipped: int) -> None:
    clients = [client("three", number, [0, 1, 2], num_labels=3) for number in range(4)]
    labels = [one.validation.label.tolist() for one in flip_classes(clients, share)]
    assert labels == [[0, 1, 2]] * (4 - flipped) + [[2, 1, 0]] * flipped


def test_flipping_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="--flipped-clients reverses classes, and task 'stars' has none"):
        flip_classes([client("stars", 0, [1.0], num_labels=1)], 0.5)


def texts(one: ClientData) -> list[str]:
    assert isinstance(one.train, Rows)
    return list(one.train.text)


@pytest.mark.parametrize(("own_share", "own"), [(1.0, 6), (0.5, 3), (1 / 3, 2), (0.25, 2)])
def test_sources_exchange_rows_one_for_one(own_share: float, own: int) -> None:
    clients = [client(task, number, [0, 1, 0, 1, 0, 1], num_labels=2) for task in "abc" for number in range(2)]
    merged = merge_sources(clients, own_share)
    assert {one.task.name for one in merged} == {"a+b+c"}
    assert [one.name for one in merged] == [one.name for one in clients]
    for one in merged:
        sources = [text.split("-")[0] for text in texts(one)]
        assert len(sources) == 6 and sources.count(one.name[0]) == own
        rest = [sources.count(other) for other in "abc" if other != one.name[0]]
        assert max(rest) - min(rest) <= 1
    dealt = [text for one in merged for text in texts(one)]
    assert len(set(dealt)) == len(dealt) == 36


def test_a_row_keeps_its_label_on_its_way() -> None:
    clients = [client(task, 0, labels, num_labels=2) for task, labels in (("a", [0, 0]), ("b", [1, 1]))]
    for one in merge_sources(clients, 0.5):
        assert [text[0] for text in texts(one)] == ["ab"[label] for label in one.train.label]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (
            [client("a", 0, [0, 1], num_labels=2), client("b", 0, [0, 1], num_labels=3)],
            "--one-task takes tasks as sources of one, and 'b' has other classes than 'a'",
        ),
        (
            [client("a", 0, [0, 1], num_labels=2), client("b", 0, [0, 1, 1], num_labels=2)],
            "--own-share exchanges rows one for one, and sources have other sizes",
        ),
    ],
)
def test_what_cannot_be_one_task_is_refused(clients: list[ClientData], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_sources(clients, 0.5)


def dealt(**changes: Any) -> tuple[ClientData, ...]:
    labels = np.arange(240) % 3

    def load(_: Source) -> TaskData:
        splits = {
            split: Rows(text=tuple(f"{split} {row}" for row in range(240)), label=labels.astype(np.int64))
            for split in ("train", "validation", "test")
        }
        return TaskData(**splits)

    task = Task(name="three", num_labels=3, label_names=("x", "y", "z"), load=load)
    settings: dict[str, Any] = {
        **{"clients_per_task": 4, "samples": 20, "validation_samples": 20, "test_samples": 30, "seed": 5},
        **{"partition": "dirichlet", "dirichlet_alpha": 0.1, "shuffle_labels": False},
    }
    return make_clients([task], Source(cache_dir=None), **{**settings, **changes})  # type: ignore[arg-type]


def test_clients_in_turn_have_the_sizes_that_are_given() -> None:
    assert [len(one.train) for one in dealt(client_sizes=(10, 30, 60))] == [10, 30, 60, 10]
    with pytest.raises(AtlasError, match="task 'three' has 240 train rows and --client-sizes say 400 together"):
        dealt(client_sizes=(100,))


def test_test_rows_come_in_the_clients_own_mix_or_in_that_of_the_task() -> None:
    own, balanced = dealt(), dealt(test_mix="task")
    assert max(int(np.bincount(one.test.label, minlength=3).max()) for one in own) >= 20
    assert all(np.bincount(one.test.label, minlength=3).tolist() == [10, 10, 10] for one in balanced)
    assert [one.train.label.tolist() for one in own] == [one.train.label.tolist() for one in balanced]


def test_without_a_setting_nothing_changes() -> None:
    clients = dealt()
    assert flip_classes(clients, 0.0) == clients
    assert replace(clients[0]).digest() == dealt(client_sizes=(), test_mix="own")[0].digest()
