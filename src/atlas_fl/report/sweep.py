"""Tables, CSV and charts of sweeps and searches: score over a setting, with error bars over seeds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from atlas_fl.experiment.search import SearchResult, Trial
from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.finished_runs import read_summary
from atlas_fl.report.html.charts import TALLEST, Chart, Row, chart
from atlas_fl.report.table import Cell, Table, count, plain

EVENLY = "iid"
"""The end of an axis of classes per client: all of them."""

WORDS = {
    "nc": "classes per client (N_c)",
    "local_steps": "local steps (J)",
    "lr": "learning rate",
}
"""Names of settings in a figure, if their own do not say it."""


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """The runs of one combination of values."""

    scores: tuple[float, ...]
    """Final test score of each seed, mean over clients; none if a run has no test scores."""

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
    lines: Mapping[str, Mapping[str, SweepCell]]
    """By the values of the other settings, and by the value on the axis; the line of a sweep over one setting is ``."""
    metric: str
    """`accuracy` where that is every task's metric, else `score`."""
    seeds: int


def read_sweep_scores(changes: Sequence[Mapping[str, str]], runs: Sequence[Path | str]) -> SweepScores:
    """Scores of complete runs, each with the swept settings that it differs in; seeds are runs of equal settings.

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
        line: {value: SweepCell(scores=tuple(scores)) for value, scores in cells.items()}
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
    """Name of a setting in a figure."""
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


def _sort_values(values: Sequence[str], lines: Mapping[str, Mapping[str, SweepCell]]) -> tuple[str, ...]:
    if _are_numbers(values):
        return tuple(sorted(values, key=lambda value: (value == EVENLY, _number(value) or 0.0)))
    means = {value: fmean(cells[value].mean for cells in lines.values() if value in cells) for value in values}
    return tuple(sorted(values, key=lambda value: means[value], reverse=True))


def sweep_chart(swept: SweepScores, *, note: str = "") -> Chart | None:
    """Mean score by value, with error bars over seeds; None where no run has test scores.

    Numbers lie along the bottom and are joined to lines, evenly spaced; words stand at the left, the best above.
    """
    rows = _rows(swept)
    if not rows:
        return None
    names = list(swept.lines)
    lines = len(swept.values) * max(1.0, len(names) / 2)
    return chart(
        "sweep_numbers" if swept.is_numeric else "sweep_words",
        rows,
        name="sweep",
        title=f"Test {swept.metric} over {word_of(swept.along)}",
        note="; ".join(part for part in (_how(swept), note) if part),
        axis=word_of(swept.along),
        score=f"test {swept.metric}",
        values=[value if swept.is_numeric else value.replace("_", " ") for value in swept.values],
        lines=names,
        legend={"columns": 2, "labelLimit": 340} if any(names) else None,
        height=300 if swept.is_numeric else int(min(max(160, 30 * lines), TALLEST)),
    )


def _rows(swept: SweepScores) -> list[Row]:
    """A row for each seed of each cell that has scores, with the mean and the spread of the cell."""
    return [
        {
            "line": line,
            "value": value if swept.is_numeric else value.replace("_", " "),
            "mean": cells[value].mean,
            "low": cells[value].mean - cells[value].std,
            "high": cells[value].mean + cells[value].std,
            "of_seed": score,
        }
        for line, cells in swept.lines.items()
        for value in swept.values
        if value in cells
        for score in cells[value].scores
    ]


def _how(swept: SweepScores) -> str:
    if swept.seeds < 2:
        return "mean over clients, one seed"
    return f"mean over clients and {swept.seeds} seeds; bars: std over seeds; dots: each seed"


SHOWN_DIGITS, LONGEST = 3, 8


def search_table(search: SearchResult) -> Table:
    """A row for each trial, the chosen values and their score on validation; the best is bold."""
    names, best = list(search.best.changes), search.best
    rows: list[list[Cell]] = [
        [
            str(trial.number),
            *(_short(trial.changes[name]) for name in names),
            *(plain(trial.score if trial.scores else None, 4), count(trial.best_round if trial.scores else None)),
            f"{max(trial.scores, default=0)}{' given up' if trial.pruned else ''}",
        ]
        for trial in search.trials
    ]
    return Table(
        title=f"{len(search.trials)} trials",
        columns=("trial", *names, "validation", "best round", "rounds"),
        rows=rows,
        note=f"mean validation score over clients in a trial's best round; best: trial {best.number}, {best.run}",
        bold_row=search.trials.index(best),
    )


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
