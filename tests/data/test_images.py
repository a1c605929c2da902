"""Images go through what texts go through: splits, leaks, clients, statistics."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_fl.data.cleaning import arrange, check_no_leak, clean, deduplicate
from atlas_fl.data.clients import ClientData, label_statistics, majority, make_clients
from atlas_fl.data.task import Images, Source, Task, TaskData, as_texts
from atlas_fl.errors import ConfigError, DataError
from tests.data.images import as_images

NOWHERE = Source(cache_dir=Path("/nowhere"))


def images(labels: list[int], *, first: int = 0, side: int = 4, channels: int = 1) -> Images:
    """Images that all differ: each spells its number in its first two pixels."""
    pixels = np.full((len(labels), side, side, channels), 7, dtype=np.uint8)
    numbers = np.arange(first, first + len(labels))
    pixels[:, 0, 0, 0], pixels[:, 0, 1, 0] = numbers % 256, numbers // 256
    return Images(pixels=pixels, label=np.asarray(labels, dtype=np.int64))


def numbers(found: Any) -> list[int]:
    return (found.pixels[:, 0, 0, 0].astype(int) + 256 * found.pixels[:, 0, 1, 0].astype(int)).tolist()


def task(count: int = 430) -> Task:
    def load(source: Source) -> TaskData:
        return arrange(
            {"all": images([i % 3 for i in range(count)])}, name="toy", validation_share=source.validation_share
        )

    return Task(name="toy", num_labels=3, images=True, label_names=("a", "b", "c"), load=load)


def make(**changes: Any) -> tuple[ClientData, ...]:
    settings: dict[str, Any] = {
        "clients_per_task": 4,
        "samples": 40,
        "validation_samples": 20,
        "test_samples": 30,
        "partition": "iid",
        "dirichlet_alpha": 0.5,
        "seed": 1,
        "shuffle_labels": False,
    }
    return make_clients([task()], NOWHERE, **{**settings, **changes})


def test_take_keeps_pixels_and_labels_together() -> None:
    taken = images([0, 1, 2]).take([2, 0])
    assert (numbers(taken), taken.label.tolist(), len(taken), taken.size) == ([2, 0], [2, 0], 2, (4, 4, 1))
    assert len(images([0, 1]).take([])) == 0


@pytest.mark.parametrize(
    ("pixels", "label"),
    [
        (np.zeros((2, 4, 4, 1), dtype=np.float32), np.zeros(2, dtype=np.int64)),
        (np.zeros((2, 4, 4), dtype=np.uint8), np.zeros(2, dtype=np.int64)),
        (np.zeros((2, 4, 4, 2), dtype=np.uint8), np.zeros(2, dtype=np.int64)),
        (np.zeros((2, 4, 4, 1), dtype=np.uint8), np.zeros(3, dtype=np.int64)),
        (np.zeros((2, 4, 4, 1), dtype=np.uint8), np.zeros(2, dtype=np.float32)),
    ],
)
def test_what_is_no_batch_of_images_is_refused(pixels: Any, label: Any) -> None:
    with pytest.raises(AssertionError):
        Images(pixels=pixels, label=label)


def test_equal_pixels_are_one_image_and_contradicting_labels_are_none() -> None:
    twice = images([0, 1, 2, 0]).take([0, 1, 1, 2, 3, 3])
    assert numbers(deduplicate(twice)) == [0, 1, 2, 3]
    torn = Images(pixels=twice.pixels, label=np.asarray([0, 1, 2, 2, 0, 0]))
    assert numbers(deduplicate(torn)) == [0, 2, 3]


def test_the_same_bytes_in_another_shape_are_another_image() -> None:
    flat = Images(pixels=np.zeros((1, 2, 8, 1), dtype=np.uint8), label=np.zeros(1, dtype=np.int64))
    tall = Images(pixels=np.zeros((1, 8, 2, 1), dtype=np.uint8), label=np.zeros(1, dtype=np.int64))
    check_no_leak({"train": flat, "test": tall})


def test_a_leaked_image_is_found_by_its_pixels_and_named_by_its_place() -> None:
    with pytest.raises(DataError, match=r"1 images are in train and in test, such as number 1; remove them"):
        check_no_leak({"train": images([0, 1]), "test": images([2], first=1)})


def test_cleaning_keeps_what_is_in_two_splits_in_the_test() -> None:
    found = clean(TaskData(train=images([0, 1, 2]), validation=images([1, 2], first=1), test=images([2], first=2)))
    assert [numbers(part) for part in (found.train, found.validation, found.test)] == [[0], [1], [2]]


def test_validation_is_a_fifth_or_the_share_that_is_asked_for() -> None:
    given = {"train": images([i % 2 for i in range(100)]), "test": images([0, 1], first=300)}
    assert len(arrange(given, name="x").validation) == 20
    found = arrange(given, name="x", validation_share=0.1)
    assert [len(part) for part in (found.train, found.validation, found.test)] == [90, 10, 2]
    assert np.bincount(found.validation.label).tolist() == [5, 5]
    alone = arrange({"all": images([i % 2 for i in range(43)])}, name="x", validation_share=0.1)
    assert [len(part) for part in (alone.train, alone.validation, alone.test)] == [27, 3, 13]
    for cut in (
        lambda: arrange(given, name="x", validation_share=0.009),
        lambda: arrange({"all": given["train"]}, name="x", validation_share=0.013),
    ):
        with pytest.raises(DataError, match=r"--validation-share 0.0.* of the (100|70) rows of task 'x' is not one"):
            cut()


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "quantity"])
def test_no_image_is_given_twice(partition: str) -> None:
    clients = make(partition=partition, samples=50, validation_samples=25, test_samples=32)
    given = [n for client in clients for part in (client.train, client.validation, client.test) for n in numbers(part)]
    assert len(set(given)) == len(given) == 4 * 107


def test_a_digest_knows_every_pixel_label_and_shape() -> None:
    (client,) = make(clients_per_task=1)
    assert client.digest() == make(clients_per_task=1)[0].digest()
    train = as_images(client.train)
    pixels = train.pixels.copy()
    pixels[3, 2, 2, 0] += 1
    label = train.label.copy()
    label[3] += 1
    others = [
        Images(pixels=pixels, label=train.label),
        Images(pixels=train.pixels, label=label),
        Images(pixels=train.pixels.reshape(-1, 2, 8, 1), label=train.label),
    ]
    digests = {
        ClientData(name="x", task=client.task, train=other, validation=client.validation, test=client.test).digest()
        for other in [train, *others]
    }
    assert len(digests) == 4


def test_shuffling_permutes_labels_and_no_pixel() -> None:
    for before, after in zip(make(), make(shuffle_labels=True)):
        assert numbers(before.train) == numbers(after.train)
        assert before.train.label.tolist() != after.train.label.tolist()
        assert sorted(before.train.label) == sorted(after.train.label)


def test_statistics_by_hand() -> None:
    held = images([0, 0, 0, 1])
    (row,) = label_statistics([ClientData(name="toy-0", task=task(), train=held, validation=held, test=held)])
    assert row["labels"] == {"a": 3, "b": 1, "c": 0}
    assert majority(held) == row["majority"]["train"] == 0.75


def test_images_are_not_taken_for_texts() -> None:
    with pytest.raises(ConfigError, match="task 'x' is of images and the model reads text; choose a task of text or"):
        as_texts(images([0]), task="x")
