"""Figures of the client graph, of the clusters with the table over k, and of how much of its own a client keeps."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from atlas_fl.report.format import cluster_name
from atlas_fl.report.record import Record
from atlas_fl.report.style import (
    FAINT,
    INK,
    MOST_LABELS,
    NOTE_SIZE,
    TICK_SIZE,
    annotate,
    bar_of,
    between_clusters,
    cells,
    hide_axes,
    marker_of,
    name_rows,
    new_figure,
    numbers,
    task_colours,
    task_legend,
    tidy,
)


def draw_adjacency(record: Record) -> Figure:
    """The adjacency matrix with clients in the order of their clusters, each cluster framed."""
    count = len(record.clients)
    side = float(np.clip(0.42 * count, 3.6, 10.0))
    num_edges, subtitle = _count(record)
    figure = new_figure(width=side + 2.9, height=side + 2.0, title="Client graph", subtitle=subtitle)
    axes = figure.add_subplot()
    if record.plan.get("adjacency") is None:
        annotate(axes, "the plan holds no graph")
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


def draw_sharing(record: Record) -> Figure:
    """Rows are clients, columns groups of parameters: the share of its own model that each client keeps."""
    rows, groups = record.sharing, sorted({row["parameters"] for row in record.sharing}, key=group_order)
    order = record.sorted_clients
    names = [record.clients[index] for index in order]
    values = np.full((len(names), len(groups)), np.nan)
    for row in rows:
        if row["client"] in names:
            values[names.index(row["client"]), groups.index(row["parameters"])] = row["own_share"]
    figure = new_figure(
        width=float(np.clip(0.9 * len(groups) + 4.0, 5.0, 14.0)),
        height=float(np.clip(0.42 * len(names), 2.4, 10.0)) + 2.4,
        title="How much of its own each client keeps",
        subtitle="the rest is others'; below: variance between\nclients that are compared, over the noise of one",
    )
    axes = figure.add_subplot()
    image = cells(axes, values, colours=mpl.colormaps["Blues"], norm=Normalize(0, 1))
    axes.set_facecolor("#f4f4f4")
    numbers(axes, image, values, lambda value: f"{value:.0%}")
    name_rows(axes, record, order)
    ratios = {group: [row.get("variance_over_noise") for row in rows if row["parameters"] == group] for group in groups}
    labels = [f"{group}\n{_ratio_words(ratios[group])}" for group in groups]
    axes.set_xticks(range(len(groups)), labels=labels, fontsize=TICK_SIZE)
    bar_of(figure, image, axes, "share of its own model")
    task_legend(figure, record)
    return figure


def group_order(group: str) -> tuple[bool, list[int], str]:
    """Sorts layers by their number, and heads after all of them."""
    return group == "head", [int(number) for number in re.findall(r"\d+", group)], group


def _ratio_words(ratios: Sequence[float | None]) -> str:
    """The variance between clients over the noise of one, of every task if tasks differ."""
    known = sorted({ratio for ratio in ratios if ratio is not None})
    return "no noise" if not known else " to ".join(f"{ratio:.2g}" for ratio in dict.fromkeys((known[0], known[-1])))


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
            position = ((start + end - 1) / 2, -0.62)
            axes.text(*position, label, ha="center", va="bottom", size=NOTE_SIZE, color=INK)


K_COLUMNS = {
    "k": "k",
    "silhouette": "silhouette",
    "davies_bouldin": "Davies-\nBouldin",
    "calinski_harabasz": "Calinski-\nHarabasz",
    "gap": "gap",
    "atlas": "ATLAS\nscore",
    "singletons": "single-\ntons",
}


def draw_clusters(record: Record) -> Figure:
    """Left: principal components of the sketches; right: every k that was weighed, the chosen one marked."""
    clustering = record.plan.get("clustering") or {}
    figure = new_figure(
        width=11.5,
        height=5.2,
        title=f"{_plural(len(record.clients), 'client')} in {_num_clusters(record)}",
        subtitle=_how(clustering),
    )
    table = clustering.get("k_table") or ()
    legends = _legends(record)
    heights = [2 + len(table), max(len(handles) for handles in legends) if record.sketches else 1]
    panels = figure.subplot_mosaic([["points", "table"], ["points", "legend"]], height_ratios=heights)
    left, right = panels["points"], panels["table"]
    hide_axes(panels["legend"])
    if record.sketches is None:
        annotate(left, "no client was fingerprinted in this run")
    else:
        _points(left, record, *record.sketches)
        _place_legends(panels["legend"], *legends)
    _k_table(right, table) if table else annotate(right, "no number of clusters was searched")
    return figure


def principal_components(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both halves on the first two principal components of their means, (n, 2) each, and the shares of variance (2,).

    Sketches are (n, dim). With fewer than three clients the missing components are zero.
    """
    mean = (first.astype(np.float64) + second.astype(np.float64)) / 2
    centre = mean.mean(axis=0)
    _, sizes, directions = np.linalg.svd(mean - centre, full_matrices=False)
    axes = np.zeros((2, mean.shape[1]))
    axes[: len(directions[:2])] = directions[:2]
    axes *= np.where(axes[np.arange(2), np.abs(axes).argmax(axis=1)] < 0, -1.0, 1.0)[:, None]  # the sign is free
    shares = np.zeros(2)
    variance = np.square(sizes)
    shares[: len(variance[:2])] = variance[:2] / max(float(variance.sum()), 1e-300)
    return (first - centre) @ axes.T, (second - centre) @ axes.T, shares


