"""Charts of masks (density, overlap), and of scores over the scales of a task vector."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.html.charts import (
    FAINT,
    INK,
    category,
    chart,
    colours,
    heat_map,
    quantity,
    row_height,
    tips,
)
from atlas_fl.report.html.elements import Chart


def density_chart(masks: Mapping[str, Mapping[str, float]], *, share: float | None = None) -> Chart:
    """Bars by layer, one colour a mask; a dashed line at the share of all weights where that is one number."""
    layers = list(next(iter(masks.values())))
    names = list(masks)
    rows = [
        {"mask": name, "tensor": layer, "moving": moving}
        for name, shares in masks.items()
        for layer, moving in shares.items()
    ]
    encoding = {
        "x": quantity("moving", "share of the layer's weights", zero=True),
        "yOffset": {"field": "mask", "type": "nominal", "sort": names},
        "color": colours("mask", None, domain=names) | {"legend": {"columns": 1, "labelLimit": 400}},
        "tooltip": tips(("mask", "mask", ""), ("tensor", "layer", ""), ("moving", "may move", ".2%")),
    }
    of_all = {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "color": FAINT, "strokeDash": [4, 3], "strokeWidth": 1.5},
        "encoding": {"x": {"datum": share}, "y": None},
    }
    bars = {"mark": {"type": "bar"}, "encoding": encoding}
    spec = {
        "data": {"name": "rows"},
        "encoding": {"y": category("tensor", None, order=layers, labelLimit=300)},
        "layer": [bars] if share is None else [bars, of_all],
    }
    return Chart(
        name="mask",
        title="Weights that may move, by layer",
        note="share of each layer's weights" + ("" if share is None else "; dashed: share of all weights"),
        spec=chart(spec, height=row_height(len(rows))),
        data={"rows": rows},
    )


def overlap_chart(names: Sequence[str], overlaps: np.ndarray, *, densities: Sequence[float]) -> Chart:
    """A heat map of the Jaccard indices of all pairs, (masks, masks)."""
    rows = [
        {"mask": name, "other": other, "overlap": float(overlaps[i, j])}
        for i, name in enumerate(names)
        for j, other in enumerate(names)
    ]
    return Chart(
        name="overlap",
        title="How far masks agree",
        note=f"Jaccard index: both over either; chance alone: {by_chance(densities):.3f}",
        spec=heat_map(
            x=category("other", None, order=names, labelAngle=-60, labelLimit=300),
            y=category("mask", None, order=names, labelLimit=300),
            value="overlap",
            title="Jaccard index",
            form=".2f",
            tooltip=tips(("mask", "mask", ""), ("other", "and", ""), ("overlap", "Jaccard index", ".4f")),
            domain=(0.0, 1.0),
        ),
        data={"rows": rows},
    )


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


def scales_chart(test: ByScale) -> Chart:
    """A line for every run's task, and a dashed one for their mean."""
    scales = sorted(test)
    names = list(test[scales[0]])
    rows = [{"run": name, "scale": scale, "accuracy": test[scale][name]} for name in names for scale in scales]
    known = tips(("run", "run", ""), ("scale", "scale", ".3g"), ("accuracy", "accuracy", ".4f"))
    field = colours("run", None, domain=names) | {"legend": {"columns": 1, "labelLimit": 400}}
    lines = {"mark": {"type": "line", "point": {"size": 40}}, "encoding": {"color": field, "tooltip": known}}
    mean = {
        "data": {"name": "mean"},
        "mark": {"type": "line", "color": INK, "strokeWidth": 2.5, "strokeDash": [6, 3]},
    }
    spec = {
        "data": {"name": "rows"},
        "encoding": {"x": quantity("scale", "scale", grid=False), "y": quantity("accuracy", "test accuracy")},
        "layer": [lines, mean] if len(names) > 1 else [lines],
    }
    return Chart(
        name="scales",
        title="Test accuracy over the scale of the task vector",
        note="scale 0: the base with the heads of the runs" + ("; dashed: mean" if len(names) > 1 else ""),
        spec=chart(spec, height=320),
        data={"rows": rows, "mean": [{"scale": scale, "accuracy": fmean(test[scale].values())} for scale in scales]},
    )
