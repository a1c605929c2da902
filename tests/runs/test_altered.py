"""A run's folder names no file outside of itself, whoever made its digests anew."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config
from atlas_fl.errors import CheckpointError
from atlas_fl.experiment.run import run_config
from atlas_fl.report.record import read_record
from tests.runs.resealing import resealed

Make = Callable[..., Config]


@pytest.fixture(scope="module")
def complete(shared_config: Make) -> Path:
    """A complete run."""
    return run_config(shared_config(name="complete")).folder


@pytest.mark.parametrize("plan", ["../../elsewhere/plan.json", "/etc/passwd", "audit/round-0001/record.json", 3, ""])
def test_a_record_names_no_plan_outside_of_its_run(complete: Path, tmp_path: Path, plan: object) -> None:
    copy = Path(shutil.copytree(complete, tmp_path / "run"))
    file = copy / "audit/round-0002/record.json"
    resealed(file, {**json.loads(file.read_text()), "plan": plan})
    with pytest.raises(CheckpointError, match=r"record\.json is no record of a round: .*; restore it from a copy"):
        audit_run(copy)


@pytest.mark.parametrize("name", ["../../elsewhere.json", "/etc/passwd", ""])
def test_digests_name_no_file_outside_of_their_run(complete: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(complete, tmp_path / "run"))
    resealed(copy / "digests.json", {"files": {name: "0" * 64}})
    with pytest.raises(CheckpointError, match="no file inside the folder"):
        read_record(copy)
    content = json.loads((copy / "audit/round-0001/record.json").read_text())
    resealed(copy / "audit/round-0001/record.json", {**content, "files": {name: "0" * 64}})
    assert any("no file inside the folder" in row.detail for row in audit_run(copy).failures)
