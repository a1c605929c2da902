"""`atlas compare`: methods over the same seeds, with intervals, paired tests against a control and hurt clients.

The scores are those of finished runs: a run of every method for every seed, with the same clients. Written as tables,
JSON, Markdown and LaTeX. Which statistic answers which question: docs/algorithms/statistics.md.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.markup import escape
from rich.table import Table

from atlas_fl.errors import ConfigError, DataError
from atlas_fl.experiment.tuning import TunedMethod
from atlas_fl.report.finished_runs import RunScores, read_scores
from atlas_fl.report.format import EMPTY, add_columns, human_bytes, new_table, number
from atlas_fl.report.score_table import BASELINE, escape_latex
from atlas_fl.report.statistics import (
    ROPE,
    MethodStatistics,
    PairedComparison,
    compare_with_control,
    describe_methods,
    hurt_share,
    least_sign_flip_p,
)

CONTROLS = ("fedavg_cluster", "fedavg", BASELINE)
"""Whom others are compared with where nobody says: the first of these that is there."""


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """What a comparison says of one method."""

    statistics: MethodStatistics
    """Of its test scores; `hurt` is against local training, None without it."""
    hurt_by_control: float | None
    """Share of seeds x clients that score less than with the control; None of the control itself."""
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
                hurt_by_control=None if name == control else hurt_share(values, scores[control]),
                gain_over_majority=_mean([run.gain_over_majority for run in by_seed.values()]),
                variance_in_tasks=variance_in_tasks(values, tasks),
                bytes_below_whole=_mean([run.bytes_below_whole for run in by_seed.values()]),
                num_bytes=float(np.mean([run.num_bytes for run in by_seed.values()])),
                seconds=_mean([run.seconds for run in by_seed.values()]),
            )
            for (name, by_seed), values in zip(runs.items(), scores.values(), strict=True)
        },
        pairs=compare_with_control(scores, control=control, seed=seed) if len(seeds) > 1 and len(scores) > 1 else {},
    )


def _control(control: str | None, names: Sequence[str]) -> str:
    if control is None:
        return next((name for name in CONTROLS if name in names), names[0])
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


def methods_table(comparison: MethodComparison) -> Table:
    """One row a method, in eighty columns."""
    table = new_table("Methods")
    headings = ["mean and\n95%", "middle\nhalf", "worst\nclient", "lowest\nthird", "hurt:\nlocal", "hurt:\ncontrol"]
    add_columns(table, ["method"], [*headings, "bytes"])
    for name, row in comparison.rows.items():
        statistics = row.statistics
        table.add_row(
            escape(name),
            number(statistics.mean, 3) + _half_width(statistics.interval),
            number(statistics.interquartile_mean, 3),
            number(statistics.worst_client, 3),
            number(statistics.lowest_third, 3),
            number(statistics.hurt, 2),
            number(row.hurt_by_control, 2),
            human_bytes(row.num_bytes),
        )
    table.caption = (
        f"test scores over {len(comparison.seeds)} seeds and {len(comparison.clients)} clients; middle half:"
        " interquartile mean over seeds x tasks;\nhurt: share of clients that score less than with local training, or"
        f" with the control, {comparison.control}"
    )
    return table


def _interval(interval: tuple[float, float] | None) -> str:
    return EMPTY if interval is None else f"{interval[0]:.3f}..{interval[1]:.3f}"


def pairs_table(comparison: MethodComparison) -> Table:
    """One row a method against the control, in eighty columns."""
    table = new_table(f"Against {comparison.control}")
    headings = ["difference\nand 95%", "d_z", "p", "p\n(Holm)", "P\n(equal)", "P\n(better)", "seeds\nneeded"]
    add_columns(table, ["method"], headings)
    for name, pair in comparison.pairs.items():
        table.add_row(
            escape(name),
            number(pair.mean, 3, sign=True) + _half_width(pair.interval),
            number(pair.effect_size, 1, sign=True),
            number(pair.sign_flip_p, 3),
            number(pair.adjusted_p, 3),
            number(pair.bayesian.rope, 2),
            number(pair.bayesian.right, 2),
            EMPTY if pair.seeds_needed is None else str(pair.seeds_needed),
        )
    least = least_sign_flip_p(len(comparison.seeds))
    table.caption = (
        f"paired by seed; p by sign flips, at least {least:.3g} with {len(comparison.seeds)} seeds, Holm over the rows;"
        f"\nP: Bayesian signed-rank, equal within {ROPE:g}; seeds needed: for a difference of that size, power .8"
    )
    return table


def _half_width(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" ±{(interval[1] - interval[0]) / 2:.3f}"


def methods_json(comparison: MethodComparison, tuned: Sequence[TunedMethod] = ()) -> str:
    """All of it as strict JSON, and what was tried of each method."""
    tuning = {method.strategy: [asdict(trial) for trial in method.trials] for method in tuned}
    return json.dumps({**asdict(comparison), "tuning": tuning}, indent=1, allow_nan=False) + "\n"


def methods_markdown(comparison: MethodComparison, tuned: Sequence[TunedMethod] = ()) -> str:
    """Both tables as Markdown, and what was tried of each method, the best first."""
    lines = [
        f"{len(comparison.seeds)} seeds, {len(comparison.clients)} clients, control `{comparison.control}`",
        "",
        "| method | mean | 95% | worst client | lowest third | hurt: local | hurt: control | bytes |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| `{name}` | {' | '.join(_cells(row))} |" for name, row in comparison.rows.items()),
    ]
    if comparison.pairs:
        lines += [
            "",
            f"| minus `{comparison.control}` | difference | 95% | d_z | p | p (Holm) | Wilcoxon p | equal | better |",
            "|---|---|---|---|---|---|---|---|---|",
            *(f"| `{name}` | {' | '.join(_pair_cells(pair))} |" for name, pair in comparison.pairs.items()),
        ]
    if tuned:
        lines += ["", "| method | tried on development seeds: settings (validation) |", "|---|---|"]
        lines += [f"| `{method.strategy}` | {_trials(method)} |" for method in tuned]
    return "\n".join([*lines, ""])


def _trials(method: TunedMethod) -> str:
    ordered = sorted(method.trials, key=lambda trial: trial.validation, reverse=True)
    return "; ".join(
        " ".join(f"{name} {value:g}" for name, value in trial.settings.items()) + f" ({trial.validation:.3f})"
        for trial in ordered
    )


def methods_latex(comparison: MethodComparison) -> str:
    """The methods as a LaTeX table (booktabs), with the difference to the control and its adjusted p."""
    headings = ["method", "mean", "95\\%", "worst client", "difference", "p (Holm)"]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", r"\toprule", " & ".join(headings) + r" \\"]
    lines.append(r"\midrule")
    for name, row in comparison.rows.items():
        mean, interval, worst = _cells(row)[:3]
        pair = comparison.pairs.get(name)
        against = [EMPTY, EMPTY] if pair is None else [f"${pair.mean:+.3f}$", number(pair.adjusted_p, 3)]
        lines.append(" & ".join([escape_latex(name), mean, interval, worst, *against]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _cells(row: MethodRow) -> list[str]:
    statistics = row.statistics
    return [
        number(statistics.mean, 3),
        _interval(statistics.interval),
        number(statistics.worst_client, 3),
        number(statistics.lowest_third, 3),
        number(statistics.hurt, 2),
        number(row.hurt_by_control, 2),
        human_bytes(row.num_bytes),
    ]


def _pair_cells(pair: PairedComparison) -> list[str]:
    return [
        number(pair.mean, 3, sign=True),
        _interval(pair.interval),
        number(pair.effect_size, 2, sign=True),
        number(pair.sign_flip_p, 3),
        number(pair.adjusted_p, 3),
        number(pair.wilcoxon_p, 3),
        number(pair.bayesian.rope, 2),
        number(pair.bayesian.right, 2),
    ]
