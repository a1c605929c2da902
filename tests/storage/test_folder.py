import re

import pytest

from atlas_fl.errors import CheckpointError
from atlas_fl.storage.run_folder import InnerPath, RunFolder, find_run, list_runs, remove_aborted_run, run_log, run_name


def make_run(path) -> None:
    path.mkdir(parents=True)
    (path / "config.toml").write_text("")
    (path / "plan.json").write_text("{}")


def test_the_paths_are_those_of_the_design(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    names = ["config", "plan", "metrics", "ledger", "summary"]
    names += ["checkpoints", "adapters", "figures", "audit", "log", "sketches"]
    assert [getattr(folder, name).relative_to(tmp_path).as_posix() for name in names] == [
        *("config.toml", "plan.json", "metrics.jsonl", "ledger.jsonl", "summary.json"),
        *("checkpoints", "adapters", "figures", "audit", "log.txt", "plan.safetensors"),
    ]
    assert folder.audit_round(7).name == "round-0007"
    assert folder.adapter("movie-0") == tmp_path / "adapters" / "movie-0"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", [True, False])
def test_every_file_of_a_run_goes_where_its_planning_failed_and_nothing_else_does(tmp_path, made: bool) -> None:
    path = tmp_path / "run"
    folder = RunFolder(path)
    own = [getattr(folder, name) for name, kind in vars(RunFolder).items() if isinstance(kind, InnerPath)]
    own = [file for file in own if file.suffix]
    assert len(own) >= 11
    own += [path / ".lock", path / ".plan.json.writing"]
    own += [place / name for name in ("start.safetensors", "record.json") for place in (folder.audit_round(0),)]
    for file in own:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    remove_aborted_run(path, is_new=made)
    assert path.exists() is not made
    assert made or not any(path.iterdir())
    (path / "audit" / "round-0000").mkdir(parents=True)
    mine = [path / "audit" / "round-0000" / "notes.txt", path / "own.txt"]
    for file in (*own, *mine):
        file.touch()
    remove_aborted_run(path, is_new=made)
    assert sorted(file for file in path.rglob("*") if file.is_file()) == sorted(mine)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("minilm", "quick-fedavg_cluster-minilm-s7-abcdef01"),
        ("Qwen/Qwen2.5-0.5B", "quick-fedavg_cluster-qwen2.5-0.5b-s7-abcdef01"),
        ("/data/my model/", "quick-fedavg_cluster-my-model-s7-abcdef01"),
    ],
)
def test_a_name_says_recipe_rule_model_seed_and_hash(model: str, expected: str) -> None:
    found = run_name(preset="quick", strategy="fedavg_cluster", model=model, seed=7, config_hash="abcdef0123456789")
    assert found == expected


def test_a_run_is_found_by_path_and_by_name(tmp_path) -> None:
    make_run(tmp_path / "runs" / "one")
    assert find_run(tmp_path / "runs" / "one") == RunFolder(tmp_path / "runs" / "one")
    assert find_run("one", runs_dir=tmp_path / "runs") == RunFolder(tmp_path / "runs" / "one")


def test_what_is_no_run_is_refused_with_the_runs_that_there_are(tmp_path) -> None:
    (tmp_path / "none").mkdir()
    text = f"not a run folder: {tmp_path / 'none'}; a run folder holds config.toml and plan.json; there are no runs in"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        find_run(tmp_path / "none", runs_dir=tmp_path)
    for index in range(10):
        make_run(tmp_path / f"run-{index}")
    text = "not a run folder: other; a run folder holds config.toml and plan.json; have: run-0, run-1"
    with pytest.raises(CheckpointError, match=re.escape(text) + r".*run-7 and 2 more$"):
        find_run("other", runs_dir=tmp_path)


def test_a_plan_without_config_is_no_run(tmp_path) -> None:
    make_run(tmp_path / "whole")
    make_run(tmp_path / "half")
    (tmp_path / "half" / "config.toml").unlink()
    assert list_runs(tmp_path) == ["whole"]
    assert list_runs(tmp_path / "nowhere") == []


def test_log_lines_are_time_level_message_and_sessions_append(tmp_path) -> None:
    for session in (1, 2):
        with run_log(tmp_path / "run" / "log.txt") as log:
            log(f"session {session}")
            log("first\nsecond")
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    times = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert len(lines) == 4
    assert re.fullmatch(rf"{times} INFO session 1", lines[0])
    assert re.fullmatch(rf"{times} INFO first \| second", lines[1])
    assert re.fullmatch(rf"{times} INFO session 2", lines[2])
