"""Asynchronous rounds: kills end in the same bits, and sites that are late arrive as in a simulation."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from atlas_fl.config import to_toml
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.methods.fedbuff import FedAvgByArrival
from atlas_fl.storage.jsonl import read_json
from tests.runs.federation import Federations, adapters
from tests.runs.finished import FinishedRuns, Make
from tests.runs.processes import SECONDS, Programs
from tests.runs.reading import passing_audit
from tests.runs.sessions import check_same_runs

pytestmark = pytest.mark.slow

SLOW = "memory_gb=8,gflops=20,up_mbps=20,down_mbps=50,latency_ms=20,max_rank=64"
FAST = SLOW.replace("=20,", "=200,", 1)
SETTINGS = {"strategy": "fedbuff", "ranks": "4", "rounds": 5, "dropout": 0.1}


def participants(folder: Path) -> list[list[str]]:
    """The clients in each step of a run."""
    return [read_json(file)["participants"] for file in sorted(folder.glob("audit/round-*/record.json"))[1:]]


@pytest.mark.parametrize("knob", [{"buffer": 2}, {"round_percentile": 50}], ids=["a buffer", "steps of equal length"])
def test_a_run_killed_between_steps_ends_in_the_same_bits(
    config: Make, finished: FinishedRuns, programs: Programs, tmp_path: Path, knob: Mapping[str, object]
) -> None:
    """The update of a client that is at work when the run is killed is the same after it."""
    settings = {**SETTINGS, **knob, "device": (f"slow={SLOW}", f"fast={FAST}"), "devices": ("slow", "fast")}
    whole = finished(config(name="whole", **settings))
    killed = tmp_path / "runs" / "killed"
    (tmp_path / "config.toml").write_text(to_toml(config(name="killed", **settings)))
    program = programs.start("run", "--config", "config.toml", folder=tmp_path)
    while not (killed / "checkpoints/round-0003").exists():
        assert not program.ended, program.text
        time.sleep(0.002)
    program.kill()
    assert not (killed / "summary.json").exists(), "it was killed too late"
    assert resume_run(killed).complete
    check_same_runs(whole.folder, killed)
    passing_audit(killed)
    steps = participants(killed)
    assert len({len(step) for step in steps}) > 1 and len(steps[-1]) == 4


STEPS: Mapping[str, Sequence[Sequence[str]]] = {
    "buffer": [
        ["movie-1-1", "movie-2-1"],
        ["movie-0-1", "movie-1-2"],
        ["movie-0-3", "movie-2-2"],
        ["movie-0-4", "movie-1-3", "movie-2-4"],
    ],
    "round_percentile": [["movie-1-1"], ["movie-0-1"], ["movie-0-3", "movie-1-2", "movie-2-1"]],
}
"""By knob the trainings that end in each step: client, and the round in which it began."""


@pytest.mark.parametrize(("knob", "value"), [("buffer", 2), ("round_percentile", 60)])
def test_late_sites_and_a_killed_server_end_in_the_bits_of_a_simulation_with_these_arrivals(
    federation: Federations, config: Make, monkeypatch: pytest.MonkeyPatch, knob: str, value: int
) -> None:
    """A slow site is in later steps, with its staleness; work that is open when the server is killed is done again."""
    steps, sites = STEPS[knob], {f"movie-{part}": "laptop_8gb" for part in range(3)}
    settings = {**SETTINGS, "rounds": len(steps), "clients_per_task": 3, "devices": ("laptop_8gb",), knob: value}
    fed = federation(sites, **settings)

    def end(trainings: Sequence[str]) -> None:
        limit = time.monotonic() + SECONDS
        for name in trainings:
            (fed.folder / name).touch()
        while any((fed.folder / name).exists() for name in trainings):
            assert not any(site.ended for site in joined), [site.text for site in joined]
            assert time.monotonic() < limit, [program.text for program in (*joined, server)]
            time.sleep(0.01)

    server, port = fed.serve()
    joined = [fed.join(name, port, fault="waits before it trains") for name in sites]
    for number, trainings in enumerate(steps, 1):
        if number == len(steps) - 1:
            at_work = sorted(name for later in steps[number - 1 :] for name in later if int(name[-1]) <= number)
            for site, name in zip(joined, at_work, strict=True):
                site.wait_for(f"train, round {name[-1]}")
            server.kill()
            server, _ = fed.serve(port=port)
            end(at_work)
        end(trainings)
        server.wait_for(f"round {number}/")
    for program in (*joined, server):
        program.end()
    passing_audit(fed.served.path)
    expected = [[training[:7] for training in trainings] for trainings in steps]
    assert participants(fed.served.path) == expected

    def schedule(*_: object, round: int, **__: object) -> tuple[tuple[str, ...], float]:
        return tuple(expected[round - 1]), 1.0

    monkeypatch.setattr(FedAvgByArrival, "schedule", schedule)
    simulated = config(tasks=("movie",), pack_tokens=1, secrets=fed.folder, name="simulated", **settings)
    assert adapters(fed.served.path) == adapters(run_config(simulated).folder) == fed.own_adapters
