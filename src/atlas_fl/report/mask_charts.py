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
        dashed="" if share is None else "; dashed: share of all weights",
        layers=list(next(iter(masks.values()))),
        masks=list(masks),
        share=[] if share is None else [{"share": share}],
        height=row_height(len(rows)),
    )


def overlap_chart(names: Sequence[str], overlaps: np.ndarray, *, densities: Sequence[float]) -> Chart:
    """A heat map of the Jaccard indices of all pairs, (masks, masks)."""
    rows = [
        {"mask": name, "other": other, "overlap": float(overlaps[i, j])}
        for i, name in enumerate(names)
        for j, other in enumerate(names)
    ]
    return heat_map("overlap", rows, chance=by_chance(densities), domain=(0.0, 1.0))


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
    splits = {"test": test, "validation": validation}
    return format_csv(
        {"scale": scale}
        | {f"{split}:{name}": value for split, scores in splits.items() for name, value in scores[scale].items()}
        for scale in test
    )


def scales_chart(test: ByScale) -> Chart:
    """A line for every run's task, and a dashed one for their mean."""
    names = list(next(iter(test.values())))
    rows = [{"run": name, "scale": scale, "accuracy": test[scale][name]} for name in names for scale in sorted(test)]
    return chart("scales", rows, runs=names)
