"""Runs of a comparison at once, each in a process of its own."""

from pathlib import Path

import pytest

from atlas_fl.config import run_folder
from atlas_fl.errors import CheckpointError
from atlas_fl.experiment.parallel_runs import run_in_processes
from atlas_fl.experiment.sweep import grid
from tests.runs.conftest import configs

pytestmark = pytest.mark.core


def test_runs_at_once_end_as_finished_runs_and_are_not_repeated(tiny_model: Path, tmp_path: Path) -> None:
    base = configs(tiny_model, tmp_path)(rounds=1, samples=8, clusters="oracle", runs_dir=str(tmp_path / "runs"))
    points = grid(base, over={"strategy": ("local", "fedavg")}, seeds=(1,))
    told: list[tuple[int, str]] = []
    folders = run_in_processes(points, jobs=2, on_run=lambda index, _, state: told.append((index, state)))
    assert sorted(told) == [(0, "new"), (1, "new")]
    assert folders == tuple(run_folder(point.config).path for point in points)
    assert all((folder / "summary.json").is_file() for folder in folders)
    written = [(folder / "summary.json").stat().st_mtime_ns for folder in folders]
    assert run_in_processes(points, jobs=2) == folders
    assert [(folder / "summary.json").stat().st_mtime_ns for folder in folders] == written


def test_a_run_that_fails_says_why_and_the_others_stay(tiny_model: Path, tmp_path: Path) -> None:
    base = configs(tiny_model, tmp_path)(rounds=1, samples=8, clusters="oracle", runs_dir=str(tmp_path / "runs"))
    good, bad = grid(base, over={"samples": ("8", "100000")}, seeds=(1,))
    with pytest.raises(CheckpointError, match=r"failed: .*task 'movie' has \d+ train rows"):
        run_in_processes((good, bad), jobs=1)
    assert run_folder(good.config).summary.is_file()
