"""A file or folder is there in full or not at all, nothing of a user's goes, and a full disk is told with a path."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from atlas_fl.storage.files import DRAFT_MARKER, atomic_folder
from atlas_fl.storage.folder_access import write_atomic
from atlas_fl.storage.jsonl import append_rows
from atlas_fl.storage.run_folder import run_log


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def write(path: Path, **files: str) -> None:
    with atomic_folder(path) as draft:
        for name, text in files.items():
            (draft / name).write_text(text)


def test_a_folder_is_there_with_all_its_files_or_not_at_all(tmp_path) -> None:
    with atomic_folder(tmp_path / "deep" / "new") as draft:
        (draft / "a").write_text("1")
        assert not (tmp_path / "deep" / "new").exists()
    assert names(tmp_path) == ["deep", "deep/new", "deep/new/a"]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", a="1")
    assert names(tmp_path / "empty") == ["a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no"), OSError(errno.ENOSPC, "No space left")])
def test_what_fails_leaves_nothing(tmp_path, error: BaseException) -> None:
    with pytest.raises(type(error)), atomic_folder(tmp_path / "new") as draft:
        (draft / "a").write_text("1")
        raise error
    assert names(tmp_path) == []


def test_files_that_were_there_stay_but_for_those_that_are_written(tmp_path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "thesis.txt").write_text("years of work")
    (tmp_path / "old" / "a").write_text("of before")
    write(tmp_path / "old", a="1", b="2")
    assert {path.name: path.read_text() for path in (tmp_path / "old").iterdir()} == {
        "thesis.txt": "years of work",
        "a": "1",
        "b": "2",
    }


def test_what_a_killed_write_has_left_goes_and_what_another_has_put_there_stays(tmp_path) -> None:
    drafts = tmp_path / ".new.0123456789abcdef.writing"
    for left in ("", DRAFT_MARKER, "content/a"):
        drafts.mkdir(exist_ok=True)
        if left:
            (drafts / DRAFT_MARKER).touch()
            (drafts / left).parent.mkdir(exist_ok=True)
            (drafts / left).touch()
        write(tmp_path / "new", b="2")
        assert names(tmp_path) == ["new", "new/b"]
    drafts.mkdir()
    (drafts / "thesis.txt").write_text("years of work")
    (tmp_path / ".new.fedcba9876543210.writing").symlink_to(drafts)
    write(tmp_path / "new", b="3")
    assert (drafts / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "new" / "b").read_text() == "3"


def test_a_full_disk_is_told_with_the_path_whoever_writes(tmp_path) -> None:
    """`/dev/full` takes nothing, and small contents fail once more when their file is closed."""

    def small(folder: Path) -> None:
        (folder / "a").symlink_to("/dev/full")
        (folder / "a").write_text("a few bytes")

    def tensors(folder: Path) -> None:
        save_file({"a": torch.ones(3)}, folder / "a")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    for fill in (small, tensors):
        with pytest.raises(OSError, match="No space left") as caught, atomic_folder(tmp_path / "new") as draft:
            fill(draft)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "new"))
        assert names(tmp_path) == []
    with pytest.raises(OSError, match="Input/output error") as caught, atomic_folder(tmp_path / "new"):
        raise SafetensorError("something else")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "new"))


@contextmanager
def no_room() -> Iterator[None]:
    """A disk whose files take eight bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_with_the_path_of_a_small_file(tmp_path) -> None:
    """What is in a file's buffer fails once more when the file is closed."""
    rows = tmp_path / "rows.jsonl"
    with pytest.raises(OSError, match="too large") as caught, no_room():
        append_rows(rows, [{"a": 1, "b": 2}])
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(rows))
    log = tmp_path / "log.txt"
    with pytest.raises(OSError, match="too large") as caught, no_room(), run_log(log) as tell:
        tell("round 1 of 3")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(log))
    with pytest.raises(OSError, match="too large") as caught, no_room():
        write_atomic(tmp_path / "state.json", b'{"some": "content"}')
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "state.json"))
    assert names(tmp_path) == ["log.txt", "rows.jsonl"]
