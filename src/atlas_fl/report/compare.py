"""Many runs side by side: mean and spread over seeds, the worst client, the gain over local training, bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from atlas_fl.errors import CheckpointError
from atlas_fl.io.digests import check_files
from atlas_fl.io.folder import find_run
from atlas_fl.io.results import read_json
from atlas_fl.io.shapes import SUMMARY, fits, needs

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
    needs(summary, "run", "overall", "tasks", "bytes", file=find_run(run).summary)
    needs(summary["overall"], "final", "best", file=find_run(run).summary)
    return summary


def read_summary(run: Path | str) -> Mapping[str, Any]:
    """The content of `summary.json` of a complete run.

    Raises:
        CheckpointError: the run is missing or not complete.
    """
    folder = find_run(run)
    if not folder.summary.exists():
        raise CheckpointError(f"run {folder.path} is not complete: it has no summary.json; atlas resume {folder.path}")
    check_files(folder, folder.summary)
    content: Mapping[str, Any] = read_json(folder.summary)
    fits(content, SUMMARY, file=folder.summary)
    return content


def _seed(summary: Mapping[str, Any]) -> object:
    return summary["run"].get("seed")


def _row(
    name: str, summaries: Sequence[Mapping[str, Any]], baseline: Mapping[object, Mapping[str, Any]], score: str
) -> ComparisonRow:
    overall = [summary["overall"][score] for summary in summaries]
    means = [entry.get("test", {}).get("primary") for entry in overall]
    known = [mean for mean in means if mean is not None]
    return ComparisonRow(
        name=name,
        seeds=len(summaries),
        mean=_mean(means),
        std=stdev(known) if len(known) == len(means) > 1 else None,
        worst=_mean([entry.get("worst_client", {}).get("primary") for entry in overall]),
        gain_over_local=_gain(summaries, baseline, score),
        gain_over_majority=_mean([entry.get("test", {}).get("gain_over_majority") for entry in overall]),
        bytes_up=fmean(summary["bytes"]["up"] for summary in summaries),
        bytes_down=fmean(summary["bytes"]["down"] for summary in summaries),
        seconds=_mean([summary.get("seconds", {}).get("total") for summary in summaries]),
        tasks=_task_means(summaries, score),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None where a value is missing: a mean over the others would compare different seeds."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _gain(
    summaries: Sequence[Mapping[str, Any]], baseline: Mapping[object, Mapping[str, Any]], score: str
) -> float | None:
    """Mean over the seeds that local training was run with of the mean over clients; the same clients on both sides."""
    gains = []
    for summary in summaries:
        own, local = _by_client(summary, score), _by_client(baseline.get(_seed(summary), {}), score)
        shared = own.keys() & local.keys()
        if shared:
            gains.append(fmean(own[client] - local[client] for client in shared))
    return fmean(gains) if gains else None


def _by_client(summary: Mapping[str, Any], score: str) -> dict[str, float]:
    clients = summary.get("clients", {})
    tested = {client: entry.get(score, {}).get("test", {}) for client, entry in clients.items()}
    return {client: test["primary"] for client, test in tested.items() if "primary" in test}


def _task_means(summaries: Sequence[Mapping[str, Any]], score: str) -> dict[str, float]:
    names = dict.fromkeys(task for summary in summaries for task in summary["tasks"])
    found = {
        task: _mean(
            [summary["tasks"].get(task, {}).get(score, {}).get("test", {}).get("primary") for summary in summaries]
        )
        for task in names
    }
    return {task: mean for task, mean in found.items() if mean is not None}
