"""What lies on the disk is what was written: damage is found by the command that reads it, in one line."""

import json
import shutil
from pathlib import Path

import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.cli.main import main
from atlas_fl.errors import CheckpointError
from atlas_fl.events import Note
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.report.record import read_record
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.resealing import resealed


@pytest.fixture(scope="module")
def whole(shared_config: Make) -> Path:
    """A complete run; tests copy it before they damage it."""
    return run_config(shared_config(name="whole", rounds=3, recluster_every=2)).folder


@pytest.fixture(scope="module")
def stopped(shared_config: Make) -> Path:
    """The same run after two of its three rounds."""
    return run_config(shared_config(name="stopped", rounds=3, recluster_every=2, max_rounds=2)).folder


@pytest.fixture
def complete(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def partial(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def flip(file: Path, *, at: float = 0.5) -> None:
    """Change the lowest bit of one byte, at this share of the file: of text so that it stays text."""
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    file.write_bytes(content)


def other_digit(file: Path, name: str) -> None:
    """Change the first digit of this entry's value."""
    text = file.read_text()
    start = text.index(f'"{name}": ') + len(name) + 4
    place = next(place for place in range(start, len(text)) if text[place].isdigit())
    file.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])


@pytest.mark.parametrize("name", ["plan.json", "plan.safetensors"])
def test_a_run_does_not_go_on_with_a_plan_that_is_not_the_one_it_made(partial: Path, name: str) -> None:
    flip(partial / name)
    before = (partial / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=rf"damaged file .*{name}: its SHA-256 is \w+, and \w+ was written; res"):
        resume_run(partial)
    assert (partial / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["metrics", "ledger"])
def test_a_row_that_is_damaged_before_all_checkpoints_is_one_line_and_nothing_is_lost(partial: Path, name: str) -> None:
    file = partial / f"{name}.jsonl"
    content = file.read_bytes()
    flip(file, at=0.01)
    damaged = file.read_bytes()
    with pytest.raises(CheckpointError, match=rf"{name}\.jsonl: its SHA-256 of the first \d+ bytes is .*; restore it"):
        resume_run(partial)
    assert file.read_bytes() == damaged
    file.write_bytes(content)
    assert resume_run(partial).complete


@pytest.mark.slow
def test_a_row_that_is_damaged_after_an_older_checkpoint_is_written_again(partial: Path, whole: Path) -> None:
    flip(partial / "metrics.jsonl", at=0.99)
    told: list[object] = []
    assert resume_run(partial, on_event=told.append).complete
    lines = [event.text for event in told if isinstance(event, Note)]
    assert any("round-0002 passed over: damaged file" in line and "going on from round-0001" in line for line in lines)
    assert rows(partial) == rows(whole)
    assert same_tensors(state(partial), state(whole))
    passing_audit(partial)


