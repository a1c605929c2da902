"""The nine tasks of GLUE, from a directory, the cache of `datasets`, or the hub, in this order.

A. Wang et al., GLUE, ICLR 2019. The labels of most of its test splits are hidden; `splits.arrange` says what is used
in their place: the published validation split is the test, and validation is cut from train.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.data.cleaning import arrange
from atlas_fl.data.hub import Published, find_tables, missing_split, source_files
from atlas_fl.data.tables import Table, column, texts
from atlas_fl.data.task import Labels, Metric, Rows, Source, Task, TaskData
from atlas_fl.errors import DataError

REPOSITORY = "nyu-mll/glue"
HIDDEN = -1
_SPLITS = {"train": ("train",), "validation": ("validation", "validation_matched"), "test": ("test", "test_matched")}


@dataclass(frozen=True, kw_only=True)
class Format:
    """Columns and labels of one of the tasks."""

    name: str
    text: str
    pair: str | None = None
    label_names: tuple[str, ...] = ()
    """Empty for a regression."""


def load_glue(source: Source, *, form: Format) -> TaskData:
    """The splits of a GLUE task; a `DataError` names what is missing and the three ways to supply it."""
    tables = find_tables(_hub_source(form), _folder(source, form))
    rows = {}
    for split, names in _SPLITS.items():
        name = next((name for name in names if name in tables), None)
        # Some copies leave the hidden labels out, others write -1.
        if name is not None and (split != "test" or "label" in tables[name]):
            rows[split] = _rows(tables[name], form, origin=f"{name} of GLUE {form.name}")
    if "train" not in rows:
        raise missing_split(f"GLUE {form.name}", tuple(tables))
    return arrange(rows, name=form.name)


def _hub_source(form: Format) -> Published:
    return Published(
        title=f"GLUE task {form.name!r}",
        repository=REPOSITORY,
        config=form.name,
        cached_as=(REPOSITORY, "glue"),
        dataset_name="glue",
        splits=tuple(name for names in _SPLITS.values() for name in names),
    )


def _folder(source: Source, form: Format) -> Path | None:
    return None if source.data_dir is None else source.data_dir / form.name


def _rows(table: Table, form: Format, *, origin: str) -> Rows:
    label = _labels(column(table, "label", origin=origin), form, origin=origin)
    pair = None if form.pair is None else texts(table, form.pair, origin=origin)
    rows = Rows(text=texts(table, form.text, origin=origin), pair=pair, label=label)
    return rows.take(np.flatnonzero(label != HIDDEN))


def _labels(values: Sequence[Any], form: Format, *, origin: str) -> Labels:
    names = {name: index for index, name in enumerate(form.label_names)}
    try:
        if not names:
            return np.asarray([float(value) for value in values], dtype=np.float32)
        label = np.asarray([names[value] if value in names else int(value) for value in values], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"a label of {origin} is wrong: {error}; have {', '.join(names) or 'numbers'}") from error
    wrong = label[(label < HIDDEN) | (label >= len(names))]
    if len(wrong):
        raise DataError(f"label {wrong[0]} in {origin} is out of range; it has {len(names)} classes from 0 on")
    return label


def _task(form: Format, *, metric: Metric = "accuracy", max_length: int = 128) -> Task:
    return Task(
        name=form.name,
        num_labels=len(form.label_names) or 1,
        metric=metric,
        max_length=max_length,
        label_names=form.label_names,
        note="GLUE; tested on its validation split",
        load=partial(load_glue, form=form),
        files=lambda source: source_files(_hub_source(form), _folder(source, form)),
    )


_EQUIVALENT = ("not_equivalent", "equivalent")
_ENTAILED = ("entailment", "not_entailment")

GLUE: tuple[Task, ...] = (
    _task(Format(name="sst2", text="sentence", label_names=("negative", "positive"))),
    _task(Format(name="mrpc", text="sentence1", pair="sentence2", label_names=_EQUIVALENT), metric="f1"),
    _task(Format(name="cola", text="sentence", label_names=("unacceptable", "acceptable")), metric="mcc"),
    _task(Format(name="qnli", text="question", pair="sentence", label_names=_ENTAILED), max_length=256),
    _task(
        Format(name="qqp", text="question1", pair="question2", label_names=("not_duplicate", "duplicate")),
        metric="f1",
    ),
    _task(
        Format(name="mnli", text="premise", pair="hypothesis", label_names=("entailment", "neutral", "contradiction"))
    ),
    _task(Format(name="rte", text="sentence1", pair="sentence2", label_names=_ENTAILED)),
    _task(Format(name="wnli", text="sentence1", pair="sentence2", label_names=("not_entailment", "entailment"))),
    _task(Format(name="stsb", text="sentence1", pair="sentence2"), metric="pearson"),
)
