"""The figure of a run with `--leakage`: what every cut gives away of the texts."""

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from atlas_fl.report.record import Record
from atlas_fl.report.style import INK, TICK_SIZE, new_figure, task_colours, tidy


def draw(record: Record) -> Figure:
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
        own, colour = [row for row in rows if row["task"] == task], colours[task]
        axes.plot([row["blocks"] for row in own], [row["read"] for row in own], marker=".", color=colour, label=task)
        axes.axhline(own[0]["commonest"], color=colour, linewidth=1, linestyle=(0, (4, 3)))
        for row in own:
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
