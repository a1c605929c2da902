"""A run that is killed with SIGKILL at any moment and resumed ends in the same bytes as one that was not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed_run.py")


@pytest.fixture(scope="module")
def script() -> Iterator["subprocess.Popen[str]"]:
    """One process for all modes: what takes its time is the import."""
    with subprocess.Popen(
        [sys.executable, SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "least_kills"), [("steps", 50), ("replacing", 30), ("times", 3)])
def test_a_killed_and_resumed_run_ends_in_the_same_bytes(mode: str, least_kills: int, tmp_path, script) -> None:
    script.stdin.write(f"{mode} {tmp_path}\n")
    script.stdin.flush()
    said = script.stdout.readline()
    assert said, script.stderr.read()
    assert json.loads(said)["kills"] >= least_kills
