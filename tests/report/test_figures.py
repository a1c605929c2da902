import json

import numpy as np
import pytest
from PIL import Image

from atlas_fl.errors import CheckpointError
from atlas_fl.report.drawing import draw
from atlas_fl.report.figures import FIGURES, MEASURED, draw_all
from atlas_fl.report.html.elements import Chart
from atlas_fl.report.html.run_clients import data_of_clients, likeness
from atlas_fl.report.html.run_scores import convergence
from atlas_fl.report.record import Record, read_record
from atlas_fl.report.table import Table
from tests.report.html.hostile import NAMES, rename
from tests.report.svg import overlaps, text_of

SCENES = {
    "quick": {"refused": True},
    "one client, nothing trained": {"tasks": 1, "clients_per_task": 1, "rounds": 0, "sends": False, "sketches": False},
    "seven tasks": {"tasks": 7, "clients_per_task": 3, "rounds": 12, "undecided": True, "f1": True, "eval_every": 3},
}


def drawn(record: Record, name: str) -> str:
    figure = (FIGURES | MEASURED)[name]
    return figure.draw(figure.section(record))


def charts(section) -> dict[str, Chart]:
    return {block.name: block for block in section.blocks if isinstance(block, Chart)}


def test_seven_figures_at_300_dpi(make_run) -> None:
    run = make_run()
    paths = draw_all(run)
    assert [path.name for path in paths] == [f"{name}.png" for name in FIGURES]
    assert len(paths) == 7
    for path in paths:
        assert path.parent == run / "figures"
        with Image.open(path) as image:
            assert image.format == "PNG" and image.info["Software"] == "ATLAS"
            assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
            assert min(image.size) >= 1000


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


def test_a_figure_has_every_chart_of_its_kind_and_no_tip(make_run) -> None:
    record = read_record(make_run(f1=True))
    text = text_of(drawn(record, "convergence"))
    mean = np.mean([list(member.series("validation").values()) for member in record.by_task["trec"]], axis=0)
    assert f"{mean[-1]:.3f}" in text.split("\n")
    for task in record.tasks:
        assert f"{task}: validation score" in text and f"{task}: loss" in text
    assert "accuracy, which is not the score" in text
    other = read_record(make_run("other"))
    assert "accuracy, which is not the score" not in text_of(drawn(other, "convergence"))


def test_the_score_map_frames_what_was_refused_in_the_order_of_the_clusters(make_run) -> None:
    record = read_record(make_run(eval_every=2, rounds=5, refused=True, interleaved=True))
    chart = charts(convergence(record))["scores"]
    names = [record.clients[index] for index in record.sorted_clients]
    assert chart.spec["encoding"]["y"]["scale"]["domain"] == names
    assert chart.spec["encoding"]["x"]["scale"]["domain"] == [0, 2, 4, 5]
    assert chart.data["refused"] == [{"client": record.clients[1], "round": 2}]
    assert [row["client"] for row in chart.data["starts"]] == [names[3], names[6]]
    printed = text_of(drawn(record, "scores")).split("\n")
    stored = [f"{row['score']:.2f}" for row in chart.data["rows"]]
    assert [text for text in printed if text in stored][: len(stored)] == stored


def test_the_score_map_is_coloured_by_the_score_itself_where_a_task_has_no_classes(make_run) -> None:
    folder = make_run("regression")
    kept = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in kept:
        row.pop("majority", None)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert "colour: score" in charts(convergence(read_record(folder)))["scores"].note


def test_the_graph_says_its_edges_and_who_has_none(make_run) -> None:
    record = read_record(make_run(undecided=True, interleaved=True))
    chart = charts(likeness(record))["weight"]
    matrix = np.array(record.plan["adjacency"])
    for row in chart.data["rows"]:
        i, j = record.clients.index(row["client"]), record.clients.index(row["other"])
        assert row["weight"] == matrix[i, j]
    assert len(chart.data["rows"]) == np.count_nonzero(matrix)
    assert "7 edges, 1 of 9 clients without any" in text_of(drawn(record, "adjacency"))


