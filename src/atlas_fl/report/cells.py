"""What the heat maps share: a grid of cells, numbers in them, and the task of every row at the side."""

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from atlas_fl.report.record import Record
from atlas_fl.report.style import LINES, NOTE_SIZE, TICK_SIZE, readable_on, task_colours, tidy

MOST_LABELS = 60
"""Rows above which their names would overlap, and so are left out."""
BAR_POINTS = 6
"""Width of the bar that shows a row's task, and of its distance from the cells."""
MOST_NUMBERS = 640
"""Cells above which the numbers in them could not be read."""


def cells(axes: Axes, values: np.ndarray, *, colours: Colormap, norm: Normalize) -> AxesImage:
    """A matrix (rows, columns) as coloured cells with white joints; NaN stays empty."""
    image = axes.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    rows, columns = values.shape
    tidy(axes, grid="")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    if rows <= MOST_LABELS and columns <= MOST_LABELS:
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2)
        axes.tick_params(which="minor", length=0)
    return image


def numbers(
    axes: Axes, image: AxesImage, values: np.ndarray, form: Callable[[float], str], *, shades: np.ndarray | None = None
) -> None:
    """Every value in its cell, black or white by the cell's colour; nothing where they would be too small.

    The colour is that of the value itself, or of another number, where `shades` (rows, columns) has it.
    """
    if values.size > MOST_NUMBERS or max(values.shape) > MOST_LABELS:
        return
    size = NOTE_SIZE - 1
    rgba = np.asarray(image.cmap(image.norm(values if shades is None else shades)))  # (rows, columns, 4)
    for row, column in np.argwhere(np.isfinite(values)):
        colour = readable_on(rgba[row, column].tolist())
        axes.text(column, row, form(values[row, column]), ha="center", va="center", size=size, color=colour)


def name_rows(axes: Axes, record: Record, order: Sequence[int]) -> None:
    """The clients' names beside their rows, and a bar in the colour of each one's task."""
    colours = task_colours(record.tasks)
    names = [record.clients[index] for index in order]
    shown = len(names) <= MOST_LABELS
    axes.set_yticks(range(len(names)) if shown else [], labels=names if shown else [])
    axes.tick_params(
        axis="y", pad=2 * BAR_POINTS, labelsize=TICK_SIZE if len(names) <= MOST_LABELS // 2 else TICK_SIZE - 2
    )
    # In points, so that the bar is as wide in a large figure as in a small one.
    left = ScaledTranslation(-BAR_POINTS / 72, 0, axes.get_figure(root=True).dpi_scale_trans)  # type: ignore[union-attr]
    place = axes.get_yaxis_transform() + left
    for task, run in groupby(range(len(names)), key=lambda row: record.task_of[names[row]]):
        rows = list(run)
        bar = Line2D([0, 0], [rows[0] - 0.5, rows[-1] + 0.5], linewidth=BAR_POINTS, color=colours[task])
        bar.set(transform=place, clip_on=False, solid_capstyle="butt")
        axes.add_artist(bar)


def task_legend(figure: Figure, record: Record) -> None:
    """The colours of the tasks below the figure."""
    colours = task_colours(record.tasks)
    handles = [Patch(facecolor=colours[task], label=task) for task in record.tasks]
    columns = -(-len(handles) // -(-len(handles) // 6))  # rows of even length, six at most
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=TICK_SIZE)


def between_clusters(record: Record, order: Sequence[int]) -> list[int]:
    """The rows before which another cluster begins; every undecided client is one of its own."""
    clusters = [record.cluster_of[record.clients[index]] for index in order]
    return [row for row in range(1, len(order)) if clusters[row] != clusters[row - 1] or clusters[row] < 0]


def bar_of(
    figure: Figure, image: AxesImage, axes: Axes | list[Axes], label: str, ticks: Sequence[float] | None = None
) -> Axes:
    """A slim colour bar at the right of the axes."""
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=6 * figure.get_figheight(), ticks=ticks)
    bar.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=TICK_SIZE, length=2, color=LINES)
    bar.set_label(label, size=TICK_SIZE)
    return bar.ax
