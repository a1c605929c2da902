import re

import pytest

from atlas_fl.report.html.palette import (
    LEAST_CONTRAST,
    THEMES,
    colour_variables,
    contrast,
    contrasting,
    luminance,
    series_colours,
)
from atlas_fl.report.style import KIND_COLOURS, TASK_COLOURS

LEAST_OF_TEXT = 4.5


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_graphics_stand_out_from_the_ground(theme: str) -> None:
    colours = THEMES[theme]
    for ink in ("ink", "faint", "accent", "warning"):
        for ground in ("ground", "panel"):
            assert contrast(colours[ink], colours[ground]) >= LEAST_OF_TEXT, (ink, ground)
    for name, value in series_colours(theme).items():
        assert contrast(value, colours["ground"]) >= LEAST_CONTRAST, name


def test_contrast_by_hand() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert luminance("#0000ff") == pytest.approx(0.0722)


def test_a_colour_that_stands_out_stays_as_it_is_in_the_figures() -> None:
    assert contrasting("#0072B2", ground="#ffffff") == "#0072b2"
    assert contrasting("#E69F00", ground="#ffffff") != "#e69f00"


def test_every_series_and_kind_of_message_has_a_variable_in_both_themes() -> None:
    names = {f"series-{index}" for index in range(len(TASK_COLOURS))} | {f"kind-{kind}" for kind in KIND_COLOURS}
    light, dark = (set(re.findall(r"--([\w-]+):", part)) for part in colour_variables().split("@media"))
    assert light == dark
    assert light >= names
