import json
import re
from base64 import b64encode
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.errors import CheckpointError
from atlas_fl.report.html.elements import render
from atlas_fl.report.html.run_page import run_page
from atlas_fl.storage.digests import write_digests
from atlas_fl.storage.run_folder import RunFolder
from tests.report.html.hostile import NAMES, rename
from tests.report.html.reading import Element, chart_of, parse_page, sections_of, table_of

MOST_BYTES = 6_000_000
CLOSING = "Test scores of atlas, minilm"
WHOLE = ["outcome", "convergence", "clients", "plan", "costs", "settings"]


def page_of(run: Path) -> Element:
    return parse_page(render(run_page(run)))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def append(file: Path, *rows: dict[str, Any]) -> None:
    file.write_text(file.read_text("utf-8") + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def change_plan(run: Path, **parts: Any) -> None:
    """Write the plan with these parts, and without those that are None."""
    plan = json.loads((run / "plan.json").read_text("utf-8")) | parts
    kept = {name: part for name, part in plan.items() if part is not None}
    (run / "plan.json").write_text(json.dumps(kept), encoding="utf-8")


def test_sections_come_in_the_order_in_which_people_ask(make_run) -> None:
    assert sections_of(page_of(make_run())) == WHOLE


def test_the_page_loads_nothing_and_runs_its_own_scripts_alone(make_run) -> None:
    text = render(run_page(make_run()))
    page = parse_page(text)
    assert len(text.encode()) < MOST_BYTES
    named = [element for name in ("link", "img", "iframe", "object", "base", "form") for element in page.all(name)]
    assert named == []
    assert not any("src" in script.attributes for script in page.all("script"))
    assert not re.search(r"@import|url\(", "".join(style.text for style in page.all("style")))
    assert all(str(link.attributes["href"]).startswith("#") for link in page.all("a"))
    policy = next(str(meta.attributes["content"]) for meta in page.all("meta") if "http-equiv" in meta.attributes)
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src" not in policy
    running = [script for script in page.all("script") if "type" not in script.attributes]
    hashes = [f"'sha256-{b64encode(sha256(script.text.encode()).digest()).decode()}'" for script in running]
    assert len(hashes) == 2
    assert re.findall(r"'sha256-[^']+'", policy) == hashes
    assert "'unsafe-inline'" not in policy.split("script-src")[1]


def test_numbers_of_tables_are_those_of_the_summary(make_run) -> None:
    run = make_run()
    summary, page = json.loads((run / "summary.json").read_text("utf-8")), page_of(run)
    tasks = {row["task"]: row for row in table_of(page, CLOSING)}
    assert set(tasks) == set(summary["tasks"])
    for task, group in summary["tasks"].items():
        final, row = group["final"], tasks[task]
        assert row["final"] == final["test"]["primary"]
        assert row["majority"] == final["test"]["majority"]
        assert row["over majority"] == final["test"]["gain_over_majority"]
        assert row["best"] == group["best"]["test"]["primary"]
        assert row["spread"] == final["spread"]["std"]
        assert str(row["worst client"]).startswith(final["worst_client"]["client"])
    clients = {row["client"]: row for row in table_of(page, "By client")}
    for name, entry in summary["clients"].items():
        assert clients[name]["final"] == entry["final"]["test"]["primary"]
        assert clients[name]["in round"] == entry["best"]["round"]
        assert clients[name]["best"] == entry["best"]["test"]["primary"]
        assert (clients[name]["sent"], clients[name]["received"]) == (entry["bytes"]["up"], entry["bytes"]["down"])
    phases = {row["phase"]: row["time here"] for row in table_of(page, "By phase")}
    assert phases == summary["seconds"]["phases"]
    kinds = {row["kind"]: row["up"] for row in table_of(page, "By kind of message")}
    assert kinds == {kind: ways["up"] for kind, ways in summary["bytes"]["by_kind"].items()}


def test_the_page_says_that_no_privacy_budget_bounds_what_was_sent(make_run) -> None:
    (section,) = (one for one in page_of(make_run()).all("section") if one.attributes.get("id") == "outcome")
    assert "privacy spent" in section.text and "no bound" in section.text


def test_the_best_client_is_the_one_with_the_highest_final_test_score(make_run) -> None:
    run = make_run(tasks=1, clients_per_task=4)
    clients = json.loads((run / "summary.json").read_text("utf-8"))["clients"]
    scores = {name: entry["final"]["test"]["primary"] for name, entry in clients.items()}
    facts = {fact.all("dt")[0].text: fact.all("dd")[-1].text for fact in page_of(run).all("dl")[0].all("div")}
    assert facts["best client"] == max(scores, key=lambda name: scores[name])
    assert facts["worst client"] == min(scores, key=lambda name: scores[name])


def test_numbers_of_charts_are_those_of_the_rows_and_of_the_plan(make_run) -> None:
    run = make_run()
    page, plan = page_of(run), json.loads((run / "plan.json").read_text("utf-8"))
    stored = {
        (row["client"], row["round"]): row["primary"]
        for row in rows_of(run / "metrics.jsonl")
        if row.get("split") == "validation"
    }
    assert {(row["client"], row["round"]): row["score"] for row in chart_of(page, "scores")} == stored
    drawn = [row for row in chart_of(page, "score-0") if row["client"] != "(mean)"]
    lines = {(row["client"], row["round"]): row["value"] for row in drawn}
    assert lines == {key: value for key, value in stored.items() if key[0].startswith("movie")}
    sums: dict[tuple[Any, ...], int] = defaultdict(int)
    for row in rows_of(run / "ledger.jsonl"):
        sums[row["round"], row["direction"], row["kind"]] += row["bytes"]
    drawn = {(row["round"], row["direction"], row["kind"]): row["bytes"] for row in chart_of(page, "bytes")}
    assert drawn == dict(sums)
    ranks = {(row["client"], row["layer"]): row["rank"] for row in chart_of(page, "ranks")}
    assert ranks == {
        (client["name"], layer): rank for client in plan["clients"] for layer, rank in enumerate(client["ranks"])
    }
    names, matrix = [client["name"] for client in plan["clients"]], plan["adjacency"]
    weights = {(row["client"], row["other"]): row["weight"] for row in chart_of(page, "adjacency")}
    assert weights == {(a, b): matrix[i][j] for i, a in enumerate(names) for j, b in enumerate(names) if matrix[i][j]}


def test_what_the_files_do_not_hold_has_no_section(make_run) -> None:
    run = make_run(sends=False, sketches=False)
    (run / "summary.json").unlink()
    change_plan(run, adjacency=None, clustering={}, importance=None, data=[], notes=[])
    page = page_of(run)
    assert sections_of(page) == ["outcome", "convergence", "clients", "plan", "settings"]
    assert "not complete" in page.all("header")[0].text


def test_a_run_that_was_killed_shows_the_scores_that_it_has(make_run) -> None:
    run = make_run(rounds=3)
    finished = table_of(page_of(run), CLOSING)
    (run / "summary.json").unlink()
    page = page_of(run)
    assert table_of(page, "Test scores") == finished
    assert "after round 3" in page.all("header")[0].text
    assert "plan" in sections_of(page), "what the plan predicts is there without a summary"


def test_a_run_that_was_killed_while_it_planned_says_so(make_run) -> None:
    run = make_run(rounds=0, sends=False)
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text("")
    page = page_of(run)
    assert "outcome" not in sections_of(page)
    assert "No round has been saved yet" in page.all("header")[0].text


def test_attackers_are_named_above_all_else(make_run) -> None:
    run = make_run()
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    summary |= {"attackers": ["movie-0"], "honest": summary["tasks"]["trec"]}
    (run / "summary.json").write_text(json.dumps(summary))
    header = page_of(run).all("header")[0].text
    score = summary["honest"]["final"]["test"]["primary"]
    assert f"simulated attackers: movie-0; the others have a test score of {score:.3f}" in header


def test_one_client_gives_a_page(make_run) -> None:
    page = page_of(make_run(tasks=1, clients_per_task=1))
    assert len(table_of(page, "By client")) == 1
    assert not any(script.attributes.get("id") == "data-clusters" for script in page.all("script"))


@pytest.mark.slow
def test_two_hundred_clients_fit(make_run) -> None:
    text = render(run_page(make_run(tasks=4, clients_per_task=50, rounds=2)))
    assert len(text.encode()) < MOST_BYTES / 2
    assert len(table_of(parse_page(text), "By client")) == 200


def test_hostile_names_are_text(make_run) -> None:
    run = make_run()
    harmless = page_of(run)
    page = page_of(rename(run))
    for name in ("script", "img", "b", "section", "figure", "table"):
        assert len(page.all(name)) == len(harmless.all(name)), name
    shown = {cell.text for table in page.all("table") for cell in table.all("bdi")}
    assert shown >= set(NAMES.values())
    assert {row["client"] for row in chart_of(page, "outcome")} == {NAMES[name] for name in NAMES if "-" in name}
    assert not any(key.startswith("on") for element in everything(page) for key in element.attributes)


def everything(element: Element) -> list[Element]:
    return [found for child in element.children for found in (child, *everything(child))]


def test_mishaps_are_listed_once_with_their_rounds(make_run) -> None:
    run = make_run(refused=True)
    append(
        run / "metrics.jsonl",
        *({"round": at, "client": "trec-0", "event": "missing"} for at in (3, 5)),
        {"round": 4, "client": "trec-1", "event": "joined", "cluster": 1},
        {"round": 4, "client": "trec-2", "event": "hosted", "work": "training", "host": "movie-0"},
        {"round": 4, "event": "mixed", "spread_before": 0.0},
        {"round": 4, "event": "timed", "device_seconds": 1.5},
    )
    rows = {row["client"]: row for row in table_of(page_of(run), "Events")}
    assert set(rows) == {"movie-1", "trec-0", "trec-1", "trec-2"}
    assert (rows["trec-0"]["event"], rows["trec-0"]["times"], rows["trec-0"]["rounds"]) == ("missing", 2, "3, 5")
    assert rows["movie-1"]["detail"] == "head.bias: NaN"
    assert rows["trec-2"]["detail"] == "movie-0"


def test_how_personal_models_are_is_what_was_measured_last(make_run) -> None:
    run = make_run(tasks=1, clients_per_task=2)
    common = {"event": "sharing measured", "client": "movie-0", "effective_clients": 2.0}
    append(
        run / "metrics.jsonl",
        {**common, "round": 2, "parameters": "layer 10", "own_share": 0.9, "variance_over_noise": 1.0},
        {**common, "round": 4, "parameters": "layer 10", "own_share": 0.25, "variance_over_noise": 3.0},
        {**common, "round": 4, "parameters": "layer 2", "own_share": 0.5},
        {**common, "round": 4, "parameters": "head", "own_share": 1.0},
    )
    page = page_of(run)
    assert {row["parameters"]: row["own_share"] for row in chart_of(page, "sharing")} == {
        "layer 10": 0.25,
        "layer 2": 0.5,
        "head": 1.0,
    }


def test_a_layer_without_adapter_is_an_empty_cell(make_run) -> None:
    run = make_run(tasks=1, clients_per_task=1)
    plan = json.loads((run / "plan.json").read_text("utf-8"))
    change_plan(run, clients=[plan["clients"][0] | {"ranks": [0, 0, 8]}])
    assert [(row["layer"], row["rank"]) for row in chart_of(page_of(run), "ranks")] == [(2, 8)]


def test_scores_by_class_are_those_of_the_counts_by_hand(make_run) -> None:
    run = make_run()
    rows = rows_of(run / "metrics.jsonl")
    last = max(row["round"] for row in rows)
    of_movie = [row for row in rows if (row["task"], row.get("split"), row["round"]) == ("movie", "test", last)]
    # of the first class 4 of 8 are found, and 2 of another are taken for it, at every client
    counts = {"hits": [4, 10], "examples": [8, 12], "predicted": [6, 14]}
    for row in of_movie:
        row["classes"] = counts
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    page, names = page_of(run), ("class", "precision", "recall", "f1", "support")
    assert [[row[name] for name in names] for row in table_of(page, "By class")] == [
        ["a class with a name", pytest.approx(2 / 3), 0.5, pytest.approx(4 / 7), 8 * len(of_movie)],
        ["b", pytest.approx(10 / 14), pytest.approx(10 / 12), pytest.approx(10 / 13), 12 * len(of_movie)],
    ]
    assert len(table_of(page, "By class and client")) == 2 * len(of_movie)


def test_the_settings_are_those_of_the_file_and_make_the_run_again(make_run) -> None:
    run = make_run(tasks=1, clients_per_task=1, seed=7)
    page = page_of(run)
    commands = [code.text for code in page.all("code")]
    assert any("seed = 7" in text for text in commands), "config.toml"
    assert any("--seed 7" in words and words.startswith("atlas run --preset") for words in commands), commands
    assert f"atlas run --config {run.name}/config.toml --name again" in commands


def test_a_file_that_is_not_what_was_written_is_named_in_one_line(make_run) -> None:
    run = make_run(tasks=1, clients_per_task=1)
    write_digests(RunFolder(run), {"plan.json": "0" * 64})
    with pytest.raises(CheckpointError, match=r"damaged file .*plan\.json: its SHA-256 is .*; restore it from a copy"):
        run_page(run)


def test_the_same_run_gives_the_same_page(make_run) -> None:
    run = make_run(tasks=2, clients_per_task=3)
    assert render(run_page(run)) == render(run_page(run))


def test_a_name_from_right_to_left_turns_no_other_word(make_run) -> None:
    rows = table_of(page_of(rename(make_run())), "Clusters (corrected)")
    clients = str(rows[1]["clients"])
    assert clients.startswith(f"\u2068{NAMES['trec-0']}\u2069, ")
    assert clients.endswith(f", {NAMES['trec-2']}")
