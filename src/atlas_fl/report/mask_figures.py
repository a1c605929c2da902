"""Figures of masks (density, overlap), of scores over the scales of a task vector, and of what each cut leaks."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import matplotlib as mpl
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.record import Record
from atlas_fl.report.style import (
    FAINT,
    INK,
    MARKERS,
    TASK_COLOURS,
    TICK_SIZE,
    bar_of,
    cells,
    new_figure,
    numbers,
    task_colours,
    tidy,
)

LETTER = 0.075
"""Inches of a letter of a label."""


def draw_mask(record: Record) -> Figure:
    """The share of weights that may move in every layer, of a run's mask."""
    sparse = record.plan["sparse"]
    return draw_density({str(sparse["mask"]).replace("_", " "): sparse["layers"]}, share=1 - sparse["sparsity"])


def draw_density(masks: Mapping[str, Mapping[str, float]], *, share: float | None = None) -> Figure:
    """Bars by layer, one colour a mask; a dashed line at the share of all weights where that is one number."""
    layers = list(next(iter(masks.values())))
    labels = max(map(len, layers))
    figure = new_figure(
        width=float(np.clip(1.6 + 0.16 * len(layers) * (len(masks) + 1), 7.0, 13.0)),
        height=3.6 + LETTER * labels + 0.22 * len(masks) * (len(masks) > 1),
        title="Weights that may move, by layer",
        subtitle="share of each layer's weights" + ("" if share is None else "; dashed: share of all weights"),
    )
    axes = figure.add_subplot()
    tidy(axes, y="share")
    wide = 0.8 / len(masks)
    for index, (name, densities) in enumerate(masks.items()):
        positions = np.arange(len(layers)) - 0.4 + wide * (index + 0.5)
        axes.bar(positions, list(densities.values()), wide, color=TASK_COLOURS[index % len(TASK_COLOURS)], label=name)
    if share is not None:
        axes.axhline(share, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    axes.set_xticks(range(len(layers)), labels=layers, rotation=90)
    axes.set_xlim(-0.6, len(layers) - 0.4)
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=TICK_SIZE)
    return figure


def draw_overlap(names: Sequence[str], overlaps: np.ndarray, *, densities: Sequence[float]) -> Figure:
    """A heat map of the Jaccard indices of all pairs, (masks, masks)."""
    longest = max(map(len, names))
    figure = new_figure(
        width=float(np.clip(2.2 + 0.55 * len(names) + LETTER * longest, 6.6, 13.0)),
        height=float(np.clip(1.6 + 0.42 * len(names) + LETTER * longest, 3.6, 13.0)),
        title="How far masks agree",
        subtitle=f"Jaccard index: both over either; chance alone: {by_chance(densities):.3f}",
    )
    axes = figure.add_subplot()
    image = cells(axes, overlaps, colours=mpl.colormaps["viridis"], norm=Normalize(0, 1))
    numbers(axes, image, overlaps, lambda value: f"{value:.2f}")
    axes.set_yticks(range(len(names)), labels=list(names))
    axes.set_xticks(range(len(names)), labels=list(names), rotation=90)
    axes.tick_params(labelsize=TICK_SIZE)
    bar_of(figure, image, axes, "Jaccard index")
    return figure


def by_chance(densities: Sequence[float]) -> float:
    """The mean expected Jaccard index of all pairs, were each mask drawn at random with its density.

    >>> round(by_chance([0.1, 0.1]), 4)  # 0.01 of 0.19
    0.0526
    """
    pairs = [(a, b) for index, a in enumerate(densities) for b in densities[index + 1 :]]
    return float(np.mean([a * b / (a + b - a * b) for a, b in pairs if a + b > 0])) if pairs else 1.0


ByScale = Mapping[float, Mapping[str, float]]
"""Accuracy by scale and run."""


def scales_csv(test: ByScale, validation: ByScale) -> str:
    """A row a scale: accuracy of every run's task on test and on validation images, in full."""
    names = list(next(iter(test.values())))
    header = ["scale", *(f"test:{name}" for name in names), *(f"validation:{name}" for name in names)]
    rows = [
        [scale, *(scores[name] for name in names), *(validation[scale][name] for name in names)]
        for scale, scores in test.items()
    ]
    return format_csv(header, rows)


def draw_scales(test: ByScale) -> Figure:
    """A line for every run's task, and a dark one for their mean."""
    scales = sorted(test)
    names = list(test[scales[0]])
    figure = new_figure(
        width=8.0,
        height=4.4 + 0.2 * len(names),
        title="Test accuracy over the scale of the task vector",
        subtitle="scale 0: the base with the heads of the runs",
    )
    axes = figure.add_subplot()
    tidy(axes, x="scale", y="test accuracy")
    for index, name in enumerate(names):
        colour, marker = TASK_COLOURS[index % len(TASK_COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(scales, [test[scale][name] for scale in scales], color=colour, marker=marker, label=name)
    if len(names) > 1:
        means = [fmean(test[scale].values()) for scale in scales]
        axes.plot(scales, means, color=INK, linewidth=2.4, linestyle=(0, (4, 2)), label="mean")
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=TICK_SIZE)
    return figure


def draw_leakage(record: Record) -> Figure:
    """Tokens that the probe reads over the cut, a line a task; rings are the cuts that were taken, dashes the guess."""
    rows, colours = record.plan["leakage"], task_colours(record.tasks)
    figure = new_figure(
        width=7.5,
        height=4.8,
        title="What a cut gives away",
        subtitle="tokens of unseen texts that a linear probe reads out of what crosses",
    )
    axes = figure.add_subplot()
    tidy(axes, x="blocks on the client", y="tokens read")
    taken = {(client["task"], client.get("cut")) for client in record.plan["clients"]}
    for task in [task for task in record.tasks if any(row["task"] == task for row in rows)]:
        task_rows, colour = [row for row in rows if row["task"] == task], colours[task]
        axes.plot(
            [row["blocks"] for row in task_rows],
            [row["read"] for row in task_rows],
            marker=".",
            color=colour,
            label=task,
        )
        axes.axhline(task_rows[0]["commonest"], color=colour, linewidth=1, linestyle=(0, (4, 3)))
        for row in task_rows:
            if (task, row["blocks"]) in taken:
                axes.plot(row["blocks"], row["read"], marker="o", markersize=11, color=colour, fillstyle="none")
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    marks = [
        Line2D([], [], color=INK, marker="o", markersize=9, fillstyle="none", linewidth=0, label="a cut of this run"),
        Line2D([], [], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="always the commonest token"),
    ]
    handles = [*axes.get_legend_handles_labels()[0], *marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=TICK_SIZE)
    return figure
