from pathlib import Path
from typing import Any

import pytest

from atlas_fl.audit.report import AuditRow
from atlas_fl.cli.display import show
from atlas_fl.cli.tables import SHOWN_FAILURES, audit_table, failure_lines, outcome

SUMMARY: dict[str, Any] = {
    "tasks": {"movie": {"clients": 1, "final": {"test": {"primary": 0.75, "majority": 0.5}}}},
    "overall": {"clients": 1, "final": {"test": {"primary": 0.75}}},
    "seconds": {"total": 5.0},
    "bytes": {"up": 1000, "down": 2000, "total": 3000},
    "events": {"refused": [{"client": "trec-0", "round": 2, "reason": "NaN in [head]"}]},
}


def shown(things: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setenv("COLUMNS", "120")
    show(things)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_outcome_says_all_of_the_summary(capsys, monkeypatch) -> None:
    lines = shown(outcome(Path("runs/x"), SUMMARY, complete=True), capsys, monkeypatch)
    text = "\n".join(" ".join(line) for line in lines)
    assert "movie 1 0.500 0.750" in text
    assert "1.0 kB up, 2.0 kB down" in text
    assert text.endswith("refused: trec-0 in round 2: NaN in [head]\nrun folder: runs/x")


def test_the_audit_shows_rounds_and_the_first_failures(capsys, monkeypatch) -> None:
    good = AuditRow(run="a", round=1, client="movie-0", check="mixed", error=5.6e-8)
    failure = AuditRow(run="a", round=2, client="movie-0", check="mixed", detail="off by 0.5")
    rounds = {("a", 1): [good] * 9, ("a", 2): [failure, *[good._replace(error=None)] * 8]}
    failures = [failure] * (SHOWN_FAILURES + 3)
    lines = shown([audit_table(rounds), *failure_lines(failures)], capsys, monkeypatch)
    assert ["a", "1", "9", "0", "5.6e-08"] in lines
    assert ["a", "2", "9", "1", "-"] in lines
    assert lines.count(["FAILED", "a", "round", "2", "movie-0", "mixed:", "off", "by", "0.5"]) == SHOWN_FAILURES
    assert lines[-1] == ["and", "3", "more"]


def test_what_concerns_all_rounds_of_a_run_is_in_no_round(capsys, monkeypatch) -> None:
    failure = AuditRow(run="a", round=0, client="", check="different", detail="ends as b does")
    lines = shown([audit_table({("a", 0): [failure]}), *failure_lines([failure])], capsys, monkeypatch)
    assert ["a", "all", "1", "1", "-"] in lines
    assert lines[-1] == ["FAILED", "a", "different:", "ends", "as", "b", "does"]
