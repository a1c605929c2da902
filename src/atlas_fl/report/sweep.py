"""Tables, CSV and figures of sweeps and searches: score over a setting, with error bars over seeds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from atlas_fl.experiment.search import SearchResult, Trial
from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.finished_runs import read_summary
from atlas_fl.report.format import add_columns, new_table, number
from atlas_fl.report.style import MARKERS, TASK_COLOURS, TICK_SIZE, annotate, new_figure, tidy

EVENLY = "iid"
"""The end of an axis of classes per client: all of them."""

WORDS = {
    "nc": "classes per client (N_c)",
    "local_steps": "local steps (J)",
    "lr": "learning rate",
}
"""How settings are called whose names do not say it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The runs of one combination of values."""

    scores: tuple[float, ...]
    """Of each seed: the final test score, mean over clients; none where a run has no test scores."""

    @property
    def mean(self) -> float:
        """Over seeds; NaN where there is none."""
        return fmean(self.scores) if self.scores else float("nan")

    @property
    def std(self) -> float:
        """Standard deviation over seeds (n - 1); 0 for one seed."""
        return stdev(self.scores) if len(self.scores) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class SweepScores:
    """A sweep: one setting along the axis, a line for every combination of the others."""

    along: str
    """The setting of the axis."""
    values: tuple[str, ...]
    """Its values: numbers in rising order with `iid` behind them, or words, the best first."""
    is_numeric: bool
    lines: Mapping[str, Mapping[str, Cell]]
    """By the values of the other settings, and by the value on the axis; the line of a sweep over one setting is ``."""
    metric: str
    """`accuracy` where that is every task's metric, else `score`."""
    seeds: int


def read_sweep_scores(changes: Sequence[Mapping[str, str]], runs: Sequence[Path | str]) -> SweepScores:
    """What complete runs say, each with the swept settings that it differs in; seeds are runs of equal settings.

    Along the axis goes the first setting whose values are numbers, or the first one if there is none.

    Raises:
        CheckpointError: a run is missing or not complete.
    """
    values = {name: tuple(dict.fromkeys(changed[name] for changed in changes)) for name in changes[0]}
    along = next((name for name in values if _are_numbers(values[name])), next(iter(values)))
    tests = [_test(read_summary(run)) for run in runs]
    scores_by_line: dict[str, dict[str, list[float]]] = {}
    for changed, test in zip(changes, tests, strict=True):
        line = ", ".join(f"{word_of(name)} {value}" for name, value in changed.items() if name != along)
        cell = scores_by_line.setdefault(line, {}).setdefault(changed[along], [])
        cell.extend([test["primary"]] if "primary" in test else [])
    lines = {
        line: {value: Cell(scores=tuple(scores)) for value, scores in cells.items()}
        for line, cells in scores_by_line.items()
    }
    is_accuracy = all(test.get("accuracy") == test.get("primary") for test in tests)
    return SweepScores(
        along=along,
        values=_sort_values(values[along], lines),
        is_numeric=_are_numbers(values[along]),
        lines=lines,
        metric="accuracy" if is_accuracy else "score",
        seeds=max(len(cell.scores) for cells in lines.values() for cell in cells.values()),
    )


def word_of(setting: str) -> str:
    """What a setting is called in a figure."""
    return WORDS.get(setting, setting.replace("_", " "))


