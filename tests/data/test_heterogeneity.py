import json
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.data.clients import ClientData, label_statistics, shard_notes
from atlas_fl.data.task import Rows, Source, Task, TaskData


def no_data(source: Source) -> TaskData:
    raise AssertionError(Path(source.cache_dir))


def client(name: str, label: list[float], *, num_labels: int = 2) -> ClientData:
    names = ("no", "yes") if num_labels > 1 else ()
    task = Task(name=name.partition("-")[0], num_labels=num_labels, label_names=names, load=no_data)
    values = np.asarray(label, dtype=np.int64 if num_labels > 1 else np.float32)
    rows = Rows(text=("t",) * len(label), label=values)
    return ClientData(name=name, task=task, train=rows, validation=rows.take([0]), test=rows.take([0, 1]))


def test_statistics_by_hand() -> None:
    rows = label_statistics([client("a-0", [0, 0, 0, 1]), client("b-0", [1, 1]), client("a-1", [1, 1, 1, 1])])
    assert [row["client"] for row in rows] == ["a-0", "b-0", "a-1"]
    assert rows[0] == {
        "client": "a-0",
        "task": "a",
        "metric": "accuracy",
        "examples": {"train": 4, "validation": 1, "test": 2},
        "majority": {"train": 0.75, "validation": 1.0, "test": 1.0},
        "labels": {"no": 3, "yes": 1},
        "distance": 0.375,  # its mix .75/.25 against the task's .375/.625
    }
    assert rows[1]["distance"] == 0.0  # alone in its task
    assert json.loads(json.dumps(rows))[2]["labels"] == {"no": 0, "yes": 4}


def test_statistics_in_words_by_hand() -> None:
    clients = [client("a-0", [0, 0, 0, 1]), client("b-0", [1, 1]), client("a-1", [1] * 5 + [0])]
    clients.append(client("r-0", [1.0, 3.0], num_labels=1))
    assert shard_notes(label_statistics(clients)) == (
        # of ten, four are of the first class: .75 and a sixth against .4, which is .35 and .23 apart
        "a: 10 training examples over 2 clients, 4 to 6 each (2 to test on), of 2 of 2 classes; mixes of labels are"
        " 0.29 from the task's on average (0 equal, 1 nothing in common)",
        "b: 2 training examples over 1 client, 2 each (2 to test on), of 1 of 2 classes; mixes of labels are"
        " 0.00 from the task's on average (0 equal, 1 nothing in common); b-0: one class alone, so that a score says"
        " little",
    )


def test_a_regression_has_mean_and_deviation() -> None:
    (row,) = label_statistics([client("r-0", [1.0, 3.0], num_labels=1)])
    assert row["labels"] == {"mean": pytest.approx(2.0), "std": pytest.approx(1.0)}
    assert "majority" not in row
    assert "distance" not in row
