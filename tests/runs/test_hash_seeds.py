"""No order of a set reaches a result: runs in processes with different PYTHONHASHSEED end in the same bytes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.config import to_toml
from atlas_fl.methods.registry import METHODS, RULES
from tests.runs.finished import Make

SEEDS = (0, 1)
LABELS = ("1", "01", "001", "2", "02")
"""Equal numbers that are different classes: a sort by number leaves them in the order in which they come."""
QUICK = ("atlas", "fedpac", "flora", "scaffold", "ditto", "ifca", "fedadam")
"""One method for each kind of what is kept: halves, features, frozen parts, controls, models, clusters, moments."""
SMALL: Mapping[str, Any] = {"samples": 16, "validation_samples": 6, "test_samples": 6, "rounds": 2, "lr": 0.02}


def table(folder: Path) -> Path:
    """A csv of five classes whose names are two numbers."""
    file = folder / "numbers.csv"
    rows = [f"a note of number {i},{LABELS[i % len(LABELS)]}\n" for i in range(120)]
    file.write_text("text,label\n" + "".join(rows))
    return file


def settings(make: Make, folder: Path, methods: Sequence[str]) -> list[Path]:
    files = []
    for method in methods:
        row = METHODS.get(method)
        own: dict[str, Any] = {"ranks": row.settings.get("ranks", "4") if row else "4"}
        if row and "personal_rounds" in row.suggested:
            own["personal_rounds"] = 1
        config = make(
            **{**SMALL, **own, "strategy": method, "task": f"numbers={table(folder)}"},
            **{"tasks": ("movie", "numbers"), "participation": 0.75},
        )
        file = folder / f"{method}.toml"
        file.write_text(to_toml(config))
        files.append(file)
    return files


def outcomes(files: Sequence[Path], *, seed: int, folder: Path) -> dict[str, dict[str, str]]:
    """Digests of all files by run, from a process with this hash seed."""
    place = folder / f"seed-{seed}"
    place.mkdir()
    for file in files:
        text = file.read_text().replace(str(folder / "runs"), str(place / "runs"))
        (place / file.name).write_text(text.replace('name = "run"', f'name = "{file.stem}"'))
    done = subprocess.run(
        [sys.executable, "-m", "tests.runs.hash_seeds", *(str(place / file.name) for file in files)],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    assert found.keys() == {file.name for file in files}
    return found


def check_same(files: Sequence[Path], folder: Path) -> None:
    with ThreadPoolExecutor() as threads:
        first, *others = threads.map(lambda seed: outcomes(files, seed=seed, folder=folder), SEEDS)
    differing = {
        f"{run}: {name}"
        for other in others
        for run in first
        for name in first[run].keys() | other[run].keys()
        if first[run].get(name) != other[run].get(name)
    }
    assert all(len(files) > 10 for files in first.values())
    assert not differing


@pytest.mark.product
@pytest.mark.slow
def test_no_order_of_a_set_reaches_a_file_of_a_run(config: Make, tmp_path: Path) -> None:
    check_same(settings(config, tmp_path, QUICK), tmp_path)


@pytest.mark.product
@pytest.mark.slow
def test_no_order_of_a_set_reaches_a_file_of_any_method(config: Make, tmp_path: Path) -> None:
    # rules of factor space alone need settings that their methods have: feddyn, flora, fedex
    left_out = {*QUICK, *(name for name, rule in RULES.items() if rule.in_factors)}
    check_same(settings(config, tmp_path, [name for name in {**RULES, **METHODS} if name not in left_out]), tmp_path)
