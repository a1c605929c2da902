"""Figures by class: training labels per client, accuracy per class of image runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from atlas_fl.experiment.summary import class_counts, class_names
from atlas_fl.report.record import Record
from atlas_fl.report.style import (
    FAINT,
    INK,
    LABEL_SIZE,
    MOST_LABELS,
    NOTE_SIZE,
    TASK_COLOURS,
    TICK_SIZE,
    annotate,
    bar_of,
    cells,
    new_figure,
    numbers,
    tidy,
)

MOST_ROWS_NAMED = MOST_LABELS // 2
"""Rows of all panels above which names are small."""


def draw_label_distribution(record: Record) -> Figure:
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
        annotate(figure.add_subplot(), "no task of this run has classes")
        return figure
    grid = figure.add_gridspec(len(panels), 1, height_ratios=[max(count, 2) for count in rows])
    norm = Normalize(0, max(float(np.nanmax(counts)) for _, counts in panels.values()))
    for index, (task, (names, counts)) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[index, 0])
        image = cells(axes, counts, colours=mpl.colormaps["Blues"], norm=norm)
        axes.set_facecolor("#f4f4f4")
        axes.set_title(task, size=LABEL_SIZE + 1, color=INK, loc="left", weight="bold")
        numbers(axes, image, counts, lambda value: f"{value:.0f}")
        _name(axes, names, record.plan["data"], task, small=sum(rows) > MOST_ROWS_NAMED)
    bar_of(figure, image, list(figure.axes), "examples")
    return figure


def _panels(record: Record) -> dict[str, tuple[list[str], np.ndarray]]:
    """Of every task with classes: its clients and their counts, float64 (clients, classes) with NaN for none."""
    panels: dict[str, tuple[list[str], np.ndarray]] = {}
    for task in record.tasks:
        rows = [row for row in record.plan.get("data") or () if row["task"] == task and "distance" in row]
        if rows:
            counts = np.array([list(row["labels"].values()) for row in rows], dtype=np.float64)
            counts[counts == 0] = np.nan
            panels[task] = [row["client"] for row in rows], counts
    return panels


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


ROW, MOST_HIGH = 0.2, 6.0
"""Inches of a client's row, and of all rows of a task at most."""
MOST_BARS_NAMED = 20
"""Bars above which the numbers on them would cover each other."""


def draw_accuracy_by_class(record: Record) -> Figure:
    """For every task bars of the classes' accuracy over all test images, above a heat map of clients by classes."""
    tasks = [task for task in record.tasks if any(map(class_counts, record.by_task[task]))]
    rows = [len(record.by_task[task]) for task in tasks]
    wide = max((len(class_names(record.plan, task)) for task in tasks), default=0)
    figure = new_figure(
        width=float(np.clip(3.4 + 0.34 * wide, 7.0, 13.0)),
        height=float(np.clip(1.8 + 2.4 * len(tasks) + sum(min(ROW * count, MOST_HIGH) for count in rows), 4.0, 14.0)),
        title="Test accuracy by class",
        subtitle="bars: all test images by their clients' models; dashed: all classes; below: each client, empty: none",
    )
    if not tasks:
        annotate(figure.add_subplot(), "no test images have been scored yet")
        return figure
    heights = [height for count in rows for height in (1.7, float(np.clip(ROW * count, 0.8, MOST_HIGH)))]
    grid = figure.add_gridspec(2 * len(tasks), 1, height_ratios=heights)
    for index, task in enumerate(tasks):
        above = figure.add_subplot(grid[2 * index, 0])
        _task(figure, above, figure.add_subplot(grid[2 * index + 1, 0], sharex=above), record, task)
    return figure


def _task(figure: Figure, above: Axes, below: Axes, record: Record, task: str) -> None:
    members = [
        (member.client, counts_of_client)
        for member in record.by_task[task]
        if (counts_of_client := class_counts(member)) is not None
    ]
    counts = np.array([client_counts for _, client_counts in members], dtype=np.float64)  # (n, 2, classes)
    hits, examples = counts[:, 0], counts[:, 1]
    names = class_names(record.plan, task) or [str(index) for index in range(hits.shape[1])]
    _bars(above, _share(hits.sum(0), examples.sum(0)), float(hits.sum() / examples.sum()), task=task)
    shares = _share(hits, examples)
    image = cells(below, shares, colours=mpl.colormaps["viridis"], norm=Normalize(0, 1))
    below.set_facecolor("#f4f4f4")
    numbers(below, image, shares, lambda value: f"{value:.2f}".replace("0.", "."))
    shown, few = len(members) <= MOST_LABELS, len(names) <= MOST_LABELS
    below.set_yticks(range(len(members)) if shown else [], labels=[name for name, _ in members] if shown else [])
    below.set_ylabel("" if shown else f"{len(members)} clients", size=LABEL_SIZE)
    below.set_xticks(range(len(names)) if few else [], labels=names if few else [], rotation=90)
    below.tick_params(labelsize=TICK_SIZE if len(members) <= MOST_LABELS // 2 else TICK_SIZE - 2)
    bar_of(figure, image, below, "accuracy")


def _bars(axes: Axes, shares: np.ndarray, overall: float, *, task: str) -> None:
    tidy(axes, title=task, y="accuracy")
    axes.bar(range(len(shares)), np.nan_to_num(shares), width=0.7, color=TASK_COLOURS[0])
    axes.axhline(overall, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.5, 1])
    axes.tick_params(labelbottom=False, bottom=False, which="both")
    for index, share in enumerate(shares if len(shares) <= MOST_BARS_NAMED else ()):
        if np.isfinite(share):
            axes.text(index, share + 0.02, f"{share:.2f}", ha="center", va="bottom", size=NOTE_SIZE)


def _share(hits: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Hits over examples, NaN where there is none."""
    shares: np.ndarray = np.divide(hits, examples, out=np.full(hits.shape, np.nan), where=examples > 0)
    return shares