def _how(clustering: Mapping[str, Any]) -> str:
    if clustering.get("method", "none") == "none":
        return "nothing was clustered in this run"
    verdict = (clustering.get("structure") or {}).get("reason", "")
    return "; ".join(text for text in (f"method: {clustering['method']}", verdict) if text)


def _num_clusters(record: Record) -> str:
    labels = set(record.cluster_of.values())
    decided, alone = len(labels - {-1}), sum(label < 0 for label in record.cluster_of.values())
    lone = f", {alone} train{'s' if alone == 1 else ''} alone" if alone else ""
    return _plural(decided, "cluster") + lone


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _points(axes: Axes, record: Record, first: np.ndarray, second: np.ndarray) -> None:
    """A marker for each client; the line through it ends at its two halves, so its length is the noise."""
    ends = principal_components(first, second)
    tidy(
        axes,
        title="principal components of the sketches",
        x=f"first component, {100 * ends[2][0]:.0f}% of the variance",
        y=f"second component, {100 * ends[2][1]:.0f}%",
        grid="both",
    )
    colours = task_colours(record.tasks)
    for index, name in enumerate(record.clients):
        colour, marker = colours[record.task_of[name]], marker_of(record.cluster_of[name])
        half, other = ends[0][index], ends[1][index]
        axes.plot(*zip(half, other), color=colour, linewidth=1, alpha=0.55, zorder=2)
        axes.plot(
            *((half + other) / 2),
            marker,
            color=colour,
            markersize=7.5,
            markeredgecolor="white",
            markeredgewidth=0.8,
            zorder=3,
        )
    axes.margins(0.12)


def _legends(record: Record) -> tuple[list[Line2D], list[Line2D]]:
    colours = task_colours(record.tasks)
    tasks = [Line2D([], [], color=colours[task], linewidth=5, label=task) for task in record.tasks]
    clusters = sorted(set(record.cluster_of.values()), key=lambda label: (label < 0, label))
    shapes = [
        Line2D([], [], color=FAINT, marker=marker_of(label), markersize=7, linestyle="", label=cluster_name(label))
        for label in clusters
    ]
    return tasks, [*shapes, Line2D([], [], color=FAINT, linewidth=1, label="between a client's two halves")]


def _place_legends(axes: Axes, tasks: list[Line2D], clusters: list[Line2D]) -> None:
    """Tasks by colour at the left, clusters by shape at the right; axes hold one legend, so the first is an artist."""
    first = axes.legend(handles=tasks, loc="upper left", bbox_to_anchor=(0, 1), frameon=False, fontsize=TICK_SIZE)
    axes.legend(handles=clusters, loc="upper left", bbox_to_anchor=(0.5, 1), frameon=False, fontsize=TICK_SIZE)
    axes.add_artist(first)


def _k_table(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    hide_axes(axes)
    chosen = " (shaded: chosen)" if any(row.get("chosen") for row in rows) else ""
    axes.set_title(f"numbers of clusters that were weighed{chosen}", size=10.5, color=INK, loc="left", weight="bold")
    columns = [name for name in K_COLUMNS if any(row.get(name) is not None for row in rows)]
    text = [[_score(row.get(name)) for name in columns] for row in rows]
    table = axes.table(text, colLabels=[K_COLUMNS[name] for name in columns], loc="upper center", cellLoc="right")
    table.auto_set_font_size(False)
    table.set_fontsize(TICK_SIZE)
    table.scale(1, 1.45)
    for (row, _), cell in table.get_celld().items():
        is_chosen = row > 0 and bool(rows[row - 1].get("chosen"))
        cell.set(linewidth=0, facecolor="#e3eef7" if is_chosen else "white" if row % 2 else "#f6f6f6")
        cell.get_text().set(color=INK, weight="bold" if is_chosen or row == 0 else "normal")
        if row == 0:
            cell.set(height=cell.get_height() * 1.5, facecolor="white")
            cell.get_text().set_horizontalalignment("right")


def _score(value: float | None) -> str:
    """An undefined score is a dash, never a number."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"
