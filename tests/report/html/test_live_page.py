"""The page of a run that goes on: how far it is by its log, who is in trouble, and nothing of it once it is over."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from atlas_fl.report.html.elements import render
from atlas_fl.report.html.live_page import (
    SILENT,
    Progress,
    live_page,
    read_progress,
    state_of,
    summary_row,
    warnings_of,
)
from atlas_fl.storage.run_folder import RunFolder
from tests.report.html.reading import parse_page, sections_of

NOW = datetime(2026, 1, 1, 10, 5, 0, tzinfo=UTC)
LOG = """2026-01-01T10:00:00Z INFO loading
2026-01-01T10:00:10Z INFO round 1
2026-01-01T10:00:40Z INFO round 1 of 6: loss 1.0, 29.9 s, 10 bytes
2026-01-01T10:00:40Z INFO round 2
2026-01-01T10:01:00Z INFO round 2 of 6: loss 0.9, 20.0 s, 10 bytes; validation: movie-0 0.5
2026-01-01T10:01:00Z INFO round 3
"""


def unfinished(run: Path, log: str = LOG) -> RunFolder:
    (run / "summary.json").unlink()
    (run / "log.txt").write_text(log)
    return RunFolder(run)


def test_how_far_a_run_is_follows_from_its_log_by_hand(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(LOG)
    progress = read_progress(RunFolder(tmp_path), now=NOW)
    assert (progress.doing, progress.done, progress.rounds) == ("round 3", 2, 6)
    assert progress.seconds_left == 4 * 20.0, "the one round whose beginning and end as rounds ended are known"
    assert progress.silent == 240.0
    assert progress.seconds == 60.0, "from the first line to the last"
    (tmp_path / "log.txt").write_text("".join(LOG.splitlines(keepends=True)[:3]))
    assert read_progress(RunFolder(tmp_path), now=NOW).seconds_left == 5 * 30.0
    (tmp_path / "log.txt").unlink()
    assert read_progress(RunFolder(tmp_path), now=NOW) == Progress(
        doing="begins", done=0, rounds=None, seconds_left=None, silent=0.0, seconds=0.0, is_over=False
    )


@pytest.mark.parametrize(
    "line",
    [
        "2026-13-45T99:99:99Z INFO round 2 of 6: x",
        "2026-01-01T10:00:00Z INFO round 3 of " + "9" * 400 + ": x",
        "\x00\xff no line",
    ],
)
def test_a_line_that_is_none_is_left_out(tmp_path: Path, line: str) -> None:
    (tmp_path / "log.txt").write_text(f"{LOG}{line}\n")
    progress = read_progress(RunFolder(tmp_path), now=NOW)
    assert (progress.done, progress.rounds, progress.seconds_left) == (2, 6, 80.0)


def test_what_cannot_be_read_is_said_in_the_list(make_run) -> None:
    folder = unfinished(make_run())
    folder.log.unlink()
    folder.log.mkdir()
    assert summary_row(folder, now=NOW) == ("cannot be read now", "", "")


def test_the_state_says_that_a_run_is_silent(make_run) -> None:
    run, now = make_run(), datetime.now(UTC)
    assert not state_of(run, now=now).endswith("silent")
    assert state_of(run, now=now + timedelta(seconds=SILENT + 60)).endswith(" silent")


def test_a_run_that_goes_on_says_so_first_and_one_that_is_over_does_not(make_run) -> None:
    run = make_run()
    assert sections_of(parse_page(render(live_page(RunFolder(run), now=NOW))))[0] == "outcome"
    text = render(live_page(unfinished(run), now=NOW), state="now")
    assert sections_of(parse_page(text))[0] == "now"
    assert "2 of 6" in text and "1.3 min" in text
    assert "connect-src &#39;self&#39;" in text and "?state" in text
    assert "connect-src" not in render(live_page(RunFolder(run), now=NOW))


def test_a_run_without_a_plan_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(LOG.splitlines()[0])
    assert sections_of(parse_page(render(live_page(RunFolder(tmp_path), now=NOW)))) == ["now"]


def scores(client: str, *values: float, majority: float = 0.5) -> list[dict[str, object]]:
    rows = [{"split": "validation", "client": client, "primary": value, "majority": majority} for value in values]
    return [{**row, "round": round} for round, row in enumerate(rows, 1)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.6, 0.8, 0.7), "<a> gets worse: 0.700 now, 0.800 at best"),
        ((0.6, 0.8, 0.4), "<a> scores 0.400, less than by guessing its commonest class (0.500)"),
        ((0.6, 0.8, 0.76), None),
    ],
)
def test_who_is_in_trouble_is_said(values: tuple[float, ...], words: str | None) -> None:
    progress = Progress(doing="round 4", done=3, rounds=6, seconds_left=1.0, silent=5.0, seconds=9.0, is_over=False)
    assert warnings_of(progress, scores("<a>", *values)) == ([] if words is None else [words])


def test_a_run_that_says_nothing_for_long_is_doubted(make_run) -> None:
    folder = unfinished(make_run())
    later = datetime(2026, 1, 1, 12, 1, 0, tzinfo=UTC)
    assert "said nothing for 2.0 h" in render(live_page(folder, now=later))
    assert summary_row(folder, now=later)[:2] == ("silent", "2 of 6")
    assert summary_row(folder, now=NOW)[:2] == ("round 3", "2 of 6")


def test_the_state_changes_with_each_line_and_the_run_is_not_touched(make_run) -> None:
    folder = unfinished(make_run())
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    first = state_of(folder.path, now=NOW)
    live_page(folder, now=NOW)
    assert state_of(folder.path, now=NOW) == first
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before
    with folder.log.open("a") as file:
        file.write("2026-01-01T10:01:30Z INFO export\n")
    assert state_of(folder.path, now=NOW) != first
