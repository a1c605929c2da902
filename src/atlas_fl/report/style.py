"""Style of figures: sizes, colours that colour-blind readers can tell apart, labels, heat maps.

Figures are made through matplotlib's objects on the Agg canvas: no pyplot, no display, no setting that outlives them.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import ScaledTranslation

from atlas_fl.report.record import Record
from atlas_fl.storage.files import set_aside
from atlas_fl.storage.folder_access import memory_bytes, read_named_file, write_atomic

DPI = 300
SOFTWARE = "ATLAS"
"""Stands in every figure, which is known by it."""
INK, FAINT, LINES = "#222222", "#6f6f6f", "#d9d9d9"
TITLE_SIZE, LABEL_SIZE, TICK_SIZE, NOTE_SIZE = 13, 9.5, 8.5, 8

# Okabe and Ito (2008) without yellow and black, then four of Tol's muted scheme: safe for every common deficiency.
TASK_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#999933", "#332288", "#44AA99"),
)
MARKERS = "os^DPXv<>hpd8"
UNDECIDED_MARKER = "*"
KIND_COLOURS = {
    "adapter": "#0072B2",
    "head": "#56B4E9",
    "fingerprint": "#CC79A7",
    "weights": "#009E73",
    "activation": "#D55E00",
    "gradient": "#E69F00",
    "label": "#882255",
    "mask": "#999933",
    "control": "#888888",
    "correction": "#661100",
    "features": "#332288",
    "halves": "#DDCC77",
    "frozen": "#44AA99",
}


def task_colours(tasks: Sequence[str]) -> dict[str, str]:
    """The colour of every task: the same in all figures of a run."""
    return {task: TASK_COLOURS[index % len(TASK_COLOURS)] for index, task in enumerate(tasks)}


def marker_of(cluster: int) -> str:
    """The marker of a cluster; undecided clients (-1) have their own."""
    return UNDECIDED_MARKER if cluster < 0 else MARKERS[cluster % len(MARKERS)]


def new_figure(*, width: float, height: float, title: str, subtitle: str) -> Figure:
    """An empty figure in inches, with what is seen as its title and how to read it below."""
    # Placed by hand, because the layout knows one title only: 0.62 inches at the top are kept free for two.
    engine = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - 0.62 / height), w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(width, height), layout=engine, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.12 / width, 1 - 0.12 / height, title, size=TITLE_SIZE, weight="bold", color=INK, va="top")
    figure.text(0.12 / width, 1 - 0.37 / height, subtitle, size=LABEL_SIZE, color=FAINT, va="top")
    return figure


def tidy(axes: Axes, *, title: str = "", x: str = "", y: str = "", grid: str = "y") -> None:
    """Titles and labels in one size, no frame above and on the right, a faint grid behind (`x`, `y`, `both`, none)."""
    axes.set_title(title, size=LABEL_SIZE + 1, color=INK, loc="left", weight="bold")
    axes.set_xlabel(x, size=LABEL_SIZE, color=INK)
    axes.set_ylabel(y, size=LABEL_SIZE, color=INK)
    axes.tick_params(labelsize=TICK_SIZE, colors=INK, length=3, width=0.6, color=FAINT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
        axes.spines[side].set_linewidth(0.6)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(visible=True, axis=grid, color=LINES, linewidth=0.6)  # type: ignore[arg-type]


def hide_axes(axes: Axes) -> None:
    """Hide the frame, the ticks and the grid."""
    axes.set_axis_off()


def annotate(axes: Axes, text: str) -> Text:
    """Write a sentence in the middle of empty axes, where there is nothing to draw."""
    hide_axes(axes)
    return axes.text(0.5, 0.5, text, ha="center", va="center", size=LABEL_SIZE, color=FAINT, transform=axes.transAxes)


def readable_on(rgba: Sequence[float]) -> str:
    """Black or white, whichever is read better on this colour (relative luminance of WCAG 2)."""
    linear = [(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4) for part in rgba[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if luminance < 0.18 else INK


def save_figure(figure: Figure, path: Path, *, within: Path | None = None) -> Path:
    """Write a PNG at 300 DPI in one step and return its path; the same figure gives the same bytes.

    No part of the path below `within` is a link.
    """
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": SOFTWARE})
    write_atomic(path, buffer.getvalue(), within=within)
    return path


def save_vector(figure: Figure, path: Path, *, within: Path | None = None) -> Path:
    """Write a PDF in one step and return its path, as `save_figure`; the same figure gives the same bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format="pdf", metadata={"Creator": SOFTWARE, "CreationDate": None})
    write_atomic(path, buffer.getvalue(), within=within)
    return path


def save_beside(figure: Figure, path: Path, *, within: Path | None = None) -> Path:
    """`save_figure` into a folder of the user's: a figure that was not drawn here is kept under another name."""
    if path.is_file() and f"Software\0{SOFTWARE}".encode() not in read_named_file(path, max_bytes=memory_bytes()):
        set_aside(path)
    return save_figure(figure, path, within=within)


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
    transform = axes.get_yaxis_transform() + left
    for task, run in groupby(range(len(names)), key=lambda row: record.task_of[names[row]]):
        rows = list(run)
        bar = Line2D([0, 0], [rows[0] - 0.5, rows[-1] + 0.5], linewidth=BAR_POINTS, color=colours[task])
        bar.set(transform=transform, clip_on=False, solid_capstyle="butt")
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
