import csv
import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.decomposition import PCA

from atlas_fl.report.figure_rows import EVERY_CLIENT, ROWS, principal_components, to_csv
from atlas_fl.report.figures import FIGURES, MEASURED, draw_all
from atlas_fl.report.record import read_record


def test_every_figure_has_rows() -> None:
    assert set(ROWS) == {*FIGURES, *MEASURED}


def test_each_figure_lies_there_as_png_of_300_dpi_and_pdf_with_its_numbers(make_run) -> None:
    run = make_run(tasks=2, clients_per_task=2, rounds=1)
    paths = draw_all(run)
    assert paths == [run / "figures" / f"{name}.png" for name in FIGURES] and len(paths) == 7
    for path in paths:
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
            assert min(image.size) >= 1000
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        rows = list(csv.DictReader(StringIO(path.with_suffix(".csv").read_text("utf-8"))))
        drawn = ROWS[path.stem](read_record(run))
        assert len(rows) == len(drawn)
        for row, values in zip(rows, drawn):
            assert row == {name: "" if value is None else str(value) for name, value in values.items()}


def test_drawing_again_gives_the_same_bytes_and_no_numbers_that_are_gone(make_run, monkeypatch) -> None:
    for name in set(FIGURES) - {"bytes", "clusters"}:
        monkeypatch.delitem(FIGURES, name)
    run = make_run(tasks=1, clients_per_task=1, rounds=1, sketches=False)
    draw_all(run)
    first = {path.name: path.read_bytes() for path in (run / "figures").iterdir()}
    draw_all(run)
    assert {path.name: path.read_bytes() for path in (run / "figures").iterdir()} == first
    (run / "ledger.jsonl").write_text("")
    draw_all(run)
    assert (run / "figures" / "bytes.csv").read_bytes() == b""


def test_the_mean_over_a_task_by_hand(make_run) -> None:
    run = make_run(tasks=1, clients_per_task=2, rounds=1)
    rows = ROWS["convergence"](read_record(run))
    of_round = {row["client"]: row["value"] for row in rows if (row["series"], row["round"]) == ("validation score", 1)}
    assert of_round[EVERY_CLIENT] == pytest.approx((of_round["movie-0"] + of_round["movie-1"]) / 2)
    stored = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert of_round["movie-1"] in [row["primary"] for row in stored if row["client"] == "movie-1" and "primary" in row]


def test_csv_keeps_every_digit_and_quotes_what_needs_it() -> None:
    rows = [{"client": 'a "b", c', "score": 0.1 + 0.2}, {"client": "d\ne", "score": None, "more": 1}]
    assert list(csv.reader(StringIO(to_csv(rows)))) == [
        ["client", "score", "more"],
        ['a "b", c', "0.30000000000000004", ""],
        ["d\ne", "", "1"],
    ]
    assert to_csv([]) == ""


def test_principal_components_agree_with_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.normal(size=(2, 12, 30))
    one, two, shares = principal_components(first, second)
    model = PCA(n_components=2, svd_solver="full").fit((first + second) / 2)
    expected = model.transform((first + second) / 2)
    np.testing.assert_allclose(np.abs((one + two) / 2), np.abs(expected), atol=1e-10)
    np.testing.assert_allclose(np.abs(one), np.abs(model.transform(first)), atol=1e-10)
    np.testing.assert_allclose(shares, model.explained_variance_ratio_)


def test_two_clients_have_one_component() -> None:
    one, two, shares = principal_components(np.array([[0.0, 1.0], [0.0, 3.0]]), np.array([[0.0, 1.0], [0.0, 3.0]]))
    np.testing.assert_allclose(one, [[-1, 0], [1, 0]], atol=1e-12)
    np.testing.assert_allclose(two, one)
    np.testing.assert_allclose(shares, [1, 0], atol=1e-12)
