"""Charts of a comparison of methods: scores by seed, differences from the control, clients, the Pareto front."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atlas_fl.report.comparison_tables import shown
from atlas_fl.report.html.charts import (
    FAINT,
    INK,
    Spec,
    category,
    chart,
    heat_map,
    quantity,
    row_height,
    tips,
)
from atlas_fl.report.html.elements import Chart, Row
from atlas_fl.report.html.palette import colour
from atlas_fl.report.method_comparison import MethodComparison, pareto_front
from atlas_fl.report.statistics import ROPE

VERDICTS = ("worse", "equal", "better", "not decided")
SAME_MEMORY = 1.02
"""Predictions that differ by less differ by the lengths of texts alone, and are no reason for a chart."""
VERDICT_COLOURS = (colour(1), colour(0), colour(2), FAINT)


def by_mean(comparison: MethodComparison) -> list[str]:
    """The methods, the highest mean first."""
    return sorted(comparison.rows, key=lambda name: -comparison.rows[name].statistics.mean)


def _seed_means(comparison: MethodComparison, name: str) -> list[float]:
    """The mean over the clients of every seed."""
    return [float(np.mean(scores)) for scores in comparison.scores[name]]


def score_chart(comparison: MethodComparison, place: int) -> Chart:
    """Dots of all seeds with a line through those of one seed, means and their 95% intervals."""
    order = by_mean(comparison)
    rows: list[Row] = [
        {"method": name, "rank": rank, "seed": str(seed), "score": score}
        for rank, name in enumerate(order)
        for seed, score in zip(comparison.seeds, _seed_means(comparison, name))
    ]
    means = [_mean_row(comparison, name) for name in order]
    y = category("method", None, order=order, labelOverlap="greedy")
    known = tips(("method", "method", ""), ("seed", "seed", ""), ("score", "score", ".4f"))
    seeds: Spec = {
        "encoding": {"x": quantity("score", "mean test score of the clients"), "y": y, "tooltip": known},
        "layer": [
            {
                "mark": {"type": "line", "color": FAINT, "strokeWidth": 1, "opacity": 0.35},
                "encoding": {"detail": {"field": "seed"}, "order": {"field": "rank", "type": "quantitative"}},
            },
            {"mark": {"type": "point", "filled": True, "color": FAINT, "size": 22, "opacity": 0.9}},
        ],
    }
    known = tips(("method", "method", ""), ("mean", "mean", ".4f"), ("low", "95% from", ".4f"), ("high", "to", ".4f"))
    kinds = {"domain": ["method", "control"], "range": [colour(0), colour(1)]}
    fill = {"field": "kind", "type": "nominal", "scale": kinds, "legend": None}
    layers = [seeds, *_interval_layers(y, "mean test score of the clients", fill=fill, tooltip=known)]
    return Chart(
        name=f"means-{place}",
        title="Test score of every method",
        note="large: mean over seeds with its 95% t interval, the control in orange; small: one seed, joined by lines",
        spec=chart({"data": {"name": "rows"}, "layer": layers}, height=row_height(len(order))),
        data={"rows": rows, "means": means},
    )


def _mean_row(comparison: MethodComparison, name: str) -> Row:
    statistics = comparison.rows[name].statistics
    low, high = statistics.interval or (None, None)
    kind = "control" if name == comparison.control else "method"
    return {"method": name, "kind": kind, "mean": statistics.mean, "low": low, "high": high}


def _interval_layers(y: Spec, title: str, *, fill: Spec, tooltip: Sequence[Spec]) -> list[Spec]:
    """Means of the rows `means` with their intervals."""
    return [
        {
            "data": {"name": "means"},
            "mark": {"type": "rule", "strokeWidth": 2.5},
            "encoding": {"x": quantity("low", title), "x2": {"field": "high"}, "y": y, "color": fill},
        },
        {
            "data": {"name": "means"},
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": {"x": quantity("mean", title), "y": y, "color": fill, "tooltip": list(tooltip)},
        },
    ]


def difference_chart(comparison: MethodComparison, place: int) -> Chart:
    """Differences from the control by seed, their means with 95% intervals, and what is no difference in practice."""
    pairs = comparison.pairs
    order = sorted(pairs, key=lambda name: -pairs[name].mean)
    rows: list[Row] = [
        {"method": name, "seed": str(seed), "difference": difference}
        for name in order
        for seed, difference in zip(comparison.seeds, pairs[name].differences)
    ]
    means: list[Row] = []
    for name in order:
        low, high = pairs[name].interval or (None, None)
        verdict = shown(pairs[name]) if shown(pairs[name]) in VERDICTS else VERDICTS[-1]
        means.append({"method": name, "mean": pairs[name].mean, "low": low, "high": high, "verdict": verdict})
    y = category("method", None, order=order, labelOverlap="greedy")
    title = f"difference from {comparison.control}"
    return Chart(
        name=f"differences-{place}",
        title=f"Difference from {comparison.control}, paired by seed",
        note=f"band: within {ROPE:g}, no difference in practice; large: mean with its 95% interval; small: one seed",
        spec=chart({"data": {"name": "rows"}, "layer": _difference_layers(y, title)}, height=row_height(len(order))),
        data={"rows": rows, "means": means, "band": [{"from": -ROPE, "to": ROPE}]},
    )


def _difference_layers(y: Spec, title: str) -> list[Spec]:
    verdicts: dict[str, Any] = {
        "field": "verdict",
        "type": "nominal",
        "title": "probability of .95 or more that it is",
        "scale": {"domain": list(VERDICTS), "range": list(VERDICT_COLOURS)},
    }
    known = tips(("method", "method", ""), ("mean", "difference", "+.4f"), ("low", "95% from", "+.4f"))
    known += tips(("high", "to", "+.4f"), ("verdict", "in practice", ""))
    of_seed = tips(("method", "method", ""), ("seed", "seed", ""), ("difference", "difference", "+.4f"))
    return [
        {
            "data": {"name": "band"},
            "mark": {"type": "rect", "color": FAINT, "opacity": 0.18},
            "encoding": {"x": quantity("from", title, form="+f"), "x2": {"field": "to"}},
        },
        {"data": {"name": "band"}, "mark": {"type": "rule", "color": INK}, "encoding": {"x": {"datum": 0}}},
        {
            "mark": {"type": "point", "filled": True, "color": FAINT, "size": 22, "opacity": 0.9},
            "encoding": {"x": quantity("difference", title), "y": y, "tooltip": of_seed},
        },
        *_interval_layers(y, title, fill=verdicts, tooltip=known),
    ]


def client_map(comparison: MethodComparison, place: int) -> Chart:
    """Methods by clients: the mean over seeds of the client's test score."""
    order = by_mean(comparison)
    rows: list[Row] = [
        {"method": name, "client": client, "score": float(score)}
        for name in order
        for client, score in zip(comparison.clients, np.mean(comparison.scores[name], axis=0))
    ]
    values = [row["score"] for row in rows]
    return Chart(
        name=f"by-client-{place}",
        title="Whom a method serves: test score of every client",
        note="mean over seeds",
        spec=heat_map(
            x=category("client", None, order=comparison.clients, labelOverlap="greedy", labelAngle=-60),
            y=category("method", None, order=order, labelOverlap="greedy"),
            value="score",
            title="score",
            form=".2f",
            tooltip=tips(("method", "method", ""), ("client", "client", ""), ("score", "score", ".4f")),
            domain=(min(values), max(values)),
        ),
        data={"rows": rows},
    )


