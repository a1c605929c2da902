"""Figure 3: the graph of phase 4, whose model is pulled towards whose."""

from collections.abc import Sequence
from itertools import pairwise

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from atlas_fl.report.cells import MOST_LABELS, bar_of, between_clusters, cells, name_rows, numbers, task_legend
from atlas_fl.report.record import Record
from atlas_fl.report.style import INK, NOTE_SIZE, TICK_SIZE, new_figure, say
from atlas_fl.report.words import cluster_name


def draw(record: Record) -> Figure:
    """The adjacency matrix with clients in the order of their clusters, each cluster framed."""
    count = len(record.clients)
    side = float(np.clip(0.42 * count, 3.6, 10.0))
    num_edges, subtitle = _count(record)
    figure = new_figure(width=side + 2.9, height=side + 2.0, title="Who is pulled towards whom", subtitle=subtitle)
    axes = figure.add_subplot()
    if record.plan.get("adjacency") is None:
        say(axes, "the plan holds no graph")
        return figure
    order = record.sorted_clients
    values = np.array(record.plan["adjacency"], dtype=np.float64)[np.ix_(order, order)]
    values[values == 0] = np.nan  # no edge: an empty cell, which a faint one would not say
    top = float(np.nanmax(values)) if num_edges else 1.0
    image = cells(axes, values, colours=mpl.colormaps["Blues"], norm=Normalize(0, top))
    axes.set_facecolor("#f4f4f4")
    axes.set_aspect("equal")
    if count <= 16:
        numbers(axes, image, values, lambda value: f"{value:.2f}".replace("0.", "."))
    name_rows(axes, record, order)
    names = [record.clients[index] for index in order] if count <= MOST_LABELS else []
    axes.set_xticks(range(len(names)), labels=names, rotation=90)
    axes.tick_params(axis="x", labelsize=TICK_SIZE if count <= MOST_LABELS // 2 else TICK_SIZE - 2)
    _frame_clusters(axes, record, order)
    bar_of(figure, image, axes, "edge weight")
    task_legend(figure, record)
    return figure


def _count(record: Record) -> tuple[int, str]:
    adjacency = np.array(record.plan.get("adjacency") or [[0.0]])
    edges = int(np.count_nonzero(np.triu(adjacency, 1)))
    alone = int(np.sum(~adjacency.any(axis=1))) if record.clients else 0
    lone = f", {alone} of {len(record.clients)} clients without any" if alone else ""
    return edges, f"{edges} edges{lone}; frames: clusters; empty cell: no edge"


def _frame_clusters(axes: Axes, record: Record, order: Sequence[int]) -> None:
    """A frame round each cluster, named at its upper right corner where there is room outside the matrix."""
    bounds = [0, *between_clusters(record, order), len(order)]
    for start, end in pairwise(bounds):
        label = cluster_name(record.cluster_of[record.clients[order[start]]])
        size = end - start
        frame = Rectangle(
            (start - 0.5, start - 0.5), size, size, fill=False, edgecolor=INK, linewidth=1.6, clip_on=False
        )
        axes.add_patch(frame)
        if len(bounds) <= 16:
            place = ((start + end - 1) / 2, -0.62)
            axes.text(*place, label, ha="center", va="bottom", size=NOTE_SIZE, color=INK)
