"""Folders of images by class, written with Pillow."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atlas_fl.data.registry import find_tasks
from atlas_fl.data.task import Images, Source, TaskData
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import ConfigError, DataError
from tests.data.images import as_images

NOWHERE = Source(cache_dir=Path("/nowhere"))


def write(folder: Path, count: int, *, first: int = 0, size: tuple[int, int] = (6, 6), mode: str = "L") -> None:
    """So many images that all differ, without loss."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        draw = np.random.default_rng([number, len(folder.name), ord(folder.name[0])])
        shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
        Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"{number:03}.png")


def load(description: str, **source: float) -> TaskData:
    return parse_tasks(description)[0].load(Source(cache_dir=Path("/nowhere"), **source))


def splits(data: TaskData) -> list[Images]:
    return [as_images(part) for part in (data.train, data.validation, data.test)]


def test_one_folder_of_classes_is_cut_into_splits(tmp_path: Path) -> None:
    for name in ("dog", "cat", "eel"):
        write(tmp_path / name, 20)
    write(tmp_path / ".hidden", 3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    task = parse_tasks(f"pets={tmp_path}")[0]
    assert (task.name, task.num_labels, task.label_names, task.images) == ("pets", 3, ("cat", "dog", "eel"), True)
    data = task.load(NOWHERE)
    assert sum(map(len, splits(data))) == 60
    assert splits(data)[0].size == (6, 6, 1)
    dog = np.asarray(Image.open(tmp_path / "dog" / "004.png"))
    found = [label for part in splits(data) for p, label in zip(part.pixels, part.label) if (p[..., 0] == dog).all()]
    assert found == [1]
    assert [task.name for task in find_tasks([], [f"pets={tmp_path}"])] == ["pets"]


@pytest.mark.parametrize("validation", ["validation", "val", None])
def test_folders_of_splits_keep_them(validation: str | None, tmp_path: Path) -> None:
    for split, count in (("train", 20), ("test", 5), (validation, 4)):
        for name in ("a", "b"):
            if split:
                write(tmp_path / split / name, count, first={"train": 0, "test": 30}.get(split, 50))
    data = load(f"x={tmp_path}", validation_share=0.1)
    assert [len(part) for part in splits(data)] == ([40, 8, 10] if validation else [36, 4, 10])
    held = {Image.open(file).tobytes() for file in (tmp_path / "test").rglob("*.png")}
    assert {image.tobytes() for image in splits(data)[2].pixels} == held


def test_folders_of_no_split_are_named_and_a_split_is_there_once(tmp_path: Path) -> None:
    for split in ("train", "val", "test", "more"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            for index in range(3):
                color = (80 * index + 10, 40 * len(split), 200 if label == "a" else 20)
                Image.new("RGB", (4, 4), color).save(tmp_path / split / label / f"{index}.png")
    task = parse_tasks(f"mine={tmp_path}")[0]
    assert task.load(Source(cache_dir=Path("/nowhere"))).notes == (
        f"1 files are left out, whose names are of no split: {tmp_path / 'more'}",
    )
    (tmp_path / "more").rename(tmp_path / "Validation")
    with pytest.raises(DataError, match=r"holds the validation split more than once \(Validation, val\); keep one"):
        parse_tasks(f"mine={tmp_path}")


def test_a_class_of_one_split_has_the_same_number_in_the_other(tmp_path: Path) -> None:
    for split, names in (("train", "abc"), ("test", "bc")):
        for name in names:
            write(tmp_path / split / name, 5, first=len(split) * 10)
    assert parse_tasks(f"x={tmp_path}")[0].label_names == ("a", "b", "c")
    assert set(splits(load(f"x={tmp_path}"))[2].label) == {1, 2}


def test_a_class_of_the_test_alone_is_refused(tmp_path: Path) -> None:
    for split, names in (("train", "ab"), ("test", "abc")):
        for name in names:
            write(tmp_path / split / name, 5, first=len(split) * 10)
    with pytest.raises(DataError, match="class 'c' of task 'x' has 5 test rows and no training row; give it"):
        load(f"x={tmp_path}")


def test_size_scales_the_shorter_side_and_crops_the_middle_by_hand(tmp_path: Path) -> None:
    for name, level in (("a", 10), ("b", 200)):
        (tmp_path / name).mkdir()
        for number in range(8):
            pixels = np.full((8, 24), level + number, dtype=np.uint8)
            pixels[:, :8] = pixels[:, 16:] = 0  # a third at either side, which the middle leaves out
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    found = np.concatenate([part.pixels for part in splits(load(f"x={tmp_path},size=4"))])
    assert found.shape == (16, 4, 4, 1)
    levels = found[:, 1:3, 1:3].mean(axis=(1, 2, 3))
    assert sorted(levels) == pytest.approx([*range(10, 18), *range(200, 208)], abs=4)  # bicubic swings at the edges


def test_one_image_in_colour_makes_all_of_three_channels(tmp_path: Path) -> None:
    write(tmp_path / "a", 10)
    write(tmp_path / "b", 10, mode="RGB")
    found = splits(load(f"x={tmp_path}"))
    assert {part.size for part in found} == {(6, 6, 3)}
    grey = np.concatenate([part.pixels[part.label == 0] for part in found])
    assert (grey == grey[..., :1]).all()


def test_how_the_camera_was_held_is_undone(tmp_path: Path) -> None:
    write(tmp_path / "a", 10)
    write(tmp_path / "b", 10)
    turned = Image.fromarray(np.arange(36, dtype=np.uint8).reshape(6, 6))
    held = turned.getexif()
    held[0x0112] = 3  # upside down
    turned.save(tmp_path / "a" / "turned.png", exif=held)
    found = np.concatenate([part.pixels for part in splits(load(f"x={tmp_path}"))])
    assert any((image[..., 0] == np.arange(36).reshape(6, 6)[::-1, ::-1]).all() for image in found)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, 10)
    whole = (tmp_path / "a" / "003.png").read_bytes()
    for content in (b"", b"no image at all", whole[:60], whole[:-30]):
        (tmp_path / "a" / "003.png").write_bytes(content)
        with pytest.raises(DataError, match=r"cannot read the image .*003\.png: .*; mend or remove it"):
            load(f"x={tmp_path}")


def test_sixteen_bits_are_refused_and_not_cut_off(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, 10)
    Image.fromarray(np.full((6, 6), 40_000, dtype=np.uint16)).save(tmp_path / "a" / "scan.png")
    with pytest.raises(DataError, match=r"cannot read the image .*scan\.png: its pixels are of mode I;16 and no bytes"):
        load(f"x={tmp_path}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size=0", "size='0' of task 'x' is no number of pixels from 1 to 4096"),
        ("size=big", "size='big' of task 'x' is no number of pixels"),
        ("text=a", "unknown option of a task of images 'text'"),
        ("size=", "gives an option twice or without a value"),
    ],
)
def test_wrong_options_are_one_line(options: str, message: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, 2)
    with pytest.raises(ConfigError, match=message):
        parse_tasks(f"x={tmp_path},{options}")


