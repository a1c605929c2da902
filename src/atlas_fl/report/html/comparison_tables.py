"""Tables of a comparison of methods on its page, and what it comes down to in words."""

from collections.abc import Mapping

import numpy as np

from atlas_fl.report.comparison_tables import SHOWN, shown
from atlas_fl.report.html.comparison_charts import by_mean
from atlas_fl.report.method_comparison import AVERAGE, MethodComparison
from atlas_fl.report.score_table import BASELINE
from atlas_fl.report.statistics import ROPE, PairedComparison, compare_with_control, least_sign_flip_p
from atlas_fl.report.table import Cell, Table, count, duration, plain, share, size


def method_table(comparison: MethodComparison) -> Table:
    """One row a method: its scores, its worst clients, whom it hurts."""
    rows: list[list[Cell]] = []
    for name in by_mean(comparison):
        row, told = comparison.rows[name], comparison.rows[name].statistics
        low, high = told.interval or (None, None)
        least, most = told.interquartile_interval or (None, None)
        rows.append(
            [
                *(name, plain(told.mean), plain(low), plain(high), plain(told.std)),
                *(plain(told.interquartile_mean), plain(least), plain(most)),
                *(plain(told.worst_client), plain(told.lowest_third), plain(row.gain_over_majority, sign=True)),
                *(plain(row.loss), plain(row.calibration_error)),
                *(share(told.hurt), share(row.hurt_by_average), share(row.hurt_by_control)),
            ]
        )
    return Table(
        title="Methods",
        columns=(
            *("method", "mean", "95% from", "to", "std over seeds", "middle half", "95% from", "to"),
            *("worst client", "lowest third", "over majority", "test loss", "calibration error"),
            *(f"hurt: {BASELINE}", f"hurt: {AVERAGE}", f"hurt: {comparison.control}"),
        ),
        rows=rows,
        note=(
            "mean with a t interval over seeds; middle half: interquartile mean over seeds and tasks, its interval by a"
            " bootstrap of whole seeds; test loss: cross-entropy, nats; calibration error: confidence against accuracy;"
            " hurt: share of clients that score less than with local training, FedAvg, or the control"
        ),
    )


def pair_table(comparison: MethodComparison) -> Table:
    """One row a method: its difference from the control, and what tests say of it."""
    pairs = comparison.pairs
    rows: list[list[Cell]] = []
    for name in sorted(pairs, key=lambda name: -pairs[name].mean):
        pair = pairs[name]
        low, high = pair.interval or (None, None)
        rows.append(
            [
                *(name, shown(pair), plain(pair.mean, sign=True), plain(low, sign=True), plain(high, sign=True)),
                *(plain(pair.bayesian.left), plain(pair.bayesian.rope), plain(pair.bayesian.right)),
                *(plain(pair.sign_flip_p), plain(pair.adjusted_p), plain(pair.wilcoxon_p), plain(pair.effect_size, 2)),
                *(share(pair.probability_of_improvement), count(pair.seeds_needed)),
            ]
        )
    least = least_sign_flip_p(len(comparison.seeds))
    return Table(
        title=f"Against {comparison.control}, paired by seed",
        columns=(
            *("method", "in practice", "difference", "95% from", "to", "P worse", "P equal", "P better"),
            *("p", "p (Holm)", "p (Wilcoxon)", "d_z", "run beats run", "seeds needed"),
        ),
        rows=rows,
        note=(
            f"in practice, and P: Bayesian signed-rank test, equal within {ROPE:g}, said from {SHOWN:g} on; p: sign"
            f" flips, at least {least:.3g} here; d_z: mean over standard deviation; run beats run: of any two seeds;"
            " seeds needed: for a difference of that size with power .8"
        ),
    )


def cost_table(comparison: MethodComparison) -> Table:
    """One row a method: bytes and time of a run."""
    rows: list[list[Cell]] = []
    for name in sorted(comparison.rows, key=lambda name: comparison.rows[name].num_bytes):
        row = comparison.rows[name]
        rows.append(
            [
                *(name, plain(row.statistics.mean), size(row.num_bytes), share(row.bytes_below_whole)),
                size(row.memory_bytes),
                *(
                    duration(None if row.seconds is None else row.seconds + (row.reused_seconds or 0.0)),
                    duration(row.reused_seconds),
                ),
            ]
        )
    columns = ("method", "mean", "bytes", "below the whole model", "device memory", "time", "of it reused")
    note = "of a run, mean over seeds; below: bytes that it does not send of those of whole models in every round;"
    note += " device memory: what training takes of the client that needs most, as the plan predicts it;"
    note += (
        " reused: what results had taken that it took over from earlier runs; frozen states that are kept are not in it"
    )
    return Table(title="Costs", columns=columns, rows=rows, note=note)


def equal_in_practice(comparison: MethodComparison) -> list[str]:
    """Who is better, equal or worse than the control in practice, and who is equal to the best method."""
    best = by_mean(comparison)[0]
    lines = [_verdicts(comparison.pairs, comparison.control)]
    if best != comparison.control:
        scores = {name: np.asarray(values, np.float64) for name, values in comparison.scores.items()}
        lines.append(_verdicts(compare_with_control(scores, control=best, seed=0), best, is_best=True))
    return lines


def _verdicts(pairs: Mapping[str, PairedComparison], control: str, *, is_best: bool = False) -> str:
    """`Against X: better: a, b; equal within 0.01: c; not decided: d.`"""
    groups: dict[str, list[str]] = {"better": [], "equal": [], "worse": []}
    undecided: list[str] = []
    for name, pair in sorted(pairs.items(), key=lambda item: -item[1].mean):
        groups.get(shown(pair), undecided).append(name)
    titles = {"better": "better", "equal": f"equal within {ROPE:g}", "worse": "worse"}
    parts = [f"{titles[verdict]}: {', '.join(names)}" for verdict, names in groups.items() if names]
    parts += [f"not decided: {', '.join(undecided)}"] if undecided else []
    return f"Against {control}{', the highest mean' if is_best else ''}: {'; '.join(parts)}."
