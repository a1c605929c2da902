import re

import numpy as np
import pytest

from atlas_fl.report.html.palette import (
    KIND_COLOURS,
    LEAST_CONTRAST,
    TASK_COLOURS,
    THEMES,
    colour_variables,
    contrast,
    contrasting,
    luminance,
    series_colours,
)
from atlas_fl.storage.ledger import KINDS

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


def test_a_colour_that_stands_out_stays_as_it_is() -> None:
    assert contrasting("#0072B2", ground="#ffffff") == "#0072b2"
    assert contrasting("#E69F00", ground="#ffffff") != "#e69f00"


def test_every_series_and_kind_of_message_has_a_variable_in_both_themes() -> None:
    names = {f"series-{index}" for index in range(len(TASK_COLOURS))} | {f"kind-{kind}" for kind in KIND_COLOURS}
    light, dark = (set(re.findall(r"--([\w-]+):", part)) for part in colour_variables().split("@media"))
    assert light == dark
    assert light >= names


def test_series_and_kinds_of_messages_have_colours_that_differ() -> None:
    assert len(set(TASK_COLOURS)) == len(TASK_COLOURS) == 10
    assert len(set(KIND_COLOURS.values())) == len(KIND_COLOURS)
    assert KIND_COLOURS.keys() == set(KINDS), "every message that can be sent can be drawn"


def deuteranopia(colour: str) -> np.ndarray:
    """How someone without green cones sees a colour, linear RGB (Machado, Oliveira and Fernandes 2009)."""
    linear = np.power([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)], 2.2)
    matrix = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    return np.clip(np.array(matrix) @ linear, 0, 1)


def test_the_first_tasks_are_told_apart_without_green_cones() -> None:
    seen = [deuteranopia(colour) for colour in TASK_COLOURS[:6]]
    apart = [np.linalg.norm(one - two) for index, one in enumerate(seen) for two in seen[index + 1 :]]
    assert min(apart) > 0.12
    red_green = [deuteranopia(colour) for colour in ("#c00000", "#507000")]  # the measure sees a pair that is confused
    assert np.linalg.norm(red_green[0] - red_green[1]) < 0.12
