"""The heat map of clients by classes."""

import numpy as np
from matplotlib.text import Text

from atlas_fl.report.record import Record
from atlas_fl.report.run_figures import draw_label_distribution


def record_of(clients: int, classes: int) -> tuple[Record, np.ndarray]:
    counts = np.random.default_rng(0).integers(0, 3, (clients, classes)) * 7
    plan = {
        "clients": [{"name": f"cifar-{index}", "task": "cifar"} for index in range(clients)],
        "data": [
            {
                "client": f"cifar-{index}",
                "task": "cifar",
                "labels": {f"class {place}": int(count) for place, count in enumerate(row)},
                "distance": 0.5 + index % 2 / 10,
            }
            for index, row in enumerate(counts)
        ],
    }
    return Record(name="x", plan=plan, metrics=[], ledger=[]), counts


def test_cells_are_the_counts_and_none_is_empty() -> None:
    record, counts = record_of(4, 3)
    figure = draw_label_distribution(record)
    (image,) = figure.axes[0].images
    np.testing.assert_array_equal(np.nan_to_num(image.get_array().filled(np.nan)), counts)
    assert (np.isnan(image.get_array().filled(np.nan)) == (counts == 0)).all()
    said = [item.get_text() for item in figure.findobj(Text)]
    assert sorted(text for text in said if text in ("7", "14")) == sorted(str(n) for n in counts.ravel() if n)
    assert {"cifar-0", "class 2", "cifar"} <= set(said)
    assert any("to its task's: 0.55 of 1" in text for text in said)


def test_a_hundred_clients_of_a_hundred_classes_are_one_picture_without_names() -> None:
    record, counts = record_of(100, 100)
    figure = draw_label_distribution(record)
    (image,) = figure.axes[0].images
    assert image.get_array().shape == counts.shape
    assert len(figure.axes[0].get_xticklabels()) == len(figure.axes[0].get_yticklabels()) == 0
    assert max(figure.get_size_inches()) <= 14


def test_tasks_without_classes_have_no_panel(make_run) -> None:
    from atlas_fl.report.record import read_record

    record = read_record(make_run(tasks=7))
    titles = [axes.get_title(loc="left") for axes in draw_label_distribution(record).axes]
    assert titles[:-1] == record.tasks[:-1]
    assert titles[-1] == ""  # the colour bar
