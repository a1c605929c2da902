"""Examples from Python: lists, columns, pandas and datasets give one file and one federation."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

from atlas_fl import Config, own_data, task_row, validate
from atlas_fl.config.presets import federation_name
from atlas_fl.data.clients import ClientData
from atlas_fl.errors import ConfigError, DataError
from atlas_fl.setup.assembly import load_clients

ROWS = [
    {"note": f"note {n}", "urgency": ("low", "high")[n % 2], "hospital": ("north", "south")[n % 3 == 0], "extra": [n]}
    for n in range(120)
]
COLUMNS = {"text": "note", "label": "urgency", "client": "hospital"}


def clients_of(config: Config) -> tuple[ClientData, ...]:
    return load_clients(validate(config))


def test_all_forms_of_examples_are_one_file(tmp_path: Path) -> None:
    frame = pd.DataFrame(ROWS)
    names = datasets.ClassLabel(names=["low", "high"])
    numbered = frame.assign(urgency=[n % 2 for n in range(120)]).drop(columns="extra")
    data = datasets.Dataset.from_pandas(numbered).cast_column("urgency", names)
    forms: list[Any] = [ROWS, frame, frame.to_dict("list"), data, iter(ROWS)]
    rows = {task_row(form, name="triage", folder=tmp_path, **COLUMNS) for form in forms}
    assert len(rows) == len(list(tmp_path.iterdir())) == 1
    config = own_data(*rows, rounds=2)
    assert (config.training.rounds, config.data.tasks, config.data.devices) == (2, (), ("laptop_8gb",))
    assert (config.data.samples, config.data.test_samples, federation_name(config)) == (None, None, "triage")
    assert config.ranks.ranks == "8" and own_data(*rows, devices=("cpu_2gb",)).ranks.ranks == "budget"
    whole = validate(own_data(*rows, trainable="full", strategy="fedavg"))
    assert whole.trainable(images=False) == "full", "the rank of adapters is in nobody's way"
    clients = clients_of(config)
    assert [client.name for client in clients] == ["north", "south"]
    assert sum(len(rows) for client in clients for rows in client.splits.values()) == 120


def test_splits_labels_and_dates_are_kept(tmp_path: Path) -> None:
    parts = {"train": ROWS[:80], "validation": ROWS[80:100], "test": pd.DataFrame(ROWS[100:])}
    row = task_row(parts, name="t", folder=tmp_path, labels=("low", "mid", "high"), **COLUMNS)
    clients = clients_of(own_data(row))
    assert clients[0].task.label_names == ("low", "mid", "high")
    assert np.sum([[len(rows) for rows in one.splits.values()] for one in clients], axis=0).tolist() == [80, 20, 20]
    dated = [{**one, "when": pd.Timestamp(2026, 1, 1) + pd.Timedelta(days=n)} for n, one in enumerate(ROWS)]
    clients = clients_of(own_data(task_row(dated[::-1], name="t", folder=tmp_path, order="when", **COLUMNS)))
    assert clients[0].test.text[-1] == "note 119"  # type: ignore[union-attr]


def test_rows_may_say_their_task(tmp_path: Path) -> None:
    rows = [{**row, "kind": ("topic", "triage")[n % 4 > 1]} for n, row in enumerate(ROWS)]
    for form in (rows, pd.DataFrame(rows).drop(columns="extra")):
        clients = clients_of(own_data(task_row(form, name="notes", folder=tmp_path, task="kind", **COLUMNS)))
        assert {client.task.name for client in clients} == {"notes-topic", "notes-triage"}
        one = task_row(form, name="notes", folder=tmp_path, task="kind:topic", labels=("low", "high"), **COLUMNS)
        assert [client.name for client in clients_of(own_data(one))] == ["north", "south"]
    config = own_data(*(one.replace("topic", kind) for kind in ("topic", "triage")))
    assert (len(clients_of(config)), federation_name(config)) == (4, "notes")


def test_settings_and_tasks_that_are_said_stay() -> None:
    config = own_data("t=t.csv,client=c", preset="smoke", tasks=("movie", "t"), samples=7, devices=("cpu_2gb",))
    assert (config.data.tasks, config.data.samples) == (("movie", "t"), 7)
    assert (config.data.devices, federation_name(config)) == (("cpu_2gb",), "smoke")
    assert own_data("t=t.csv,client=c", preset="smoke").data.samples == 24


@pytest.mark.parametrize(
    ("examples", "options", "message"),
    [
        (
            ROWS,
            {"text": "body"},
            "the examples of 't' have no 'body'; they have 'note', 'urgency', 'hospital', 'extra'",
        ),
        (ROWS, {**COLUMNS, "order": "extra"}, r"row 1 of 't' has \[0\] in column 'extra'; allowed: a text, a number"),
        ([("a", "b")], COLUMNS, r"a DataFrame or a Dataset, and one is \('a', 'b'\); give a dict for each"),
    ],
)
def test_what_is_no_example_is_one_line(examples: Any, options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        task_row(examples, name="t", folder=tmp_path, **options)


def test_an_option_that_does_not_exist_is_said_when_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown task option 'cleint'; did you mean 'client'"):
        validate(own_data(task_row(ROWS, name="t", folder=tmp_path, text="note", label="urgency", cleint="hospital")))
