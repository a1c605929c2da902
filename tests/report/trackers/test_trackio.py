"""What Trackio is given of a run, and what its own database keeps of it where it is installed."""

import json
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atlas_fl.config import Config
from atlas_fl.events import Event, Note, PhaseStarted, RoundFinished
from atlas_fl.report.trackers import numbers_of, track_run
from tests.report.trackers.test_track_run import ROWS, tracker_of

ROUND = RoundFinished(round=3, rounds=3, scores={}, loss=0.5, seconds=1.0, bytes=8, rows=ROWS)


def track(folder: Path) -> None:
    told = list[Event]()
    with track_run([tracker_of("trackio", "federations")], Config(), folder, told.append) as logging:
        logging.tell(PhaseStarted("round 3"))
        logging.tell(ROUND)
        logging.summary({"overall": {"final": {"test": {"accuracy": 0.625}}}})
    assert not any(isinstance(event, Note) for event in told)


def test_a_run_that_goes_on_is_the_one_of_its_name(monkeypatch, tmp_path) -> None:
    calls = list[Any]()

    def init(**options: Any) -> Any:
        calls.append(options)
        return SimpleNamespace(
            log=lambda numbers, *, step: calls.append((numbers, step)), finish=lambda: calls.append("end")
        )

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    track(tmp_path)
    begun, *logged = calls
    assert (begun["project"], begun["name"], begun["resume"]) == ("federations", tmp_path.name, "allow")
    assert begun["config"]["seed"] == 42 and begun["auto_log_cpu"] is begun["embed"] is False
    assert logged == [(numbers_of(ROUND), 3), ({"summary/overall/final/test/accuracy": 0.625}, 3), "end"]


def test_what_its_database_keeps_is_what_the_round_brought(monkeypatch, tmp_path) -> None:
    trackio = pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio")
    track(tmp_path / "one")
    (database,) = tmp_path.glob("trackio/*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    (name, step, first), (_, _, last) = rows
    kept = json.loads(first)
    wanted = numbers_of(ROUND)
    assert (name, step) == ("one", 3) and {key: kept[key] for key in wanted} == wanted
    assert json.loads(last)["summary/overall/final/test/accuracy"] == 0.625
