"""Clients that differ by a known amount: worked out on rows whose text is their number."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_fl.config.schema import DataConfig
from atlas_fl.config.validation import check_labels
from atlas_fl.data.clients import ClientData, make_clients
from atlas_fl.data.heterogeneity import (
    centralize,
    disagreement,
    flip_classes,
    heterogeneity_notes,
    merge_sources,
    separate_sources,
    shift_concepts,
)
from atlas_fl.data.task import Rows, Source, Task, TaskData
from atlas_fl.errors import AtlasError, ConfigError, DataError


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

    splits = {split: rows(split) for split in ("train", "validation", "test")}
    return ClientData(name=f"{task}-{number}", task=own, source=task, number=number, **splits)


def test_clients_in_turn_call_other_values_positive() -> None:
    """Values -1, 0, 1 above the cuts -0.5 and 0.5: (no, yes, yes) and (no, no, yes)."""
    clients = [client("stars", number, [-1.0, 0.0, 1.0], num_labels=1) for number in range(3)]
    shifted = shift_concepts(clients, (-0.5, 0.5))
    assert [one.test.label.tolist() for one in shifted] == [[0, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert {(one.task.num_labels, one.task.metric) for one in shifted} == {(2, "accuracy")}
    assert [one.train.text for one in shifted if isinstance(one.train, Rows)] == [
        one.train.text for one in clients if isinstance(one.train, Rows)
    ]


def test_in_one_place_a_task_is_one_client_with_the_rows_as_its_clients_judge_them() -> None:
    clients = [client("stars", number, [-1.0, 0.0, 1.0], num_labels=1) for number in range(2)]
    other = client("words", 0, [0, 1], num_labels=2)
    one, words = centralize([*shift_concepts(clients, (-0.5, 0.5)), other])
    assert (one.name, words.name) == ("stars-all", "words-all")
    assert one.test.label.tolist() == [0, 1, 1, 0, 0, 1]
    assert isinstance(one.train, Rows) and one.train.text == tuple(
        f"stars-{number}-train-{row}" for number in range(2) for row in range(3)
    )
    assert words.digest() == other.digest()


def test_a_cut_that_leaves_one_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--rating-cuts 3 leaves stars-0 with one class \(values from -1 to 1\)"):
        shift_concepts([client("stars", 0, [-1.0, 1.0], num_labels=1)], (3.0,))


@pytest.mark.parametrize(("share", "flipped"), [(0.0, 0), (0.3, 1), (0.375, 2), (1.0, 4)])
def test_so_many_clients_of_a_task_have_reversed_classes(share: float, flipped: int) -> None:
    clients = [client("three", number, [0, 1, 2], num_labels=3) for number in range(4)]
    labels = [one.validation.label.tolist() for one in flip_classes(clients, share)]
    assert labels == [[0, 1, 2]] * (4 - flipped) + [[2, 1, 0]] * flipped


def test_two_cuts_disagree_on_what_lies_between_them() -> None:
    """Of -1, 0 and 1 the cuts -0.5 and 0.5 part the 0; of three pairs of clients two have different cuts."""
    clients = [client("stars", number, [-1.0, 0.0, 1.0], num_labels=1) for number in range(3)]
    assert disagreement(clients) is None
    shifted = shift_concepts(clients, (-0.5, 0.5))
    assert disagreement(shifted) == pytest.approx(2 / 3 * 1 / 3)
    assert heterogeneity_notes(shifted) == (
        "stars: two clients give 0.22 of the same examples other labels, on average",
    )
    assert disagreement(shift_concepts(clients, (0.0,))) == 0
    assert heterogeneity_notes(clients) == ()


def test_who_is_cut_and_flipped_says_the_opposite_of_its_own_cut() -> None:
    clients = [client("stars", number, [-1.0, 0.0, 1.0], num_labels=1) for number in range(2)]
    _, last = flip_classes(shift_concepts(clients, (-0.5, 0.5)), 0.5)
    assert (last.concept.cut, last.concept.flipped) == (0.5, True)
    assert last.train.label.tolist() == [1, 1, 0]
    assert last.given is not None and last.given.tolist() == [-1.0, 0.0, 1.0]


def texts(one: ClientData) -> list[str]:
    assert isinstance(one.train, Rows)
    return list(one.train.text)


@pytest.mark.parametrize(("own_share", "own"), [(1.0, 6), (0.5, 3), (0.25, 2)])
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


def test_the_plan_tells_how_much_is_of_the_own_source_and_what_was_left_out_of_all() -> None:
    clients = [replace(client(task, 0, [0, 1] * 4, num_labels=2), left_out=len(task)) for task in ("a", "bb")]
    merged = merge_sources(clients, 0.75)
    assert heterogeneity_notes(merged) == ("a+bb: 0.75 of a client's training examples are of its own source",)
    assert [one.left_out for one in merged] == [3, 3]


def source(name: str, train: str, validation: str, test: str) -> Task:
    """A task of one-letter texts, all of one class."""
    data = TaskData(**{split: one_class(letters) for split, letters in zip(SPLITS, (train, validation, test))})
    return Task(name=name, num_labels=2, label_names=("x", "y"), load=partial(given, data=data))


SPLITS = ("train", "validation", "test")


def one_class(letters: str) -> Rows:
    return Rows(text=tuple(letters), label=np.zeros(len(letters), np.int64))


def given(_: Source, *, data: TaskData) -> TaskData:
    return data


def test_a_text_of_two_sources_stays_where_it_is_most_expensive_to_lose() -> None:
    """Of a and b: t is tested in b, v validated in a, and s trained on in both, where a is the first."""
    apart = separate_sources((source("a", "tsc", "vd", "ef"), source("b", "vsg", "hi", "te")))
    a, b = (task.load(Source(cache_dir=Path("/nowhere"))) for task in apart)
    assert ["".join(rows.text) for rows in (a.train, a.validation, a.test)] == ["sc", "vd", "ef"]
    assert ["".join(rows.text) for rows in (b.train, b.validation, b.test)] == ["g", "hi", "t"]
    assert (a.left_out, b.left_out) == (1, 3)


def test_sources_that_leak_into_each_other_are_refused() -> None:
    leaky = client("b", 0, [0, 1], num_labels=2)
    clients = [
        client("a", 0, [0, 1], num_labels=2),
        replace(leaky, train=replace(leaky.train, text=("a-0-test-1", "u"))),
    ]
    with pytest.raises(DataError, match="1 texts are in train and in test, such as 'a-0-test-1'"):
        merge_sources(clients, 1.0)


def test_sources_with_and_without_pairs_are_refused() -> None:
    other = client("b", 0, [0, 1], num_labels=2)
    pairs = {split: replace(getattr(other, split), pair=("p", "q")) for split in SPLITS}
    with pytest.raises(ConfigError, match="--one-task takes tasks of one form, and some have pairs of texts"):
        merge_sources([client("a", 0, [0, 1], num_labels=2), replace(other, **pairs)], 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rating_cuts": (0.0,)},
            "--rating-cuts needs tasks of values .movie_ratings, metric=pearson., and 'three' has none",
        ),
        ({"flipped_clients": 0.5}, "--flipped-clients needs tasks of classes, and 'stars' has none"),
        ({"test_mix": "balanced"}, "--test-mix balanced needs tasks of classes of its own, and 'stars' has none"),
        ({"one_task": True}, "--one-task takes tasks as sources of one, and 'three' has other classes than 'stars'"),
    ],
)
def test_tasks_without_the_labels_for_it_are_refused_before_anything_is_read(
    values: dict[str, Any], message: str
) -> None:
    tasks = [client(name, 0, [0, 1], num_labels=count).task for name, count in (("stars", 1), ("three", 3))]
    with pytest.raises(ConfigError, match=message):
        check_labels(tasks, DataConfig(**values))


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
    with pytest.raises(AtlasError, match=r"'three' has 240 train rows and 4 clients need 400 \(--client-sizes"):
        dealt(client_sizes=(100,))


def test_sizes_that_fit_together_are_dealt_though_equal_ones_would_not() -> None:
    """239 of 240 rows among seven, whose mean would be rounded up to 35."""
    sizes = (35, 34, 34, 34, 34, 34, 34)
    assert [len(one.train) for one in dealt(client_sizes=sizes, clients_per_task=7)] == list(sizes)


def test_clients_of_one_class_can_be_tested_on_all() -> None:
    clients = dealt(partition="classes", classes_per_client=1, test_mix="task")
    assert all(np.bincount(one.test.label, minlength=3).tolist() == [10, 10, 10] for one in clients)
    assert {len(set(rows.label.tolist())) for one in clients for rows in (one.train, one.validation)} == {1}


def test_test_rows_come_in_the_clients_own_mix_or_in_that_of_the_task() -> None:
    own, balanced = dealt(), dealt(test_mix="task")
    assert max(int(np.bincount(one.test.label, minlength=3).max()) for one in own) >= 20
    assert all(np.bincount(one.test.label, minlength=3).tolist() == [10, 10, 10] for one in balanced)
    for split in ("train", "validation"):
        assert [one.splits[split].label.tolist() for one in own] == [
            one.splits[split].label.tolist() for one in balanced
        ]


def scarce(labels: list[int], **changes: Any) -> list[list[int]]:
    """By client the test rows of each class where the test split of the task has these labels."""
    task = replace(dealt()[0].task, load=lambda _: scarce_data(labels))
    settings: dict[str, Any] = {
        **{"clients_per_task": 3, "samples": 20, "validation_samples": 20, "test_samples": 9, "seed": 5},
        **{"partition": "dirichlet", "dirichlet_alpha": 0.1, "shuffle_labels": False, "test_mix": "balanced"},
    }
    clients = make_clients([task], Source(cache_dir=None), **{**settings, **changes})
    given = [text for one in clients if isinstance(one.test, Rows) for text in one.test.text]
    assert len(set(given)) == len(given)
    return [np.bincount(one.test.label, minlength=3).tolist() for one in clients]


def scarce_data(labels: list[int]) -> TaskData:
    splits = {
        split: Rows(text=tuple(f"{split} {row}" for row in range(len(own))), label=np.asarray(own, np.int64))
        for split, own in (("train", [0, 1, 2] * 80), ("validation", [0, 1, 2] * 80), ("test", labels))
    }
    return TaskData(**splits)


@pytest.mark.parametrize(
    ("counts", "by_client"),
    [
        ((50, 20, 9), [[3, 3, 3]] * 3),
        # six of the rarest are two each, and the seven others of a client are four and three, in turn
        ((50, 20, 6), [[4, 3, 2], [4, 3, 2], [3, 4, 2]]),
        # 13, 13 and 1: four of each of two, and the three others to one client each
        ((50, 20, 1), [[5, 4, 0], [4, 5, 0], [4, 4, 1]]),
        ((27, 0, 0), [[9, 0, 0]] * 3),
    ],
)
@pytest.mark.parametrize("partition", ["dirichlet", "classes"])
def test_balanced_test_rows_by_hand(counts: tuple[int, ...], by_client: list[list[int]], partition: str) -> None:
    labels = [value for value, count in enumerate(counts) for _ in range(count)]
    dealt_rows = scarce(labels, partition=partition, classes_per_client=1 if partition == "classes" else None)
    assert dealt_rows == by_client


def test_a_split_that_is_dealt_out_whole_is_balanced_as_far_as_it_can_be() -> None:
    assert scarce([0] * 4 + [1] * 4 + [2] * 2, test_samples=None) == [[2, 1, 1], [1, 2, 0], [1, 1, 1]]


def test_without_a_setting_nothing_changes() -> None:
    clients = dealt()
    assert flip_classes(clients, 0.0) == clients
    assert replace(clients[0]).digest() == dealt(client_sizes=(), test_mix="own")[0].digest()
