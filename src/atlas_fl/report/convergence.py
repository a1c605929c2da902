"""Figure 1: how each task converges, score above and loss below, with the majority class as the line to beat."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from atlas_fl.io.scores import History, mean_series, sampled_series
from atlas_fl.report.record import Record
from atlas_fl.report.style import FAINT, INK, NOTE_SIZE, TICK_SIZE, bare, new_figure, say, task_colours, tidy

COLUMNS = 4


def draw(record: Record) -> Figure:
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
        say(figure.add_subplot(), "no round has been evaluated yet")
        return figure
    grid = figure.subplots(2 * blocks, columns, squeeze=False, height_ratios=[3, 2] * blocks)
    colours = task_colours(record.tasks)
    for index in range(blocks * columns):
        block, column = divmod(index, columns)
        above, below = grid[2 * block, column], grid[2 * block + 1, column]
        if index >= len(tasks):
            bare(above)
            bare(below)
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
