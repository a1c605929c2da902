"""A run that is killed with SIGKILL at any moment and resumed ends in the same bytes as one that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed_run.py")


@pytest.mark.parametrize(("mode", "least_kills"), [("steps", 50), ("replacing", 30), ("times", 3)])
def test_a_killed_and_resumed_run_ends_in_the_same_bytes(mode: str, least_kills: int, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, mode, tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] >= least_kills
