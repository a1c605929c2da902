"""Figures of a run: loss and score over rounds, by client and by class, LoRA ranks by layer, bytes by kind."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from atlas_fl.experiment.summary import History, class_counts, class_names, mean_series, sampled_series
from atlas_fl.report.format import human_bytes
from atlas_fl.report.record import Record
from atlas_fl.report.style import (
    FAINT,
    INK,
    KIND_COLOURS,
    LABEL_SIZE,
    MOST_LABELS,
    NOTE_SIZE,
    TASK_COLOURS,
    TICK_SIZE,
    annotate,
    bar_of,
    between_clusters,
    cells,
    hide_axes,
    name_rows,
    new_figure,
    numbers,
    task_colours,
    task_legend,
    tidy,
)
from atlas_fl.storage.ledger import KINDS, Totals

COLUMNS = 4


def draw_convergence(record: Record) -> Figure:
    """Small multiples, one column a task: thin lines are clients, the bold line is their mean."""
    tasks = [task for task in record.tasks if record.by_task[task]]
    columns = max(1, min(COLUMNS, len(tasks)))
    blocks = max(1, -(-len(tasks) // columns))
    figure = new_figure(
        width=max(7.0, 0.6 + 3.0 * columns),
        height=1.2 + 4.2 * blocks,
        title="How each task converges",
        subtitle="thin: one client; bold: mean over the task's clients",
    )
    if not tasks:
        annotate(figure.add_subplot(), "no round has been evaluated yet")
        return figure
    grid = figure.subplots(2 * blocks, columns, squeeze=False, height_ratios=[3, 2] * blocks)
    colours = task_colours(record.tasks)
    for index in range(blocks * columns):
        block, column = divmod(index, columns)
        above, below = grid[2 * block, column], grid[2 * block + 1, column]
        if index >= len(tasks):
            hide_axes(above)
            hide_axes(below)
            continue
        # where not every round is evaluated, scores begin later than losses
        below.sharex(above)
        members = record.by_task[tasks[index]]
        _scores(above, members, title=tasks[index], colour=colours[tasks[index]], first=column == 0)
        _losses(below, members, colour=colours[tasks[index]], first=column == 0)
    figure.legend(handles=_legend(record), loc="outside lower center", ncols=5, frameon=False, fontsize=TICK_SIZE)
    return figure


def _scores(axes: Axes, members: Sequence[History], *, title: str, colour: str, first: bool) -> None:
    tidy(axes, title=title, y="validation score" if first else "")
    for member in members:
        _line(axes, member.series("validation"), color=colour, linewidth=0.9, alpha=0.4)
    mean = mean_series(members, "validation")
    _line(axes, mean, color=colour, linewidth=2.4)
    if _has_other_score(members):
        accuracy = mean_series(members, "validation", "accuracy")
        _line(axes, accuracy, color=colour, linewidth=1.2, linestyle=":")
    majority = mean_series(members, "validation", "majority")
    if majority:
        axes.axhline(majority[max(majority)], color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    _label_end(axes, mean, colour)
    axes.tick_params(labelbottom=False)


def _has_other_score(members: Sequence[History]) -> bool:
    """Whether the task is judged by another metric than accuracy, to which the majority class belongs."""
    accuracy = mean_series(members, "validation", "accuracy")
    return bool(accuracy) and accuracy != mean_series(members, "validation")


def _losses(axes: Axes, members: Sequence[History], *, colour: str, first: bool) -> None:
    tidy(axes, x="round", y="loss" if first else "")
    _line(axes, mean_series(members, "validation", "loss"), color=colour, linewidth=2.0)
    _line(axes, sampled_series(members, "train", "loss"), color=colour, linewidth=1.3, linestyle=(0, (5, 1.5, 1, 1.5)))


def _line(axes: Axes, values: dict[int, float], **style: object) -> None:
    if values:
        marker = "o" if len(values) == 1 else ""
        axes.plot(list(values), list(values.values()), marker=marker, markersize=4, **style)  # type: ignore[arg-type]
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1, steps=[1, 2, 5, 10]))


def _label_end(axes: Axes, mean: dict[int, float], colour: str) -> None:
    """The last mean as a number right of its line, outside the axes so that it covers nothing."""
    if mean:
        last = max(mean)
        axes.annotate(
            f"{mean[last]:.3f}".lstrip("0"),
            (1, mean[last]),
            xycoords=axes.get_yaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            size=NOTE_SIZE,
            color=colour,
            weight="bold",
            va="center",
        )


def _legend(record: Record) -> list[Line2D]:
    """The kinds of lines that this figure holds."""
    styles: list[tuple[str, dict[str, object]]] = [
        ("mean validation score, loss", {"linewidth": 2.4}),
        ("one client", {"linewidth": 0.9, "alpha": 0.5}),
        ("training loss", {"linewidth": 1.3, "linestyle": (0, (5, 1.5, 1, 1.5))}),
        ("majority class (accuracy)", {"linewidth": 1, "linestyle": (0, (4, 3)), "color": INK}),
    ]
    if any(_has_other_score(members) for members in record.by_task.values()):
        styles.insert(2, ("accuracy, where it is not the score", {"linewidth": 1.2, "linestyle": ":"}))
    return [Line2D([], [], label=label, **({"color": FAINT} | style)) for label, style in styles]  # type: ignore[arg-type]


MOST_TICKS = 26
REFUSED_COLOUR = "#D55E00"


def draw_scores(record: Record) -> Figure:
    """A heat map, clients by rounds; clusters are set apart by lines, a round with a refused update is framed."""
    rounds = sorted({at for history in record.histories.values() for at in history.series("validation")})
    figure = new_figure(
        width=float(np.clip(3.2 + 0.52 * len(rounds), 7.0, 13.0)),
        height=float(np.clip(1.9 + 0.3 * len(record.clients), 3.6, 14.0)),
        title="Validation score of every client, round by round",
        subtitle="numbers: score; lines between clusters"
        + ("; framed: the client's update was refused" if _refusals(record) else ""),
    )
    axes = figure.add_subplot()
    if not rounds:
        annotate(axes, "no round has been evaluated yet")
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
    axes.set_xticks(shown, labels=[str(rounds[index]) for index in shown])
    axes.set_xlabel("round", size=LABEL_SIZE)


def _refusals(record: Record) -> list[tuple[int, str]]:
    """Round and client of every refused update."""
    return [(row["round"], row["client"]) for row in record.metrics if row.get("event") == "refused"]


def _frame_refused(figure: Figure, record: Record, order: list[int], rounds: list[int]) -> None:
    names = [record.clients[index] for index in order]
    for at, client in _refusals(record):
        if at in rounds and client in names:
            corner = rounds.index(at) - 0.46, names.index(client) - 0.43
            frame = Rectangle(corner, 0.92, 0.86, fill=False, edgecolor=REFUSED_COLOUR, linewidth=2, zorder=3)
            figure.axes[0].add_patch(frame)


def draw_ranks(record: Record) -> Figure:
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
        annotate(axes, "the plan holds no ranks")
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


def draw_traffic(record: Record) -> Figure:
    """Left: each round, up above the line and down below it; right: what each kind adds up to."""
    sums = record.totals
    figure = new_figure(
        width=10.5,
        height=4.6,
        title=f"{human_bytes(sums.total) if sums.total else 'Nothing'} in messages",
        subtitle=f"{human_bytes(sums.up)} up to the server, {human_bytes(sums.down)} down to the clients; "
        f"{_between(sums)}lengths of the encoded payloads",
    )
    if not sums.total:
        annotate(figure.add_subplot(), "this run sent nothing")
        return figure
    left, right = figure.subplots(1, 2, width_ratios=[2.2, 1])
    kinds = [kind for kind in KINDS if kind in sums.by_kind]
    _rounds(left, record, kinds)
    _kinds(right, record, kinds)
    return figure


def _between(sums: Totals) -> str:
    between = sums.between_clients + sums.relayed
    return f"{human_bytes(between)} of it between clients; " if between else ""


def _rounds(axes: Axes, record: Record, kinds: Sequence[str]) -> None:
    by_cell: dict[tuple[str, str, int], int] = defaultdict(int)
    for row in record.ledger:
        by_cell[row.kind, row.direction, row.round] += row.bytes
    rounds = np.arange(min(row.round for row in record.ledger), max(row.round for row in record.ledger) + 1)
    tidy(axes, title="by round", x="round", y="bytes")
    for direction, sign in (("up", 1), ("down", -1)):
        base = np.zeros(len(rounds))
        for kind in kinds:
            heights = sign * np.array([by_cell[kind, direction, int(at)] for at in rounds], dtype=np.float64)
            axes.bar(rounds, heights, bottom=base, width=0.78, color=KIND_COLOURS[kind], linewidth=0)
            base += heights
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=14, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(abs(value))))
    low, high = axes.get_ylim()
    axes.set_ylim(low * 1.12, high * 1.12)
    for text, height, align in (("up", 0.98, "top"), ("down", 0.02, "bottom")):
        axes.text(0.01, height, text, transform=axes.transAxes, size=LABEL_SIZE, weight="bold", color=INK, va=align)


def _kinds(axes: Axes, record: Record, kinds: Sequence[str]) -> None:
    tidy(axes, title="by kind", grid="")
    sums = [sum(record.totals.by_kind[kind].values()) for kind in kinds]
    positions = range(len(kinds))
    axes.barh(positions, sums, color=[KIND_COLOURS[kind] for kind in kinds], height=0.62)
    axes.set_yticks(positions, labels=kinds)
    axes.invert_yaxis()
    for position, size in zip(positions, sums):
        share = 100 * size / record.totals.total
        percent = f"{share:.1f}%" if share >= 0.05 else "below 0.1%"
        axes.annotate(
            f"{human_bytes(size)}, {percent}",
            (size, position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=TICK_SIZE,
            color=INK,
        )
    axes.set_xlim(0, 1.55 * max(sums))
    axes.set_ylim(max(3, len(kinds)) - 0.4, -0.6)
    axes.set_xticks([])  # the numbers stand beside the bars
    axes.spines["bottom"].set_visible(False)


MOST_ROWS_NAMED = MOST_LABELS // 2
"""Rows of all panels above which names are small."""


def draw_label_distribution(record: Record) -> Figure:
    """A heat map of clients by classes for every task that has classes; an empty cell is no example at all."""
    panels = _panels(record)
    rows = [len(counts) for _, counts in panels.values()]
    wide = max((counts.shape[1] for _, counts in panels.values()), default=2)
    figure = new_figure(
        width=float(np.clip(3.4 + 0.34 * wide, 7.0, 13.0)),
        height=float(np.clip(1.6 + 0.26 * sum(rows) + 1.0 * len(panels), 3.6, 14.0)),
        title="Training examples of every client, by class",
        subtitle=_subtitle(record, panels),
    )
    if not panels:
        annotate(figure.add_subplot(), "no task of this run has classes")
        return figure
    grid = figure.add_gridspec(len(panels), 1, height_ratios=[max(count, 2) for count in rows])
    norm = Normalize(0, max(float(np.nanmax(counts)) for _, counts in panels.values()))
    for index, (task, (names, counts)) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[index, 0])
        image = cells(axes, counts, colours=mpl.colormaps["Blues"], norm=norm)
        axes.set_facecolor("#f4f4f4")
        axes.set_title(task, size=LABEL_SIZE + 1, color=INK, loc="left", weight="bold")
        numbers(axes, image, counts, lambda value: f"{value:.0f}")
        _name(axes, names, record.plan["data"], task, small=sum(rows) > MOST_ROWS_NAMED)
    bar_of(figure, image, list(figure.axes), "examples")
    return figure


def _panels(record: Record) -> dict[str, tuple[list[str], np.ndarray]]:
    """Of every task with classes: its clients and their counts, float64 (clients, classes) with NaN for none."""
    panels: dict[str, tuple[list[str], np.ndarray]] = {}
    for task in record.tasks:
        rows = [row for row in record.plan.get("data") or () if row["task"] == task and "distance" in row]
        if rows:
            counts = np.array([list(row["labels"].values()) for row in rows], dtype=np.float64)
            counts[counts == 0] = np.nan
            panels[task] = [row["client"] for row in rows], counts
    return panels


def _subtitle(record: Record, panels: Mapping[str, tuple[list[str], np.ndarray]]) -> str:
    apart = [row["distance"] for row in record.plan.get("data") or () if row["task"] in panels]
    if not apart:
        return "empty cell: no example"
    return f"empty cell: no example; mean distance of a client's mix to its task's: {np.mean(apart):.2f} of 1"


def _name(axes: Axes, names: Sequence[str], data: Sequence[Mapping[str, Any]], task: str, *, small: bool) -> None:
    classes = list(next(row["labels"] for row in data if row["task"] == task))
    size = TICK_SIZE - 2 if small else TICK_SIZE
    shown = len(names) <= MOST_LABELS
    axes.set_yticks(range(len(names)) if shown else [], labels=names if shown else [])
    few = len(classes) <= MOST_LABELS
    axes.set_xticks(range(len(classes)) if few else [], labels=classes if few else [], rotation=90)
    axes.tick_params(axis="both", labelsize=size)


ROW, MOST_HIGH = 0.2, 6.0
"""Inches of a client's row, and of all rows of a task at most."""
MOST_BARS_NAMED = 20
"""Bars above which the numbers on them would cover each other."""


