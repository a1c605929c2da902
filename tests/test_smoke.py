"""The command as a user types it: a short real training on the embedded model, then its audit."""

import subprocess
import sys
from pathlib import Path

import pytest

from atlas_fl.cli.main import main


@pytest.mark.core
def test_the_preset_smoke_trains_and_passes_its_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--preset", "smoke", "--rounds", "1", "--audit", "--name", "smoke", "--runs-dir", str(tmp_path)]
    words += ["--samples", "8", "--validation-samples", "4", "--test-samples", "4", "--alone", "none"]
    subprocess.run([sys.executable, "-m", "atlas_fl", *words], check=True, capture_output=True)
    assert (tmp_path / "smoke/summary.json").exists()
    assert main(["audit", "smoke", "--runs-dir", str(tmp_path)]) == 0
    assert "audit passed" in capsys.readouterr().out
