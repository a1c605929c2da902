"""Resume is bit-exact: a run that is killed anywhere and gone on with ends as one that was not."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_fl.config import to_toml
from atlas_fl.errors import CheckpointError
from atlas_fl.events import Event, Note
from atlas_fl.experiment.run import RunResult, resume_run, run_config
from atlas_fl.storage.checkpoint import load_latest
from atlas_fl.storage.tensors import read_tensors, write_tensors
from tests.runs.finished import FinishedRuns, Make
from tests.runs.processes import Program, Programs
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.sessions import check_same_runs

DAMAGES = ("altered", "missing", "a folder", "its folder is a file")

MOMENTS: dict[str, Callable[[Path], bool]] = {
    "while planning": lambda folder: (folder / "log.txt").exists(),
    "after the plan": lambda folder: (folder / "plan.json").exists(),
    "in a round": lambda folder: (folder / "checkpoints/round-0001").exists(),
    "between rows and checkpoint": lambda folder: (folder / "audit/round-0002/start.safetensors").exists(),
}


# Of everything that could go wrong: partial participation, dropout, a schedule, clusters measured anew.
SETTINGS = {"participation": 0.75, "dropout": 0.1, "schedule": "cosine", "recluster_every": 2, "rounds": 3, "eta": 0.3}


@pytest.fixture(scope="module")
def whole(shared_config: Make, finished: FinishedRuns) -> RunResult:
    """The run that nothing disturbs."""
    return finished(shared_config(name="whole", **SETTINGS))


def wait_for(ready: Callable[[], bool], program: Program) -> None:
    while not ready():
        assert not program.ended, f"the run ended before the moment of the kill:\n{program.text}"
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_anywhere_ends_in_the_same_bits(
    config: Make, whole: RunResult, programs: Programs, tmp_path: Path, moment: str
) -> None:
    killed = tmp_path / "runs" / "killed"
    (tmp_path / "config.toml").write_text(to_toml(config(name="killed", **SETTINGS)))
    program = programs.start("run", "--config", "config.toml", folder=tmp_path)
    try:
        wait_for(lambda: MOMENTS[moment](killed), program)
    finally:
        program.kill()
    assert not (killed / "summary.json").exists(), "it was killed too late"
    result = resume_run(killed)
    assert result.complete
    check_same_runs(whole.folder, killed)
    passing_audit(killed)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_sessions_of_few_rounds_make_the_same_run(config: Make, finished: FinishedRuns, every: int) -> None:
    """Also where they are shorter than the rounds between two checkpoints."""
    whole = finished(config(name="whole", rounds=3))
    parts = run_config(config(name="parts", rounds=3, max_rounds=1, checkpoint_every=every))
    assert (parts.rounds, parts.complete) == (1, False)
    assert not (parts.folder / "summary.json").exists()
    assert resume_run(parts.folder, max_rounds=1).rounds == 2
    assert resume_run(parts.folder).complete
    assert same_tensors(state(whole.folder), state(parts.folder))
    assert rows(whole.folder) == rows(parts.folder)


@pytest.mark.parametrize("damage", ["truncated", *(pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES)])
def test_a_damaged_checkpoint_is_passed_over_with_a_line(config: Make, finished: FinishedRuns, damage: str) -> None:
    whole = finished(config(name="whole", rounds=3))
    parts = finished(config(name="parts", rounds=3, max_rounds=2))
    file = parts.folder / "checkpoints/round-0002/state.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    if damage == "its folder is a file":
        shutil.rmtree(file.parent)
        file.parent.write_text("")
    elif damage == "a folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    told: list[Event] = []
    assert resume_run(parts.folder, on_event=told.append).complete
    lines = [event.text for event in told if isinstance(event, Note)]
    assert any("round-0002 passed over" in line and "going on from round-0001" in line for line in lines), lines
    assert same_tensors(state(whole.folder), state(parts.folder))
    assert rows(whole.folder) == rows(parts.folder)


def _relu(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "relu"}))


def _two_tokens_swapped(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=lambda token: -vocabulary[token])[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))


def _other_weight(folder: Path) -> None:
    weights = dict(read_tensors(folder / "model.safetensors"))
    name = next(iter(weights))
    write_tensors(folder / "model.safetensors", {**weights, name: weights[name] + 1}, metadata=("format", "pt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "part"), [(_relu, "architecture"), (_two_tokens_swapped, "tokenizer"), (_other_weight, "weights")]
)
def test_a_run_goes_on_with_the_model_that_it_was_begun_with_and_no_other(
    config: Make, tiny_model: Path, tmp_path: Path, change: Callable[[Path], None], part: str
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    begun = run_config(config(model=str(model), max_rounds=1, rounds=2, tasks="movie"))
    saved, _ = load_latest(begun.folder / "checkpoints")
    recorded = saved.state["origin"]["model"]
    assert recorded.keys() == {"weights", "vocabulary", "architecture", "tokenizer"}
    kept = {path: path.read_bytes() for path in model.iterdir()}
    change(model)
    with pytest.raises(CheckpointError, match=f"^the {part} of the model .* is not the one that run .* was begun with"):
        resume_run(begun.folder)
    for path, content in kept.items():
        path.write_bytes(content)
    assert resume_run(begun.folder).complete
