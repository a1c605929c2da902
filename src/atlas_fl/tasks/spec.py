"""What a task is: labelled texts, their splits, and how a model is scored on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

Metric: TypeAlias = Literal["accuracy", "f1", "mcc", "pearson"]
"""The score that a task is judged by; pearson makes it a regression."""

METRICS: tuple[Metric, ...] = get_args(Metric)

Labels: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""One label per row: int64 classes from 0 on, or float32 values of a regression."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Labelled texts, or pairs of texts."""

    text: tuple[str, ...]
    pair: tuple[str, ...] | None = None
    """The second text of every row, for tasks on two texts."""
    label: Labels

    def __len__(self) -> int:
        return len(self.text)

    def take(self, index: Sequence[int] | Labels) -> "Rows":
        """The rows of these positions, in this order."""
        positions = np.asarray(index, dtype=np.int64)
        text = tuple(self.text[i] for i in positions)
        pair = None if self.pair is None else tuple(self.pair[i] for i in positions)
        return Rows(text=text, pair=pair, label=self.label[positions])


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The three splits of a task: clean, and without a text in common."""

    train: Rows
    validation: Rows
    test: Rows


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where tasks are read from."""

    cache_dir: Path
    """The folder of the embedded data (`io.fetch.embedded_dir()`)."""
    data_dir: Path | None = None
    """The user's directory of data sets that would else come from the hub."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A named task and the function that reads it."""

    name: str
    num_labels: int
    """Classes; 1 is a regression."""
    metric: Metric = "accuracy"
    max_length: int = 128
    """Longest sequence in tokens."""
    label_names: tuple[str, ...] = ()
    """One name per class; empty for a regression."""
    note: str = ""
    """What a reader must know: where the rows come from, how labels and splits were made."""
    load: Callable[[Source], TaskData]

    @property
    def is_regression(self) -> bool:
        """Whether the labels are values and no classes."""
        return self.num_labels == 1
