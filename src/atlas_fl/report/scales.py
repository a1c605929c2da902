"""Accuracy over the scales of a task vector: as CSV, and as a figure."""

import csv
from collections.abc import Mapping
from io import StringIO
from statistics import fmean

from matplotlib.figure import Figure

from atlas_fl.report.style import INK, MARKERS, TASK_COLOURS, TICK_SIZE, new_figure, tidy

ByScale = Mapping[float, Mapping[str, float]]
"""Accuracy by scale and run."""


def to_csv(test: ByScale, validation: ByScale) -> str:
    """A row a scale: accuracy of every run's task on test and on validation images, in full."""
    names = list(next(iter(test.values())))
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["scale", *(f"test:{name}" for name in names), *(f"validation:{name}" for name in names)])
    for scale, found in test.items():
        writer.writerow([scale, *(found[name] for name in names), *(validation[scale][name] for name in names)])
    return text.getvalue()


def draw(test: ByScale) -> Figure:
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
