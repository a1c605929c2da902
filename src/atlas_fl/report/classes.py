"""Figure 7: which client has how many training examples of which class."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from atlas_fl.report.cells import MOST_LABELS, bar_of, cells, numbers
from atlas_fl.report.record import Record
from atlas_fl.report.style import INK, LABEL_SIZE, TICK_SIZE, new_figure, say

MOST_ROWS_NAMED = MOST_LABELS // 2
"""Rows of all panels above which names are small."""


def draw(record: Record) -> Figure:
    """A heat map of clients by classes for every task that has classes; an empty cell is no example at all."""
    panels = _panels(record)
    rows = [len(counts) for _, counts in panels.values()]
    wide = max((counts.shape[1] for _, counts in panels.values()), default=2)
    figure = new_figure(
        width=float(np.clip(3.4 + 0.34 * wide, 7.0, 13.0)),
        height=float(np.clip(1.6 + 0.26 * sum(rows) + 1.0 * len(panels), 3.6, 14.0)),
        title="Training examples of every client, by class",
        subtitle=_subtitle(record, panels),
    )
    if not panels:
        say(figure.add_subplot(), "no task of this run has classes")
        return figure
    grid = figure.add_gridspec(len(panels), 1, height_ratios=[max(count, 2) for count in rows])
    norm = Normalize(0, max(float(np.nanmax(counts)) for _, counts in panels.values()))
    for place, (task, (names, counts)) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[place, 0])
        image = cells(axes, counts, colours=mpl.colormaps["Blues"], norm=norm)
        axes.set_facecolor("#f4f4f4")
        axes.set_title(task, size=LABEL_SIZE + 1, color=INK, loc="left", weight="bold")
        numbers(axes, image, counts, lambda value: f"{value:.0f}")
        _name(axes, names, record.plan["data"], task, small=sum(rows) > MOST_ROWS_NAMED)
    bar_of(figure, image, list(figure.axes), "examples")
    return figure


def _panels(record: Record) -> dict[str, tuple[list[str], np.ndarray]]:
    """Of every task with classes: its clients and their counts, float64 (clients, classes) with NaN for none."""
    found: dict[str, tuple[list[str], np.ndarray]] = {}
    for task in record.tasks:
        rows = [row for row in record.plan.get("data") or () if row["task"] == task and "distance" in row]
        if rows:
            counts = np.array([list(row["labels"].values()) for row in rows], dtype=np.float64)
            counts[counts == 0] = np.nan
            found[task] = [row["client"] for row in rows], counts
    return found


def _subtitle(record: Record, panels: Mapping[str, tuple[list[str], np.ndarray]]) -> str:
    apart = [row["distance"] for row in record.plan.get("data") or () if row["task"] in panels]
    if not apart:
        return "empty cell: no example"
    return f"empty cell: no example; mean distance of a client's mix to its task's: {np.mean(apart):.2f} of 1"


def _name(axes: Axes, names: Sequence[str], data: Sequence[Mapping[str, Any]], task: str, *, small: bool) -> None:
    classes = list(next(row["labels"] for row in data if row["task"] == task))
    size = TICK_SIZE - 2 if small else TICK_SIZE
    shown = len(names) <= MOST_LABELS
    axes.set_yticks(range(len(names)) if shown else [], labels=names if shown else [])
    few = len(classes) <= MOST_LABELS
    axes.set_xticks(range(len(classes)) if few else [], labels=classes if few else [], rotation=90)
    axes.tick_params(axis="both", labelsize=size)
