"""What the figure of a sweep shows, on invented summaries."""

from itertools import product
from pathlib import Path

import pytest

from atlas_fl.report.drawing import draw
from atlas_fl.report.sweep import SweepScores, read_sweep_scores, sweep_chart
from atlas_fl.storage.jsonl import write_json
from tests.report.svg import overlaps, text_of

SCORES = {42: 0.50, 123: 0.60, 456: 0.70}
"""By seed; mean 0.6 and standard deviation 0.1 by hand."""


def swept(folder: Path, over: dict[str, list[str]], *, seeds: int = 3, metric: str = "accuracy") -> SweepScores:
    """A sweep in which the first value scores `SCORES`, and every next one of each setting 0.05 more."""
    changes, runs = [], []
    for values in product(*over.values()):
        own = dict(zip(over, values, strict=True))
        shift = 0.05 * sum(over[name].index(value) for name, value in own.items())
        for seed, score in list(SCORES.items())[:seeds]:
            run = folder / f"{'-'.join(values)}-{seed}"
            run.mkdir()
            (run / "config.toml").write_text("")
            write_json(run / "plan.json", {})
            test = {"primary": score + shift, metric: score + shift}
            summary = {"run": {}, "overall": {"final": {"test": test}}, "tasks": {}, "clients": {}, "bytes": {}}
            write_json(run / "summary.json", summary)
            changes.append(own)
            runs.append(run)
    return read_sweep_scores(changes, runs)


def drawn(scores: SweepScores, *, note: str = "") -> str:
    chart = sweep_chart(scores, note=note)
    assert chart is not None
    return draw([chart])


def test_mean_and_spread_over_seeds_by_hand(tmp_path: Path) -> None:
    found = swept(tmp_path, {"nc": ["iid", "1"]})
    assert found.values == ("1", "iid") and found.is_numeric and found.metric == "accuracy" and found.seeds == 3
    cell = found.lines[""]["iid"]
    assert cell.mean == pytest.approx(0.6) and cell.std == pytest.approx(0.1)
    chart = sweep_chart(found)
    assert chart is not None
    assert [row["mean"] for row in chart.data["rows"]] == pytest.approx([0.65, 0.6])
    assert [(row["high"] - row["low"]) / 2 for row in chart.data["rows"]] == pytest.approx([0.1, 0.1])
    assert [row["mean"] for row in chart.data["seeds"][3:]] == pytest.approx([0.5, 0.6, 0.7])


def test_classes_lie_along_the_axis_and_local_steps_are_lines(tmp_path: Path) -> None:
    lines = text_of(drawn(swept(tmp_path, {"nc": ["10", "1", "5", "iid"], "local_steps": ["4", "8", "16"]}))).split(
        "\n"
    )
    assert [line for line in lines if line in ("1", "5", "10", "iid")] == ["1", "5", "10", "iid"]
    assert [line for line in lines if "steps" in line] == [f"local steps (J) {j}" for j in (4, 8, 16)]
    assert "Test accuracy over classes per client (N_c)" in lines


def test_numbers_lie_along_the_axis_whichever_came_first(tmp_path: Path) -> None:
    found = swept(tmp_path, {"mask": ["random", "least_sensitive"], "sparsity": ["0.9", "0.5"]}, seeds=1)
    assert found.along == "sparsity" and found.values == ("0.5", "0.9")
    assert list(found.lines) == ["mask random", "mask least_sensitive"]
    assert "one seed" in text_of(drawn(found))


def test_strategies_stand_in_the_order_that_comes_out(tmp_path: Path) -> None:
    found = swept(tmp_path, {"mask": ["random", "least_sensitive", "most_sensitive"]})
    assert found.values == ("most_sensitive", "least_sensitive", "random")
    lines = text_of(drawn(found)).split("\n")
    best = ["most sensitive", "least sensitive", "random"]
    assert [line for line in lines if line in best] == best, "the best stands above"


def test_other_metrics_than_accuracy_are_a_score(tmp_path: Path) -> None:
    assert "Test score over eta" in text_of(drawn(swept(tmp_path, {"eta": ["0", "0.1"]}, metric="mcc")))


@pytest.mark.parametrize(
    "over",
    [
        {"nc": ["1", "5", "10", "50", "iid"], "local_steps": ["4", "8", "16"]},
        {"mask": ["least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random", "none"]},
        {"mask": ["least_sensitive", "random"], "share": ["A+B", "A+B+head"], "head_first": ["ridge", "none"]},
        {"eta": ["0", "0.01", "0.1", "0.5", "1"], "strategy": ["fedavg", "local", "atlas", "fedavg_cluster", "x"]},
    ],
)
def test_no_words_cover_each_other_or_leave_the_page(tmp_path: Path, over: dict[str, list[str]]) -> None:
    assert overlaps(drawn(swept(tmp_path, over), note="32 gradient steps in every run")) == []


def test_a_sweep_without_test_scores_has_no_chart(tmp_path: Path) -> None:
    found = swept(tmp_path, {"eta": ["0"]}, seeds=1)
    empty = SweepScores(**{**vars(found), "lines": {"": {"0": type(found.lines[""]["0"])(scores=())}}})
    assert sweep_chart(empty) is None
