import numpy as np

from atlas_fl.data.task import Rows


def test_take_keeps_texts_pairs_and_labels_together() -> None:
    rows = Rows(text=("a", "b", "c"), pair=("x", "y", "z"), label=np.asarray([0, 1, 2]))
    taken = rows.take([2, 0])
    assert (taken.text, taken.pair, taken.label.tolist()) == (("c", "a"), ("z", "x"), [2, 0])
    assert len(rows) == 3
    assert len(rows.take([])) == 0
