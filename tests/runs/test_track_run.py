"""A run that is logged elsewhere too is the same run, also where the logging fails."""

from collections.abc import Mapping
from typing import Any

import pytest

from atlas_fl.events import Event, RoundFinished
from atlas_fl.experiment.run import run_config
from atlas_fl.report.trackers import TrackedRun, Tracker, numbers_of, track_run
from tests.runs.finished import Make
from tests.runs.reading import rows, same_tensors, state


class Kept(Tracker):
    """A tracker that keeps what it is given, up to some round."""

    title = "Kept"

    def __init__(self, *, until: int) -> None:
        self.until, self.logged, self.kept_summary = until, dict[int, Mapping[str, float]](), dict[str, Any]()

    def check(self) -> None: ...

    def begin(self, run: TrackedRun) -> None:
        assert run.first_round == 1

    def log(self, numbers: Mapping[str, float], *, round: int) -> None:
        if round > self.until:
            raise OSError("no space left on device")
        self.logged[round] = numbers

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self.kept_summary |= summary

    def finish(self, *, is_failed: bool) -> None:
        assert not is_failed


@pytest.mark.parametrize("until", [2, 1])
def test_a_run_that_is_logged_ends_in_the_same_bits(image_config: Make, until: int) -> None:
    settings = {"rounds": 2, "eval_every": 2, "clients_per_task": 2, "participation": 1, "audit": False}
    plain, logged = run_config(image_config(name="plain", **settings)), image_config(name="logged", **settings)
    kept, told = Kept(until=until), list[Event]()
    with track_run([kept], logged, plain.folder.parent / "logged", told.append) as logging:
        result = run_config(logged, on_event=logging.tell)
        logging.summary(result.summary)
    assert same_tensors(state(plain.folder, round=2), state(result.folder, round=2))
    assert rows(plain.folder) == rows(result.folder)
    events = {event.round: event for event in told if isinstance(event, RoundFinished)}
    assert kept.logged == {number: numbers_of(events[number]) for number in range(1, until + 1)}
    accuracy = [row["accuracy"] for row in rows(result.folder) if row.get("split") == "test"]
    assert numbers_of(events[2])["test/accuracy"] == pytest.approx(sum(accuracy) / 2)
    assert until == 1 or "overall" in kept.kept_summary, "after an error it may or may not have been asked for"
