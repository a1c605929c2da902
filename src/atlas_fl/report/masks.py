"""Figures of masks: where they let weights move, and how far several of them agree."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from atlas_fl.report.cells import bar_of, cells, numbers
from atlas_fl.report.record import Record
from atlas_fl.report.style import FAINT, TASK_COLOURS, TICK_SIZE, new_figure, tidy

LETTER = 0.075
"""Inches of a letter of a label."""


def draw(record: Record) -> Figure:
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
        places = np.arange(len(layers)) - 0.4 + wide * (index + 0.5)
        axes.bar(places, list(densities.values()), wide, color=TASK_COLOURS[index % len(TASK_COLOURS)], label=name)
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
