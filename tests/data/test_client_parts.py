"""Parts of a client: worked by hand on embeddings of one number, and what every cut keeps."""

import numpy as np
import pytest

from atlas_fl.data.client_parts import cut_client
from atlas_fl.data.clients import ClientData, site_of, whole_of
from atlas_fl.data.registry import find_tasks
from atlas_fl.data.task import Rows


def texts(words: str) -> Rows:
    labels = np.arange(len(words.split())) % 2
    return Rows(text=tuple(words.split()), label=labels)


def client_of(train: str, validation: str, test: str) -> ClientData:
    (task,) = find_tasks(("movie",))
    splits = {"train": texts(train), "validation": texts(validation), "test": texts(test)}
    return ClientData(name="movie-0", task=task, left_out=3, source="movie", notes=("a note",), **splits)


def column(*numbers: float) -> np.ndarray:
    return np.array(numbers, dtype=np.float32)[:, None]


CLIENT = client_of("a b c d e", "f g", "h i j")
EMBEDDED = {"train": column(0, 10, 1, 11, 2), "validation": column(9, 3), "test": column(5, 6, -4)}
"""Centres 1 and 10.5: 5 is nearer to the first, 6 to the second."""


def test_every_text_is_in_the_part_with_the_nearest_centre() -> None:
    parts = cut_client(CLIENT, EMBEDDED, count=2, seed=4)
    by_texts = {part.train.text: part for part in parts}
    low, high = by_texts["a", "c", "e"], by_texts["b", "d"]
    assert (low.validation.text, low.test.text) == (("g",), ("h", "j"))
    assert (high.validation.text, high.test.text) == (("f",), ("i",))
    assert low.train.label.tolist() == [0, 0, 0] and high.train.label.tolist() == [1, 1]
    assert sorted(part.name for part in parts) == ["movie-0.part1", "movie-0.part2"]
    assert {whole_of(part.name) for part in parts} == {site_of(part.name, "movie") for part in parts} == {"movie-0"}
    assert sum(part.left_out for part in parts) == 3 and whole_of("movie-0") == "movie-0"


@pytest.mark.parametrize(
    ("split", "values", "words"),
    [
        ("train", column(0, 10, 1, 0, 2), "would have 1 train examples"),
        ("validation", column(9, 10), "would have 0 validation examples"),
        ("test", column(1, 2, 3), "would have 0 test examples"),
    ],
)
def test_a_client_with_too_few_texts_for_a_part_stays_whole_with_a_note(split, values, words) -> None:
    (whole,) = cut_client(CLIENT, {**EMBEDDED, split: values}, count=2, seed=4)
    assert whole.name == "movie-0" and whole.train is CLIENT.train
    assert whole.notes[0] == "a note" and whole.notes[1].startswith("movie-0 stays whole: one of 2 parts")
    assert whole.notes[1].endswith(words)


def test_more_parts_than_training_texts_are_none() -> None:
    (whole,) = cut_client(CLIENT, EMBEDDED, count=6, seed=4)
    assert whole.name == "movie-0" and len(whole.notes) == 2


def test_parts_are_a_function_of_the_seed_and_the_texts_alone() -> None:
    draws = np.random.default_rng(0)
    embedded = {
        "train": draws.normal(size=(5, 8)),
        "validation": draws.normal(size=(2, 8)),
        "test": draws.normal(size=(3, 8)),
    }
    first, again = (cut_client(CLIENT, embedded, count=2, seed=4) for _ in range(2))
    assert [(part.name, part.train.text, part.notes) for part in first] == [
        (part.name, part.train.text, part.notes) for part in again
    ]
