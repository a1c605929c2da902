"""The command as a user types it: a short real training on the embedded model, then its audit."""

import subprocess
import sys
from pathlib import Path

import pytest


def atlas(*words: str, folder: Path) -> str:
    """What `atlas` with these words prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "atlas_fl", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.core
def test_the_preset_smoke_trains_and_passes_its_audit(tmp_path: Path) -> None:
    runs = ("--runs-dir", "runs")
    atlas("run", "--preset", "smoke", "--audit", "--name", "smoke", *runs, folder=tmp_path)
    assert (tmp_path / "runs/smoke/summary.json").exists()
    assert "audit passed" in atlas("audit", "smoke", *runs, folder=tmp_path)
