"""Digests of files: what is altered, cut off or missing is named; what nobody knows of is left alone."""

from hashlib import sha256

import pytest

from atlas_fl.errors import CheckpointError
from atlas_fl.storage.checkpoint import save
from atlas_fl.storage.digests import Digests, check_files, find_faults, read_checked_rows, read_digests, write_digests
from atlas_fl.storage.jsonl import append_rows, write_json
from atlas_fl.storage.run_folder import RunFolder

ROW = {"round": 1, "event": "missing", "client": "a-0"}


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """Rows of three rounds, of which a checkpoint covers two."""
    found = RunFolder(tmp_path / "run")
    write_json(tmp_path / "run/plan.json", {"clients": []})
    running = sha256()
    length = append_rows(found.metrics, [ROW, {**ROW, "round": 2}], running=running)
    known = {"plan.json": sha256(found.plan.read_bytes()).hexdigest(), "metrics.jsonl": running.hexdigest()}
    state = {"metrics_bytes": length, "ledger_bytes": 0, "digests": known}
    save(found.checkpoints, round=2, tensors={}, state=state)
    append_rows(found.metrics, [{**ROW, "round": 3}])
    return found


def test_a_running_digest_is_that_of_the_file(tmp_path) -> None:
    running = sha256()
    for round in range(5):
        append_rows(tmp_path / "rows.jsonl", [{**ROW, "round": round}], running=running)
        assert running.hexdigest() == sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()


def test_rows_count_as_far_as_the_checkpoint_covers_them(folder) -> None:
    assert [row["round"] for row in read_checked_rows(folder, folder.metrics)] == [1, 2]
    content = folder.metrics.read_bytes()
    folder.metrics.write_bytes(content[:20])
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: it holds 20 bytes of \d+ that were written; "):
        read_checked_rows(folder, folder.metrics)
    folder.metrics.write_bytes(content.replace(b"2", b"3", 1))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: its SHA-256 of the first \d+ bytes is \w{12}, and"):
        read_checked_rows(folder, folder.metrics)


def test_every_bit_of_a_file_is_looked_at_and_other_files_are_left_alone(folder) -> None:
    content = folder.plan.read_bytes()
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        folder.plan.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"damaged file .*plan\.json"):
            check_files(folder, folder.plan)
    folder.plan.unlink()
    with pytest.raises(CheckpointError, match=r"plan\.json: it is missing; restore it from a copy, or"):
        check_files(folder, folder.plan)
    check_files(folder, folder.config, folder.log)


def test_the_digests_of_a_complete_run_take_the_place_of_a_checkpoints(folder) -> None:
    export = folder.adapter("a-0") / "adapter_model.safetensors"
    export.parent.mkdir(parents=True)
    export.write_bytes(b"numbers")
    write_json(folder.summary, {"run": {"rounds": 3}})
    write_digests(folder, {"summary.json": sha256(folder.summary.read_bytes()).hexdigest()})
    assert read_digests(folder) == Digests(
        sha256={
            "summary.json": sha256(folder.summary.read_bytes()).hexdigest(),
            "adapters/a-0/adapter_model.safetensors": sha256(b"numbers").hexdigest(),
        }
    )
    assert not list(find_faults(folder))
    export.write_bytes(b"numbert")
    assert [file for file, _ in find_faults(folder)] == [export]
    export.unlink()
    assert not list(find_faults(folder)), "whoever removes exports to save room does no harm"
