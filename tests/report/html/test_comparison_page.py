import json
from pathlib import Path
from statistics import fmean

import pytest

from atlas_fl.errors import ConfigError
from atlas_fl.report.finished_runs import read_finished_run
from atlas_fl.report.html.comparison_page import comparison_page
from atlas_fl.report.html.elements import render
from atlas_fl.report.method_comparison import compare_methods, pareto_front
from tests.report.html.reading import Element, chart_of, parse_page, sections_of, table_of

MOST_BYTES = 6_000_000


@pytest.fixture
def runs(make_federation, tmp_path) -> list[Path]:
    """Runs of three methods with three seeds each."""
    make_federation(2)
    return sorted(path.parent for path in tmp_path.glob("*/summary.json"))


def page_of(runs: list[Path], *, control: str | None = None) -> Element:
    return parse_page(render(comparison_page(runs, control=control)))


def test_means_and_intervals_are_those_of_the_runs(runs) -> None:
    page, by_method = page_of(runs), {}
    for name in ("local", "fedavg", "fedper"):
        scores = [read_finished_run(run).scores.scores.values() for run in runs if f"-{name}-" in run.name]
        by_method[name] = [fmean(values) for values in scores]
    table = {row["method"]: row for row in table_of(page, "Scores")}
    assert set(table) == set(by_method)
    for name, values in by_method.items():
        assert table[name]["mean and 95%"] == pytest.approx(fmean(values))
        drawn = [row["score"] for row in chart_of(page, "means-0") if row["method"] == name]
        assert drawn == pytest.approx(values)
    means = {row["method"]: row for row in chart_of(page, "means-0")}
    assert [means[name]["kind"] for name in by_method] == ["method", "control", "method"]
    assert all(row["low"] < row["mean"] < row["high"] for row in means.values())


def test_what_is_said_of_a_method_is_what_the_test_says(runs) -> None:
    groups = {name: [run for run in runs if f"-{name}-" in run.name] for name in ("local", "fedavg", "fedper")}
    page, pairs = page_of(runs), compare_methods(groups, control="fedavg").pairs
    for row in table_of(page, "Against fedavg"):
        assert row["difference and 95%"] == pairs[str(row["method"])].mean
    for row in table_of(page, "Tests against fedavg"):
        pair = pairs[str(row["method"])]
        assert (row["P worse"], row["P equal"], row["P better"]) == pytest.approx(
            (pair.bayesian.left, pair.bayesian.rope, pair.bayesian.right)
        )
        assert row["p (Holm)"] == pair.adjusted_p
    drawn = {(row["method"], row["seed"]): row["difference"] for row in chart_of(page, "differences-0")}
    assert drawn == {
        (name, str(seed)): difference
        for name, pair in pairs.items()
        for seed, difference in zip((1, 2, 3), pair.differences)
    }


def test_the_front_holds_what_nothing_beats(runs) -> None:
    page = page_of(runs)
    rows = chart_of(page, "front-0")
    costs, scores = ({row["method"]: row[name] for row in rows} for name in ("bytes", "score"))
    assert {row["method"] for row in rows if row["front"] == "front"} == set(pareto_front(costs, scores))


def test_memory_is_drawn_where_methods_differ_in_it(runs) -> None:
    assert "predicted memory of the fullest device" not in page_of(runs).text
    for run in runs:
        if "-fedper-" in run.name:
            summary = json.loads((run / "summary.json").read_text())
            for client in summary["clients"].values():
                client["predicted"]["memory_bytes"] = 1.5e9
            (run / "summary.json").write_text(json.dumps(summary))
    rows = {row["method"]: row["bytes"] for row in chart_of(page_of(runs), "memory-front-0")}
    assert rows == {"fedper": 1.5e9, "fedavg": 552.9e6, "local": 552.9e6}


def test_a_front_by_hand() -> None:
    costs = {"dear": 9, "cheap": 1, "beaten": 5, "good": 5, "same as good": 5}
    scores = {"dear": 0.9, "cheap": 0.5, "beaten": 0.6, "good": 0.7, "same as good": 0.7}
    assert pareto_front(costs, scores) == ["cheap", "good", "same as good", "dear"]


def test_another_control_can_be_chosen_and_an_unknown_one_is_named(runs) -> None:
    assert table_of(page_of(runs, control="local"), "Against local")
    with pytest.raises(ConfigError, match=r"--control is nobody, and contradiction, dial 2 has fedavg, fedper, local"):
        comparison_page(runs, control="nobody")


def test_runs_that_cannot_be_compared_are_named(runs) -> None:
    (runs[0] / "summary.json").unlink()
    page = page_of(runs)
    warnings = page.all("header")[0].text
    assert f"Not complete, and so not compared: {runs[0].name}." in warnings
    name, seed = runs[0].name.split("-")[1:]
    assert f"{name} lacks the seeds {seed}, and is in no table." in page.text


def test_only_unfinished_runs_are_refused_in_one_line(runs) -> None:
    for run in runs:
        (run / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"none of these 9 runs can be compared"):
        comparison_page(runs)


def test_one_method_is_described_and_compared_with_none(runs) -> None:
    page = page_of([run for run in runs if "-local-" in run.name])
    assert sections_of(page) == ["federation-0", "costs-0"]


def test_one_seed_has_no_tests(runs) -> None:
    page = page_of([run for run in runs if run.name.endswith("-1")])
    assert sections_of(page) == ["federation-0", "costs-0"]


@pytest.mark.slow
def test_several_federations_are_ranked(make_federation, tmp_path) -> None:
    for dial in (1, 2, 3):
        make_federation(dial)
    text = render(comparison_page(sorted(path.parent for path in tmp_path.glob("*/summary.json"))))
    page = parse_page(text)
    assert len(text.encode()) < MOST_BYTES
    assert sections_of(page)[0] == "ranks"
    glance = {row["method"]: row["contradiction, dial 2"] for row in table_of(page, "At a glance")}
    assert list(glance) == ["fedavg", "fedper", "local"]
    ranks = {row["method"]: row["average rank"] for row in table_of(page, "Ranks over all federations")}
    assert sum(map(float, ranks.values())) == pytest.approx(6), "ranks 1, 2 and 3 in each"
    assert ranks["fedper"] < ranks["local"]
