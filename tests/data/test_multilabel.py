"""Rows of several labels: as they are read, refused, split, dealt out, counted and scored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn.metrics
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from atlas_fl.cli.main import main
from atlas_fl.client.local_training import example_loss
from atlas_fl.data.cleaning import deduplicate, strata
from atlas_fl.data.clients import label_statistics, make_clients, shard_notes
from atlas_fl.data.metrics import by_class, scores
from atlas_fl.data.task import Rows, Source, Task
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import ConfigError, DataError
from atlas_fl.setup.own_data import task_row

NOWHERE = Source(cache_dir=Path("/nowhere"))
CELLS = ("rash;fever", "fever", "", "cough; rash ;rash", "cough")
NAMES = ("cough", "fever", "rash")


def write(folder: Path, cells: Any = CELLS, *, header: str = "text,label", name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(header + "\n" + "".join(f'text {i},"{cells[i % len(cells)]}"\n' for i in range(60)))
    return path


def by_text(task: Task) -> dict[str, list[float]]:
    data = task.load(NOWHERE)
    rows = [pair for rows in data.splits.values() for pair in zip(rows.text, rows.label.tolist(), strict=True)]
    return dict(sorted(rows))


def test_a_cell_is_several_labels_one_or_none(tmp_path: Path) -> None:
    (task,) = parse_tasks(f"mine={write(tmp_path)},multi=;")
    assert (task.num_labels, task.multilabel, task.has_classes, task.metric) == (3, True, False, "micro_f1")
    assert task.label_names == NAMES
    found = by_text(task)
    assert [found[f"text {i}"] for i in range(5)] == [[0, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1], [1, 0, 0]]
    assert task.load(NOWHERE).train.label.dtype == np.float32


def test_a_table_of_every_kind_has_the_same_labels(tmp_path: Path) -> None:
    expected = by_text(parse_tasks(f"mine={write(tmp_path)},multi=semicolon")[0])
    lists = [[word.strip() for word in CELLS[i % 5].split(";") if word] for i in range(60)]
    table = pd.DataFrame({"text": [f"text {i}" for i in range(60)], "label": lists})
    table.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    table.to_parquet(tmp_path / "t.parquet")
    table.assign(label=[",".join(one) or None for one in lists]).to_parquet(tmp_path / "words.parquet")
    rows = [task_row(table, name="mine", folder=tmp_path / "own", multi="comma")]
    rows += [f"mine={tmp_path / name},multi=comma" for name in ("t.jsonl", "t.parquet", "words.parquet")]
    for row in rows:
        assert by_text(parse_tasks(row)[0]) == expected, row


def test_declared_labels_are_the_columns_and_clients_may_lack_some(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [(i, "a;b" if i % 3 else "b", "one") for i in range(40)] + [(40 + i, "", "two") for i in range(20)]
    path.write_text("text,label,who\n" + "".join(f"text {i},{cell},{who}\n" for i, cell, who in rows))
    (task,) = parse_tasks(f"mine={path},multi=;,labels=z|b|a,client=who")
    assert task.label_names == ("z", "b", "a")
    clients = make_clients([task], NOWHERE, **DEALT, partition="natural")
    counts = [client.train.label.sum(axis=0).tolist() for client in clients]
    assert counts[0][0] == 0 < counts[0][2] < counts[0][1] == len(clients[0].train)
    assert counts[1] == [0, 0, 0]
    statistics = label_statistics(clients)
    assert [list(row["labels"].values()) for row in statistics] == counts
    assert statistics[0]["cardinality"] == sum(counts[0]) / len(clients[0].train)
    assert shard_notes(statistics)[0].endswith("labels an example")
    (alone,) = parse_tasks("mine,labels=a|b,multi=;")
    assert (alone.num_labels, alone.multilabel, alone.metric) == (2, True, "micro_f1")


DEALT: dict[str, Any] = {
    **{"clients_per_task": 3, "samples": None, "validation_samples": None, "test_samples": None},
    **{"dirichlet_alpha": 0.5, "seed": 1, "shuffle_labels": False},
}

REFUSED = {
    "multi=::": "multi=:: of task 'mine' is no separator; give one character, or a word of comma, semicolon, tab, pipe",
    "multi=;,metric=f1": "judged by micro_f1, macro_f1, accuracy, auroc: say one of these, or leave multi= out",
    "multi=;,metric=pearson": "judged by micro_f1, macro_f1, accuracy, auroc",
    "metric=micro_f1": "which of one class a row is accuracy; say accuracy, or add multi=;",
    "multi=;,target=text": "what has labels no target=",
    "multi=;,labels=cough|fever": "has 'rash' in column 'label' (rows: 24), which is none of the classes",
    "multi=pipe": "has two labels with multi=pipe between them, as in 'cough; rash ;rash'; name the character",
    "multi=e,label=text": "has 61 different values in 120 places, such as 't",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_is_one_line(options: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        parse_tasks(f"mine={write(tmp_path)},{options}")
    assert REFUSED[options] in str(caught.value)
    assert "\n" not in str(caught.value)


CELL_FAULTS = {
    "['a', 'b']": "a list as a program prints it",
    "nan": "no value in 'label' ('nan')",
}


@pytest.mark.parametrize("cell", CELL_FAULTS)
def test_a_cell_that_is_no_list_of_labels_is_told(cell: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 30 problems") as caught:
        parse_tasks(f"mine={write(tmp_path, ('a;b', cell))},multi=;")
    assert CELL_FAULTS[cell] in str(caught.value)
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": f"t{i}", "label": ["a", None]}) + "\n" for i in range(9)))
    with pytest.raises(DataError, match="no value in 'label'"):
        parse_tasks(f"mine={path},multi=;")


def test_rows_are_told_apart_and_spread_by_their_sets_of_labels() -> None:
    label = np.asarray([[1, 0], [1, 0], [0, 1], [1, 1]], dtype=np.float32)
    rows = Rows(text=("same", "Same", "other", "other"), label=label)
    assert deduplicate(rows).text == ("same",)
    assert len(set(strata(label))) == 3
    assert strata(label, edges=np.asarray([2.0])).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("partition", ["iid", "quantity", "linear"])
def test_rows_are_dealt_out_by_how_many_labels_they_have(partition: str, tmp_path: Path) -> None:
    (task,) = parse_tasks(f"mine={write(tmp_path)},multi=;")
    clients = make_clients([task], NOWHERE, **DEALT, partition=partition)
    dealt = [text for client in clients for rows in client.splits.values() for text in rows.text]
    assert len(dealt) == len(set(dealt)) == 60
    assert all(client.train.label.shape == (len(client.train), 3) for client in clients)


WORDS = {
    "--partition dirichlet": "--partition dirichlet deals rows out by their one class, and there is mine",
    "--partition shard": "take --partition iid",
    "--partition pathological --nc 2": "take --partition iid",
    "--strategy fedpac": "take fedavg",
    "--strategy fedavg_prior": "take another strategy than fedavg_prior",
    "--label-smoothing 0.1": "leave it out",
    "--flipped-clients 0.5": "leave it out",
    "--attack label_flip --attackers 1": "take --attack sign_flip",
    "--test-mix balanced": "take --test-mix own or task",
    "--rating-cuts 1 2": "needs tasks of values",
    "--trainable full --mask least_sensitive": "take lowest_magnitude, highest_magnitude or random",
}


@pytest.mark.parametrize("words", WORDS)
def test_what_needs_one_class_a_row_is_refused(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = f"mine={write(tmp_path)},multi=;"
    assert main(["plan", "--task", task, *words.split()]) == 2
    said = capsys.readouterr().err
    assert WORDS[words] in said
    assert said.count("\n") == 1


def no_data(_: Source) -> Any:
    raise AssertionError("nobody reads it")


TASK = Task(name="t", num_labels=3, multilabel=True, metric="micro_f1", label_names=NAMES, load=no_data)


def test_scores_by_hand() -> None:
    labels = np.asarray([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=np.float32)
    logits = np.asarray([[1, -1, -1], [-1, -1, -1], [1, 1, 2]], dtype=np.float32)
    found = scores(TASK, labels, logits)
    assert found["accuracy"] == pytest.approx(1 / 3)  # the second row alone is right in all
    assert found["micro_f1"] == found["primary"] == pytest.approx(2 * 3 / (4 + 4))
    assert found["macro_f1"] == pytest.approx((1 + 1 + 0) / 3)
    assert by_class(labels, logits) == {"hits": [2, 1, 0], "examples": [2, 1, 1], "predicted": [2, 1, 1]}
    broken = logits.copy()
    broken[1] = [0, np.nan, 0]  # not even a row without a label is right
    found = scores(TASK, labels, broken)
    assert (found["accuracy"], found["auroc"]) == (0, 0)
    assert found["micro_f1"] == pytest.approx(2 * 3 / (4 + 7))
    assert np.isnan(found["loss"])


def test_scores_agree_with_scikit_learn_and_torch() -> None:
    rng = np.random.default_rng(3)
    labels = (rng.random((70, 5)) < (0.5, 0.3, 0.1, 0.6, 0.0)).astype(np.float32)
    logits = (2 * labels - 1 + 2 * rng.normal(size=labels.shape)).astype(np.float32)
    found, predicted = scores(TASK, labels, logits), logits > 0
    loss = binary_cross_entropy_with_logits(torch.from_numpy(logits), torch.from_numpy(labels))
    assert example_loss(torch.from_numpy(logits), torch.from_numpy(labels)) == loss
    f1 = {
        name: sklearn.metrics.f1_score(labels, predicted, average=name, zero_division=0) for name in ("micro", "macro")
    }
    both = labels.any(axis=0)
    assert found == pytest.approx(
        {
            "loss": float(loss),
            "accuracy": sklearn.metrics.accuracy_score(labels, predicted),
            "micro_f1": f1["micro"],
            "macro_f1": f1["macro"],
            "auroc": sklearn.metrics.roc_auc_score(labels[:, both], logits[:, both], average="macro"),
            "primary": f1["micro"],
        },
        rel=1e-6,
    )
