import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib import colors, rcParams
from matplotlib.axes import Axes
from matplotlib.axis import XTick
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from sklearn.decomposition import PCA

from atlas_fl.errors import CheckpointError
from atlas_fl.report.figures import FIGURES, draw_all
from atlas_fl.report.graph_figures import principal_components
from atlas_fl.report.record import Record, read_record
from atlas_fl.report.style import KIND_COLOURS, TASK_COLOURS, readable_on, save_figure, task_colours
from atlas_fl.storage.ledger import KINDS

SCENES = {
    "quick": {"refused": True},
    "one client, nothing trained": {"tasks": 1, "clients_per_task": 1, "rounds": 0, "sends": False, "sketches": False},
    "seven tasks": {"tasks": 7, "clients_per_task": 3, "rounds": 12, "undecided": True, "f1": True, "eval_every": 3},
}


def text_of(figure: Figure) -> str:
    return "\n".join(item.get_text() for item in figure.findobj(Text) if item.get_visible())


def _within(place: float, axes: Axes, tick: object) -> bool:
    """Whether a tick lies in the part of its axis that is drawn."""
    limits = axes.get_xlim() if isinstance(tick, XTick) else axes.get_ylim()
    return min(limits) <= place <= max(limits)


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of visible words that cover each other, and words that leave the figure."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    ticks = [tick for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks()]
    beyond = [tick.label1 for tick in ticks if not _within(tick.get_loc(), tick.axes, tick)]
    items = [item for item in figure.findobj(Text) if item.get_visible() and item.get_text().strip()]
    items = [item for item in items if not any(item is label for label in beyond)]
    boxes = [(item.get_text(), item.get_window_extent(renderer).padded(-1)) for item in items]
    page = figure.bbox.padded(1)
    outside = [(text, "outside") for text, box in boxes if not (page.x0 <= box.x0 and box.x1 <= page.x1)]
    pairs = [
        (text, other)
        for index, (text, box) in enumerate(boxes)
        for other, place in boxes[index + 1 :]
        if box.overlaps(place)
    ]
    return outside + pairs


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
@pytest.mark.parametrize("name", FIGURES)
def test_no_words_cover_each_other_or_leave_the_page(make_run, name: str, scene: dict) -> None:
    figure = FIGURES[name](read_record(make_run(**scene)))
    assert isinstance(figure.canvas, FigureCanvasAgg)
    assert overlaps(figure) == []


def test_the_same_run_gives_the_same_bytes(make_run, tmp_path) -> None:
    record = read_record(make_run(tasks=1, clients_per_task=2, rounds=1))
    first, second = (save_figure(FIGURES["bytes"](record), tmp_path / f"{name}.png").read_bytes() for name in "ab")
    assert first == second


def test_drawing_changes_no_setting_of_matplotlib(make_run) -> None:
    record, before = read_record(make_run()), dict(rcParams)
    for draw in FIGURES.values():
        draw(record)
    assert dict(rcParams) == before


def test_figures_are_drawn_without_pyplot(make_run) -> None:
    code = "import sys; from atlas_fl.report.figures import FIGURES, read_record; record = read_record(sys.argv[1])\n"
    code += "[draw(record) for draw in FIGURES.values()]; sys.exit('matplotlib.pyplot' in sys.modules)"
    run = make_run(tasks=1, clients_per_task=1, rounds=1)
    assert subprocess.run([sys.executable, "-c", code, run], check=False).returncode == 0


