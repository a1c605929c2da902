import re
import signal
import subprocess
import sys

import pytest

from atlas_fl.errors import CheckpointError
from atlas_fl.storage.files import run_lock

HOLD = "import sys; from pathlib import Path; from atlas_fl.storage.files import run_lock\n"
HOLD += "with run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_a_run_has_one_writer_until_that_one_ends(tmp_path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        text = f"run {tmp_path} is being written by another process; wait for it, or end it and resume"
        with pytest.raises(CheckpointError, match=re.escape(text)), run_lock(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with run_lock(tmp_path):
            pass


def test_a_lock_can_be_taken_again(tmp_path) -> None:
    for _ in range(2):
        with run_lock(tmp_path / "new"):
            pass
