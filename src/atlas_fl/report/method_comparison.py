"""`atlas compare`: methods over the same seeds, with intervals, paired tests against a control and hurt clients.

The scores are those of finished runs: a run of every method for every seed, with the same clients. How they are
written: `report.comparison_tables`. Which statistic answers which question: docs/algorithms/statistics.md.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from atlas_fl.errors import ConfigError, DataError
from atlas_fl.frozen import Frozen
from atlas_fl.report.finished_runs import Measures, RunScores, read_finished_run
from atlas_fl.report.statistics import (
    Interval,
    MethodStatistics,
    PairedComparison,
    compare_with_control,
    describe_method,
    hurt_share,
    percentile_interval,
    round_scores,
    share_of_draws,
    task_means,
)

BASELINE = "local"
AVERAGE = "fedavg"
"""The method that "worse than the average" is measured against."""
LEVEL_WITH = 0.0005
"""Least difference of two means that three decimals tell from none."""
MOST_NAMED = 4
"""Methods that a sentence names."""
CONTROLS = ("fedavg_cluster", AVERAGE, BASELINE)
"""Default controls: the first of these that is there."""


class MethodRow(Measures):
    """Row of one method in a comparison, or of one value in a sweep: runs that differ in their seed."""

    statistics: MethodStatistics
    """Statistics of its test scores; `hurt` is against local training, None without it."""
    hurt_by_average: float | None
    """Share of seeds x clients that score less than with FedAvg, whatever the control is; None without FedAvg and of
    FedAvg itself."""
    hurt_by_control: float | None
    """Share of seeds x clients that score less than with the control; None of the control itself."""
    variance_in_tasks: float | None
    """Variance of the scores of the clients of a task, the mean over tasks and seeds; None without two of a task."""
    tasks: Mapping[str, float]
    """Mean score by task."""


class MethodComparison(Frozen):
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
    by_examples: Mapping[str, Interval] = field(default_factory=dict)
    """By method, the interval of its difference over draws of the test examples, as all intervals then are: a user's
    own data keep these examples in all seeds, so that seeds alone would say too little. Empty for other data."""


def compare_methods(
    groups: Mapping[str, Sequence[Path | str]], *, control: str | None = None, score: Literal["final", "best"] = "final"
) -> MethodComparison:
    """The comparison of these finished runs.

    Args:
        groups: run folders by method, one for each seed.
        control: the method that the others are compared with; by default clustered FedAvg, FedAvg or local training.
        score: the model that clients end with, or the best round by validation.

    Raises:
        ConfigError: no method is called `control`.
        CheckpointError: a run is missing or not complete.
        DataError: the runs of two methods differ in their seeds or clients, or a client has no test score.
    """
    read = {name: [read_finished_run(run, score=score).scores for run in runs] for name, runs in groups.items()}
    return compare_scores(read, control=control)


def compare_scores(groups: Mapping[str, Sequence[RunScores]], *, control: str | None = None) -> MethodComparison:
    """The comparison of runs of which these scores are known, by method; errors as of `compare_methods`."""
    if control is None:
        control = default_control(list(groups))
    if control not in groups:
        raise ConfigError(f"--control is {control}; allowed: one of the compared, {', '.join(groups)}")
    groups = {name: sorted(runs, key=lambda run: run.seed) for name, runs in groups.items()}
    seeds, clients = _common(groups)
    scores = {name: _matrix(runs, clients) for name, runs in groups.items()}
    compared = MethodComparison(
        control=control,
        seeds=seeds,
        clients=clients,
        scores={name: tuple(map(tuple, values.tolist())) for name, values in scores.items()},
        rows={
            name: _row(
                runs,
                clients,
                local=scores.get(BASELINE),
                average=None if name == AVERAGE else scores.get(AVERAGE),
                control=None if name == control else scores[control],
            )
            for name, runs in groups.items()
        },
        pairs=compare_with_control(scores, control=control, seed=0) if len(seeds) > 1 else {},
    )
    drawn = {name: [run.resampled for run in runs] for name, runs in groups.items()}
    return compared if any(None in runs for runs in drawn.values()) else _by_examples(compared, drawn)


def _by_examples(compared: MethodComparison, drawn: Mapping[str, Sequence[Any]]) -> MethodComparison:
    """The comparison with intervals over draws of the test examples, which are alike in all methods and seeds."""
    means = {
        name: np.mean([run[client].astype(np.float64) for run in runs for client in compared.clients], axis=0)
        for name, runs in drawn.items()
    }
    draws = {name: mean - means[compared.control] for name, mean in means.items() if name != compared.control}
    intervals = {name: percentile_interval(drawn) for name, drawn in draws.items()}
    rows = {
        name: replace(row, statistics=replace(row.statistics, interval=percentile_interval(means[name])))
        for name, row in compared.rows.items()
    }
    pairs = {
        name: replace(pair, interval=intervals[name], bayesian=share_of_draws(draws[name]))
        for name, pair in compared.pairs.items()
    }
    return replace(compared, rows=rows, pairs=pairs, by_examples=intervals)


CHANCE = 0.05
"""p up to which a difference is called significant."""


def comparison_sentence(compared: MethodComparison | None) -> str:
    """Which methods are ahead of the control, by how much and on how many clients, as one line; best first.

    Of one method, and of no comparison, it is empty; of one seed it names no p.
    """
    if compared is None:
        return ""
    means = {name: np.array(values).mean(axis=0) for name, values in compared.scores.items()}
    control = means.pop(compared.control, None)
    words: list[str] = []
    others: Counter[str] = Counter()
    for name in sorted(means, key=lambda name: -means[name].mean()):
        gains, pair = means[name] - control, compared.pairs.get(name)
        mean = float(gains.mean())
        verb = "level with" if abs(mean) < LEVEL_WITH else "ahead of" if mean > 0 else "behind"
        others[verb] += len(words) >= MOST_NAMED
        size = "" if abs(mean) < LEVEL_WITH else f" by {abs(mean):.3f}"
        better = f"better on {int((round_scores(gains) > 0).sum())} of {len(gains)} clients"
        chance = _interval_words(compared.by_examples[name]) if compared.by_examples else _chance_words(pair, words)
        words.append(f"{name} is {verb} {compared.control if not words else 'it'}{size} ({better}, {chance})")
    rest = ", ".join(f"{count} {verb.split()[0]}" for verb, count in others.items() if count)
    return "; ".join([*words[:MOST_NAMED], *([f"the other {others.total()}: {rest}"] if rest else [])])


def _interval_words(interval: Interval) -> str:
    low, high = interval
    return f"95% {low:+.3f} to {high:+.3f}{', within noise' if low <= 0 <= high else ''}"


def _chance_words(pair: PairedComparison | None, said: Sequence[str]) -> str:
    """The p of a difference over seeds, and the least p of so few seeds unless that was said."""
    if pair is None:
        return "one seed"
    if pair.sign_flip_p <= CHANCE or not pair.mean:
        return f"p {pair.sign_flip_p:.2g}"
    least = f"; {len(pair.differences)} seeds cannot show less than {pair.least_p:.2g}"
    is_new = pair.least_p > CHANCE and not any(least in words for words in said)
    return f"p {pair.sign_flip_p:.2g}, not significant{least * is_new}"


def describe_runs(groups: Mapping[str, Sequence[RunScores]]) -> MethodComparison:
    """Groups of runs that differ in their seed alone, compared with nothing; groups may differ in their clients."""
    rows = {name: _row(runs, list(runs[0].scores)) for name, runs in groups.items()}
    return MethodComparison(control="", seeds=(), clients=(), scores={}, rows=rows, pairs={})


Matrix: TypeAlias = npt.NDArray[np.float64]
"""Scores, (seeds, clients)."""


def _matrix(runs: Sequence[RunScores], clients: Sequence[str]) -> Matrix:
    return np.asarray([[run.scores[client] for client in clients] for run in runs], np.float64)


def _row(
    runs: Sequence[RunScores],
    clients: Sequence[str],
    *,
    local: Matrix | None = None,
    average: Matrix | None = None,
    control: Matrix | None = None,
) -> MethodRow:
    """The row of these runs; clients may be hurt against local training, the average and the control."""
    scores = _matrix(runs, clients)
    tasks = [runs[0].tasks[client] for client in clients]
    return MethodRow(
        statistics=describe_method(scores, baseline=local),
        hurt_by_average=None if average is None else hurt_share(scores, average),
        hurt_by_control=None if control is None else hurt_share(scores, control),
        variance_in_tasks=variance_in_tasks(scores, tasks),
        **{one.name: _mean([getattr(run, one.name) for run in runs]) for one in fields(Measures)},
        tasks=dict(zip(dict.fromkeys(tasks), task_means(scores, tasks).mean(axis=0).tolist(), strict=True)),
    )


def default_control(names: Sequence[str]) -> str:
    """The first of `CONTROLS` that is among these methods, with any settings, or else the first of them."""
    return next((name for control in CONTROLS for name in names if name.split()[0] == control), names[0])


def pareto_front(costs: Mapping[str, float], scores: Mapping[str, float]) -> list[str]:
    """The methods than which no other costs as little and scores as much, and better in one of both; cheapest first.

    >>> pareto_front({"a": 0, "b": 5, "c": 5, "d": 9}, {"a": 0.5, "b": 0.7, "c": 0.6, "d": 0.7})
    ['a', 'b']
    """
    points = {name: (cost, -scores[name]) for name, cost in costs.items()}
    front: list[str] = []
    for name in sorted(points, key=lambda name: points[name]):
        if not front or scores[name] > scores[front[-1]] or points[name] == points[front[-1]]:
            front.append(name)
    return front


def _common(groups: Mapping[str, Sequence[RunScores]]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The seeds and the clients that all methods have."""
    first, *others = groups
    seeds = {name: [run.seed for run in runs] for name, runs in groups.items()}
    for name in others:
        if seeds[name] != seeds[first]:
            raise DataError(
                f"{name} has the seeds {seeds[name]} and {first} {seeds[first]}; pairs need the same: run the missing"
            )
    clients = tuple(groups[first][0].scores)
    for name, runs in groups.items():
        for run in runs:
            if set(run.scores) != set(clients):
                raise DataError(
                    f"the run of {name} with seed {run.seed} has other clients than the others; compare alike"
                )
    return tuple(seeds[first]), clients


def _mean(values: Sequence[float | None]) -> Any:
    """The mean; None where one of the values is."""
    return None if None in values else float(np.mean(np.asarray(values)))


def variance_in_tasks(scores: Matrix, tasks: Sequence[str]) -> float | None:
    """The unbiased variance of the scores, (seeds, clients), of the clients of a task: mean over tasks and seeds."""
    groups = [[k for k, own in enumerate(tasks) if own == task] for task in dict.fromkeys(tasks)]
    variances = [scores[:, group].var(axis=1, ddof=1).mean() for group in groups if len(group) > 1]
    return float(np.mean(variances)) if variances else None
