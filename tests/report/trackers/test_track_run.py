"""What trackers are told of a run, and that nothing that fails there can end it."""

import builtins
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event as Event_
from types import ModuleType
from typing import Any

import pytest

from atlas_fl.config import Config, config_hash
from atlas_fl.errors import ConfigError
from atlas_fl.events import Event, Note, PhaseStarted, RoundFinished, ignore
from atlas_fl.plugins import load_plugins
from atlas_fl.report import trackers as tracking
from atlas_fl.report.trackers import TRACKERS, TrackedRun, Tracker, numbers_of, summary_numbers, track_run
from atlas_fl.storage.extras import install_command

ROWS = (
    {"round": 2, "client": "a-0", "task": "a", "split": "test", "accuracy": 0.5, "examples": 4, "classes": [[1], [2]]},
    {"round": 2, "client": "a-1", "task": "a", "split": "test", "accuracy": 0.75, "examples": 4},
    {"round": 2, "client": "a-1", "event": "refused", "reason": "NaN"},
)
ROUND = RoundFinished(round=2, rounds=3, scores={}, loss=0.25, seconds=3.0, bytes=40, rows=ROWS)
PLUGINS = Path(__file__).parents[3] / "examples/plugins"
PACKAGES = ("wandb", "tensorboard", "mlflow", "trackio")


def tracker_of(name: str, place: str) -> Tracker:
    """The tracker of the plug-in in the examples that has its name."""
    load_plugins((str(PLUGINS / f"{name}_tracker.py"),))
    return TRACKERS[name](place)


@pytest.fixture(autouse=True)
def _no_plugins() -> Iterator[None]:
    yield
    load_plugins(())


def test_numbers_of_a_round_by_hand() -> None:
    assert numbers_of(ROUND) == {
        **{"loss": 0.25, "seconds": 3.0, "bytes": 40, "events/refused": 1},
        **{"test/accuracy/a-0": 0.5, "test/accuracy/a-1": 0.75, "test/accuracy": 0.625},
        **{"test/examples/a-0": 4, "test/examples/a-1": 4, "test/examples": 4},
    }


def test_numbers_of_a_summary_are_those_over_all_clients() -> None:
    summary = {
        "overall": {"clients": 2, "final": {"test": {"accuracy": 0.5, "note": "x"}}},
        "clients": {"a-0": {"b": 1}},
    }
    assert summary_numbers(summary) == {"summary/overall/clients": 2, "summary/overall/final/test/accuracy": 0.5}
    assert summary_numbers({}) == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_without_the_package_nothing_begins(package: str, monkeypatch, tmp_path) -> None:
    real, module = builtins.__import__, {"tensorboard": "torch.utils.tensorboard"}.get(package, package)

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == module:
            raise ModuleNotFoundError(name, name=package)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with (
        pytest.raises(
            ConfigError, match=rf"--tracker {package} needs .* {re.escape(install_command(package))}"
        ) as caught,
        track_run([tracker_of(package, str(tmp_path) if package == "tensorboard" else "p")], *RUN(tmp_path)),
    ):
        pytest.fail("it began")
    assert "\n" not in str(caught.value)


def RUN(folder: Path) -> tuple[Config, Path, Callable[[Event], None]]:  # noqa: N802
    return Config(), folder, ignore


@pytest.mark.parametrize(
    ("name", "place", "allowed"),
    [
        *(
            ("wandb", place, "--tracker wandb is .*allowed: the name of a project, without")
            for place in ("", " ", "a/b", "50%")
        ),
        ("tensorboard", "", "--tracker tensorboard is ''; allowed: a folder"),
        ("tensorboard", f"{__file__}/below", "--tracker tensorboard is .*; allowed: a folder to write to"),
        ("tensorboard", "s3://bucket/x", "--tracker tensorboard is 's3://bucket/x'; allowed: a folder to write to"),
        ("tensorboard", __file__, "--tracker tensorboard is '/.*; allowed: a folder"),
        ("mlflow", " ", "--tracker mlflow= names no experiment"),
        *(("trackio", place, "the name of a project has letters") for place in ("", "a/b", "../up", "a" * 101)),
    ],
)
def test_a_name_that_a_tracker_does_not_take_is_one_line(name: str, place: str, allowed: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=allowed), track_run([tracker_of(name, place)], *RUN(tmp_path)):
        pytest.fail("it began")


