import re

import numpy as np
import pytest

from atlas_fl.report.html.charts import SERIES, colour
from atlas_fl.report.html.elements import asset
from atlas_fl.storage.ledger import KINDS

LIGHT, DARK = (dict(re.findall(r"--([\w-]+):(#\w{6})", part)) for part in asset("page.css").split("@media")[:2])
LEAST_OF_TEXT = 4.5
LEAST_OF_GRAPHICS = 3.0


def linear(colour: str) -> np.ndarray:
    """The colour in linear RGB (sRGB, IEC 61966-2-1)."""
    shares = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    """The contrast ratio of WCAG 2: from 1 to 21."""
    low, high = sorted(float(np.dot([0.2126, 0.7152, 0.0722], linear(one))) for one in (first, second))
    return (high + 0.05) / (low + 0.05)


def test_contrast_by_hand() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_graphics_stand_out_from_the_ground(colours: dict[str, str]) -> None:
    for ink in ("ink", "faint", "accent", "warning"):
        for ground in ("ground", "panel"):
            assert contrast(colours[ink], colours[ground]) >= LEAST_OF_TEXT, (ink, ground)
    for name, value in colours.items():
        if name.startswith(("series", "kind")):
            assert contrast(value, colours["ground"]) >= LEAST_OF_GRAPHICS, name


def test_every_series_and_kind_of_message_has_a_colour_of_its_own_in_both_themes() -> None:
    series, kinds = [f"series-{place}" for place in range(SERIES)], [f"kind-{kind}" for kind in KINDS]
    assert LIGHT.keys() == DARK.keys() >= {*series, *kinds}
    for names in (series, kinds):
        assert len({LIGHT[name] for name in names}) == len(names)
    assert colour(0) == colour(SERIES) == "var(--series-0)"


def deuteranopia(colour: str) -> np.ndarray:
    """How someone without green cones sees a colour, linear RGB (Machado, Oliveira and Fernandes 2009)."""
    matrix = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    return np.clip(np.array(matrix) @ linear(colour), 0, 1)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_the_first_tasks_are_told_apart_without_green_cones(colours: dict[str, str]) -> None:
    seen = [deuteranopia(colours[f"series-{place}"]) for place in range(6)]
    apart = [np.linalg.norm(one - two) for index, one in enumerate(seen) for two in seen[index + 1 :]]
    assert min(apart) > 0.09
    red_green = [deuteranopia(colour) for colour in ("#c00000", "#507000")]  # the measure sees a pair that is confused
    assert np.linalg.norm(red_green[0] - red_green[1]) < 0.09
