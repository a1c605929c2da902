"""The figure of accuracy by class."""

import numpy as np
import pytest
from matplotlib.text import Text

from atlas_fl.report.record import Record
from atlas_fl.report.run_figures import draw_accuracy_by_class
from tests.report.test_plots import overlaps, text_of


def record_of(clients: int, classes: int) -> Record:
    """Client 0 has no image of class 0; of all others two of each, of which it recognises its number modulo 3."""
    names = [f"digits-{index}" for index in range(clients)]
    labels = {f"class {place}": 2 for place in range(classes)}
    metrics = []
    for index, name in enumerate(names):
        examples = [2] * classes
        hits = [index % 3] * classes
        if index == 0:
            examples[0] = hits[0] = 0
        counts = {"hits": hits, "examples": examples}
        metrics.append({"round": 1, "client": name, "task": "digits", "split": "test", "classes": counts})
    plan = {
        "clients": [{"name": name, "task": "digits"} for name in names],
        "data": [{"client": name, "task": "digits", "labels": labels} for name in names],
    }
    return Record(name="x", plan=plan, metrics=metrics, ledger=[])


def test_bars_are_all_images_and_cells_are_clients_by_hand() -> None:
    figure = draw_accuracy_by_class(record_of(3, 2))
    above, below = figure.axes[:2]
    # class 0: 0 + 1 + 2 of 0 + 2 + 2, class 1: 3 of 6
    assert [bar.get_height() for bar in above.patches] == [pytest.approx(0.75), pytest.approx(0.5)]
    assert list(above.lines[0].get_ydata()) == [0.6, 0.6], "6 of 10 images"
    shares = below.images[0].get_array().filled(np.nan)
    np.testing.assert_array_equal(shares, [[np.nan, 0.0], [0.5, 0.5], [1.0, 1.0]])
    said = [item.get_text() for item in figure.findobj(Text)]
    assert {"digits", "digits-2", "class 1", "0.75"} <= set(said)
    assert any("dashed: all classes" in text for text in said)


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (8, 10), (100, 10), (100, 100)])
def test_no_words_cover_each_other_or_leave_the_page(clients: int, classes: int) -> None:
    assert overlaps(draw_accuracy_by_class(record_of(clients, classes))) == []


def test_a_run_that_has_scored_nothing_says_so() -> None:
    record = record_of(2, 2)
    empty = Record(name="x", plan=record.plan, metrics=[], ledger=[])
    assert "no test images have been scored yet" in text_of(draw_accuracy_by_class(empty))