class Told(Tracker):
    """A tracker that writes down what it is told, and whose network fails from one call on."""

    title = "Told"

    def __init__(self, *, failing: str = "") -> None:
        self.failing, self.calls = failing, list[tuple[str, Any]]()

    def _call(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name == self.failing:
            raise RuntimeError("no route\nto host")

    def check(self) -> None:
        self._call("check", None)

    def begin(self, run: TrackedRun) -> None:
        self._call("begin", run)

    def log(self, numbers: Mapping[str, float], *, round: int) -> None:
        self._call("log", (numbers, round))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._call("log_summary", summary)

    def finish(self, *, is_failed: bool) -> None:
        self._call("finish", is_failed)


EVENTS = (PhaseStarted("warm-up"), PhaseStarted("round 2"), ROUND, PhaseStarted("round 3"), ROUND)


@pytest.mark.parametrize("failing", ["begin", "log", "log_summary", "finish"])
def test_a_tracker_that_fails_is_told_once_and_the_run_and_the_other_go_on(failing: str, tmp_path) -> None:
    broken, whole, told = Told(failing=failing), Told(), list[Event]()
    with track_run([broken, whole], Config(), tmp_path, told.append) as logging:
        for event in EVENTS:
            logging.tell(event)
        logging.summary({"a": 1})
    (note,) = [event for event in told if isinstance(event, Note)]
    assert note.text == (
        "nothing more is logged to Told (RuntimeError: no route to host); the run goes on and keeps it all"
    )
    assert [event for event in told if event is not note] == list(EVENTS)
    run = TrackedRun(config=Config(), folder=tmp_path, first_round=2)
    logged = [("log", (numbers_of(ROUND), 2))] * 2
    assert whole.calls == [("check", None), ("begin", run), *logged, ("log_summary", {"a": 1}), ("finish", False)]
    assert run.settings["seed"] == 42 and run.settings["hash"] == config_hash(Config())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_breaks_or_of_which_only_a_folder_is_left_is_one_line(
    package: str, monkeypatch, tmp_path
) -> None:
    tracker, flag = tracker_of(package, "p" if package != "tensorboard" else str(tmp_path)), f"--tracker {package}"
    module = {"tensorboard": "torch.utils.tensorboard"}.get(package, package)
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(ConfigError, match=rf"^{flag}(:.* cannot be loaded| needs).*, or leave {flag} out$"):
        tracker.check()
    real = builtins.__import__

    def broken(name: str, *rest: Any, **more: Any) -> Any:
        if name == module:
            raise TypeError("Descriptors cannot be created\ndirectly.")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", broken)
    message = rf"^{flag}: {package} cannot be loaded \(TypeError: Descriptors cannot be created directly\.\); install"
    with pytest.raises(ConfigError, match=message):
        tracker.check()


class Slow(Told):
    """A tracker that takes its time over every round, until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event_()

    def log(self, numbers: Mapping[str, float], *, round: int) -> None:
        super().log(numbers, round=round)
        self.go.wait(30)


def test_what_waits_behind_a_failure_is_not_sent(tmp_path) -> None:
    class Blocked(Told):
        def begin(self, run: TrackedRun) -> None:
            waiting.wait(30)
            super().begin(run)

    waiting, tracker = Event_(), Blocked(failing="begin")
    with track_run([tracker], *RUN(tmp_path)) as logging:
        for event in EVENTS:
            logging.tell(event)
        waiting.set()
    assert [name for name, _ in tracker.calls] == ["check", "begin"]


def test_the_end_of_a_run_waits_for_a_slow_tracker_for_a_while_only(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tracking, "PATIENCE", 0.2)
    slow, whole, told = Slow(), Told(), list[Event]()
    with track_run([slow, whole], Config(), tmp_path, told.append) as logging:
        for event in EVENTS:
            logging.tell(event)
    (note,) = [event for event in told if isinstance(event, Note)]
    assert note.text.startswith("nothing more is logged to Told (it has not taken all within 0 s)")
    assert whole.calls[-1] == ("finish", False)
    slow.go.set()


def test_an_error_without_words_and_one_that_cannot_say_them_are_told(tmp_path) -> None:
    class Wordless(Told):
        def begin(self, run: TrackedRun) -> None:
            super().begin(run)
            raise Mute

    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise ValueError("no words")

    told = list[Event]()
    with track_run([Wordless()], Config(), tmp_path, told.append) as logging:
        logging.tell(PhaseStarted("round 1"))
    (note,) = [event for event in told if isinstance(event, Note)]
    assert "Mute" in note.text and "\n" not in note.text


def test_a_run_that_fails_is_marked_as_failed(tmp_path) -> None:
    tracker = Told()
    with pytest.raises(OSError, match="disk"), track_run([tracker], *RUN(tmp_path)) as logging:
        logging.tell(PhaseStarted("round 1"))
        raise OSError("disk is full")
    assert tracker.calls[-1] == ("finish", True)


def test_a_run_that_is_complete_already_begins_nothing(tmp_path) -> None:
    tracker = Told()
    with track_run([tracker], *RUN(tmp_path)) as logging:
        logging.summary({"a": 1})
    assert tracker.calls == [("check", None)]
