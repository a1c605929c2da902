"""Early stopping: a run ends where its validation scores no longer rise, whatever its rule, and cleanly."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from atlas_fl.audit.check import audit_run
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.experiment.summary import best_rounds, histories, mean_series, should_stop
from atlas_fl.storage import checkpoint
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors
from tests.runs.sessions import check_same_runs, in_sessions

STEADY = {"lr": 1e-12, "rounds": 9, "patience": 2}
"""Nothing is learned, so no score after the first is better."""

DISAGREE = {
    **{"fingerprint": "fisher", "tasks": "trec", "test_samples": 30, "strategy": "local", "rounds": 4, "lr": 0.02},
    **{"seed": 2, "audit": False},
}
"""A run in which test scores would choose other rounds than validation scores do."""


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def steady(shared_config: Make, told: list[str]) -> Path:
    """A finished run of half the clients a round."""
    chosen = shared_config(strategy="fedavg", participation=0.5, **STEADY)
    return run_config(chosen, on_event=lambda event: told.append(str(event))).folder


@pytest.fixture
def copied(steady: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(steady, tmp_path / "run"))


def test_a_run_that_gets_no_better_ends_cleanly(steady: Path, told: list[str]) -> None:
    found = summary(steady)
    assert found["run"]["rounds"] == 3
    assert found["stopped"] == {"round": 3}
    assert found["best"]["round"] == 1
    assert any(line == "stopped early after round 3: validation was best in round 1" for line in told)
    held = checkpoint.load_latest(steady / "checkpoints")[0]
    assert held is not None and (held.round, held.state["over"]) == (3, True)
    assert len(list((steady / "adapters").iterdir())) == 4
    passing_audit(steady)


def test_everyone_has_its_newest_model_when_a_run_stops(steady: Path) -> None:
    last = [row for row in rows(steady, "ledger") if row["round"] == 3 and row["direction"] == "down"]
    assert {row["client"] for row in last} == {"movie-0", "movie-1", "trec-0", "trec-1"}
    held = checkpoint.load_latest(steady / "checkpoints")[0]
    assert held is not None and held.state["stale"] == []


def test_the_choice_is_made_on_validation_and_never_on_test(config: Make) -> None:
    result = run_config(config(**DISAGREE, patience=2))
    found = list(histories(rows(result.folder)).values())
    validation, test = (mean_series(found, split) for split in ("validation", "test"))
    assert result.rounds == 3 and should_stop(validation, patience=2)
    assert not should_stop(test, patience=2)


def test_a_stopped_run_that_is_resumed_does_nothing_and_says_so(steady: Path) -> None:
    own = {"log.txt", ".lock"}
    before = {path: path.stat().st_mtime_ns for path in steady.rglob("*") if path.is_file() and path.name not in own}
    said: list[str] = []
    again = resume_run(steady, on_event=lambda event: said.append(str(event)))
    assert (again.complete, again.rounds) == (True, 3)
    assert said == [f"run {steady} is complete; it stopped early after round 3"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.slow
def test_a_run_in_sessions_stops_at_the_same_round_in_the_same_bits(config: Make) -> None:
    settings = {"lr": 0.02, "rounds": 8, "patience": 1, "strategy": "atlas_laplacian", "participation": 0.5}
    whole = run_config(config(name="whole", **settings))
    assert 1 < whole.rounds < 8
    parts = in_sessions(config(name="parts", max_rounds=1, **settings))
    assert parts.rounds == whole.rounds
    check_same_runs(whole.folder, parts.folder, round=whole.rounds)
    assert summary(whole.folder)["stopped"] == summary(parts.folder)["stopped"]


def test_a_run_killed_after_its_last_checkpoint_only_writes_what_is_missing(copied: Path) -> None:
    wanted = rows(copied)
    (copied / "summary.json").unlink()
    result = resume_run(copied)
    assert (result.complete, result.rounds, result.summary["stopped"]) == (True, 3, {"round": 3})
    assert rows(copied) == wanted


def test_the_best_rounds_are_kept_until_better_ones_come(config: Make, tmp_path: Path) -> None:
    folder = run_config(config(**DISAGREE, keep_best=2, keep_checkpoints=1, checkpoint_every=3)).folder
    found = list(histories(rows(folder)).values())
    scores = mean_series(found, "validation")
    best = sorted(scores, key=lambda at: (-scores[at], at))[:2]
    assert best == [1, 2] and 1 not in best_rounds(mean_series(found, "test"), 2)
    held = {int(path.name[-4:]) for path in (folder / "checkpoints").glob("round-*")}
    assert held == {*best, 4}
    export_client(folder, client="trec-0", to=tmp_path / "best", round="best")
    export_client(folder, client="trec-0", to=tmp_path / "first", round=str(best[0]))
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("best", "first")]
    assert same_tensors(*files)
    lost = next(at for at in (1, 2, 3, 4) if at not in held)
    with pytest.raises(CheckpointError, match=rf"has no checkpoint of round {lost}; have: .*--keep-best K"):
        export_client(folder, client="trec-0", to=tmp_path / "none", round=str(lost))
    with pytest.raises(ConfigError, match="--round is 'bset'; allowed: best, or the number of a round"):
        export_client(folder, client="trec-0", to=tmp_path / "none", round="bset")
    assert not (tmp_path / "none").exists()


def test_an_audit_finds_a_run_that_should_have_stopped(copied: Path) -> None:
    file = copied / "config.toml"
    file.write_text(file.read_text().replace("patience = 2", "patience = 1"))
    told = [row.detail for row in audit_run(copied).failures]
    assert told[0].startswith("config.toml is damaged") and told[1:] == ["it had to end after round 2 and went on"]
