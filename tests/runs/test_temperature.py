"""Runs with temperature scaling: calibrated at the end, else as without it, and delivered as they were scored."""

import pytest

from atlas_fl.experiment.run import resume_run, run_config
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit, rows

SMALL = {"samples": 24, "rounds": 2, "lr": 0.05, "local_epochs": 3, "validation_samples": 24, "test_samples": 24}
RUNS = {"plain": False, "scaled": True}
CASES = {
    "kriging": {"measure_round": 1},
    "fedper": {},
    "ditto": {"ranks": "4"},
    "flora": {"ranks": "4"},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", CASES)
def test_only_the_last_probabilities_differ(config: Make, finished: FinishedRuns, method: str) -> None:
    words = {**SMALL, **CASES[method], "strategy": method, "alone": "none"}
    plain, scaled = (finished(config(**words, name=name, temperature_scaling=scales)) for name, scales in RUNS.items())
    first, second = ([row for row in rows(run.folder) if "primary" in row] for run in (plain, scaled))
    for left, right in zip(first, second, strict=True):
        probabilities = {"loss", "ece", "auroc"} if left["round"] == 2 and left["split"] != "train" else set()
        same = left.keys() - probabilities
        assert {key: left[key] for key in same} == {key: right[key] for key in same}
    assert sum(row["loss"] for row in second) < sum(row["loss"] for row in first) - 0.01
    passing_audit(scaled.folder, "mixed")


@pytest.mark.slow
def test_a_run_that_was_stopped_before_its_end_ends_alike(config: Make, finished: FinishedRuns) -> None:
    words = {**SMALL, "strategy": "kriging", "measure_round": 1, "temperature_scaling": True, "alone": "none"}
    whole = finished(config(**words, name="whole"))
    parts = run_config(config(**words, name="parts", max_rounds=1))
    assert resume_run(parts.folder).complete
    names = sorted(path.relative_to(whole.folder) for path in whole.folder.glob("adapters/*/adapter_model.safetensors"))
    assert names and all((whole.folder / name).read_bytes() == (parts.folder / name).read_bytes() for name in names)
