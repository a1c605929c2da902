"""Tasks whose rows have no labels: how they are described, dealt out and scored."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.data.clients import ClientData, label_statistics, majority, make_clients
from atlas_fl.data.metrics import rouge, writing_scores
from atlas_fl.data.task import Source, TaskData
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import ConfigError, DataError

NOWHERE = Source(cache_dir=Path("/nowhere"))


def write(path: Path, count: int = 86, *, first: int = 0) -> Path:
    """Questions with answers of one to five words."""
    rows = [
        {"text": f"question {i}", "answer": " ".join([f"a{i}"] * (1 + i % 5)), "label": i % 2}
        for i in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(description: str) -> TaskData:
    return parse_tasks(description)[0].load(NOWHERE)


def clients(description: str, **changes: object) -> tuple[ClientData, ...]:
    usual: dict[str, object] = {
        "clients_per_task": 2,
        "samples": 12,
        "validation_samples": 4,
        "test_samples": 4,
        "partition": "iid",
        "dirichlet_alpha": 0.1,
        "seed": 1,
        "shuffle_labels": False,
    }
    return make_clients([parse_tasks(description)[0]], NOWHERE, **usual | changes)  # type: ignore[arg-type]


def test_a_target_is_written_after_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    task = parse_tasks(f"qa={path},target=answer")[0]
    assert (task.num_labels, task.writes, task.has_classes, task.is_regression) == (0, True, False, False)
    assert (task.metric, task.label_names) == ("accuracy", ())
    train = loaded(f"qa={path},target=answer").train
    assert train.pair is not None
    for text, pair, words in zip(train.text, train.pair, train.label):
        assert pair.split()[0] == "a" + text.split()[1]
        assert words == len(pair.split())


def test_a_target_that_is_the_text_has_no_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    for options, first in (("target=text", "question"), ("text=answer,target=answer", "a")):
        data = loaded(f"notes={path},{options}")
        assert data.train.pair is None
        assert all(text.startswith(first) for text in data.train.text)


def test_texts_of_one_length_are_a_task(tmp_path: Path) -> None:
    """They have one label, which labelled rows must not have."""
    assert len(loaded(f"notes={write(tmp_path / 't.jsonl')},target=text").train) == 40


def test_a_folder_keeps_its_splits(tmp_path: Path) -> None:
    for place, (split, count) in enumerate((("train", 20), ("validation", 30), ("test", 40))):
        write(tmp_path / f"{split}.jsonl", count, first=100 * place)
    data = loaded(f"qa={tmp_path},target=answer")
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 30, 40)
    assert data.test.pair[0].startswith("a2")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("target=", ConfigError, r"gives an option twice or without a value"),
        (
            "target=answer,label=label",
            ConfigError,
            r"'qa' has target= and label=; what writes text has text= and target=",
        ),
        ("target=answer,metric=f1", ConfigError, r"'qa' has target= and metric="),
        ("target=answer,pair=text", ConfigError, r"'qa' has target= and pair="),
        ("target=nothing", DataError, r"has no column 'nothing'; it has 'text', 'answer', 'label'"),
        (
            "text=query,target=answer",
            DataError,
            r"no column 'query'; it has .*; name the one to write 'answer' after with text=, or say text=answer for no",
        ),
    ],
)
def test_what_is_wrong_is_said(options: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        parse_tasks(f"qa={write(tmp_path / 't.jsonl')},{options}")


def test_no_row_is_given_twice_and_dirichlet_skews_by_length(tmp_path: Path) -> None:
    task = f"qa={write(tmp_path / 't.jsonl', 430)},target=answer"
    for partition in ("iid", "dirichlet", "quantity"):
        found = clients(task, partition=partition, samples=60)
        given = [text for one in found for rows in (one.train, one.validation, one.test) for text in rows.text]
        assert len(set(given)) == len(given)
    apart = {
        partition: abs(np.subtract(*[one.train.label.mean() for one in clients(task, partition=partition, samples=60)]))
        for partition in ("iid", "dirichlet")
    }
    assert apart["dirichlet"] > 0.5 > apart["iid"]


def test_shuffling_gives_prompts_the_targets_of_others(tmp_path: Path) -> None:
    task = f"qa={write(tmp_path / 't.jsonl')},target=answer"
    plain, shuffled = clients(task)[0], clients(task, shuffle_labels=True)[0]
    assert plain.train.pair and shuffled.train.pair
    assert plain.train.text == shuffled.train.text
    assert plain.train.pair != shuffled.train.pair
    assert sorted(plain.train.pair) == sorted(shuffled.train.pair)
    assert [len(text.split()) for text in shuffled.train.pair] == shuffled.train.label.tolist()
    assert plain.test.pair == shuffled.test.pair


def test_text_without_a_prompt_cannot_be_shuffled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--shuffle-labels has nothing to shuffle in task 'notes'"):
        clients(f"notes={write(tmp_path / 't.jsonl')},target=text", shuffle_labels=True)


def test_statistics_are_of_words_and_there_is_no_majority(tmp_path: Path) -> None:
    found = clients(f"qa={write(tmp_path / 't.jsonl')},target=answer")
    row = label_statistics(found)[0]
    assert row["words"]["mean"] == pytest.approx(np.mean([len(text.split()) for text in found[0].train.pair or ()]))
    assert not {"labels", "majority", "distance"} & row.keys()
    assert majority(found[0].train) is None


def test_scores_by_hand() -> None:
    # four tokens with probabilities 1/2, 1/4, 1/8, 1: the geometric mean is 2^(-6/4), so the perplexity 2^1.5
    nats = -np.log([0.5, 0.25, 0.125, 1.0])
    found = writing_scores(np.stack([nats, [1.0, 0.0, 0.0, 1.0]], axis=1).astype(np.float32))
    assert found == {
        "loss": pytest.approx(1.5 * math.log(2)),
        "perplexity": pytest.approx(2**1.5),
        "accuracy": 0.5,
        "primary": 0.5,
    }


@pytest.mark.parametrize("size", [2, 386, 50257])
def test_the_perplexity_of_a_guess_is_the_size_of_the_vocabulary(size: int) -> None:
    judged = np.stack([np.full(7, math.log(size)), np.zeros(7)], axis=1)
    assert writing_scores(judged)["perplexity"] == pytest.approx(size)


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    assert writing_scores(np.array([[800.0, 0.0]]))["perplexity"] == math.inf


def test_rouge_by_hand() -> None:
    # Of 6 words each, the longest common subsequence is "the cat on mat": 4. The same words are common, and of 5 pairs
    # each "the cat" alone.
    found = rouge(["The cat sat on the mat."], ["the cat is on a mat"])
    assert found == {
        "rouge1": pytest.approx(4 / 6),
        "rouge2": pytest.approx(1 / 5),
        "rougeL": pytest.approx(4 / 6),
        "exact_match": 0,
    }
    # two of three words of the reference, in the other order: both are common, one is a subsequence
    found = rouge(["a b c", "x"], ["b a", "x"])
    assert found == {
        "rouge1": pytest.approx((0.8 + 1) / 2),
        "rouge2": 0.0,
        "rougeL": pytest.approx((0.4 + 1) / 2),
        "exact_match": 0.5,
    }
    assert rouge(["A person ", "yes"], ["a  person", "yes."])["exact_match"] == 0.5
