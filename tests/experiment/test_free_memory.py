"""What fits into memory, from the files of the system and of finished runs."""

import doctest
import json
from pathlib import Path

import pytest

from atlas_fl.config import run_folder, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment import free_memory
from atlas_fl.experiment.free_memory import TYPICAL_BYTES, bytes_of_a_run, free_bytes, jobs_that_fit, memory_note
from atlas_fl.experiment.sweep import Point


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_examples_are_right() -> None:
    assert doctest.testmod(free_memory).failed == 0


def test_what_is_free_is_the_least_of_machine_and_control_group(tmp_path: Path) -> None:
    assert free_bytes(root=tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert free_bytes(root=tmp_path) == 4_096_000
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "1000\n")
    assert free_bytes(root=tmp_path) == 4_096_000
    write(tmp_path, "sys/fs/cgroup/memory.max", "3000\n")
    assert free_bytes(root=tmp_path) == 2000


def test_fewer_jobs_are_said_in_one_line() -> None:
    assert memory_note(4, 4, free=10**10, each=10**9) == [] == memory_note(4, 4, free=None, each=10**9)
    assert memory_note(8, 2, free=4_500_000_000, each=1_900_000_000) == [
        "2 of --jobs 8 at once: 4.5 GB of memory are free, and a run takes up to 1.9 GB"
    ]
    assert jobs_that_fit(8, free=4_500_000_000, each=1_900_000_000) == 2


def test_a_run_takes_what_the_largest_finished_one_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        Point(config=with_values(find_preset("smoke"), {"runs_dir": str(tmp_path), "seed": seed}), changes={})
        for seed in (1, 2, 3)
    ]
    assert bytes_of_a_run(points) == TYPICAL_BYTES
    for point, peak in zip(points[:2], (5, 7), strict=True):
        folder = run_folder(point.config)
        folder.path.mkdir(parents=True)
        folder.summary.write_text(json.dumps({"memory": {"rss_bytes": peak}}))
    monkeypatch.setattr(free_memory, "run_state", lambda config: "finished" if config.run.seed < 3 else "new")
    assert bytes_of_a_run(points) == 7
