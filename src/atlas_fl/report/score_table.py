"""A table of scores: groups of runs that differ only in their seed, one row each; for the terminal, CSV and LaTeX.

`atlas sweep` and `atlas compare` write it. A row has mean and deviation over seeds, the worst client, the gain over
local training, bytes and seconds; the statistics of a comparison are in `report.method_comparison`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.finished_runs import read_summary
from atlas_fl.report.format import EMPTY, number
from atlas_fl.report.table import Cell, Number, Table, count, duration, plain, size

BASELINE = "local"


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One group of runs that differ in their seed only; scores are test scores of the tasks' own metric."""

    name: str
    seeds: int
    """Runs in the group."""
    mean: float | None
    """Mean over clients, then over seeds; None where a run has no test scores."""
    std: float | None
    """Standard deviation of the per-seed means (n - 1); None for one seed."""
    worst: float | None
    """Score of the worst client, mean over seeds."""
    gain_over_local: float | None
    """Mean difference to local training, client by client and seed by seed; None where no local run shares a seed."""
    gain_over_majority: float | None
    """Accuracy above the majority class."""
    bytes_up: float
    """Bytes to the server, mean over seeds."""
    bytes_down: float
    """Bytes to the clients, mean over seeds."""
    seconds: float | None
    """Wall-clock time, mean over seeds."""
    reused_seconds: float | None
    """Seconds of the results that a run reused from earlier ones; None if a run does not say."""
    tasks: Mapping[str, float]
    """Mean score by task."""


def comparison_rows(
    groups: Mapping[str, Sequence[Path | str]],
    *,
    local: Mapping[str, Sequence[Path | str]] | None = None,
    score: Literal["final", "best"] = "final",
) -> list[ComparisonRow]:
    """One row for each group of complete runs, in the given order.

    Args:
        groups: run folders by the name of the row; the runs of a group differ in their seed.
        local: runs of local training that a row is compared with, by its name; the group called `local` by default.
        score: the model that clients end with, or the best round by validation.

    Raises:
        CheckpointError: a run is missing or not complete.
    """
    rows = []
    for name, runs in groups.items():
        alone = groups.get(BASELINE, ()) if local is None else local.get(name, ())
        baseline = {_seed(summary): summary for summary in map(read_summary, alone)}
        rows += [_row(name, [read_summary(run) for run in runs], baseline, score)] if runs else []
    return rows


def _seed(summary: Mapping[str, Any]) -> object:
    return summary["run"].get("seed")