def test_nothing_but_the_figures_loads_matplotlib() -> None:
    names = ("report.tables", "report.record", "experiment.summary")
    modules = ", ".join(f"atlas_fl.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_that_is_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        draw_all(tmp_path)


def drawn(make_run, name: str, **scene) -> tuple[Record, Figure]:
    record = read_record(make_run(**scene))
    return record, FIGURES[name](record)


def test_convergence_shows_mean_clients_and_majority(make_run) -> None:
    record, figure = drawn(make_run, "convergence")
    axes = figure.axes[1]
    assert axes.get_title(loc="left") == "trec"
    series = [np.array(line.get_ydata(), dtype=float) for line in axes.lines]
    clients = [list(member.series("validation").values()) for member in record.by_task["trec"]]
    for values, line in zip(clients, series, strict=False):
        np.testing.assert_allclose(line, values)
    np.testing.assert_allclose(series[3], np.mean(clients, axis=0))
    np.testing.assert_allclose(series[4], 0.24)
    assert f"{np.mean(clients, axis=0)[-1]:.3f}".lstrip("0") in text_of(figure)


def test_scores_stand_above_the_losses_of_their_rounds_where_only_the_last_is_evaluated(make_run) -> None:
    record = read_record(make_run(rounds=4))
    rows = [row for row in record.metrics if row.get("split") != "validation" or row["round"] == 4]
    figure = FIGURES["convergence"](replace(record, metrics=rows))
    assert [axes.get_xlim() for axes in figure.axes[:3]] == [axes.get_xlim() for axes in figure.axes[3:]]


def test_convergence_adds_accuracy_where_the_score_is_another(make_run) -> None:
    assert "accuracy, where it is not the score" in text_of(
        FIGURES["convergence"](read_record(make_run("other", f1=True)))
    )
    assert "accuracy, where it is not the score" not in text_of(FIGURES["convergence"](read_record(make_run("same"))))


def test_the_score_map_is_coloured_by_the_score_itself_where_a_task_has_no_classes(make_run) -> None:
    folder = make_run("regression")
    kept = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in kept:
        row.pop("majority", None)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    record = read_record(folder)
    shades = FIGURES["scores"](record).axes[0].images[0].get_array()
    first = record.histories[record.clients[record.sorted_clients[0]]]
    np.testing.assert_allclose(shades[0], list(first.series("validation").values()))


def test_the_score_map_holds_the_validation_scores_in_the_order_of_the_clusters(make_run) -> None:
    record, figure = drawn(make_run, "scores", eval_every=2, rounds=5, refused=True, interleaved=True)
    shades = figure.axes[0].images[0].get_array()
    rounds = [0, 2, 4, 5]
    names = [record.clients[index] for index in record.sorted_clients]
    printed = [text.get_text() for text in figure.axes[0].texts]
    for row, name in enumerate(names):
        history = record.histories[name]
        scores, majority = history.series("validation"), history.series("validation", "majority")
        np.testing.assert_allclose(shades[row], [scores[at] - majority[at] for at in rounds])
        assert printed[4 * row : 4 * row + 4] == [f"{scores[at]:.2f}".replace("0.", ".") for at in rounds]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == names
    frames = [patch for patch in figure.axes[0].patches if patch.get_edgecolor() == colors.to_rgba("#D55E00")]
    assert len(frames) == 1  # refused in round 2, the second of the evaluated rounds
    assert frames[0].get_x() == pytest.approx(1 - 0.46)
    assert frames[0].get_y() == pytest.approx(names.index(record.clients[1]) - 0.43)


def test_the_graph_is_drawn_in_blocks(make_run) -> None:
    record, figure = drawn(make_run, "adjacency", undecided=True, interleaved=True)
    values = figure.axes[0].images[0].get_array().filled(0)
    order = record.sorted_clients
    expected = np.array(record.plan["adjacency"])[np.ix_(order, order)]
    np.testing.assert_allclose(np.nan_to_num(values), expected)
    text = text_of(figure)
    assert "7 edges, 1 of 9 clients without any" in text
    for label in ("cluster 0", "cluster 1", "cluster 2", "no cluster"):
        assert label in text


def test_ranks_are_those_of_the_plan(make_run) -> None:
    record, figure = drawn(make_run, "ranks", interleaved=True)
    expected = [record.plan["clients"][index]["ranks"] for index in record.sorted_clients]
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), expected)
    assert "gpu_16gb" in text_of(figure)