def test_ranks_stand_beside_their_devices_and_bytes_beside_their_sums(make_run) -> None:
    record = read_record(make_run())
    assert "gpu_16gb" in text_of(drawn(record, "ranks")).split("\n")
    assert {"adapter", "fingerprint", "head", "all", "100.0%"} <= set(text_of(drawn(record, "bytes")).split("\n"))


def test_what_is_not_there_is_said() -> None:
    bare = Record(name="x", plan={"clients": [{"name": "a-0", "task": "a"}]}, metrics=[], ledger=[])
    assert {name: text_of(drawn(bare, name)) for name in FIGURES} == {
        "convergence": "no round has been evaluated yet",
        "scores": "no round has been evaluated yet",
        "adjacency": "the plan holds no graph",
        "clusters": "no sketches were clustered in this run",
        "ranks": "the plan holds no ranks",
        "bytes": "this run sent nothing",
        "classes": "no task of this run has classes",
    }


def test_the_k_table_is_below_the_scatter(make_run) -> None:
    record = read_record(make_run())
    text = text_of(drawn(record, "clusters"))
    lines = text.split("\n")
    row = lines[lines.index("chosen") - 1 :]
    assert row[:8] == ["3", "chosen", "0.400", "1.500", "6.500", "0.240", "0.450", "0"]
    assert record.plan["clustering"]["structure"]["reason"] in text


def test_names_that_would_do_harm_are_words_of_a_figure(make_run) -> None:
    record = read_record(rename(make_run()))
    for name in FIGURES:
        svg = drawn(record, name)
        assert "<script" not in svg and "<img" not in svg
    text = text_of(drawn(record, "scores"))
    assert {NAMES["pairs-1"], NAMES["trec-2"]} <= {line.removesuffix("\u200b") for line in text.split("\n")}


def test_a_table_with_a_long_heading_is_drawn() -> None:
    table = Table(title="Title", columns=("one two three four", "five"), rows=[["a", "b"]], footer=[["c", "d"]])
    lines = text_of(draw([table])).split("\n")
    assert [line for line in lines if line in "abcd"] == ["a", "b", "c", "d"]
    assert overlaps(draw([table])) == []


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
        counts = {"hits": hits, "examples": examples}
        row = {"round": 1, "client": name, "task": "digits", "split": "validation", "primary": 0.5}
        metrics += [row, row | {"split": "test", "classes": counts}]
    data = [
        {"client": name, "task": "digits", "labels": labels, "distance": 0.5 + index % 2 / 10}
        for index, name in enumerate(names)
    ]
    plan = {"clients": [{"name": name, "task": "digits"} for name in names], "data": data}
    return Record(name="x", plan=plan, metrics=metrics, ledger=[])


def test_accuracy_by_class_of_each_client_and_of_all_by_hand() -> None:
    chart = charts(convergence(counted(3, 2)))["by-class-0"]
    found = {(row["client"], row["class"]): row["accuracy"] for row in chart.data["rows"]}
    # class 0: 0 + 1 + 2 of 0 + 2 + 2, class 1: 3 of 6; all: 6 of 10
    assert found == {
        **{("(all clients)", "class 0"): 0.75, ("(all clients)", "class 1"): 0.5},
        **{("digits-0", "class 1"): 0.0, ("digits-1", "class 0"): 0.5, ("digits-1", "class 1"): 0.5},
        **{("digits-2", "class 0"): 1.0, ("digits-2", "class 1"): 1.0},
    }
    assert chart.spec["encoding"]["y"]["scale"]["domain"] == ["(all clients)", "digits-0", "digits-1", "digits-2"]
    assert "of all classes: 0.600" in chart.note


def test_a_class_without_examples_is_an_empty_cell() -> None:
    chart = charts(data_of_clients(counted(4, 3)))["classes-0"]
    assert {(row["class"], row["examples"]) for row in chart.data["rows"]} == {("class 1", 2), ("class 2", 2)}
    assert chart.spec["encoding"]["x"]["scale"]["domain"] == ["class 0", "class 1", "class 2"]
    assert "mean distance of their mix to the task's: 0.55 of 1" in chart.note


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
