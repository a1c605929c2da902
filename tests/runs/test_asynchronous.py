"""Asynchronous rounds: kills end in the same bits, and sites that are late arrive as in a simulation."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from atlas_fl.config import to_toml
from atlas_fl.experiment.run import resume_run
from atlas_fl.storage.jsonl import read_json
from tests.runs.finished import FinishedRuns, Make
from tests.runs.processes import Programs
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
