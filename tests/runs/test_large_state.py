"""A run whose state is on the disk, and whose checkpoints hold what has changed, is the run that it would be anyway."""

import pytest

from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.storage import checkpoint, mapped
from atlas_fl.storage.tensors import encode_tensors
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit, rows, same_tensors

SETTINGS = {"participation": 0.34, "rounds": 5, "space": "factors", "ranks": "4"}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state is too large for memory, and every change worth a checkpoint of its own."""
    monkeypatch.setattr(mapped, "LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr(checkpoint, "LEAST_KEPT", 0)


@pytest.mark.parametrize(
    "strategy", ["local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ditto", "kriging"))]
)
def test_a_large_state_ends_in_the_same_bits(
    config: Make, finished: FinishedRuns, request: pytest.FixtureRequest, strategy: str
) -> None:
    whole = finished(config(name="whole", strategy=strategy, **SETTINGS))
    request.getfixturevalue("large")
    parts = run_config(config(name="parts", strategy=strategy, **SETTINGS, max_rounds=3))
    newest = parts.folder / "checkpoints/round-0003"
    if strategy == "local":  # one client of three trains in a round
        sizes = {path.name: path.stat().st_size for path in newest.glob("*.safetensors")}
        assert sizes.keys() >= {"state-0001.safetensors", "state-0002.safetensors"}
        assert sizes["state.safetensors"] < 0.4 * sum(sizes.values())
    assert resume_run(parts.folder).complete
    left, right = (checkpoint.load_newest(run.folder / "checkpoints") for run in (whole, parts))
    assert same_tensors(left.tensors, right.tensors)
    assert encode_tensors(left.tensors) == encode_tensors(right.tensors)
    assert rows(whole.folder) == rows(parts.folder)
    assert not list(parts.folder.glob(".*writing"))
    passing_audit(parts.folder)
