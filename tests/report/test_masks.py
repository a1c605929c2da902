"""The figures of masks."""

import numpy as np
import pytest

from atlas_fl.report.mask_figures import by_chance, draw_density, draw_overlap
from tests.report.test_plots import overlaps, text_of

LAYERS = ["embeddings", *(f"encoder.layer.{block}" for block in range(12)), "layernorm"]


def test_a_bar_for_every_layer_and_mask() -> None:
    figure = draw_density({"a": {"x": 0.2, "y": 0.4}, "b": {"x": 0.1, "y": 0.5}}, share=0.3)
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.2, 0.4, 0.1, 0.5]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y"]
    assert list(axes.lines[0].get_ydata()) == [0.3, 0.3] and "dashed" in text_of(figure)


def test_cells_are_the_overlaps_and_chance_stands_beside_them() -> None:
    shared = np.array([[1.0, 0.25], [0.25, 1.0]])
    figure = draw_overlap(["a", "b"], shared, densities=[0.1, 0.1])
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), shared)
    assert {"0.25", "1.00"} <= set(text_of(figure).split("\n"))
    assert "chance alone: 0.053" in text_of(figure)


def test_what_chance_shares_by_hand_and_by_drawing() -> None:
    # a tenth of a tenth is kept by both, nineteen hundredths by either
    assert by_chance([0.1, 0.1]) == pytest.approx(0.01 / 0.19)
    draw = np.random.default_rng(0)
    first, second = draw.random(400_000) < 0.3, draw.random(400_000) < 0.6
    assert by_chance([0.3, 0.6]) == pytest.approx((first & second).sum() / (first | second).sum(), abs=0.005)


@pytest.mark.parametrize("masks", [1, 2, 5, 10])
def test_no_words_cover_each_other_or_leave_the_page(masks: int) -> None:
    names = [f"mask least_sensitive, seed {seed}" for seed in range(masks)]
    assert overlaps(draw_density({name: dict.fromkeys(LAYERS, 0.1) for name in names}, share=0.1)) == []
    assert overlaps(draw_overlap(names, np.eye(masks), densities=[0.1] * masks)) == []
