"""Figure 5: the LoRA rank of every layer and client."""

from itertools import pairwise

import matplotlib as mpl
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from atlas_fl.report.cells import MOST_LABELS, bar_of, between_clusters, cells, name_rows, numbers, task_legend
from atlas_fl.report.record import Record
from atlas_fl.report.style import INK, LABEL_SIZE, TICK_SIZE, new_figure, say


def draw(record: Record) -> Figure:
    """A heat map, clients by layers, with each client's device at the right."""
    planned = record.plan["clients"]
    width = max((len(client.get("ranks", ())) for client in planned), default=0)
    figure = new_figure(
        width=float(np.clip(5.0 + 0.5 * width, 7.0, 14.0)),
        height=float(np.clip(1.9 + 0.3 * len(planned), 3.6, 14.0)),
        title="LoRA rank of every layer and client",
        subtitle="lines between clusters; the client's device at the right",
    )
    axes = figure.add_subplot()
    if not width:
        say(axes, "the plan holds no ranks")
        return figure
    order = record.sorted_clients
    values = np.full((len(order), width), np.nan)
    for row, index in enumerate(order):
        ranks = planned[index].get("ranks", ())
        values[row, : len(ranks)] = ranks
    levels = sorted({int(rank) for rank in values[np.isfinite(values)]})
    # Ranks double, so a colour a rank, evenly spaced, tells 4 from 8 as well as 32 from 64.
    colours = ListedColormap(mpl.colormaps["YlGnBu"](np.linspace(0.12, 0.92, len(levels))))
    edges = [levels[0] - 1, *((low + high) / 2 for low, high in pairwise(levels)), levels[-1] + 1]
    image = cells(axes, values, colours=colours, norm=BoundaryNorm(edges, len(levels)))
    numbers(axes, image, values, lambda value: f"{value:.0f}")
    name_rows(axes, record, order)
    axes.set_xticks(range(width), labels=[str(layer) for layer in range(width)])
    axes.set_xlabel("layer", size=LABEL_SIZE)
    for row in between_clusters(record, order):
        axes.axhline(row - 0.5, color=INK, linewidth=1.0)
    if len(order) <= MOST_LABELS:
        size = TICK_SIZE if len(order) <= MOST_LABELS // 2 else TICK_SIZE - 2
        for row, index in enumerate(order):
            axes.text(width - 0.4, row, planned[index].get("device", ""), size=size, va="center", color=INK)
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    bar = bar_of(figure, image, axes, "rank", ticks=middles)
    bar.set_yticks(middles, labels=[str(level) for level in levels])
    task_legend(figure, record)
    return figure
