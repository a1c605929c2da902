"""Below a folder no link is followed and only regular files are opened; above it everything is as the user has it."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_fl.errors import CheckpointError
from atlas_fl.storage.folder_access import (
    DRAFT,
    cut_file,
    files_below,
    free_bytes,
    list_folder,
    open_to_append,
    read_file,
    read_named_file,
    remove_drafts,
    write_atomic,
    write_pieces,
)
from atlas_fl.storage.jsonl import from_json, read_json


def test_a_folder_that_is_reached_by_links_is_read_and_written(tmp_path) -> None:
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "other").symlink_to(tmp_path / "disk" / "run")
    for run in (tmp_path / "runs" / "run", tmp_path / "runs" / "other"):
        write_atomic(run / "audit" / "round-0001" / "record.json", b"{}", within=run)
        assert read_file(run / "audit" / "round-0001" / "record.json", max_bytes=9, within=run) == b"{}"
        with open_to_append(run / "log.txt") as file:
            file.write(b"line\n")
    assert (tmp_path / "disk" / "run" / "log.txt").read_bytes() == b"line\nline\n"


READERS: tuple[Callable[[Path], object], ...] = (
    lambda path: read_file(path, max_bytes=100),
    open_to_append,
    lambda path: cut_file(path, 0),
)


@pytest.mark.parametrize("use", READERS)
def test_links_pipes_and_devices_are_refused_and_stay(tmp_path, use: Callable[[Path], object]) -> None:
    canary = tmp_path / "canary"
    canary.write_bytes(b"mine")
    for name, target in (
        ("file", canary),
        ("folder", tmp_path),
        ("zero", "/dev/zero"),
        ("none", tmp_path / "none-there"),
    ):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(OSError, match="a link, which is not followed here"):
            use(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        use(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        use(tmp_path)
    assert canary.read_bytes() == b"mine" and not (tmp_path / "none-there").exists()


def test_no_part_of_a_path_below_the_folder_is_a_link(tmp_path) -> None:
    (tmp_path / "outside").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "audit").symlink_to(tmp_path / "outside")
    for use in (
        lambda: write_atomic(run / "audit" / "a" / "b", b"x", within=run),
        lambda: read_file(run / "audit" / "a", max_bytes=1, within=run),
        lambda: list_folder(run / "audit", within=run),
    ):
        with pytest.raises(OSError, match=r"a link, which is not followed here: '.*/run/audit'"):
            use()
    assert list((tmp_path / "outside").iterdir()) == []
    assert list(files_below(run)) == []


def test_a_file_with_another_name_is_read_and_not_written_to(tmp_path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "log.txt").hardlink_to(tmp_path / "mine")
    assert read_file(tmp_path / "log.txt", max_bytes=4) == b"mine"
    for use in READERS[2:]:
        with pytest.raises(OSError, match="a hard link, and so a file with another name"):
            use(tmp_path / "log.txt")
    write_atomic(tmp_path / "log.txt", b"new")
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_a_draft_has_a_name_of_its_own_and_nothing_of_it_stays(tmp_path) -> None:
    seen: list[str] = []

    def pieces() -> "list[bytes]":
        seen.extend(path.name for path in tmp_path.iterdir())
        return [b"x"]

    for _ in range(2):
        write_pieces(tmp_path / "a.json", (piece for _ in range(1) for piece in pieces()))
    drafts = [name for name in seen if name != "a.json"]
    assert len(set(drafts)) == 2 and all(DRAFT.fullmatch(name) for name in drafts)
    with pytest.raises(ZeroDivisionError):
        write_pieces(tmp_path / "a.json", (bytes(1 // number) for number in (1, 0)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_drafts_of_the_files_that_are_named_go_and_links_stay(tmp_path) -> None:
    ours, other, link = (f".{name}.0123456789abcdef.writing" for name in ("a.json", "b.json", "c.json"))
    for name in (ours, other):
        (tmp_path / name).touch()
    (tmp_path / link).symlink_to(tmp_path / other)
    remove_drafts(tmp_path, of=re.compile(r"[ac]\.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [other, link]


def test_sizes_and_depth_are_bounded(tmp_path) -> None:
    (tmp_path / "big").write_bytes(b"12345")
    for read in (read_file, read_named_file):
        with pytest.raises(OSError, match="5 bytes, and at most 4 are read"):
            read(tmp_path / "big", max_bytes=4)
    assert from_json("[" * 64 + "]" * 64) != []
    assert from_json('["' + "[" * 100 + '\\"]]", "{{"]')
    for deep in ("[" * 65 + "]" * 65, '{"a":' * 980 + "1" + "}" * 980, "[" * 100_000):
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            from_json(deep)
    (tmp_path / "deep.json").write_text("[" * 980 + "]" * 980)
    with pytest.raises(CheckpointError, match=r"damaged file .*deep.json: its lists are nested more than 64 deep"):
        read_json(tmp_path / "deep.json")


def test_what_is_free_is_the_least_of_machine_and_control_group(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert free_bytes(root=tmp_path) is None
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert free_bytes(root=tmp_path) == 4_096_000
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/memory.current", "1000\n")
    assert free_bytes(root=tmp_path) == 4_096_000
    write("sys/fs/cgroup/memory.max", "3000\n")
    assert free_bytes(root=tmp_path) == 2000
