"""What Weights & Biases is told of a run, read back from the file that it keeps offline."""

import builtins
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.config import Config
from atlas_fl.errors import ConfigError
from atlas_fl.events import Event, Note, PhaseStarted, RoundFinished, ignore
from atlas_fl.report import wandb as tracking
from atlas_fl.report.wandb import numbers_of, track_run

ROWS = (
    {"round": 2, "client": "a-0", "task": "a", "split": "test", "accuracy": 0.5, "examples": 4, "classes": [[1], [2]]},
    {"round": 2, "client": "a-1", "task": "a", "split": "test", "accuracy": 0.75, "examples": 4},
    {"round": 2, "client": "a-1", "event": "refused", "reason": "NaN"},
)
ROUND = RoundFinished(round=2, rounds=3, scores={}, loss=0.25, seconds=3.0, bytes=40, rows=ROWS)


def test_numbers_of_a_round_by_hand() -> None:
    assert numbers_of(ROUND) == {
        **{"loss": 0.25, "seconds": 3.0, "bytes": 40, "events/refused": 1},
        **{"test/accuracy/a-0": 0.5, "test/accuracy/a-1": 0.75, "test/accuracy": 0.625},
        **{"test/examples/a-0": 4, "test/examples/a-1": 4, "test/examples": 4},
    }


def test_without_the_package_nothing_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "wandb":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with (
        pytest.raises(ConfigError, match=r"--wandb needs the package wandb; pip install 'atlas-fl\[wandb\]'") as caught,
        track_run("p", Config(), tmp_path, ignore),
    ):
        pytest.fail("it began")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a/b", "50%"])
def test_a_name_that_no_project_has_is_one_line(name: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"--wandb is .*allowed: the name of a project, without"),
        track_run(name, Config(), tmp_path, ignore),
    ):
        pytest.fail("it began")


class Failing:
    """A wandb whose network is down, from the first call or from a later one."""

    def __init__(self, *, at: str) -> None:
        self.at, self.calls = at, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            if name == self.at:
                raise RuntimeError("no route\nto host")
            return self

        return call


@pytest.mark.parametrize("at", ["init", "log", "finish"])
def test_a_logger_that_fails_is_told_once_and_the_run_goes_on(
    at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wandb, told = Failing(at=at), list[Event]()
    monkeypatch.setattr(tracking, "_wandb", lambda: wandb)
    events = (PhaseStarted("round 1"), ROUND, PhaseStarted("round 2"), ROUND)
    with track_run("p", Config(), tmp_path, told.append) as tracker:
        for event in events:
            tracker.tell(event)
    (note,) = [event for event in told if isinstance(event, Note)]
    assert note.text == (
        "nothing more is logged to W&B (RuntimeError: no route to host); the run goes on and keeps it all"
    )
    assert [event for event in told if event is not note] == list(events)


def test_a_run_that_is_complete_already_begins_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = Failing(at="init")
    monkeypatch.setattr(tracking, "_wandb", lambda: wandb)
    with track_run("p", Config(), tmp_path, ignore) as tracker:
        tracker.summary({"a": 1})
    assert wandb.calls == []


def records(file: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format after seven bytes, a protobuf message each."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # no head fits into the rest of a block
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def items(parts: Any) -> dict[str, Any]:
    return {part.key or "/".join(part.nested_key): json.loads(part.value_json) for part in parts}


def test_what_is_logged_offline_is_what_the_rounds_brought(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    summary, found = {"overall": {"final": {"test": {"accuracy": 0.625}}}}, []
    for number in (1, 2):  # two sessions of one run
        told = list[Event]()
        with track_run("federations", Config(), tmp_path, told.append) as tracker:
            tracker.tell(PhaseStarted(f"round {number}"))
            tracker.tell(RoundFinished(round=number, rounds=2, scores={}, loss=0.5, seconds=1.0, bytes=8, rows=ROWS))
            if number == 2:
                tracker.summary(summary)
        assert not any(isinstance(event, Note) for event in told)
        (file,) = set(tmp_path.glob("wandb/offline-run-*/run-*.wandb")) - {own for own, _ in found}
        found.append((file, list(records(file))))
    for number, (_, read) in enumerate(found, 1):
        (begun,) = [one.run for one in read if one.HasField("run")][:1]
        assert begun.project == "federations" and begun.display_name == tmp_path.name
        assert items(begun.config.update)["seed"] == 42
        (logged,) = [items(one.history.item) for one in read if one.HasField("history")]
        wanted = numbers_of(RoundFinished(round=number, rounds=2, scores={}, loss=0.5, seconds=1.0, bytes=8, rows=ROWS))
        assert {key: logged[key] for key in wanted} == wanted and logged["_step"] == number
    assert len({file.name for file, _ in found}) == 1, "one run there too"
    updates = [items(one.summary.update) for _, read in found for one in read if one.HasField("summary")]
    assert any("0.625" in json.dumps(update) for update in updates if any("summary" in key for key in update))
