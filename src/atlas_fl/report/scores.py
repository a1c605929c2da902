"""Figure 2: the validation score of every client in every round, coloured by what it gains over the majority class."""

import math

import matplotlib as mpl
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from atlas_fl.report.cells import bar_of, between_clusters, cells, name_rows, numbers, task_legend
from atlas_fl.report.record import Record
from atlas_fl.report.style import INK, LABEL_SIZE, new_figure, say

MOST_TICKS = 26
REFUSED_COLOUR = "#D55E00"


def draw(record: Record) -> Figure:
    """A heat map, clients by rounds; clusters are set apart by lines, a round with a refused update is framed."""
    rounds = sorted({at for found in record.histories.values() for at in found.series("validation")})
    figure = new_figure(
        width=float(np.clip(3.2 + 0.52 * len(rounds), 7.0, 13.0)),
        height=float(np.clip(1.9 + 0.3 * len(record.clients), 3.6, 14.0)),
        title="Validation score of every client, round by round",
        subtitle="numbers: score; lines between clusters"
        + ("; framed: the client's update was refused" if _refused(record) else ""),
    )
    axes = figure.add_subplot()
    if not rounds:
        say(axes, "no round has been evaluated yet")
        return figure
    order = record.sorted_clients
    values = _matrix(record, order, rounds, "validation")
    shades, meaning = _shades(record, order, rounds, values)
    low, high = float(np.nanmin(shades)), float(np.nanmax(shades))
    norm = Normalize(math.floor(low * 20) / 20, math.ceil(high * 20 + 1e-9) / 20)
    image = cells(axes, shades, colours=mpl.colormaps["viridis"], norm=norm)
    numbers(axes, image, values, lambda value: f"{value:.2f}".replace("0.", "."), shades=shades)
    name_rows(axes, record, order)
    _name_columns(figure, rounds)
    for row in between_clusters(record, order):
        axes.axhline(row - 0.5, color=INK, linewidth=1.0)
    _frame_refused(figure, record, order, rounds)
    bar_of(figure, image, axes, meaning)
    task_legend(figure, record)
    return figure


def _shades(record: Record, order: list[int], rounds: list[int], values: np.ndarray) -> tuple[np.ndarray, str]:
    """What colours the cells, and its name: scores of tasks with two and with six classes are not alike."""
    accuracy, majority = (_matrix(record, order, rounds, "validation", metric) for metric in ("accuracy", "majority"))
    gains = accuracy - majority
    if np.array_equal(np.isnan(gains), np.isnan(values)):
        return gains, "accuracy above the majority class"
    return values, "score"


def _matrix(record: Record, order: list[int], rounds: list[int], *series: str) -> np.ndarray:
    """A series of every client, float64 (clients, rounds); NaN where a client has none."""
    values = np.full((len(order), len(rounds)), np.nan)
    for row, index in enumerate(order):
        history = record.histories.get(record.clients[index])
        for at, value in (history.series(*series) if history else {}).items():
            values[row, rounds.index(at)] = value
    return values


def _name_columns(figure: Figure, rounds: list[int]) -> None:
    axes = figure.axes[0]
    shown = range(0, len(rounds), -(-len(rounds) // MOST_TICKS))
    axes.set_xticks(shown, labels=[str(rounds[place]) for place in shown])
    axes.set_xlabel("round", size=LABEL_SIZE)


def _refused(record: Record) -> list[tuple[int, str]]:
    """Round and client of every refused update."""
    return [(row["round"], row["client"]) for row in record.metrics if row.get("event") == "refused"]


def _frame_refused(figure: Figure, record: Record, order: list[int], rounds: list[int]) -> None:
    names = [record.clients[index] for index in order]
    for at, client in _refused(record):
        if at in rounds and client in names:
            corner = rounds.index(at) - 0.46, names.index(client) - 0.43
            frame = Rectangle(corner, 0.92, 0.86, fill=False, edgecolor=REFUSED_COLOUR, linewidth=2, zorder=3)
            figure.axes[0].add_patch(frame)