def test_sizes_that_differ_are_named_with_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "a", 5)
    write(tmp_path / "b", 5, size=(9, 7))
    with pytest.raises(DataError, match=r"000\.png is 6 x 6 pixels and .*000\.png is 9 x 7; add size=6 to the task"):
        load(f"x={tmp_path}")


def test_folders_without_enough_to_learn_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "one" / "a", 5)
    with pytest.raises(DataError, match=r"has images of one class only \('a'\); a task needs a folder for each of two"):
        parse_tasks(f"x={tmp_path / 'one'}")


def test_each_folder_is_a_client_with_or_without_splits_and_one_may_lack_a_class(tmp_path: Path) -> None:
    """`9` comes before `10`; of 43 images 20 train, 10 validate and 13 test."""
    for split, count, first in (("train", 10, 0), ("val", 3, 20), ("test", 4, 30)):
        for label in "ab":
            write(tmp_path / "10" / split / label, count, first=first)
    for label, count in (("a", 14), ("b", 14), ("c", 15)):
        write(tmp_path / "9" / label, count, first=100)
    for label in "ab":
        write(tmp_path / "tiny" / label, 1, first=200)
    (tmp_path / "empty").mkdir()
    (tmp_path / "meta.csv").write_text("a,b\n1,2\n")
    for pattern in ("", "/*"):
        (task,) = parse_tasks(f"x={tmp_path}{pattern},client=file,least=3,size=4")
        assert (task.label_names, task.clients) == (("a", "b", "c"), ("client-9", "client-10"))
        data = task.load(NOWHERE)
        assert [tuple(map(len, part.splits.values())) for part in data.clients] == [(20, 10, 13), (20, 6, 8)]
        assert set(as_images(data.clients[1].train).label) == {0, 1}
        assert as_images(data.train).size == (4, 4, 1)
        assert data.notes == (
            "names of clients: '9' is client-9, '10' is client-10",
            f"2 files are left out, since they hold no images by class: {tmp_path / 'empty'}, {tmp_path / 'meta.csv'}",
            "left out since they have fewer than 3 examples: 1 of 3 clients, tiny (2)",
        )
    assert set(as_images(load(f"x={tmp_path}/10,labels=c|b|a").train).label) == {1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("client=file", "client 'tiny': task 'x' has no validation and no test rows .*leave small clients out with"),
        ("client=hospital", "client=hospital, and images have no columns; write client=file for a folder of each"),
        ("client=file,least=99", "no client of task 'x' has 99 examples, the most are 10; lower least="),
        ("client=file,labels=a|c", "has a folder of images 'b', which is none of the classes that labels= declares"),
        ("", "has no train split; .*add client=file where each folder is a client's"),
    ],
)
def test_what_is_wrong_with_folders_of_clients_is_one_line(options: str, message: str, tmp_path: Path) -> None:
    for name, count in (("big", 5), ("tiny", 1)):
        for label in "ab":
            write(tmp_path / name / label, count, first=10 * count)
    here = tmp_path / "big" if options.startswith("client=h") else tmp_path
    with pytest.raises((ConfigError, DataError), match=message):
        load(f"x={here},{options}".removesuffix(","))


def test_a_pipe_among_the_images_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("dog", "cat"):
        write(tmp_path / name, 20)
    os.mkfifo(tmp_path / "dog/pipe.png")
    with pytest.raises(DataError, match=r"cannot read the image .*pipe\.png: .*no regular file"):
        load(f"own={tmp_path}")