def test_bars_add_up_to_the_ledger(make_run) -> None:
    record, figure = drawn(make_run, "bytes")
    heights = np.array([bar.get_height() for bar in figure.axes[0].patches])
    assert heights[heights > 0].sum() == pytest.approx(record.totals.up)
    assert -heights[heights < 0].sum() == pytest.approx(record.totals.down)
    widths = [bar.get_width() for bar in figure.axes[1].patches]
    assert sum(widths) == pytest.approx(record.totals.total)


def test_what_is_not_there_is_said(make_run) -> None:
    record = read_record(make_run(sends=False, sketches=False, rounds=0))
    assert "this run sent nothing" in text_of(FIGURES["bytes"](record))
    assert "no client was fingerprinted in this run" in text_of(FIGURES["clusters"](record))
    clients = [{"name": "a-0", "task": "a"}]
    bare = Record(name="x", plan={"clients": clients}, metrics=[], ledger=[])
    expected = {
        "convergence": "no round has been evaluated yet",
        "scores": "no round has been evaluated yet",
        "adjacency": "the plan holds no graph",
        "clusters": "nothing was clustered in this run",
        "ranks": "the plan holds no ranks",
        "bytes": "this run sent nothing",
        "classes": "no task of this run has classes",
    }
    for name, sentence in expected.items():
        assert sentence in text_of(FIGURES[name](bare))


def test_the_k_table_is_beside_the_scatter(make_run) -> None:
    record, figure = drawn(make_run, "clusters")
    table = next(iter(axes.tables[0] for axes in figure.axes if axes.tables)).get_celld()
    shown = [table[3, column].get_text().get_text() for column in range(7)]
    assert shown == ["3", "0.400", "1.500", "6.500", "0.240", "0.450", "0"]
    assert table[1, 1].get_text().get_text() == "-"
    assert table[3, 0].get_facecolor() != table[2, 0].get_facecolor()
    assert "9 clients in 3 clusters" in text_of(figure)
    assert record.plan["clustering"]["structure"]["reason"] in text_of(figure)


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


def test_a_task_has_one_colour_in_all_figures_and_colours_differ() -> None:
    assert len(set(TASK_COLOURS)) == len(TASK_COLOURS) == 10
    assert len(set(KIND_COLOURS.values())) == len(KIND_COLOURS)
    assert KIND_COLOURS.keys() == set(KINDS), "every message that can be sent can be drawn"
    assert task_colours(["b", "a"]) == {"b": TASK_COLOURS[0], "a": TASK_COLOURS[1]}


def deuteranopia(colour: str) -> np.ndarray:
    """How someone without green cones sees a colour, linear RGB (Machado, Oliveira and Fernandes 2009)."""
    linear = np.power(colors.to_rgb(colour), 2.2)
    matrix = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    return np.clip(np.array(matrix) @ linear, 0, 1)


def test_the_first_tasks_are_told_apart_without_green_cones() -> None:
    seen = [deuteranopia(colour) for colour in TASK_COLOURS[:6]]
    apart = [np.linalg.norm(one - two) for index, one in enumerate(seen) for two in seen[index + 1 :]]
    assert min(apart) > 0.12
    red_green = [deuteranopia(colour) for colour in ("#c00000", "#507000")]  # the measure sees a pair that is confused
    assert np.linalg.norm(red_green[0] - red_green[1]) < 0.12


@pytest.mark.parametrize(("rgb", "ink"), [((1, 1, 1), "#222222"), ((0, 0, 0.4), "white"), ((1, 1, 0), "#222222")])
def test_numbers_are_readable_on_their_cells(rgb: tuple[float, ...], ink: str) -> None:
    assert readable_on(rgb) == ink


def test_a_run_that_was_cut_off_is_drawn_as_far_as_it_went(make_run) -> None:
    run = make_run()
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:60]) + lines[60][:20])
    record = read_record(run)
    assert len(record.metrics) == 60
    assert json.loads(lines[59])["round"] == max(row["round"] for row in record.metrics)
    assert "movie" in text_of(FIGURES["convergence"](record))