def _row(
    name: str, summaries: Sequence[Mapping[str, Any]], baseline: Mapping[object, Mapping[str, Any]], score: str
) -> ComparisonRow:
    overall = [summary["overall"][score] for summary in summaries]
    means = [entry.get("test", {}).get("primary") for entry in overall]
    defined = [mean for mean in means if mean is not None]
    return ComparisonRow(
        name=name,
        seeds=len(summaries),
        mean=_mean(means),
        std=stdev(defined) if len(defined) == len(means) > 1 else None,
        worst=_mean([entry.get("worst_client", {}).get("primary") for entry in overall]),
        gain_over_local=_gain(summaries, baseline, score),
        gain_over_majority=_mean([entry.get("test", {}).get("gain_over_majority") for entry in overall]),
        bytes_up=fmean(summary["bytes"]["up"] for summary in summaries),
        bytes_down=fmean(summary["bytes"]["down"] for summary in summaries),
        seconds=_mean([summary.get("seconds", {}).get("total") for summary in summaries]),
        reused_seconds=_mean([summary.get("seconds", {}).get("reused") for summary in summaries]),
        tasks=_task_means(summaries, score),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None where a value is missing: a mean over the others would compare different seeds."""
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined and len(defined) == len(values) else None


def _gain(
    summaries: Sequence[Mapping[str, Any]], baseline: Mapping[object, Mapping[str, Any]], score: str
) -> float | None:
    """Mean over the seeds that local training was run with of the mean over clients; the same clients on both sides."""
    gains = []
    for summary in summaries:
        scores, local = _by_client(summary, score), _by_client(baseline.get(_seed(summary), {}), score)
        shared = scores.keys() & local.keys()
        if shared:
            gains.append(fmean(scores[client] - local[client] for client in shared))
    return fmean(gains) if gains else None


def _by_client(summary: Mapping[str, Any], score: str) -> dict[str, float]:
    clients = summary.get("clients", {})
    tested = {client: entry.get(score, {}).get("test", {}) for client, entry in clients.items()}
    return {client: test["primary"] for client, test in tested.items() if "primary" in test}


def _task_means(summaries: Sequence[Mapping[str, Any]], score: str) -> dict[str, float]:
    names = dict.fromkeys(task for summary in summaries for task in summary["tasks"])
    means = {
        task: _mean(
            [summary["tasks"].get(task, {}).get(score, {}).get("test", {}).get("primary") for summary in summaries]
        )
        for task in names
    }
    return {task: mean for task, mean in means.items() if mean is not None}


def comparison_table(rows: Sequence[ComparisonRow], *, title: str = "Comparison") -> Table:
    """One row a group, in eighty columns; the best mean and the best worst client are bold."""
    best = {name: max((getattr(row, name) or 0.0 for row in rows), default=0.0) for name in ("mean", "worst")}

    def score(row: ComparisonRow, name: str) -> Number:
        value = getattr(row, name)
        return replace(plain(value), is_bold=value == best[name])

    cells: list[list[Cell]] = [
        [
            *(row.name, count(row.seeds), score(row, "mean"), plain(row.std), score(row, "worst")),
            *(plain(row.gain_over_local, sign=True), size(row.bytes_up + row.bytes_down)),
            duration(None if row.seconds is None else row.seconds + (row.reused_seconds or 0.0)),
        ]
        for row in rows
    ]
    note = "test scores of the tasks' own metrics; std over seeds of the mean over clients; time: with what reused"
    note += " results of earlier runs had taken, without frozen states that are kept"
    if any(row.gain_over_local is None for row in rows):
        note += f"\ngain over local: {EMPTY} where no run of strategy local has the same seed and settings"
    columns = ("run", "seeds", "mean", "std", "worst client", "gain over local", "bytes", "time")
    return Table(title=title, columns=columns, rows=cells, note=note)


def tasks_table(rows: Sequence[ComparisonRow]) -> Table:
    """One row a group: the gain over guessing the majority class, and the mean score of every task."""
    tasks = _tasks(rows)
    cells: list[list[Cell]] = [
        [row.name, plain(row.gain_over_majority, sign=True), *(plain(row.tasks.get(task)) for task in tasks)]
        for row in rows
    ]
    return Table(title="By task", columns=("run", "gain over majority", *tasks), rows=cells)


def to_csv(rows: Sequence[ComparisonRow]) -> str:
    """The rows as CSV with a header, full precision, one column a task (`task:NAME`); unknown values are empty."""
    tasks = _tasks(rows)
    names = [field.name for field in fields(ComparisonRow) if field.name != "tasks"]
    cells = [[*(getattr(row, name) for name in names), *(row.tasks.get(task) for task in tasks)] for row in rows]
    return format_csv([*names, *(f"task:{task}" for task in tasks)], cells)


def to_latex(rows: Sequence[ComparisonRow]) -> str:
    """The rows as a LaTeX table (booktabs): mean with std, worst client, gain over local, by task, bytes."""
    tasks = _tasks(rows)
    cells: list[list[Cell]] = [
        [
            row.name,
            number(row.mean, 3) + ("" if row.std is None else f" ±{number(row.std, 3)}"),
            *(plain(row.worst), plain(row.gain_over_local, sign=True)),
            *(plain(row.tasks.get(task)) for task in tasks),
            size(row.bytes_up + row.bytes_down),
        ]
        for row in rows
    ]
    return Table(
        title="", columns=("run", "mean", "worst client", "gain over local", *tasks, "bytes"), rows=cells
    ).latex()


def _tasks(rows: Sequence[ComparisonRow]) -> list[str]:
    return list(dict.fromkeys(task for row in rows for task in row.tasks))
