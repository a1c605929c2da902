"""Charts of masks (density, overlap), and of scores over the scales of a task vector."""

from collections.abc import Mapping, Sequence

import numpy as np

from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.html.charts import Chart, Row, chart, heat_map, row_height


def density_chart(masks: Mapping[str, Mapping[str, float]], *, share: float | None = None) -> Chart:
    """Bars by layer, one colour a mask; a dashed line at the share of all weights where that is one number."""
    rows: list[Row] = [
        {"mask": mask, "tensor": layer, "moving": moving}
        for mask, shares in masks.items()
        for layer, moving in shares.items()
    ]
    return chart(
        "mask",
        rows,
        title="Weights that may move, by layer",
        note="share of each layer's weights" + ("" if share is None else "; dashed: share of all weights"),
        layers=list(next(iter(masks.values()))),
        masks=list(masks),
        share=[] if share is None else [{"share": share}],
        height=row_height(len(rows)),
    )


def overlap_chart(names: Sequence[str], overlaps: np.ndarray, *, densities: Sequence[float]) -> Chart:
    """A heat map of the Jaccard indices of all pairs, (masks, masks)."""
    return heat_map(
        "overlap",
        [
            {"mask": name, "other": other, "overlap": float(overlaps[i, j])}
            for i, name in enumerate(names)
            for j, other in enumerate(names)
        ],
        x="other",
        y="mask",
        value="overlap",
        title="How far masks agree",
        note=f"Jaccard index: both over either; chance alone: {by_chance(densities):.3f}",
        form=".2f",
        domain=(0.0, 1.0),
        label_limit=300,
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
    names = list(next(iter(test.values())))
    return chart(
        "scales",
        [{"run": name, "scale": scale, "accuracy": test[scale][name]} for name in names for scale in sorted(test)],
        title="Test accuracy over the scale of the task vector",
        note="scale 0: the base with the heads of the runs; dashed: mean",
        runs=names,
        height=320,
    )
