"""What the figure of a sweep shows, on invented scores."""

from itertools import product

import pytest

from atlas_fl.report.drawing import draw
from atlas_fl.report.html.charts import Chart
from atlas_fl.report.sweep import sweep_chart
from tests.report.svg import overlaps, text_of

SCORES = (0.50, 0.60, 0.70)
"""By seed; mean 0.6 and standard deviation 0.1 by hand."""


def swept(over: dict[str, list[str]], *, seeds: int = 3, note: str = "") -> Chart:
    """A sweep in which the first value scores `SCORES`, and every next one of each setting 0.05 more."""
    changes, scores = [], []
    for values in product(*over.values()):
        own = dict(zip(over, values, strict=True))
        shift = 0.05 * sum(over[name].index(value) for name, value in own.items())
        for score in SCORES[:seeds]:
            changes.append(own)
            scores.append(score + shift)
    return sweep_chart(changes, scores, note=note)


def lines_of(chart: Chart) -> list[str]:
    return text_of(draw([chart])).split("\n")


def test_mean_and_spread_over_seeds_by_hand() -> None:
    chart = swept({"nc": ["iid", "1"]})
    assert [row["value"] for row in chart.rows] == ["1"] * 3 + ["iid"] * 3
    assert [row["mean"] for row in chart.rows] == pytest.approx([0.65] * 3 + [0.6] * 3)
    assert [(row["high"] - row["low"]) / 2 for row in chart.rows] == pytest.approx([0.1] * 6)
    assert [row["of_seed"] for row in chart.rows[3:]] == pytest.approx([0.5, 0.6, 0.7])


def test_classes_lie_along_the_axis_and_local_steps_are_lines() -> None:
    lines = lines_of(swept({"nc": ["10", "1", "5", "iid"], "local_steps": ["4", "8", "16"]}))
    assert [line for line in lines if line in ("1", "5", "10", "iid")] == ["1", "5", "10", "iid"]
    assert [line for line in lines if "steps" in line] == [f"local steps (J) {j}" for j in (4, 8, 16)]
    assert "Test score over classes per client (N_c)" in lines


def test_numbers_lie_along_the_axis_whichever_came_first() -> None:
    chart = swept({"mask": ["random", "least_sensitive"], "sparsity": ["0.9", "0.5"]}, seeds=1)
    assert [(row["line"], row["value"]) for row in chart.rows] == [
        ("mask random", "0.5"),
        ("mask least_sensitive", "0.5"),
        ("mask random", "0.9"),
        ("mask least_sensitive", "0.9"),
    ]
    assert chart.title == "Test score over sparsity" and "one seed" in chart.note


def test_strategies_stand_in_the_order_that_comes_out() -> None:
    best = ["most sensitive", "least sensitive", "random"]
    lines = lines_of(swept({"mask": ["random", "least_sensitive", "most_sensitive"]}))
    assert [line for line in lines if line in best] == best, "the best stands above"


@pytest.mark.parametrize(
    "over",
    [
        {"nc": ["1", "5", "10", "50", "iid"], "local_steps": ["4", "8", "16"]},
        {"mask": ["least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random", "none"]},
        {"mask": ["least_sensitive", "random"], "share": ["A+B", "A+B+head"], "head_first": ["ridge", "none"]},
        {"eta": ["0", "0.01", "0.1", "0.5", "1"], "strategy": ["fedavg", "local", "atlas", "fedavg_cluster", "x"]},
    ],
)
def test_no_words_cover_each_other_or_leave_the_page(over: dict[str, list[str]]) -> None:
    assert overlaps(draw([swept(over, note="32 gradient steps in every run")])) == []
