"""`atlas compare`: methods over the same seeds, with intervals, paired tests against a control and hurt clients.

The scores are those of finished runs: a run of every method for every seed, with the same clients. How they are
written: `report.comparison_tables`. Which statistic answers which question: docs/algorithms/statistics.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from atlas_fl.errors import ConfigError, DataError
from atlas_fl.report.finished_runs import RunScores, read_scores
from atlas_fl.report.score_table import BASELINE
from atlas_fl.report.statistics import (
    MethodStatistics,
    PairedComparison,
    compare_with_control,
    describe_methods,
    hurt_share,
)

AVERAGE = "fedavg"
"""The method that "worse than the average" is measured against."""
CONTROLS = ("fedavg_cluster", AVERAGE, BASELINE)
"""Default controls: the first of these that is there."""


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """Row of one method in a comparison."""

    statistics: MethodStatistics
    """Statistics of its test scores; `hurt` is against local training, None without it."""
    hurt_by_average: float | None
    """Share of seeds x clients that score less than with FedAvg, whatever the control is; None without FedAvg and of
    FedAvg itself."""
    hurt_by_control: float | None
    """Share of seeds x clients that score less than with the control; None of the control itself."""
    loss: float | None
    """Mean test loss: cross-entropy in nats where labels are classes; None where a run does not say."""
    calibration_error: float | None
    """Mean expected calibration error; None where a run does not say."""
    gain_over_majority: float | None
    """Mean accuracy above the majority class."""
    variance_in_tasks: float | None
    """Variance of the scores of the clients of a task, the mean over tasks and seeds; None without two of a task."""
    num_bytes: float
    """Bytes of a run, both directions."""
    bytes_below_whole: float | None
    """Share of the bytes that it does not send of those of whole models in every round; None where a run says none."""
    seconds: float | None
    """Wall-clock time of a run; None where a run does not say."""
    reused_seconds: float | None
    """Seconds of the results that a run reused from earlier ones; None if a run does not say."""
    memory_bytes: float | None
    """Memory that training takes of the fullest client's device, as predicted; None where a run does not say."""


@dataclass(frozen=True, kw_only=True)
class MethodComparison:
    """Methods over the same seeds and clients."""

    control: str
    seeds: tuple[int, ...]
    clients: tuple[str, ...]
    scores: Mapping[str, tuple[tuple[float, ...], ...]]
    """Test scores by method, (seeds, clients)."""
    rows: Mapping[str, MethodRow]
    """By method."""
    pairs: Mapping[str, PairedComparison]
    """By method: its scores minus those of the control; empty for one seed."""


def compare_methods(
    groups: Mapping[str, Sequence[Path | str]],
    *,
    control: str | None = None,
    score: Literal["final", "best"] = "final",
    seed: int = 0,
) -> MethodComparison:
    """The comparison of these finished runs.

    Args:
        groups: run folders by method, one for each seed.
        control: the method that the others are compared with; by default clustered FedAvg, FedAvg or local training.
        score: the model that clients end with, or the best round by validation.
        seed: of the bootstrap and of what tests draw.

    Raises:
        ConfigError: no method is called `control`.
        CheckpointError: a run is missing or not complete.
        DataError: the runs of two methods differ in their seeds or clients, or a client has no test score.
    """
    read = {name: [read_scores(run, score=score) for run in runs] for name, runs in groups.items()}
    return compare_scores(read, control=control, seed=seed)


