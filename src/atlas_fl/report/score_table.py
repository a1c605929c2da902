"""A table of scores: groups of runs that differ only in their seed, one row each; for the terminal, CSV and LaTeX.

`atlas sweep` and `atlas compare` write it. A row has mean and deviation over seeds, the worst client, the gain over
local training, bytes and seconds; the statistics of a comparison are in `report.method_comparison`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.finished_runs import read_summary
from atlas_fl.report.format import EMPTY, add_columns, human_bytes, new_table, number, seconds
from atlas_fl.storage.json_shapes import require_fields
from atlas_fl.storage.run_folder import find_run

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
    """What the results had taken that a run reused from earlier ones; None where a run does not say."""
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
        baseline = {_seed(summary): summary for summary in map(_complete, alone)}
        rows += [_row(name, [_complete(run) for run in runs], baseline, score)] if runs else []
    return rows


def _complete(run: Path | str) -> Mapping[str, Any]:
    """The summary with all that a row needs."""
    summary = read_summary(run)
    require_fields(summary, "run", "overall", "tasks", "bytes", file=find_run(run).summary)
    require_fields(summary["overall"], "final", "best", file=find_run(run).summary)
    return summary


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
    table = new_table(title)
    add_columns(table, ["run"], ["seeds", "mean", "std", "worst\nclient", "gain over\nlocal", "bytes", "time"])
    best = {name: max((_value(row, name) for row in rows), default=0.0) for name in ("mean", "worst")}
    for row in rows:
        table.add_row(
            escape(row.name),
            str(row.seeds),
            _bold(number(row.mean, 3), _value(row, "mean") == best["mean"]),
            number(row.std, 3),
            _bold(number(row.worst, 3), _value(row, "worst") == best["worst"]),
            number(row.gain_over_local, 3, sign=True),
            human_bytes(row.bytes_up + row.bytes_down),
            EMPTY if row.seconds is None else seconds(row.seconds + (row.reused_seconds or 0.0)),
        )
    table.caption = "test scores of the tasks' own metrics; std over seeds of the mean over clients; time: with what"
    table.caption += " reused results of earlier runs had taken, without frozen states that are kept"
    if any(row.gain_over_local is None for row in rows):
        table.caption += f"\ngain over local: {EMPTY} where no run of strategy local has the same seed and settings"
    return table


def tasks_table(rows: Sequence[ComparisonRow]) -> Table:
    """One row a group: the gain over guessing the majority class, and the mean score of every task."""
    table, tasks = new_table("By task"), _tasks(rows)
    add_columns(table, ["run"], ["gain over\nmajority", *tasks])
    for row in rows:
        gain = number(row.gain_over_majority, 3, sign=True)
        table.add_row(escape(row.name), gain, *(number(row.tasks.get(task), 3) for task in tasks))
    return table


def to_csv(rows: Sequence[ComparisonRow]) -> str:
    """The rows as CSV with a header, full precision, one column a task (`task:NAME`); unknown values are empty."""
    tasks = _tasks(rows)
    plain = [name for name in ComparisonRow.__dataclass_fields__ if name != "tasks"]
    cells = [[*(getattr(row, name) for name in plain), *(row.tasks.get(task) for task in tasks)] for row in rows]
    return format_csv([*plain, *(f"task:{task}" for task in tasks)], cells)


def to_latex(rows: Sequence[ComparisonRow]) -> str:
    """The rows as a LaTeX table (booktabs): mean with std, worst client, gain over local, by task, bytes."""
    tasks = _tasks(rows)
    headings = ["run", "mean", "worst client", "gain over local", *tasks, "bytes"]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(escape_latex, headings)) + r" \\", r"\midrule"]
    for row in rows:
        spread = "" if row.std is None else rf" $\pm$ {number(row.std, 3)}"
        cells = [
            escape_latex(row.name),
            number(row.mean, 3) + spread,
            number(row.worst, 3),
            EMPTY if row.gain_over_local is None else f"${number(row.gain_over_local, 3, sign=True)}$",
            *(number(row.tasks.get(task), 3) for task in tasks),
            human_bytes(row.bytes_up + row.bytes_down),
        ]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _tasks(rows: Sequence[ComparisonRow]) -> list[str]:
    return list(dict.fromkeys(task for row in rows for task in row.tasks))


def _value(row: ComparisonRow, name: str) -> float:
    value = getattr(row, name)
    return float("-inf") if value is None else float(value)


def _bold(text: str, yes: bool) -> str:
    return f"[bold]{text}[/bold]" if yes and text != EMPTY else text


def escape_latex(text: str) -> str:
    r"""Text with what LaTeX would take for a command written out: `fedavg_cluster` is `fedavg\_cluster`."""
    commands = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(commands.get(letter, "\\" + letter if letter in "&%$#_{}" else letter) for letter in text)
