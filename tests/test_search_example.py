"""`examples/search.py`: trials of optuna are runs of the public API."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("optuna")

from atlas_fl import Config, find_run, load_config, run_config, validate

EXAMPLE = Path(__file__).parents[1] / "examples/search.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("search_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_formula(config: Config, *, resume: bool) -> Any:
    """Validation is best at a rate of .003."""
    assert resume, "the same command goes on"
    validation = 1 - abs(math.log10(config.training.lr or 1.0) - math.log10(3e-3)) / 3
    return SimpleNamespace(summary={"best": {"round": 1, "validation": validation}}, folder=config.run.preset)


def test_trials_follow_from_the_seed_come_near_the_best_and_end_in_a_config(example, monkeypatch, capsys) -> None:
    monkeypatch.setattr(example, "run_config", by_formula)
    example.main("smoke", "25", "best.toml")
    (*lines, last) = capsys.readouterr().out.splitlines()
    scores = [float(line.split(": ")[1].split()[0]) for line in lines]
    assert f"{max(scores):.4f}" in last
    best = validate(load_config(Path("best.toml")))
    assert 1e-3 < (best.training.lr or 0) < 9e-3
    assert by_formula(best, resume=True).summary["best"]["validation"] == pytest.approx(max(scores), abs=5e-5)
    example.main("smoke", "3")
    assert capsys.readouterr().out.splitlines()[:3] == lines[:3]


@pytest.mark.product
def test_a_trial_is_a_run_of_its_own_that_is_found_again(example, capsys) -> None:
    example.main("smoke", "1")
    (first, _) = capsys.readouterr().out.splitlines()
    folder = find_run(Path(first.rsplit(", ", 1)[1]))
    summary = run_config(load_config(folder.config), resume=True).summary
    assert f": {summary['best']['validation']:.4f} in round {summary['best']['round']}," in first
