"""The charts of masks and of the scales of a task vector."""

import numpy as np
import pytest

from atlas_fl.report.drawing import draw
from atlas_fl.report.mask_charts import by_chance, density_chart, overlap_chart, scales_chart
from tests.report.svg import overlaps, text_of

LAYERS = ["embeddings", *(f"encoder.layer.{block}" for block in range(12)), "layernorm"]


def test_a_bar_for_every_layer_and_mask() -> None:
    chart = density_chart({"a": {"x": 0.2, "y": 0.4}, "b": {"x": 0.1, "y": 0.5}}, share=0.3)
    assert [row["moving"] for row in chart.rows] == [0.2, 0.4, 0.1, 0.5]
    assert {"a", "b", "x", "y"} <= set(text_of(draw([chart])).split("\n")) and "dashed" in chart.note


def test_cells_are_the_overlaps_and_chance_stands_beside_them() -> None:
    text = text_of(draw([overlap_chart(["a", "b"], np.array([[1.0, 0.25], [0.25, 1.0]]), densities=[0.1, 0.1])]))
    assert {"0.25", "1.00"} <= set(text.split("\n"))
    assert "chance alone: 0.053" in text


def test_what_chance_shares_by_hand_and_by_drawing() -> None:
    # a tenth of a tenth is kept by both, nineteen hundredths by either
    assert by_chance([0.1, 0.1]) == pytest.approx(0.01 / 0.19)
    draws = np.random.default_rng(0)
    first, second = draws.random(400_000) < 0.3, draws.random(400_000) < 0.6
    assert by_chance([0.3, 0.6]) == pytest.approx((first & second).sum() / (first | second).sum(), abs=0.005)


@pytest.mark.parametrize("masks", [1, 10])
def test_no_words_cover_each_other_or_leave_the_page(masks: int) -> None:
    names = [f"mask least_sensitive, seed {seed}" for seed in range(masks)]
    charts = [
        density_chart({name: dict.fromkeys(LAYERS, 0.1) for name in names}, share=0.1),
        overlap_chart(names, np.eye(masks), densities=[0.1] * masks),
        scales_chart({scale: dict.fromkeys(names, scale) for scale in (0.0, 0.25, 1.0)}),
    ]
    assert [overlaps(draw([chart])) for chart in charts] == [[], [], []]
