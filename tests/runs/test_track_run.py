"""A run that is logged elsewhere too is the same run, also where the logging fails."""

from collections.abc import Callable
from typing import Any

import pytest

from atlas_fl.config import Config
from atlas_fl.events import Event, RoundFinished
from atlas_fl.experiment.run import run_config
from atlas_fl.report import wandb
from atlas_fl.report.wandb import numbers_of, track_run
from tests.runs.reading import rows, same_tensors, state


class Kept:
    """A wandb that keeps what it is given, up to some round."""

    def __init__(self, *, until: int) -> None:
        self.until, self.logged, self.summary = until, dict[int, dict[str, float]](), dict[str, Any]()

    def init(self, **_: Any) -> "Kept":
        return self

    def Settings(self, **_: Any) -> None: ...  # noqa: N802

    def log(self, numbers: dict[str, float], *, step: int) -> None:
        if step > self.until:
            raise OSError("no space left on device")
        self.logged[step] = numbers

    def finish(self, *, exit_code: int) -> None:
        assert exit_code == 0


@pytest.mark.parametrize("until", [2, 1])
def test_a_run_that_is_logged_ends_in_the_same_bits(
    image_config: Callable[..., Config], until: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"rounds": 2, "eval_every": 2, "clients_per_task": 2, "participation": 1, "audit": False}
    plain, logged = run_config(image_config(name="plain", **settings)), image_config(name="logged", **settings)
    kept, told = Kept(until=until), list[Event]()
    monkeypatch.setattr(wandb, "_wandb", lambda: kept)
    with track_run("p", logged, plain.folder.parent / "logged", told.append) as tracker:
        result = run_config(logged, on_event=tracker.tell)
        tracker.summary(result.summary)
    assert same_tensors(state(plain.folder, round=2), state(result.folder, round=2))
    assert rows(plain.folder) == rows(result.folder)
    events = {event.round: event for event in told if isinstance(event, RoundFinished)}
    assert kept.logged == {number: numbers_of(events[number]) for number in range(1, until + 1)}
    accuracy = [row["accuracy"] for row in rows(result.folder) if row.get("split") == "test"]
    assert numbers_of(events[2])["test/accuracy"] == pytest.approx(sum(accuracy) / 2)
    assert until == 1 or "summary" in kept.summary, "after an error it may or may not have been asked for"
