"""A user's own data from Python: examples become a file and a row of `--task`, rows become a config.

    config = own_data(task_row(frame, name="triage", text="note", label="urgency", client="hospital"), rounds=5)
    result = run_config(config)

Examples are dicts, columns, a pandas DataFrame or a `datasets.Dataset`, or these by split. What a run reads lies in a
file named after its content, so a run is still a function of its config, and is resumed, audited and served as others.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset, with_own_data
from atlas_fl.data.tables import Table, from_datasets, split_of
from atlas_fl.data.user_files import with_labels
from atlas_fl.errors import DataError, short_repr
from atlas_fl.storage.folder_access import write_atomic

_COLUMNS = ("text", "pair", "label", "target", "client", "split", "order", "group", "task")
"""Options of a task whose values are columns."""


def own_data(*tasks: str, preset: str = "quick", **values: Any) -> Config:
    """The config of a preset for these rows of `--task`, or of `task_row`, with settings by name as in `with_values`.

    As on the command line: no task of the preset is left, all clients have one device, and where the data name the
    clients each has all its examples, unless the settings say otherwise. Nothing is checked or read: `run_config` does.
    """
    base = with_own_data(find_preset(preset), tasks, tasks=values.get("tasks"), said=values)
    return with_values(base, {**values, "task": tasks})


def task_row(
    examples: Any, *, name: str, folder: str | Path = "own-data", labels: Sequence[object] = (), **options: object
) -> str:
    """Write these examples below `folder`, and return the row of `--task` that reads them.

    `options` are those of `--task`: columns by text=, label=, client=, task= and so on, and metric=, least=; `labels`
    are the classes where some client lacks one. Of examples by split, such as a `DatasetDict`, each split is kept.

    Raises:
        DataError: a column is missing, or a value is no text, number, date or nothing.
    """
    tables = _tables(examples)
    named = {option: str(value) for option, value in options.items() if option in _COLUMNS}
    if "all" not in tables:
        named["split"] = "split"
        lengths = {split: len(next(iter(table.values()), ())) for split, table in tables.items()}
        tables = {split: {**table, "split": [split] * lengths[split]} for split, table in tables.items()}
    columns = {"text": "text", **({} if "target" in named else {"label": "label"}), **named}
    if "task" in named:
        columns["task"] = named["task"].partition(":")[0]
    lines: list[str] = []
    for table in tables.values():
        for column in columns.values():
            if column not in table:
                raise DataError(f"the examples of {name!r} have no {column!r}; they have {', '.join(map(repr, table))}")
        rows = zip(*(table[column] for column in columns.values()), strict=True)
        lists = columns.get("label") if "multi" in options else None
        values = (dict(zip(columns.values(), row)) for row in rows)
        lines += (_line(row, number, name, lists=lists) for number, row in enumerate(values, start=1))
    text = "".join(lines).encode()
    path = Path(folder) / f"{name}-{sha256(text).hexdigest()[:12]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    words = [f"{option}={value}" for option, value in {**options, **named}.items()]
    return with_labels(",".join([f"{name}={path}", *words]), [str(label) for label in labels])


def _tables(examples: Any) -> dict[str, Table]:
    """The columns of the examples by split, or as `all`."""
    if isinstance(examples, Mapping) and examples and all(split_of(word) for word in examples):
        return {str(split_of(word)): _tables(rows)["all"] for word, rows in examples.items()}
    if hasattr(examples, "with_format") and hasattr(examples, "features"):  # a datasets.Dataset
        return {"all": from_datasets({"all": examples}, class_names=True)["all"]}
    if hasattr(examples, "to_dict"):  # a pandas.DataFrame
        return {"all": examples.to_dict("list")}
    if isinstance(examples, Mapping):
        return {"all": examples}
    return {"all": _columns(list(examples))}


def _columns(rows: Sequence[Any]) -> Table:
    """The columns of rows as mappings."""
    if wrong := next((row for row in rows if not isinstance(row, Mapping)), None):
        raise DataError(
            f"examples are dicts, a mapping of columns, a DataFrame or a Dataset, and one is {short_repr(wrong)}; give"
            " a dict for each"
        )
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _line(row: Mapping[str, Any], number: int, name: str, *, lists: str | None) -> str:
    """The row as a line of JSON; `lists` is the column that may have several values in a cell."""
    values: dict[str, Any] = {}
    for column, value in row.items():
        where = f"row {number} of {name!r}"
        if column == lists and (isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1):
            values[column] = [_plain(one, where, column) for one in value]
        else:
            values[column] = _plain(value, where, column)
    return json.dumps(values) + "\n"


def _plain(value: Any, where: str, column: str) -> str | int | float | None:
    """The value as JSON has it: dates as ISO has them, numbers of NumPy as Python's."""
    if isinstance(value, date):  # a pandas.Timestamp is one too
        return value.isoformat()
    plain = value.item() if hasattr(value, "item") else value
    if plain is None or isinstance(plain, str | int | float):
        return plain
    raise DataError(f"{where} has {short_repr(value)} in column {column!r}; allowed: a text, a number or a date")
