"""Hidden states on the disk: the same bits or none, a budget, several processes."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from atlas_fl.storage.state_files import StateFiles, state_folder

KEYS = tuple(sha256(name.encode()).hexdigest() for name in "abcdef")
STATES = torch.arange(12.0).reshape(3, 4)


def size_of(folder: Path, key: str) -> int:
    return (folder / f"{key}.states").stat().st_size


def used_at(folder: Path, key: str, seconds: int) -> None:
    """Have a file be used last so many seconds after 1970."""
    os.utime(folder / f"{key}.states", (seconds, seconds))


def kept(folder: Path) -> set[str]:
    return {path.name[:64] for path in folder.glob("*.states")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_come_back_with_the_same_bits(tmp_path, dtype: torch.dtype) -> None:
    states = (STATES / 7).to(dtype)
    StateFiles(tmp_path / "new", budget_bytes=10**6).write(KEYS[0], states)
    other = StateFiles(tmp_path / "new", budget_bytes=10**6)
    found = other.read(KEYS[0])
    assert found is not None and found.dtype == dtype and torch.equal(found, states)
    assert other.read(KEYS[1]) is None
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700, "states tell of the texts"


def test_no_byte_can_be_changed_and_no_end_cut_off(tmp_path) -> None:
    StateFiles(tmp_path, budget_bytes=10**6).write(KEYS[0], STATES)
    path = tmp_path / f"{KEYS[0]}.states"
    whole = path.read_bytes()
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for content in [*changed, whole[:-1], whole[:40], b"", whole + b"0"]:
        path.write_bytes(content)
        with pytest.warns(UserWarning, match="is damaged, or of another model; its states are computed anew"):
            assert StateFiles(tmp_path, budget_bytes=10**6).read(KEYS[0]) is None
    path.write_bytes(whole)
    assert StateFiles(tmp_path, budget_bytes=10**6).read(KEYS[0]) is not None


def test_a_file_under_the_name_of_another_model_is_told_once_and_replaced(tmp_path) -> None:
    files, told = StateFiles(tmp_path, budget_bytes=10**6), list[str]()
    files.report = told.append
    files.write(KEYS[0], STATES)
    for key in KEYS[1:3]:
        (tmp_path / f"{key}.states").write_bytes((tmp_path / f"{KEYS[0]}.states").read_bytes())
        assert files.read(key) is None
    assert len(told) == 1 and KEYS[1] in told[0]
    files.write(KEYS[1], STATES + 1)
    found = files.read(KEYS[1])
    assert found is not None and torch.equal(found, STATES + 1)


def test_the_least_recently_used_makes_room(tmp_path) -> None:
    # 32 bytes of seal, 8 of a length, 64 of a header, 48 of values: 152 each; six are 912
    earlier = StateFiles(tmp_path, budget_bytes=10**6)
    for at, key in enumerate(KEYS[:4]):
        earlier.write(key, STATES)
        used_at(tmp_path, key, 1000 + at)
    size = size_of(tmp_path, KEYS[0])
    assert earlier.used_bytes() == 4 * size == 4 * 152
    files = StateFiles(tmp_path, budget_bytes=4 * size)
    assert files.read(KEYS[0]) is not None, "the oldest was used again"
    files.write(KEYS[4], STATES)
    assert kept(tmp_path) == {KEYS[0], KEYS[2], KEYS[3], KEYS[4]}
    files.write(KEYS[5], STATES)
    assert kept(tmp_path) == {KEYS[0], KEYS[3], KEYS[4], KEYS[5]}


def test_what_this_run_uses_stays_and_the_next_run_removes_it(tmp_path) -> None:
    files = StateFiles(tmp_path, budget_bytes=2 * 152)
    for key in KEYS[:4]:
        files.write(key, STATES)
    assert kept(tmp_path) == set(KEYS[:2]), "a pass that does not fit would push out what the next one needs"
    for key in KEYS[:2]:
        used_at(tmp_path, key, 1000)
    files.begin_run()
    files.write(KEYS[2], STATES)
    assert len(kept(tmp_path)) == 2 and KEYS[2] in kept(tmp_path)


def test_files_of_others_are_neither_counted_nor_removed(tmp_path) -> None:
    names = ["notes.txt", f"{KEYS[0]}.states.bak", "states", f"{KEYS[1]}.0123456789abcdef.draft"]
    for name in names:
        (tmp_path / name).write_bytes(b"0" * 100)
        os.utime(tmp_path / name, (1, 1))
    files = StateFiles(tmp_path, budget_bytes=200)
    assert files.used_bytes() == 100, "a draft that a killed process has left"
    files.write(KEYS[2], STATES)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[:3], f"{KEYS[2]}.states"])


def test_states_larger_than_the_budget_remove_nothing(tmp_path) -> None:
    StateFiles(tmp_path, budget_bytes=10**6).write(KEYS[0], STATES)
    used_at(tmp_path, KEYS[0], 1000)
    StateFiles(tmp_path, budget_bytes=160).write(KEYS[1], torch.zeros(100, 4))
    assert kept(tmp_path) == {KEYS[0]}


def test_a_disk_that_takes_nothing_is_told_once(tmp_path) -> None:
    (tmp_path / "file").touch()
    files, told = StateFiles(tmp_path / "file", budget_bytes=10**6), list[str]()
    files.report = told.append
    for key in KEYS:
        files.write(key, STATES)
    assert len(told) == 1 and "no more states are kept on the disk" in told[0]


WRITER = """
import sys, torch
from hashlib import sha256
from pathlib import Path
from atlas_fl.storage.state_files import StateFiles
files = StateFiles(Path(sys.argv[1]), budget_bytes=40_000)
files.report = lambda line: sys.exit(line)
for turn in range(40):
    for number in range(25):
        key = sha256(str(number).encode()).hexdigest()
        found = files.read(key)
        if found is None:
            files.write(key, torch.full((10, 50), float(number)))
        elif not torch.equal(found, torch.full((10, 50), float(number))):
            sys.exit(f"{key} has the states of another one")
    files.begin_run()
"""
"""Reads and writes 25 states of about 2 kB, of which 19 fit, so that processes remove what others have written."""


@pytest.mark.slow
def test_processes_that_write_read_and_remove_at_once_never_meet_a_damaged_file(tmp_path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stderr=subprocess.PIPE) for _ in "12"]
    told = [process.communicate(timeout=100)[1].decode() for process in running]
    assert told == [""] * 2 and [process.returncode for process in running] == [0] * 2
    files = StateFiles(tmp_path, budget_bytes=40_000)
    assert 0 < files.used_bytes() <= 40_000 + 2 * 40_000 // 16
    assert all(path.suffix == ".states" for path in tmp_path.iterdir()), "no drafts are left"


def test_the_folder_is_beside_what_was_fetched(monkeypatch) -> None:
    monkeypatch.setenv("ATLAS_CACHE", "/somewhere/else")
    assert state_folder() == Path("/somewhere/else/states")
    monkeypatch.delenv("ATLAS_CACHE")
    assert state_folder().parts[-2:] == ("atlas-fl", "states")
