from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atlas_fl.cli import demo
from atlas_fl.cli.demo import first_result, introduction, time_lines, with_first_results
from atlas_fl.config.presets import find_preset
from atlas_fl.events import Event, Note, PhaseStarted, RoundFinished
from atlas_fl.experiment.run_time import RunTime
from atlas_fl.storage.jsonl import write_json
from atlas_fl.storage.run_folder import RunFolder

Atlas = Callable[..., Any]
TIME = RunTime(loading=5, planning=40, round=25, rounds=12, halves=35)


def round_finished(number: int) -> RoundFinished:
    scores = {"movie-0": 0.5, "trec-0": 0.75}
    return RoundFinished(round=number, rounds=12, scores=scores, loss=1.0, seconds=30.0, bytes=1000)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that is planned."""
    clients = [("movie-0", 0), ("movie-1", 0), ("trec-0", 1), ("odd", -1)]
    write_json(tmp_path / "plan.json", {"clients": [{"name": name, "cluster": cluster} for name, cluster in clients]})
    return RunFolder(tmp_path)


def told(folder: RunFolder, *events: Event, seconds: float) -> list[Event]:
    """What a run with these events shows, whose first round takes so long."""
    shown: list[Event] = []
    times = iter([100.0, 100.0 + seconds])
    tell = with_first_results(shown.append, folder, clock=lambda: next(times))
    for event in events:
        tell(event)
    return shown


def test_who_is_alike_is_told_before_training_and_the_first_score_as_it_appears(folder: RunFolder) -> None:
    first, second = round_finished(1), round_finished(2)
    events = [PhaseStarted("ranks"), PhaseStarted("round 1"), first, PhaseStarted("round 2"), second]
    assert told(folder, *events, seconds=31.0) == [
        events[0],
        events[1],
        Note(
            "found alike, before any training together: no cluster: odd; cluster 0: movie-0 movie-1; cluster 1: trec-0"
        ),
        first,
        Note(
            "first result after 31.0 s of training: mean validation score 0.625; 11 more rounds, about 5.5 min at this"
            " pace"
        ),
        events[3],
        second,
    ]


def test_a_run_that_goes_on_tells_its_first_round_of_now(folder: RunFolder) -> None:
    shown = told(folder, PhaseStarted("round 11"), round_finished(11), round_finished(12), seconds=30.0)
    assert str(shown[3]).endswith("; 1 more round, about 30.0 s at this pace")
    assert len(shown) == 5


def test_the_last_round_has_no_time_left() -> None:
    assert first_result(round_finished(12), seconds_of_training=3) == (
        "first result after 3.0 s of training: mean validation score 0.625"
    )


def test_it_says_what_it_will_do_and_how_long_it_takes() -> None:
    text = "\n".join([*introduction(find_preset("quick")), *time_lines(TIME)])
    assert "9 clients train together on this machine, 3 for each task: movie, trec, pairs." in text
    assert "12 rounds" in text and "report.html" in text
    assert "about 6.3 min on this machine as busy as it is now: 45.0 s before round 1, then 25.0 s for each" in text


def test_a_preset_that_is_no_demonstration_is_refused(atlas: Atlas) -> None:
    said = atlas("demo", "--preset", "publication")
    assert said.code == 2
    assert "quick" in said.err and "smoke" in said.err


@pytest.mark.slow
def test_it_ends_with_the_path_of_a_page_that_is_written_and_again_without_training(
    atlas: Atlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "measure", lambda _: SimpleNamespace(runs={"smoke": TIME}))
    said = atlas("demo", "--preset", "smoke", "--runs-dir", str(tmp_path))
    assert (said.code, said.err) == (0, "")
    page = Path(said.out.splitlines()[-1])
    assert page.name == "report.html" and page.read_text(encoding="utf-8").startswith("<!doctype html>")
    lines = said.out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("round 1/2"))
    assert lines[first + 1].startswith("note: first result after ")
    assert any(line.startswith("note: found alike, before any training together: cluster 0: ") for line in lines)
    assert "about 6.3 min on this machine" in said.out

    monkeypatch.setattr(demo, "measure", lambda _: pytest.fail("a run that is there is not measured"))
    again = atlas("demo", "--preset", "smoke", "--runs-dir", str(tmp_path))
    assert (again.code, again.err) == (0, "")
    assert again.out.splitlines()[-1] == str(page)
    assert "is complete" in again.out and "round 1/2" not in again.out