def draw_accuracy_by_class(record: Record) -> Figure:
    """For every task bars of the classes' accuracy over all test images, above a heat map of clients by classes."""
    tasks = [task for task in record.tasks if any(map(class_counts, record.by_task[task]))]
    rows = [len(record.by_task[task]) for task in tasks]
    wide = max((len(class_names(record.plan, task)) for task in tasks), default=0)
    figure = new_figure(
        width=float(np.clip(3.4 + 0.34 * wide, 7.0, 13.0)),
        height=float(np.clip(1.8 + 2.4 * len(tasks) + sum(min(ROW * count, MOST_HIGH) for count in rows), 4.0, 14.0)),
        title="Test accuracy by class",
        subtitle="bars: all test images by their clients' models; dashed: all classes; below: each client, empty: none",
    )
    if not tasks:
        annotate(figure.add_subplot(), "no test images have been scored yet")
        return figure
    heights = [height for count in rows for height in (1.7, float(np.clip(ROW * count, 0.8, MOST_HIGH)))]
    grid = figure.add_gridspec(2 * len(tasks), 1, height_ratios=heights)
    for index, task in enumerate(tasks):
        above = figure.add_subplot(grid[2 * index, 0])
        _task(figure, above, figure.add_subplot(grid[2 * index + 1, 0], sharex=above), record, task)
    return figure


