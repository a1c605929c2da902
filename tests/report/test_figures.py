import csv
import json
from io import StringIO

import numpy as np
import pytest
from PIL import Image

from atlas_fl.errors import CheckpointError
from atlas_fl.report import figures
from atlas_fl.report.drawing import draw
from atlas_fl.report.figures import FIGURES, charts_of, draw_all
from atlas_fl.report.html.charts import Chart
from atlas_fl.report.record import Record, read_record
from tests.report.html.hostile import NAMES, rename
from tests.report.svg import overlaps, text_of

SCENES = {
    "quick": {"refused": True},
    "one client, nothing trained": {"tasks": 1, "clients_per_task": 1, "rounds": 0, "sends": False, "sketches": False},
    "seven tasks": {"tasks": 7, "clients_per_task": 3, "rounds": 12, "undecided": True, "f1": True, "eval_every": 3},
}


def drawn(record: Record, name: str) -> str:
    return draw(charts_of(record, name), columns=FIGURES[name].columns)


def charts(record: Record, name: str) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts_of(record, name)}


@pytest.mark.slow
def test_each_figure_lies_there_as_png_of_300_dpi_and_pdf_with_its_numbers(make_run) -> None:
    run = make_run(tasks=2, clients_per_task=2)
    record, paths = read_record(run), draw_all(run)
    held = [name for name, figure in FIGURES.items() if figure.rows(record)]
    assert held == ["convergence", "scores", "classes", "clusters", "adjacency", "ranks", "bytes"]
    assert paths == [run / "figures" / f"{name}.png" for name in held]
    for path in paths:
        with Image.open(path) as image:
            assert image.format == "PNG" and image.info["Software"] == "ATLAS"
            assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
            assert min(image.size) >= 900
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        read = list(csv.DictReader(StringIO(path.with_suffix(".csv").read_text("utf-8"))))
        for row, values in zip(read, FIGURES[path.stem].rows(record), strict=True):
            assert row == {name: "" if value is None else str(value) for name, value in values.items()}


def test_drawing_again_gives_the_same_bytes(make_run, monkeypatch) -> None:
    monkeypatch.setattr(figures, "FIGURES", {name: FIGURES[name] for name in ("bytes", "ranks")})
    run = make_run(tasks=1, clients_per_task=1, rounds=1)
    draw_all(run)
    first = {path.name: path.read_bytes() for path in (run / "figures").iterdir()}
    assert len(first) == 6
    draw_all(run)
    assert {path.name: path.read_bytes() for path in (run / "figures").iterdir()} == first


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_no_words_cover_each_other_or_leave_the_page(make_run, scene: dict) -> None:
    record = read_record(make_run(**scene))
    assert [pair for name in FIGURES for pair in overlaps(drawn(record, name))] == []


def test_the_measure_sees_words_that_cover_each_other_or_leave_the_page() -> None:
    def svg(*places: float) -> str:
        texts = "".join(f'<text transform="translate({x},20)" font-size="11px">word</text>' for x in places)
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="100" height="30">{texts}</svg>'

    assert overlaps(svg(10, 60)) == []
    assert overlaps(svg(10, 20)) == [("word", "word")]
    assert overlaps(svg(90)) == [("word", "outside")]


def test_a_folder_that_is_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        draw_all(tmp_path)


def test_a_figure_has_every_chart_of_its_kind(make_run) -> None:
    record = read_record(make_run(f1=True))
    text = text_of(drawn(record, "convergence"))
    mean = np.mean([list(member.series("validation").values()) for member in record.by_task["trec"]], axis=0)
    assert f"{mean[-1]:.3f}" in text.split("\n")
    for task in record.tasks:
        assert f"{task}: validation score" in text and f"{task}: loss" in text


def test_the_score_map_has_the_rounds_that_were_evaluated_and_clusters_side_by_side(make_run) -> None:
    record = read_record(make_run(eval_every=2, rounds=5, interleaved=True))
    chart = charts(record, "scores")["scores"]
    assert chart.spec["encoding"]["y"]["scale"]["domain"] == record.sorted_clients != list(record.task_of)
    assert chart.spec["encoding"]["x"]["scale"]["domain"] == [0, 2, 4, 5]
    printed = text_of(drawn(record, "scores")).split("\n")
    stored = [f"{row['score']:.2f}" for row in chart.rows]
    assert [text for text in printed if text in stored][: len(stored)] == stored


def test_the_graph_says_its_edges_and_who_has_none(make_run) -> None:
    record = read_record(make_run(undecided=True, interleaved=True))
    chart, clients = charts(record, "adjacency")["adjacency"], list(record.task_of)
    matrix = np.array(record.plan["adjacency"])
    for row in chart.rows:
        assert row["weight"] == matrix[clients.index(row["client"]), clients.index(row["other"])]
    assert len(chart.rows) == np.count_nonzero(matrix)
    assert "7 edges, 1 of 9 clients without any" in text_of(drawn(record, "adjacency"))


