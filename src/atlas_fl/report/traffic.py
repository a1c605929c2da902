"""Figure 6: the bytes that crossed the network, by kind, direction and round."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from atlas_fl.io.ledger import KINDS, Totals
from atlas_fl.report.record import Record
from atlas_fl.report.style import INK, KIND_COLOURS, LABEL_SIZE, TICK_SIZE, new_figure, say, tidy
from atlas_fl.report.words import human_bytes


def draw(record: Record) -> Figure:
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
        say(figure.add_subplot(), "this run sent nothing")
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
    for text, place, align in (("up", 0.98, "top"), ("down", 0.02, "bottom")):
        axes.text(0.01, place, text, transform=axes.transAxes, size=LABEL_SIZE, weight="bold", color=INK, va=align)


def _kinds(axes: Axes, record: Record, kinds: Sequence[str]) -> None:
    tidy(axes, title="by kind", grid="")
    sums = [sum(record.totals.by_kind[kind].values()) for kind in kinds]
    places = range(len(kinds))
    axes.barh(places, sums, color=[KIND_COLOURS[kind] for kind in kinds], height=0.62)
    axes.set_yticks(places, labels=kinds)
    axes.invert_yaxis()
    for place, size in zip(places, sums):
        share = 100 * size / record.totals.total
        percent = f"{share:.1f}%" if share >= 0.05 else "below 0.1%"
        axes.annotate(
            f"{human_bytes(size)}, {percent}",
            (size, place),
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