def _test(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    test: Mapping[str, Any] = summary["overall"]["final"].get("test", {})
    return test


def _are_numbers(values: Sequence[str]) -> bool:
    numbers = [value for value in values if value != EVENLY]
    return bool(numbers) and all(_number(value) is not None for value in numbers)


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _sort_values(values: Sequence[str], lines: Mapping[str, Mapping[str, Cell]]) -> tuple[str, ...]:
    if _are_numbers(values):
        return tuple(sorted(values, key=lambda value: (value == EVENLY, _number(value) or 0.0)))
    means = {value: fmean(cells[value].mean for cells in lines.values() if value in cells) for value in values}
    return tuple(sorted(values, key=lambda value: means[value], reverse=True))


APART = 0.07
"""Between the points of two lines at one value, in steps of the axis, so that error bars do not cover each other."""
WIDTH = 8.0
LETTER, KEY = 0.075, 0.6
"""Inches of a letter of the legend, and of the sign before a name."""


def draw_sweep(swept: SweepScores, *, note: str = "") -> Figure:
    """Numbers lie along the bottom and are joined to lines; words stand at the left, the best above.

    Values are evenly spaced, whatever the numbers are.
    """
    rows = len(swept.values) if not swept.is_numeric else 0
    kinds = len(swept.lines)
    figure = new_figure(
        width=WIDTH,
        height=float(np.clip(2.2 + 0.42 * rows * max(1, kinds / 2), 4.6, 12.0)),
        title=f"Test {swept.metric} over {word_of(swept.along)}",
        subtitle="; ".join(part for part in (_how(swept), note) if part),
    )
    axes = figure.add_subplot()
    if not any(cell.scores for cells in swept.lines.values() for cell in cells.values()):
        annotate(axes, "no run of this sweep has test scores")
        return figure
    (_numbers if swept.is_numeric else _words)(axes, swept)
    if any(swept.lines):
        columns = int(np.clip(WIDTH // (KEY + LETTER * max(map(len, swept.lines))), 1, kinds))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=TICK_SIZE)
    return figure


def _how(swept: SweepScores) -> str:
    if swept.seeds < 2:
        return "mean over clients, one seed"
    return f"mean over clients and {swept.seeds} seeds; bars: std over seeds; dots: each seed"


def _numbers(axes: Axes, swept: SweepScores) -> None:
    tidy(axes, x=word_of(swept.along), y=f"test {swept.metric}")
    for index, (line, cells) in enumerate(swept.lines.items()):
        positions, shown = _positions(swept, cells, index)
        colour, marker = _look(index)
        spread = [cell.std for cell in shown]
        axes.errorbar(
            positions, [cell.mean for cell in shown], yerr=spread if any(spread) else None, color=colour, marker=marker,
            label=line or None, markersize=6, linewidth=1.8, capsize=3, elinewidth=1.2,
        )  # fmt: skip
        for position, cell in zip(positions, shown, strict=True):
            if len(cell.scores) > 1:
                axes.plot([position] * len(cell.scores), cell.scores, ".", color=colour, alpha=0.45, markersize=5)
    axes.set_xticks(range(len(swept.values)), labels=list(swept.values))
    axes.set_xlim(-0.5, len(swept.values) - 0.5)


def _words(axes: Axes, swept: SweepScores) -> None:
    tidy(axes, x=f"test {swept.metric}", grid="x")
    for index, (line, cells) in enumerate(swept.lines.items()):
        positions, shown = _positions(swept, cells, index)
        colour, marker = _look(index)
        spread = [cell.std for cell in shown]
        axes.errorbar(
            [cell.mean for cell in shown], positions, xerr=spread if any(spread) else None, color=colour, marker=marker,
            label=line or None, markersize=6, linestyle="", capsize=3, elinewidth=1.2,
        )  # fmt: skip
        for position, cell in zip(positions, shown, strict=True):
            if len(cell.scores) > 1:
                axes.plot(cell.scores, [position] * len(cell.scores), ".", color=colour, alpha=0.45, markersize=5)
    axes.set_yticks(range(len(swept.values)), labels=[value.replace("_", " ") for value in swept.values])
    axes.set_ylim(len(swept.values) - 0.5, -0.5)


def _positions(swept: SweepScores, cells: Mapping[str, Cell], index: int) -> tuple[Sequence[float], list[Cell]]:
    """Where the cells of a line lie on the axis; one without scores is left out."""
    shift = APART * (index - (len(swept.lines) - 1) / 2) if swept.seeds > 1 else 0.0
    pairs = [(position + shift, cells.get(value, Cell(scores=()))) for position, value in enumerate(swept.values)]
    filled = [(position, cell) for position, cell in pairs if cell.scores]
    return [position for position, _ in filled], [cell for _, cell in filled]


def _look(index: int) -> tuple[str, str]:
    return TASK_COLOURS[index % len(TASK_COLOURS)], MARKERS[index % len(MARKERS)]


SHOWN_DIGITS, LONGEST = 3, 8


def search_table(search: SearchResult) -> Table:
    """A row for each trial, what was chosen and what it scored on validation; the best is bold."""
    names, best = list(search.best.changes), search.best
    table = new_table(f"{len(search.trials)} trials")
    add_columns(table, ["trial", *names], ["validation", "best\nround", "rounds"])
    for trial in search.trials:
        chosen = [escape(_short(trial.changes[name])) for name in names]
        score = number(trial.score, 4) if trial.scores else "-"
        rounds = f"{max(trial.scores, default=0)}{' given up' if trial.pruned else ''}"
        cells = [str(trial.number), *chosen, score, str(trial.best_round) if trial.scores else "-", rounds]
        table.add_row(*cells, style="bold" if trial is best else None)
    table.caption = f"mean validation score over clients in a trial's best round; best: trial {best.number}, {best.run}"
    return table


def search_csv(trials: Sequence[Trial]) -> str:
    """The trials as CSV with a header, in full precision."""
    names = list(trials[0].changes) if trials else []
    rows: list[list[object]] = []
    for trial in trials:
        chosen = [trial.changes[name] for name in names]
        scored = [trial.score, trial.best_round, max(trial.scores)] if trial.scores else ["", "", ""]
        rows.append([trial.number, *chosen, *scored, str(trial.pruned).lower(), trial.run])
    return format_csv(["trial", *names, "validation", "best_round", "rounds", "pruned", "run"], rows)


def _short(text: str) -> str:
    """A number with the digits that matter, every other value as it is.

    >>> [_short(text) for text in ("0.0003488520557", "8", "1e-4", "random")]
    ['0.000349', '8', '1e-4', 'random']
    """
    is_long = len(text) > LONGEST and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?", text)
    return f"{float(text):.{SHOWN_DIGITS}g}" if is_long else text
