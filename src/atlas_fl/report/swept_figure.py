"""The figure of a sweep: score over N_c, J, sparsity, eta or any other setting, with error bars over seeds."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from atlas_fl.report.style import MARKERS, TASK_COLOURS, TICK_SIZE, new_figure, say, tidy
from atlas_fl.report.swept import Cell, Swept, word_of

APART = 0.07
"""Between the points of two lines at one value, in steps of the axis, so that error bars do not cover each other."""
WIDTH = 8.0
LETTER, KEY = 0.075, 0.6
"""Inches of a letter of the legend, and of the sign before a name."""


def draw(swept: Swept, *, note: str = "") -> Figure:
    """Numbers lie along the bottom and are joined to lines; words stand at the left, the best above.

    Values are evenly spaced, whatever the numbers are.
    """
    rows = len(swept.values) if not swept.is_numeric else 0
    kinds = len(swept.lines)
    figure = new_figure(
        width=WIDTH,
        height=float(np.clip(2.2 + 0.42 * rows * max(1, kinds / 2), 4.6, 12.0)),
        title=f"Test {swept.metric} over {word_of(swept.along)}",
        subtitle="; ".join(part for part in (_how(swept), note) if part),
    )
    axes = figure.add_subplot()
    if not any(cell.scores for cells in swept.lines.values() for cell in cells.values()):
        say(axes, "no run of this sweep has test scores")
        return figure
    (_numbers if swept.is_numeric else _words)(axes, swept)
    if any(swept.lines):
        columns = int(np.clip(WIDTH // (KEY + LETTER * max(map(len, swept.lines))), 1, kinds))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=TICK_SIZE)
    return figure


def _how(swept: Swept) -> str:
    if swept.seeds < 2:
        return "mean over clients, one seed"
    return f"mean over clients and {swept.seeds} seeds; bars: std over seeds; dots: each seed"


def _numbers(axes: Axes, swept: Swept) -> None:
    tidy(axes, x=word_of(swept.along), y=f"test {swept.metric}")
    for index, (line, cells) in enumerate(swept.lines.items()):
        places, found = _placed(swept, cells, index)
        colour, marker = _look(index)
        spread = [cell.std for cell in found]
        axes.errorbar(
            places, [cell.mean for cell in found], yerr=spread if any(spread) else None, color=colour, marker=marker,
            label=line or None, markersize=6, linewidth=1.8, capsize=3, elinewidth=1.2,
        )  # fmt: skip
        for place, cell in zip(places, found, strict=True):
            if len(cell.scores) > 1:
                axes.plot([place] * len(cell.scores), cell.scores, ".", color=colour, alpha=0.45, markersize=5)
    axes.set_xticks(range(len(swept.values)), labels=list(swept.values))
    axes.set_xlim(-0.5, len(swept.values) - 0.5)


def _words(axes: Axes, swept: Swept) -> None:
    tidy(axes, x=f"test {swept.metric}", grid="x")
    for index, (line, cells) in enumerate(swept.lines.items()):
        places, found = _placed(swept, cells, index)
        colour, marker = _look(index)
        spread = [cell.std for cell in found]
        axes.errorbar(
            [cell.mean for cell in found], places, xerr=spread if any(spread) else None, color=colour, marker=marker,
            label=line or None, markersize=6, linestyle="", capsize=3, elinewidth=1.2,
        )  # fmt: skip
        for place, cell in zip(places, found, strict=True):
            if len(cell.scores) > 1:
                axes.plot(cell.scores, [place] * len(cell.scores), ".", color=colour, alpha=0.45, markersize=5)
    axes.set_yticks(range(len(swept.values)), labels=[value.replace("_", " ") for value in swept.values])
    axes.set_ylim(len(swept.values) - 0.5, -0.5)


def _placed(swept: Swept, cells: Mapping[str, Cell], index: int) -> tuple[Sequence[float], list[Cell]]:
    """Where the cells of a line lie on the axis; one without scores is left out."""
    shift = APART * (index - (len(swept.lines) - 1) / 2) if swept.seeds > 1 else 0.0
    found = [(place + shift, cells.get(value, Cell(scores=()))) for place, value in enumerate(swept.values)]
    known = [(place, cell) for place, cell in found if cell.scores]
    return [place for place, _ in known], [cell for _, cell in known]


def _look(index: int) -> tuple[str, str]:
    return TASK_COLOURS[index % len(TASK_COLOURS)], MARKERS[index % len(MARKERS)]
