"""What MLflow keeps of a run, asked of its own database, and what it is given where it is not installed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atlas_fl.config import Config, config_hash
from atlas_fl.config.settings import settings
from atlas_fl.events import Event, Note, PhaseStarted, RoundFinished
from atlas_fl.report.trackers import numbers_of, track_run
from tests.report.trackers.test_track_run import ROWS, tracker_of

SUMMARY = {"overall": {"final": {"test": {"accuracy": 0.625}}, "rounds_to": {"90%": 2}}}


def round_finished(number: int) -> RoundFinished:
    return RoundFinished(round=number, rounds=2, scores={}, loss=0.5, seconds=1.0, bytes=8, rows=ROWS)


def track_two_sessions(folder: Path) -> list[Event]:
    told = list[Event]()
    for number in (1, 2):
        with track_run([tracker_of("mlflow", "federations")], Config(), folder, told.append) as logging:
            logging.tell(PhaseStarted(f"round {number}"))
            logging.tell(round_finished(number))
            if number == 2:
                logging.summary(SUMMARY)
    return told


class Client:
    """An MLflow server as its client shows it, with one experiment of which nothing is known yet."""

    def __init__(self) -> None:
        self.runs, self.params = dict[str, dict[str, str]](), dict[str, str]()
        self.metrics, self.status = dict[str, list[tuple[float, int]]](), list[str]()

    def get_experiment_by_name(self, name: str) -> None:
        assert name == "federations"

    def create_experiment(self, name: str) -> str:
        return f"id of {name}"

    def create_run(self, experiment: str, *, tags: dict[str, str]) -> Any:
        assert experiment == "id of federations" and not self.runs
        self.runs["r"] = tags
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def search_runs(self, experiments: Sequence[str], wanted: str) -> list[Any]:
        assert list(experiments) == ["id of federations"]
        assert wanted == f"tags.`atlas_fl.hash` = '{config_hash(Config())}'"
        runs = {"other": {"mlflow.runName": "another"}, **self.runs}
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=name), data=SimpleNamespace(tags=tags))
            for name, tags in runs.items()
        ]

    def update_run(self, run: str, *, status: str) -> None:
        self.status.append(f"{run} {status}")

    def log_batch(self, run: str, *, params: Sequence[Any] = (), metrics: Sequence[Any] = ()) -> None:
        assert run == "r" and len(params) <= 100 and len(metrics) <= 1000
        self.params |= dict(params)
        for name, value, _, step in metrics:
            self.metrics.setdefault(name, []).append((value, step))

    def set_terminated(self, run: str, status: str) -> None:
        self.status.append(f"{run} {status}")


def test_two_sessions_are_one_run(monkeypatch, tmp_path) -> None:
    client = Client()
    entities = SimpleNamespace(Metric=lambda *parts: parts, Param=lambda *parts: parts)
    module = SimpleNamespace(MlflowClient=lambda: client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    assert not any(isinstance(event, Note) for event in track_two_sessions(tmp_path))
    assert client.runs == {"r": {"mlflow.runName": tmp_path.name, "atlas_fl.hash": config_hash(Config())}}
    assert client.status == ["r FINISHED", "r RUNNING", "r FINISHED"]
    assert {*client.params} == {*settings(), "hash"} and client.params["seed"] == "42"
    numbers = {name: [(value, 1), (value, 2)] for name, value in numbers_of(round_finished(2)).items()}
    summary = {"summary/overall/final/test/accuracy": [(0.625, 2)], "summary/overall/rounds_to/90_": [(2, 2)]}
    assert client.metrics == numbers | summary


def test_what_a_database_keeps_is_what_the_rounds_brought(monkeypatch, tmp_path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(mlflow, "MlflowClient", lambda: mlflow.client.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db"))
    assert not any(isinstance(event, Note) for event in track_two_sessions(tmp_path))
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("federations").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.run_name == tmp_path.name and run.info.status == "FINISHED" and run.data.params["seed"] == "42"
    wanted = numbers_of(round_finished(2))
    assert {name: run.data.metrics[name] for name in wanted} == wanted
    history = client.get_metric_history(run.info.run_id, "test/accuracy/a-0")
    assert sorted((one.step, one.value) for one in history) == [(1, 0.5), (2, 0.5)]
