"""Charts of a comparison of methods: scores by seed, differences from the control, the Pareto front."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atlas_fl.report.comparison_tables import shown
from atlas_fl.report.html.charts import Chart, Row, Spec, chart, row_height
from atlas_fl.report.method_comparison import MethodComparison, pareto_front
from atlas_fl.report.statistics import ROPE, MethodStatistics, PairedComparison

SAME_MEMORY = 1.02
"""Predictions that differ by less differ by the lengths of texts alone, and are no reason for a chart."""


def by_mean(comparison: MethodComparison) -> list[str]:
    """The methods, the highest mean first."""
    return sorted(comparison.rows, key=lambda name: -comparison.rows[name].statistics.mean)


def score_chart(comparison: MethodComparison, place: int) -> Chart:
    """Dots of all seeds with a line through those of one seed, means and their 95% intervals."""
    order = by_mean(comparison)
    rows: list[Row] = [
        {"method": name, "kind": "control" if name == comparison.control else "method", "seed": str(seed)}
        | {"score": float(np.mean(scores)), **_mean(comparison.rows[name].statistics)}
        for name in order
        for seed, scores in zip(comparison.seeds, comparison.scores[name])
    ]
    return chart("method_means", rows, name=f"means-{place}", methods=order, height=row_height(len(order)))


def _mean(statistics: MethodStatistics | PairedComparison) -> dict[str, Any]:
    low, high = statistics.interval or (None, None)
    return {"mean": statistics.mean, "low": low, "high": high}


def difference_chart(comparison: MethodComparison, place: int) -> Chart:
    """Differences from the control by seed, their means with 95% intervals, and what is no difference in practice."""
    order = sorted(comparison.pairs, key=lambda name: -comparison.pairs[name].mean)
    rows: list[Row] = []
    for name in order:
        pair = comparison.pairs[name]
        verdict = shown(pair) if shown(pair) in ("worse", "equal", "better") else "not decided"
        common = {"method": name, **_mean(pair), "verdict": verdict}
        seeds = zip(comparison.seeds, pair.differences)
        rows += [{**common, "seed": str(seed), "difference": difference} for seed, difference in seeds]
    return chart(
        "differences",
        rows,
        name=f"differences-{place}",
        control=comparison.control,
        axis=f"difference from {comparison.control}",
        methods=order,
        low=-ROPE,
        high=ROPE,
        height=row_height(len(order)),
    )


def _log_scale(values: Sequence[float]) -> Spec:
    """A logarithmic axis; one that is linear below the least positive value if there is a zero."""
    if min(values) > 0:
        return {"type": "log", "nice": True}
    return {"type": "symlog", "constant": min((value for value in values if value > 0), default=1.0), "nice": True}


def fronts(comparison: MethodComparison, place: int) -> list[Chart]:
    """Mean score against the bytes of a run and, where methods differ in it, against the predicted memory of the
    fullest client's device; the front joins methods that none beats in both."""
    traffic = {name: row.num_bytes for name, row in comparison.rows.items()}
    charts = [_front(comparison, traffic, name=f"front-{place}", cost="bytes of a run, both directions")]
    memory = {name: row.memory_bytes for name, row in comparison.rows.items() if row.memory_bytes is not None}
    if len(memory) == len(comparison.rows) and max(memory.values()) > SAME_MEMORY * min(memory.values()):
        cost = "predicted memory of the fullest device"
        charts.append(_front(comparison, memory, name=f"memory-front-{place}", cost=cost))
    return charts


def _front(comparison: MethodComparison, costs: Mapping[str, float], *, name: str, cost: str) -> Chart:
    scores = {method: row.statistics.mean for method, row in comparison.rows.items()}
    front = pareto_front(costs, scores)
    rows: list[Row] = [
        {"method": method, "bytes": costs[method], "score": scores[method]}
        | {"front": "front" if method in front else "beaten"}
        for method in sorted(by_mean(comparison), key=lambda method: method in front)  # those on the front lie on top
    ]
    return chart("front", rows, name=name, axis=cost, scale=_log_scale(list(costs.values())))
