"""Runs of a comparison at once, each in a process of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from atlas_fl.config import run_folder
from atlas_fl.errors import CheckpointError
from atlas_fl.experiment.run import run_config
from atlas_fl.experiment.sweep import grid, run_all
from tests.runs.finished import Make
from tests.runs.reading import passing_audit


@pytest.mark.product
@pytest.mark.slow
def test_runs_at_once_end_beside_one_that_fails_and_says_why_and_are_not_repeated(config: Make) -> None:
    base = config(rounds=1, samples=8, clusters="oracle")
    points = grid(base, over={"strategy": ("local",)}, seeds=(1,))
    (bad,) = grid(base, over={"clients_per_task": ("100000",)}, seeds=(1,))
    told: list[tuple[int, str]] = []
    with pytest.raises(CheckpointError, match=r"failed: .*task 'movie' has \d+ train rows"):
        run_all((*points, bad), jobs=2, on_run=lambda index, _, state: told.append((index, state)))
    assert sorted(told) == [(0, "new"), (1, "new")]
    folders = tuple(run_folder(point.config).path for point in points)
    written = [(folder / "summary.json").stat().st_mtime_ns for folder in folders]
    assert run_all(points, jobs=2) == folders
    assert [(folder / "summary.json").stat().st_mtime_ns for folder in folders] == written


@pytest.mark.core
def test_runs_that_share_work_end_in_the_bits_of_runs_alone(config: Make, tmp_path: Path) -> None:
    base = config(rounds=2, samples=8, adapted_blocks=1)
    points = grid(base, over={"strategy": ("local", "fedavg", "fedper")}, seeds=(1,))
    together = run_all(points)
    for point, folder in zip(points, together, strict=True):
        alone = replace(point.config, run=replace(point.config.run, runs_dir=str(tmp_path / "alone")))
        run_config(alone)
        for file in ("state.safetensors", "adapter_model.safetensors"):
            found = sorted(folder.rglob(file))
            assert [path.read_bytes() for path in found] == [
                (run_folder(alone).path / path.relative_to(folder)).read_bytes() for path in found
            ]
        assert sorted(folder.rglob("state.safetensors"))
        passing_audit(folder)
