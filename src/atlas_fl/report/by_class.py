"""Figure of image runs: which classes are recognised, over all clients and by client."""

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from atlas_fl.io.by_class import class_names, counts_of
from atlas_fl.report.cells import MOST_LABELS, bar_of, cells, numbers
from atlas_fl.report.record import Record
from atlas_fl.report.style import (
    FAINT,
    LABEL_SIZE,
    NOTE_SIZE,
    TASK_COLOURS,
    TICK_SIZE,
    new_figure,
    say,
    tidy,
)

ROW, MOST_HIGH = 0.2, 6.0
"""Inches of a client's row, and of all rows of a task at most."""
MOST_BARS_NAMED = 20
"""Bars above which the numbers on them would cover each other."""


def draw(record: Record) -> Figure:
    """For every task bars of the classes' accuracy over all test images, above a heat map of clients by classes."""
    tasks = [task for task in record.tasks if any(map(counts_of, record.by_task[task]))]
    rows = [len(record.by_task[task]) for task in tasks]
    wide = max((len(class_names(record.plan, task)) for task in tasks), default=0)
    figure = new_figure(
        width=float(np.clip(3.4 + 0.34 * wide, 7.0, 13.0)),
        height=float(np.clip(1.8 + 2.4 * len(tasks) + sum(min(ROW * count, MOST_HIGH) for count in rows), 4.0, 14.0)),
        title="Test accuracy by class",
        subtitle="bars: all test images by their clients' models; dashed: all classes; below: each client, empty: none",
    )
    if not tasks:
        say(figure.add_subplot(), "no test images have been scored yet")
        return figure
    heights = [height for count in rows for height in (1.7, float(np.clip(ROW * count, 0.8, MOST_HIGH)))]
    grid = figure.add_gridspec(2 * len(tasks), 1, height_ratios=heights)
    for place, task in enumerate(tasks):
        above = figure.add_subplot(grid[2 * place, 0])
        _task(figure, above, figure.add_subplot(grid[2 * place + 1, 0], sharex=above), record, task)
    return figure


def _task(figure: Figure, above: Axes, below: Axes, record: Record, task: str) -> None:
    members = [(member.client, found) for member in record.by_task[task] if (found := counts_of(member)) is not None]
    counts = np.array([own for _, own in members], dtype=np.float64)  # (n, 2, classes)
    hits, examples = counts[:, 0], counts[:, 1]
    names = class_names(record.plan, task) or [str(place) for place in range(hits.shape[1])]
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
    for place, share in enumerate(shares if len(shares) <= MOST_BARS_NAMED else ()):
        if np.isfinite(share):
            axes.text(place, share + 0.02, f"{share:.2f}", ha="center", va="bottom", size=NOTE_SIZE)


def _share(hits: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Hits over examples, NaN where there is none."""
    shares: np.ndarray = np.divide(hits, examples, out=np.full(hits.shape, np.nan), where=examples > 0)
    return shares
