"""Resume is bit-exact: a run that is killed anywhere and gone on with ends as one that was not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_fl.audit import audit
from atlas_fl.config import Config, to_toml
from atlas_fl.events import Event, Note
from atlas_fl.run import resume, run
from tests.runs.reading import rows, same_tensors, state

Make = Callable[..., Config]

MOMENTS: dict[str, Callable[[Path], bool]] = {
    "while planning": lambda folder: (folder / "log.txt").exists(),
    "after the plan": lambda folder: (folder / "plan.json").exists(),
    "in a round": lambda folder: (folder / "checkpoints/round-0001").exists(),
    "between rows and checkpoint": lambda folder: (folder / "audit/round-0002/start.safetensors").exists(),
}


def start(config: Config, folder: Path) -> "subprocess.Popen[bytes]":
    """The run of this config in a process of its own."""
    file = folder / "config.toml"
    file.write_text(to_toml(config))
    script = "import sys; from atlas_fl.cli import main; sys.exit(main())"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", script, "run", "--config", str(file)], env=dict(os.environ), **quiet)


def wait_for(ready: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    while not ready():
        assert process.poll() is None, "the run ended before the moment of the kill"
        time.sleep(0.002)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_anywhere_ends_in_the_same_bits(config: Make, tmp_path: Path, moment: str) -> None:
    # Momentum of everything that could go wrong: partial participation, dropout, a schedule, clusters measured anew.
    settings = {"participation": 0.75, "dropout": 0.1, "schedule": "cosine", "recluster_every": 2, "eta": 0.3}
    whole = run(config(name="whole", **settings))
    killed = tmp_path / "runs" / "killed"
    process = start(config(name="killed", **settings), tmp_path)
    wait_for(lambda: MOMENTS[moment](killed), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result = resume(killed)
    assert result.complete
    assert same_tensors(state(whole.folder), state(killed))
    assert rows(whole.folder) == rows(killed)
    assert rows(whole.folder, "ledger") == rows(killed, "ledger")
    assert audit(killed).ok


def test_sessions_of_few_rounds_make_the_same_run(config: Make) -> None:
    whole = run(config(name="whole"))
    parts = run(config(name="parts", max_rounds=1))
    assert (parts.rounds, parts.complete) == (1, False)
    assert not (parts.folder / "summary.json").exists()
    assert resume(parts.folder, max_rounds=1).rounds == 2
    assert resume(parts.folder).complete
    assert same_tensors(state(whole.folder), state(parts.folder))
    assert rows(whole.folder) == rows(parts.folder)


def test_sessions_shorter_than_the_rounds_between_two_checkpoints_get_on(config: Make) -> None:
    whole = run(config(name="whole"))
    parts = run(config(name="parts", max_rounds=1, checkpoint_every=3))
    for expected in (2, 3):
        assert parts.rounds == expected - 1
        parts = resume(parts.folder, max_rounds=1)
    assert parts.complete
    assert same_tensors(state(whole.folder), state(parts.folder))


def test_sessions_that_end_between_two_aggregations_make_the_same_run(config: Make) -> None:
    settings = {"aggregate_every": 3, "participation": "0.5", "rounds": 5, "eta": "0.3"}
    whole = run(config(name="whole", **settings))
    parts = run(config(name="parts", max_rounds=1, **settings))
    while not parts.complete:
        parts = resume(parts.folder, max_rounds=1)
    assert same_tensors(state(whole.folder, round=5), state(parts.folder, round=5))
    assert rows(whole.folder) == rows(parts.folder)
    assert rows(whole.folder, "ledger") == rows(parts.folder, "ledger")
    assert audit(parts.folder).ok


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_a_damaged_checkpoint_is_passed_over_with_a_line(config: Make, damage: str) -> None:
    whole = run(config(name="whole"))
    parts = run(config(name="parts", max_rounds=2))
    file = parts.folder / "checkpoints/round-0002/state.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    {
        "truncated": lambda: file.write_bytes(content[: len(content) // 2]),
        "altered": lambda: file.write_bytes(content),
        "missing": file.unlink,
    }[damage]()
    told: list[Event] = []
    assert resume(parts.folder, on_event=told.append).complete
    lines = [event.text for event in told if isinstance(event, Note)]
    assert any("round-0002 passed over" in line and "going on from round-0001" in line for line in lines), lines
    assert same_tensors(state(whole.folder), state(parts.folder))
    assert rows(whole.folder) == rows(parts.folder)
