"""What was read stays until its files change, and so many data sets of it."""

import os
import time
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from atlas_fl.data.embedded import EMBEDDED
from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import (
    MOST_KEPT,
    Images,
    Rows,
    Source,
    Task,
    TaskData,
    file_signature,
    forget,
    load_task,
    read_once,
)
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import DataError
from atlas_fl.storage.assets import embedded_dir

SOURCE = Source(cache_dir=embedded_dir())


def write_csv(path: Path, *, word: str = "good") -> Path:
    path.write_text("text,label\n" + "".join(f"{word} {i},{i % 2}\n" for i in range(20)))
    return path


def rows(*texts: str) -> Rows:
    return Rows(text=texts, label=np.zeros(len(texts), dtype=np.int64))


def test_unchanged_files_are_read_once_and_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv")
    calls = list[str]()

    def read(name: str) -> Rows:
        calls.append(name)
        return rows(name)

    forget()
    first = read_once(read, "a", files=(path,))
    assert read_once(read, "a", files=(path,)) is first
    for key in range(MOST_KEPT):
        read_once(read, str(key), files=(path,))
    assert len(calls) == 1 + MOST_KEPT
    assert read_once(read, "a", files=(path,)) is not first


@pytest.mark.parametrize("keep_times", [False, True])
def test_a_file_of_other_content_is_read_anew_at_once(tmp_path: Path, keep_times: bool) -> None:
    """Of equal size, in the moment after it was read, and with the modification time of before."""
    path = write_csv(tmp_path / "own.csv", word="good")
    before, times = parse_tasks(f"own={path}")[0].load(SOURCE), path.stat()
    time.sleep(0.02)  # clocks of file systems stand still for as long
    write_csv(path, word="poor")
    if keep_times:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = parse_tasks(f"own={path}")[0].load(SOURCE)
    assert path.stat().st_size == times.st_size
    assert isinstance(before.train, Rows) and isinstance(after.train, Rows)
    assert {text.split()[0] for text in before.train.text} == {"good"}
    assert {text.split()[0] for text in after.train.text} == {"poor"}


def test_a_file_that_replaces_another_appears_in_a_folder_or_behind_a_link_or_goes_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    seen = [file_signature((folder,))]
    for change in (
        lambda: write_csv(folder / "inner" / "a.csv"),
        lambda: write_csv(tmp_path / "b.csv").replace(folder / "inner" / "a.csv"),
        lambda: (folder / "inner" / "a.csv").unlink(),
        lambda: (folder / "linked").symlink_to(tmp_path / "outside"),
        lambda: write_csv(tmp_path / "outside" / "c.csv"),
        lambda: (folder / "loop").symlink_to(folder),
        lambda: (folder / "loop").unlink(),
        lambda: (folder / "linked").unlink(),
        lambda: (folder / "inner").rmdir(),
        lambda: folder.rmdir(),
    ):
        change()
        seen.append(file_signature((folder,)))
    assert len(set(seen)) == len(seen)
    assert file_signature((folder,)) == ((str(folder), ()),)


def test_nothing_is_kept_of_what_could_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    for _ in range(2):
        with pytest.raises(DataError, match="there is no file"):
            parse_tasks(f"own={path}")
    write_csv(path)
    assert parse_tasks(f"own={path}")[0].num_labels == 2


def test_descriptions_that_read_a_file_differently_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("text,label,level\n" + "".join(f"word {i},{i % 2},{i % 3}\n" for i in range(40)))
    assert [parse_tasks(f"own={path}{end}")[0].num_labels for end in ("", ",label=level", ",metric=pearson")] == [
        2,
        3,
        1,
    ]


def test_options_of_a_folder_of_images_are_part_of_its_key(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(15):
            Image.fromarray(draw.integers(0, 256, (6, 6), dtype=np.uint8)).save(tmp_path / name / f"{number}.png")
    plain, small = (load_task(parse_tasks(f"pets={tmp_path}{end}")[0], SOURCE).train for end in ("", ",size=4"))
    assert isinstance(plain, Images) and isinstance(small, Images)
    assert (plain.size, small.size) == ((6, 6, 1), (4, 4, 1))
    assert load_task(parse_tasks(f"pets={tmp_path}")[0], SOURCE).train is plain


def test_sources_that_cut_splits_differently_share_nothing() -> None:
    sizes = [
        len(load_task(TASKS["digits"], Source(cache_dir=SOURCE.cache_dir, validation_share=share)).validation)
        for share in (0.1, 0.2)
    ]
    assert sizes[0] < sizes[1]


def test_threads_that_ask_together_read_once(tmp_path: Path) -> None:
    calls, together = list[object](), Barrier(4)
    forget()

    def slow() -> Rows:
        calls.append(None)
        time.sleep(0.05)
        return rows("x")

    def ask() -> None:
        together.wait()
        read_once(slow, files=(tmp_path,))

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_a_task_that_names_no_files_is_read_each_time() -> None:
    def load(source: Source) -> TaskData:
        del source
        return TaskData(train=rows("a"), validation=rows("b"), test=rows("c"))

    task = Task(name="own", num_labels=2, load=load)
    assert load_task(task, SOURCE) is not load_task(task, SOURCE)


@pytest.mark.parametrize("name", [task.name for task in EMBEDDED])
def test_a_registered_task_names_every_file_that_it_opens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, files, plain = set[Path](), TASKS[name].files, Path.open

    def watched(self: Path, *args: Any, **options: Any) -> Any:
        opened.add(self)
        return plain(self, *args, **options)

    monkeypatch.setattr(Path, "open", watched)
    TASKS[name].load(SOURCE)  # what the package itself reads once, such as its list of assets
    opened.clear()
    forget()
    TASKS[name].load(SOURCE)
    assert files is not None
    assert opened
    assert opened <= set(files(SOURCE))


def test_every_registered_task_is_kept() -> None:
    assert [name for name, task in TASKS.items() if task.files is None] == []


def test_a_data_set_in_a_directory_is_read_anew_when_a_split_changes(tmp_path: Path) -> None:
    (tmp_path / "rte").mkdir()
    source, seen = Source(cache_dir=Path("/nowhere"), data_dir=tmp_path), list[TaskData]()
    for word in ("good", "good", "poor"):
        for split, count in (("train", 40), ("validation", 10)):
            lines = "".join(f"{split} {word} {i},so,{i % 2}\n" for i in range(count))
            if not seen or word == "poor":
                (tmp_path / "rte" / f"{split}.csv").write_text(f"sentence1,sentence2,label\n{lines}")
        seen.append(load_task(TASKS["rte"], source))
    assert seen[0] is seen[1]
    assert isinstance(seen[2].train, Rows)
    assert all("poor" in text for text in seen[2].train.text)