def compare_scores(
    groups: Mapping[str, Sequence[RunScores]], *, control: str | None = None, seed: int = 0
) -> MethodComparison:
    """The comparison of runs of which these scores are known, by method; errors as of `compare_methods`."""
    runs = {name: {run.seed: run for run in members} for name, members in groups.items()}
    control = _control(control, list(runs))
    seeds, clients = _common(runs)
    scores = {
        name: np.asarray([[by_seed[seed].scores[client] for client in clients] for seed in seeds], np.float64)
        for name, by_seed in runs.items()
    }
    first = next(iter(runs.values()))[seeds[0]]
    tasks = [first.tasks[client] for client in clients]
    local = BASELINE if BASELINE in scores else None
    described = describe_methods(scores, seed=seed, baseline=local, tasks=tasks, whole_seeds=True)
    return MethodComparison(
        control=control,
        seeds=seeds,
        clients=clients,
        scores={name: tuple(map(tuple, values.tolist())) for name, values in scores.items()},
        rows={
            name: MethodRow(
                statistics=described[name],
                hurt_by_average=None
                if name == AVERAGE or AVERAGE not in scores
                else hurt_share(values, scores[AVERAGE]),
                hurt_by_control=None if name == control else hurt_share(values, scores[control]),
                loss=_mean([run.loss for run in by_seed.values()]),
                calibration_error=_mean([run.calibration_error for run in by_seed.values()]),
                gain_over_majority=_mean([run.gain_over_majority for run in by_seed.values()]),
                variance_in_tasks=variance_in_tasks(values, tasks),
                bytes_below_whole=_mean([run.bytes_below_whole for run in by_seed.values()]),
                num_bytes=float(np.mean([run.num_bytes for run in by_seed.values()])),
                seconds=_mean([run.seconds for run in by_seed.values()]),
                reused_seconds=_mean([run.reused_seconds for run in by_seed.values()]),
                memory_bytes=_mean([run.memory_bytes for run in by_seed.values()]),
            )
            for (name, by_seed), values in zip(runs.items(), scores.values(), strict=True)
        },
        pairs=compare_with_control(scores, control=control, seed=seed) if len(seeds) > 1 and len(scores) > 1 else {},
    )


def default_control(names: Sequence[str]) -> str:
    """The first of `CONTROLS` that is among these methods, or else the first of them."""
    return next((name for name in CONTROLS if name in names), names[0])


def pareto_front(costs: Mapping[str, float], scores: Mapping[str, float]) -> list[str]:
    """The methods than which no other costs as little and scores as much, and better in one of both; cheapest first.

    >>> pareto_front({"a": 0, "b": 5, "c": 5, "d": 9}, {"a": 0.5, "b": 0.7, "c": 0.6, "d": 0.7})
    ['a', 'b']
    """
    front = [
        name
        for name in costs
        if not any(
            costs[other] <= costs[name]
            and scores[other] >= scores[name]
            and (costs[other] < costs[name] or scores[other] > scores[name])
            for other in costs
        )
    ]
    return sorted(front, key=lambda name: costs[name])


def _control(control: str | None, names: Sequence[str]) -> str:
    if control is None:
        return default_control(names)
    if control not in names:
        raise ConfigError(f"--control is {control}; allowed: one of the compared, {', '.join(names)}")
    return control


def _common(runs: Mapping[str, Mapping[int, RunScores]]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The seeds and the clients that all methods have."""
    names = list(runs)
    for name in names[1:]:
        if set(runs[name]) != set(runs[names[0]]):
            raise DataError(
                f"{name} has the seeds {sorted(runs[name])} and {names[0]} {sorted(runs[names[0]])}; pairs"
                " need the same: run the missing ones"
            )
    seeds = tuple(sorted(runs[names[0]]))
    clients = tuple(runs[names[0]][seeds[0]].scores)
    for name, by_seed in runs.items():
        for seed, run in by_seed.items():
            if set(run.scores) != set(clients):
                raise DataError(f"the run of {name} with seed {seed} has other clients than the others; compare alike")
    return seeds, clients


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined and len(defined) == len(values) else None


def variance_in_tasks(scores: np.ndarray, tasks: Sequence[str]) -> float | None:
    """The unbiased variance of the scores, (seeds, clients), of the clients of a task: mean over tasks and seeds."""
    groups = [[k for k, own in enumerate(tasks) if own == task] for task in dict.fromkeys(tasks)]
    variances = [scores[:, group].var(axis=1, ddof=1).mean() for group in groups if len(group) > 1]
    return float(np.mean(variances)) if variances else None