def test_what_is_not_there_has_no_chart_and_no_file(make_run) -> None:
    bare = Record(name="x", plan={"clients": [{"name": "a-0", "task": "a"}]}, metrics=[], ledger=[])
    assert charts_of(bare, *FIGURES) == []
    run = make_run(rounds=0, sends=False, sketches=False, tasks=1, clients_per_task=1)
    assert [path.stem for path in draw_all(run)] == ["convergence", "scores", "classes", "ranks"]


def test_sketches_are_drawn_by_their_components_and_from_six_clients_on_by_t_sne(make_run) -> None:
    record = read_record(make_run())
    assert list(charts(record, "clusters")) == ["clusters", "tsne"]
    assert record.plan["clustering"]["structure"]["reason"] in text_of(drawn(record, "clusters"))
    five = read_record(make_run("five", tasks=1, clients_per_task=5))
    assert list(charts(five, "clusters")) == ["clusters"]


@pytest.mark.slow
def test_names_that_would_do_harm_are_words_of_a_figure(make_run) -> None:
    record = read_record(rename(make_run()))
    for name in FIGURES:
        svg = drawn(record, name)
        assert "<script" not in svg and "<img" not in svg
    text = text_of(drawn(record, "scores"))
    assert {NAMES["pairs-1"], NAMES["trec-2"]} <= {line.removesuffix("\u200b") for line in text.split("\n")}


def counted(clients: int, classes: int) -> Record:
    """Client 0 has no image of class 0; of all others two of each, of which it recognises its number modulo 3."""
    names = [f"digits-{index}" for index in range(clients)]
    labels = {f"class {place}": 2 * (place > 0) for place in range(classes)}
    metrics = []
    for index, name in enumerate(names):
        examples = [2] * classes
        hits = [index % 3] * classes
        if index == 0:
            examples[0] = hits[0] = 0
        counts = {"hits": hits, "examples": examples, "predicted": hits}
        row = {"round": 1, "client": name, "task": "digits", "split": "validation", "primary": 0.5}
        metrics += [row, row | {"split": "test", "classes": counts}]
    data = [
        {"client": name, "task": "digits", "labels": labels, "distance": 0.5 + index % 2 / 10}
        for index, name in enumerate(names)
    ]
    plan = {"clients": [{"name": name, "task": "digits"} for name in names], "data": data}
    return Record(name="x", plan=plan, metrics=metrics, ledger=[])


def test_accuracy_by_class_of_each_client_and_of_all_by_hand() -> None:
    chart = charts(counted(3, 2), "by-class")["by-class-0"]
    found = {(row["client"], row["class"]): row["accuracy"] for row in chart.rows}
    # class 0: 0 + 1 + 2 of 0 + 2 + 2, class 1: 3 of 6
    assert found == {
        **{("(all clients)", "class 0"): 0.75, ("(all clients)", "class 1"): 0.5},
        **{("digits-0", "class 1"): 0.0, ("digits-1", "class 0"): 0.5, ("digits-1", "class 1"): 0.5},
        **{("digits-2", "class 0"): 1.0, ("digits-2", "class 1"): 1.0},
    }
    assert chart.spec["encoding"]["y"]["scale"]["domain"] == ["(all clients)", "digits-0", "digits-1", "digits-2"]


def test_a_class_without_examples_is_an_empty_cell() -> None:
    chart = charts(counted(4, 3), "classes")["classes-0"]
    assert {(row["class"], row["examples"]) for row in chart.rows} == {("class 1", 2), ("class 2", 2)}
    assert chart.spec["encoding"]["x"]["scale"]["domain"] == ["class 0", "class 1", "class 2"]
    assert "mean distance of their mix to the task's: 0.55 of 1" in chart.note


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (8, 10), (100, 10), (100, 100)])
def test_figures_by_class_fit_any_number_of_clients_and_classes(clients: int, classes: int) -> None:
    record = counted(clients, classes)
    assert overlaps(drawn(record, "by-class")) == overlaps(drawn(record, "classes")) == []


def test_a_run_that_was_cut_off_is_drawn_as_far_as_it_went(make_run) -> None:
    run = make_run()
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:60]) + lines[60][:20])
    record = read_record(run)
    assert len(record.metrics) == 60
    assert "movie: validation score" in text_of(drawn(record, "convergence"))


def test_what_is_measured_of_masks_is_drawn_as_it_stands_in_the_plan(make_run) -> None:
    run = make_run(tasks=1, clients_per_task=2)
    plan = json.loads((run / "plan.json").read_text())
    plan["sparse"] = {"mask": "least_sensitive", "sparsity": 0.9, "layers": {"layer 0": 0.2, "layer 1": 0.1}}
    record = Record(name="x", plan=plan, metrics=[], ledger=[])
    assert {"layer 0", "layer 1"} <= set(text_of(drawn(record, "mask")).split("\n"))
