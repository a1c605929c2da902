"""What lies where a run is to be: nothing of a user's is lost, and one process at a time writes."""

import errno
import json
import re
from pathlib import Path

import pytest

from atlas_fl.cli.main import main
from atlas_fl.errors import AtlasError, CheckpointError, ConfigError
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.storage import checkpoint
from atlas_fl.storage.files import run_lock
from atlas_fl.storage.folder_access import os_errors_with_path
from tests.runs.finished import FinishedRuns, Make
from tests.runs.resealing import with_new_digests

TOO_MANY = 10**4


@pytest.fixture
def stopped(config: Make, finished: FinishedRuns) -> Path:
    return finished(config(max_rounds=1)).folder


def test_a_folder_of_the_users_is_refused_and_kept(config: Make, tmp_path: Path) -> None:
    thesis = tmp_path / "runs/run/thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    for samples in (24, TOO_MANY):
        with pytest.raises(ConfigError, match=r"exists, is no run and holds thesis\.txt; choose another --name"):
            run_config(config(samples=samples))
    assert thesis.read_text() == "years of work"
    assert [path.name for path in thesis.parent.iterdir()] == ["thesis.txt"]


def test_a_file_where_the_folder_is_to_be_is_refused(config: Make, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/run").write_text("mine")
    with pytest.raises(ConfigError, match="is a file; choose another --name"):
        run_config(config())
    assert (tmp_path / "runs/run").read_text() == "mine"


@pytest.mark.parametrize("there", [True, False], ids=["empty folder", "no folder"])
def test_what_could_not_be_planned_leaves_the_place_as_it_was(config: Make, tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "runs/run"
    if there:
        folder.mkdir(parents=True)
    with pytest.raises(AtlasError, match="lower --clients-per-task"):
        run_config(config(clients_per_task=TOO_MANY))
    assert folder.exists() is there
    if there:
        assert list(folder.iterdir()) == []
    assert run_config(config(max_rounds=1)).rounds == 1


def test_what_came_into_the_folder_while_the_run_was_planned_stays(config: Make, tmp_path: Path) -> None:
    folder = tmp_path / "runs/run"

    def add(_event: object) -> None:
        (folder / "audit/mine").mkdir(parents=True, exist_ok=True)
        for name in ("thesis.txt", "audit/mine/notes.txt"):
            (folder / name).write_text("years of work")

    with pytest.raises(AtlasError, match="lower --clients-per-task"):
        run_config(config(clients_per_task=TOO_MANY), on_event=add)
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert found == ["audit/mine/notes.txt", "thesis.txt"]


def test_a_file_with_the_name_of_the_lock_keeps_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    with run_lock(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "mine"


def test_who_does_not_get_the_lock_removes_nothing(config: Make, tmp_path: Path) -> None:
    folder = tmp_path / "runs/run"
    with run_lock(folder), pytest.raises(CheckpointError, match="being written by another process"):
        run_config(config())
    assert (folder / ".lock").exists()
    assert run_config(config(max_rounds=1)).rounds == 1


def test_a_lock_whose_file_was_removed_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, who held it has removed the folder."""
    import atlas_fl.storage.files as lock

    real, removed = lock.fcntl.flock, []

    def flock(file, how):
        if not removed:
            removed.append((tmp_path / "run/.lock").unlink())
        real(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with run_lock(tmp_path / "run"), pytest.raises(CheckpointError), run_lock(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"^lr = .*$", "lr = 0.25", "was begun with lr = 0.005, and its config.toml now says 0.25; restore the file"),
        (r"^rounds = .*$", "rounds = 3", "was begun with rounds = 2, and its config.toml now says 3"),
        (r"^batch_size = .*$", "batch_size = 0", "--batch-size is 0; allowed:"),
    ],
)
def test_a_run_does_not_go_on_with_other_settings(stopped: Path, old: str, new: str, message: str) -> None:
    file = stopped / "config.toml"
    before = (stopped / "metrics.jsonl").read_bytes()
    text = file.read_text()
    file.write_text(re.sub(f"(?m){old}", new, text))
    with pytest.raises(AtlasError, match=re.escape(message)):
        resume_run(stopped)
    assert (stopped / "metrics.jsonl").read_bytes() == before
    file.write_text(text)
    assert resume_run(stopped).complete


def test_a_run_does_not_go_on_with_other_data(config: Make, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    words = ["red", "green", "blue", "black", "white", "brown"]
    rows = [f"the {one} and the {two} {number},{number % 2}" for number in range(6) for one in words for two in words]
    file.write_text("\n".join(["text,label", *rows]))
    folder = run_config(config(tasks=("own",), task=(f"own={file}",), max_rounds=1)).folder
    file.write_text("\n".join(["text,label", *rows[7:]]))
    with pytest.raises(CheckpointError, match="the data of client own-0 are not those that run"):
        resume_run(folder)
    file.write_text("\n".join(["text,label", *rows]))
    assert resume_run(folder).complete


def test_a_run_without_a_good_checkpoint_says_that_it_begins_again(stopped: Path) -> None:
    for state in (stopped / "checkpoints").glob("*/state.json"):
        state.write_text("{}")
    told: list[object] = []
    assert resume_run(stopped, on_event=told.append).complete
    assert any("passed over" in str(event) and "beginning again" in str(event) for event in told)


def test_a_line_that_is_no_row_is_named(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write("5\n")
    with_new_digests(stopped)
    assert main(["report", str(stopped)]) == 2
    assert re.search(r"damaged line \d+ of .*metrics\.jsonl: 5 is no row", capsys.readouterr().err)


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(stopped: Path, capsys, monkeypatch) -> None:
    def full(path: Path, _: object, **__: object) -> None:
        with os_errors_with_path(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_sealed", full)
        assert main(["resume", str(stopped)]) == 2
    error = capsys.readouterr().err
    assert re.search(r"state\.json: No space left on device; free some space; a run goes on with", error)
    assert resume_run(stopped).complete
    assert json.loads((stopped / "summary.json").read_text())["run"]["name"] == "run"