def _task(figure: Figure, above: Axes, below: Axes, record: Record, task: str) -> None:
    members = [
        (member.client, counts_of_client)
        for member in record.by_task[task]
        if (counts_of_client := class_counts(member)) is not None
    ]
    counts = np.array([client_counts for _, client_counts in members], dtype=np.float64)  # (n, 2, classes)
    hits, examples = counts[:, 0], counts[:, 1]
    names = class_names(record.plan, task) or [str(index) for index in range(hits.shape[1])]
    _bars(above, _share(hits.sum(0), examples.sum(0)), float(hits.sum() / examples.sum()), task=task)
    shares = _share(hits, examples)
    image = cells(below, shares, colours=mpl.colormaps["viridis"], norm=Normalize(0, 1))
    below.set_facecolor("#f4f4f4")
    numbers(below, image, shares, lambda value: f"{value:.2f}".replace("0.", "."))
    shown, few = len(members) <= MOST_LABELS, len(names) <= MOST_LABELS
    below.set_yticks(range(len(members)) if shown else [], labels=[name for name, _ in members] if shown else [])
    below.set_ylabel("" if shown else f"{len(members)} clients", size=LABEL_SIZE)
    below.set_xticks(range(len(names)) if few else [], labels=names if few else [], rotation=90)
    below.tick_params(labelsize=TICK_SIZE if len(members) <= MOST_LABELS // 2 else TICK_SIZE - 2)
    bar_of(figure, image, below, "accuracy")


def _bars(axes: Axes, shares: np.ndarray, overall: float, *, task: str) -> None:
    tidy(axes, title=task, y="accuracy")
    axes.bar(range(len(shares)), np.nan_to_num(shares), width=0.7, color=TASK_COLOURS[0])
    axes.axhline(overall, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.5, 1])
    axes.tick_params(labelbottom=False, bottom=False, which="both")
    for index, share in enumerate(shares if len(shares) <= MOST_BARS_NAMED else ()):
        if np.isfinite(share):
            axes.text(index, share + 0.02, f"{share:.2f}", ha="center", va="bottom", size=NOTE_SIZE)


def _share(hits: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Hits over examples, NaN where there is none."""
    shares: np.ndarray = np.divide(hits, examples, out=np.full(hits.shape, np.nan), where=examples > 0)
    return shares