def _log_scale(values: Sequence[float]) -> Spec:
    """A logarithmic axis; one that is linear below the least positive value if there is a zero."""
    if min(values) > 0:
        return {"type": "log", "nice": True}
    return {"type": "symlog", "constant": min((value for value in values if value > 0), default=1.0), "nice": True}


def traffic_front(comparison: MethodComparison, place: int) -> Chart:
    """Mean score against the bytes of a run; the front joins methods that none beats in both."""
    costs = {name: row.num_bytes for name, row in comparison.rows.items()}
    words = "bytes of a run"
    return _front_chart(comparison, costs, name=f"front-{place}", title=words, axis=f"{words}, both directions")


def memory_front(comparison: MethodComparison, place: int) -> Chart | None:
    """Mean score against the memory of the fullest client's device, as predicted; None where all take the same."""
    costs = {name: row.memory_bytes for name, row in comparison.rows.items() if row.memory_bytes is not None}
    if len(costs) < len(comparison.rows) or max(costs.values()) <= SAME_MEMORY * min(costs.values()):
        return None
    axis = "memory of the client that needs most, as predicted"
    return _front_chart(comparison, costs, name=f"memory-front-{place}", title="the memory of a device", axis=axis)


def _front_chart(
    comparison: MethodComparison, costs: Mapping[str, float], *, name: str, title: str, axis: str
) -> Chart:
    scores = {name: row.statistics.mean for name, row in comparison.rows.items()}
    front = pareto_front(costs, scores)
    rows: list[Row] = [
        {"method": one, "bytes": costs[one], "score": scores[one], "front": "front" if one in front else "beaten"}
        for one in sorted(by_mean(comparison), key=lambda one: one in front)  # those on the front lie on top
    ]
    on_front = [row for row in rows if row["front"] == "front"]
    return Chart(
        name=name,
        title=f"Mean test score against {title}",
        note="joined: the Pareto front, methods that no other beats in both",
        spec=chart({"data": {"name": "rows"}, "layer": _front_layers(list(costs.values()), axis=axis)}, height=420),
        data={"rows": rows, "front": on_front},
    )


def _front_layers(costs: Sequence[float], *, axis: str) -> list[Spec]:
    """A step line through the front, points, and the names of those on the front."""
    x = quantity("bytes", axis, zero=False, labelExpr="format(datum.value, '.2~s') + 'B'")
    x["scale"] = _log_scale(costs)
    x["axis"] |= {"labelOverlap": "greedy"}
    y = quantity("score", "mean test score")
    known = tips(("method", "method", ""), ("score", "mean score", ".4f"), ("bytes", "bytes", ",.0f"))
    kinds = {"domain": ["front", "beaten"], "range": [colour(1), colour(0)]}
    fill = {"field": "front", "type": "nominal", "scale": kinds, "title": None}
    return [
        {
            "data": {"name": "front"},
            "mark": {"type": "line", "interpolate": "step-after", "color": colour(1), "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": fill, "tooltip": known},
        },
        {
            "data": {"name": "front"},
            "mark": {"type": "text", "align": "right", "dx": -8, "dy": -8, "fill": INK, "limit": 140},
            "encoding": {"x": x, "y": y, "text": {"field": "method"}},
        },
    ]
