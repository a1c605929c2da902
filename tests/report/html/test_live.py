"""The pages of `atlas watch`: how far each run is by its log, and what it has written so far as its own page."""

import json
from pathlib import Path

import pytest

from atlas_fl.report.html.live import find_places, list_text, page_text, state_of
from tests.report.html.reading import parse_page, sections_of, table_of


def unfinished(run: Path) -> Path:
    (run / "summary.json").unlink()
    return run


def row_of(run: Path) -> dict[str, float | str]:
    places = find_places([run])
    (row,) = table_of(parse_page(list_text(places, state_of(places))), "Runs")
    return row


def test_how_far_a_run_is_follows_from_its_rows_by_hand(make_run) -> None:
    run = unfinished(make_run(rounds=2))
    row = row_of(run)
    assert row["rounds"] == "2 of 12"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row["primary"] for row in rows if row["split"] == "validation" and row["round"] == 2]
    assert row["mean validation score"] == pytest.approx(sum(last) / len(last))


def test_a_run_that_is_complete_cannot_be_read_or_begins_says_so_in_the_list(make_run, tmp_path) -> None:
    assert row_of(make_run())["rounds"] == "complete"
    broken = unfinished(make_run("broken"))
    (broken / "metrics.jsonl").write_text("{\n")
    assert row_of(broken)["rounds"] == "cannot be read now"
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.toml").write_text("")
    assert row_of(begun)["rounds"] == "begins"


def test_the_time_left_is_that_of_the_rounds_to_come_by_hand(make_run) -> None:
    run = unfinished(make_run(rounds=2))
    line = "2026-01-01T10:01:30Z INFO round {} of 12: loss nan, {} s, 1,859,112 bytes; validation: a 0.5\n"
    with (run / "log.txt").open("a") as file:
        file.write(line.format(1, "20.0") + line.format(2, "4.0"))
    assert row_of(run)["time left"] == "2.0 min"  # ten rounds of twelve seconds
    assert "About 2.0 min left, by what its rounds took." in parse_page(page_text(run, "left")).text
    assert "time left" not in row_of(make_run("complete"))


def test_the_page_of_a_run_is_that_of_the_report_and_asks_for_news(make_run) -> None:
    run = unfinished(make_run())
    text = page_text(run, "now")
    page = parse_page(text)
    assert sections_of(page)[:2] == ["outcome", "convergence"]
    assert "This run is not complete. Shown is what was saved after round 6." in page.text
    assert "connect-src &#39;self&#39;" in text and "?state" in text and 'data-state="now"' in text


def test_the_state_changes_with_each_line_and_the_run_is_not_touched(make_run) -> None:
    run = unfinished(make_run())
    places, before = find_places([run]), {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    first = state_of(places)
    page_text(run, first)
    assert state_of(places) == first
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    with (run / "log.txt").open("a") as file:
        file.write("2026-01-01T10:01:30Z INFO export\n")
    assert state_of(places) != first
