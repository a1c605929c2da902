"""The section of answers of a run's page: what `atlas evaluate` left, side by side."""

import json
from pathlib import Path

import pytest

from atlas_fl.errors import CheckpointError
from atlas_fl.report.answers import LONGEST, SHOWN
from atlas_fl.report.html.elements import render
from atlas_fl.report.html.run_page import run_page
from atlas_fl.storage.run_folder import RunFolder
from tests.report.html.reading import Element, parse_page, sections_of, table_of

HOSTILE = "</td><script>window.harmed = 1</script>"
LONG = "beginning " + "x" * LONGEST + " end"
SCORES = "Models on the test rows of 2 clients"


def evaluated(run: Path, *, answers: int = 2) -> Path:
    """Write what `atlas evaluate` leaves: one client without a model alone, who answers nothing, and one with it."""
    scores = {
        "movie-0": {"base": {"primary": 0.0, "exact_match": 0.0}, "federated": {"primary": 0.5, "exact_match": 0.25}},
        "movie-1": {kind: {"primary": 0.5, "exact_match": 0.75} for kind in ("base", "alone", "federated")},
    }
    written = {"movie-0": {"base": "", "federated": LONG}, "movie-1": dict.fromkeys(scores["movie-1"], "ja")}
    folder = RunFolder(run)
    folder.evaluation.write_text(json.dumps({"split": "test", "clients": scores}))
    rows = [
        {"client": client, "prompt": LONG if client == "movie-0" else HOSTILE, "reference": "ja", "answers": own}
        for client, own in written.items()
        for _ in range(answers)
    ]
    folder.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def page_of(run: Path) -> Element:
    return parse_page(render(run_page(run)))


def test_answers_stand_side_by_side_with_the_mean_scores_of_each_kind(make_run) -> None:
    page = page_of(evaluated(make_run()))
    assert sections_of(page)[1] == "answers"
    assert table_of(page, SCORES) == [
        {"model": "base", "clients": 2, "score": 0.25, "exact match": 0.375},
        {"model": "alone", "clients": 1, "score": 0.5, "exact match": 0.75},
        {"model": "federated", "clients": 2, "score": 0.5, "exact match": 0.5},
    ]
    first, second, third, fourth = table_of(page, "Answers")
    assert first == second and third == fourth
    assert third == {"client": "movie-1", "prompt": HOSTILE, "reference": "ja"} | dict.fromkeys(
        ("base", "alone", "federated"), "ja"
    )
    cut = f"[{len(LONG) - LONGEST} characters left out]"
    assert (first["base"], first["alone"]) == ("(nothing)", "-")
    assert first["prompt"] == f"{cut} {LONG[-LONGEST:]}" and first["federated"] == f"{LONG[:LONGEST]} {cut}"
    assert not any("harmed" in script.text for script in page.all("script"))


def test_many_answers_are_shown_in_part_some_of_each_client(make_run) -> None:
    page = page_of(evaluated(make_run(), answers=SHOWN))
    shown = [row["client"] for row in table_of(page, "Answers")]
    assert shown == ["movie-0"] * (SHOWN // 2) + ["movie-1"] * (SHOWN // 2)
    assert any(f"{SHOWN} of {2 * SHOWN}; all are in answers.jsonl" in note.text for note in page.all("p"))


@pytest.mark.parametrize("damage", ['{"client": "a"}\n', "[]\n"])
def test_damaged_answers_are_named(make_run, damage: str) -> None:
    run = evaluated(make_run())
    RunFolder(run).answers.write_text(damage)
    with pytest.raises(CheckpointError, match=r"answers\.jsonl"):
        run_page(run)