@pytest.mark.slow
def test_a_row_that_is_damaged_after_the_newest_checkpoint_is_cut_back(partial: Path, whole: Path) -> None:
    with (partial / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 3, "client": \xff\n')
    assert all(row["round"] < 3 for row in read_record(partial).metrics)
    assert resume_run(partial).complete
    assert rows(partial) == rows(whole)


def test_settings_of_a_session_that_changed_are_taken(partial: Path) -> None:
    file = partial / "config.toml"
    file.write_text(file.read_text().replace("keep_checkpoints = 2", "keep_checkpoints = 4"))
    assert resume_run(partial).complete
    assert len(list((partial / "checkpoints").glob("round-*"))) == 3
    passing_audit(partial)


DECIDING = ("plan.json", "plan.safetensors", "metrics.jsonl", "ledger.jsonl")
"""What a report draws."""


@pytest.mark.parametrize("name", DECIDING)
@pytest.mark.parametrize("kind", ["complete", "partial"])
def test_nothing_is_drawn_from_a_damaged_file(name: str, kind: str, request, capsys) -> None:
    folder = request.getfixturevalue(kind)
    flip(folder / name)
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{name}: its SHA-256" in error


@pytest.mark.parametrize("name", ["config.toml", "plan-0003.json"])
def test_nothing_is_exported_by_a_damaged_plan(complete: Path, tmp_path: Path, name: str) -> None:
    flip(complete / name)
    with pytest.raises(CheckpointError, match=f"damaged file .*{name}"):
        export_client(complete, client="0", to=tmp_path / "out")


@pytest.mark.parametrize("round", [None, "best"])
def test_an_older_model_is_not_exported_in_place_of_a_damaged_one(complete: Path, tmp_path, round: str | None) -> None:
    flip(complete / "checkpoints/round-0003/state.safetensors")
    with pytest.raises(CheckpointError, match=r"checkpoint .*/round-0003 is damaged: .*; restore it from a copy"):
        export_client(complete, client="0", to=tmp_path / "out", round=round)
    assert not (tmp_path / "out").exists()
    assert export_client(complete, client="0", to=tmp_path / "out", round="2").is_dir()


def test_a_digit_of_the_summary_is_found_by_resume_and_compare(complete: Path) -> None:
    from atlas_fl.report.finished_runs import read_summary

    other_digit(complete / "summary.json", "total")
    for read in (resume_run, read_summary):
        with pytest.raises(
            CheckpointError, match=r"damaged file .*summary\.json: .*; restore it from a copy, or remove"
        ):
            read(complete)


def test_what_the_end_of_a_run_wrote_is_written_again(complete: Path, whole: Path) -> None:
    """The remedy that the message gives."""
    for name in ("summary.json", "digests.json", "adapters/movie-0/adapter_model.safetensors"):
        flip(complete / name)
    assert not audit_run(complete).ok
    (complete / "summary.json").unlink()
    assert resume_run(complete).complete
    passing_audit(complete)
    name = "adapters/movie-0/adapter_model.safetensors"
    assert (complete / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_every_file_of_a_run_is_found_by_the_audit(whole: Path, stopped: Path, tmp_path: Path) -> None:
    for folder in (whole, stopped):
        files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        files = [file for file in files if file.name not in ("log.txt", ".lock")]
        assert len(files) >= 17
        copy = Path(shutil.copytree(folder, tmp_path / folder.name))
        passing_audit(copy)
        for file in files:
            flip(copy / file)
            try:
                damage = [row.detail for row in audit_run(copy).failures if row.check == "files"]
            except CheckpointError as error:
                damage = [str(error)]
            assert any(str(file) in line for line in damage), file
            flip(copy / file)


def test_a_complete_run_does_not_lose_its_digests_unnoticed(complete: Path) -> None:
    (complete / "digests.json").unlink()
    with pytest.raises(CheckpointError, match=r"damaged file .*digests\.json: it is missing"):
        read_record(complete)
    assert [row.detail[:20] for row in audit_run(complete).failures] == ["digests.json is dama"]


@pytest.mark.parametrize("plan", ["../../elsewhere/plan.json", "/etc/passwd", "audit/round-0001/record.json", 3, ""])
def test_a_record_names_no_plan_outside_of_its_run(complete: Path, plan: object) -> None:
    file = complete / "audit/round-0002/record.json"
    resealed(file, {**json.loads(file.read_text()), "plan": plan})
    with pytest.raises(CheckpointError, match=r"record\.json is no record of a round: .*; restore it from a copy"):
        audit_run(complete)


@pytest.mark.parametrize("name", ["../../elsewhere.json", "/etc/passwd", ""])
def test_digests_name_no_file_outside_of_their_run(complete: Path, name: str) -> None:
    resealed(complete / "digests.json", {"files": {name: "0" * 64}})
    with pytest.raises(CheckpointError, match="no file inside the folder"):
        read_record(complete)
    file = complete / "audit/round-0001/record.json"
    resealed(file, {**json.loads(file.read_text()), "files": {name: "0" * 64}})
    assert any("no file inside the folder" in row.detail for row in audit_run(complete).failures)
