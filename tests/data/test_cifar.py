import gzip
import tarfile
import zlib
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest
from PIL import Image

from atlas_fl.data.cache import load_task
from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import Images, Source, TaskData
from atlas_fl.errors import DataError
from tests.data.images import as_images
from tests.data.pickles import batch, batch_of_python_3, write_cifar


def load(name: str, data_dir: Path | None) -> TaskData:
    return TASKS[name].load(Source(cache_dir=Path("/nowhere"), data_dir=data_dir, validation_share=0.1))


def sizes(data: TaskData) -> list[int]:
    return [len(part) for part in (data.train, data.validation, data.test)]


def same(left: TaskData, right: TaskData) -> bool:
    pairs = [(as_images(getattr(left, s)), as_images(getattr(right, s))) for s in ("train", "test")]
    return all((one.pixels == two.pixels).all() and (one.label == two.label).all() for one, two in pairs)


@pytest.fixture(name="_offline")
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def test_the_classes_are_those_of_the_data_sets() -> None:
    ten, hundred = TASKS["cifar10"].label_names, TASKS["cifar100"].label_names
    assert (len(ten), len(set(hundred)), TASKS["cifar100"].images) == (10, 100, True)
    assert list(hundred) == sorted(hundred)
    assert (hundred[0], hundred[23], hundred[99], ten[9]) == ("apple", "cloud", "worm", "truck")


@pytest.mark.parametrize("write", [batch, batch_of_python_3])
@pytest.mark.parametrize(("name", "classes", "train"), [("cifar10", 10, 10), ("cifar100", 100, 100)])
def test_the_python_archive_is_read(name: str, classes: int, train: int, write, tmp_path: Path) -> None:
    write_cifar(tmp_path, name, train=train, test=20, classes=classes, write=write)
    data = load(name, tmp_path)
    whole = 5 * train if name == "cifar10" else train
    assert sizes(data) == [whole - whole // 10, whole // 10, 20]
    first = np.random.default_rng(0).integers(0, 256, (train, 32, 32, 3), dtype=np.uint8)[0]
    held = np.concatenate([as_images(data.train).pixels, as_images(data.validation).pixels])
    assert (held == first).all(axis=(1, 2, 3)).sum() == 1  # red, green and blue lie where they lay
    assert set(data.test.label) <= set(range(classes))


def test_the_packed_archive_gives_the_same(tmp_path: Path) -> None:
    write_cifar(tmp_path / "a", "cifar100", train=40, test=10, classes=100)
    (tmp_path / "b").mkdir()
    with tarfile.open(tmp_path / "b" / "cifar-100-python.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "a" / "cifar-100-python", arcname="cifar-100-python")
    assert same(load("cifar100", tmp_path / "a"), load("cifar100", tmp_path / "b"))
    assert same(load("cifar100", tmp_path / "a"), load("cifar100", tmp_path / "a" / "cifar-100-python"))


def test_a_saved_folder_of_the_hubs_format_is_read(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    pixels = draw.integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    columns = datasets.Features(
        img=datasets.Image(), fine_label=datasets.Value("int64"), coarse_label=datasets.Value("int64")
    )
    splits = {}
    for split, part in (("train", pixels[:20]), ("test", pixels[20:])):
        labels = {"fine_label": [7 * i % 100 for i in range(len(part))], "coarse_label": [0] * len(part)}
        rows = {"img": [Image.fromarray(image) for image in part], **labels}
        splits[split] = datasets.Dataset.from_dict(rows, features=columns)
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "cifar100")
    data = load("cifar100", tmp_path)
    assert sizes(data) == [18, 2, 10]
    assert (as_images(data.test).pixels == pixels[20:]).all()
    assert data.test.label.tolist() == [7 * i for i in range(10)]
    splits["train"].to_parquet(tmp_path / "other" / "cifar100" / "train-00000-of-00001.parquet")
    splits["test"].to_parquet(tmp_path / "other" / "cifar100" / "test-00000-of-00001.parquet")
    assert same(load("cifar100", tmp_path / "other"), data)


@pytest.mark.usefixtures("_offline")
def test_where_it_is_nowhere_one_line_names_the_ways(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"CIFAR-100 is not here: there is no folder .*HF_HUB_OFFLINE") as caught:
        load("cifar100", tmp_path)
    assert "DIR/cifar-100-python.tar.gz" in str(caught.value)
    assert "load_dataset('uoft-cs/cifar100', 'cifar100')" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"CIFAR-10 is not here: no --data-dir was given"):
        load("cifar10", None)


ITSELF = batch(np.zeros((2, 32, 32, 3), dtype=np.uint8), [0, 1], key="fine_labels").replace(
    b"](K\x00K\x01e", b"]q\x09(h\x09h\x09e"
)
"""Labels that are a list of itself."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (batch(np.zeros((2, 16, 16, 3), dtype=np.uint8), [0, 1], key="fine_labels"), "holds no images of CIFAR-100"),
        (batch(np.zeros((2, 32, 32, 3), dtype=np.uint8), [0, 1], key="labels"), "with 'fine_labels'"),
        (batch(np.zeros((2, 32, 32, 3), dtype=np.uint8), [0, 100], key="fine_labels"), "whole numbers from 0 to 99"),
        (batch(np.zeros((2, 32, 32, 3), dtype=np.uint8), [0], key="fine_labels"), "are not 2 whole numbers"),
        (b"\x80\x02]q\x00.", "holds no images of CIFAR-100"),
        (ITSELF, "are not 2 whole numbers"),
    ],
)
def test_a_wrong_file_of_the_archive_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar100", train=4, test=4, classes=4)
    (tmp_path / "cifar-100-python" / "train").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load("cifar100", tmp_path)


def test_a_damaged_tar_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(b"half of it")
    with pytest.raises(DataError, match=r"cannot read .*cifar-10-python\.tar\.gz: .*; get the official archive again"):
        load("cifar10", tmp_path)
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(DataError, match=r"cannot read .*data_batch_1"):
        load("cifar10", tmp_path)


def unpacks(content: bytes) -> bool:
    try:
        gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return False
    return True


def test_no_flipped_bit_of_a_packed_archive_is_read_as_other_images(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar100", train=4, test=4, classes=4)
    folder, path = tmp_path / "cifar-100-python", tmp_path / "cifar-100-python.tar.gz"
    # pixels that repeat are packed: some flips break the packing itself, others give other pixels
    content = batch(np.arange(4 * 32 * 32 * 3).reshape(4, 32, 32, 3).astype(np.uint8), [0, 1, 2, 3], key="fine_labels")
    (folder / "train").write_bytes(content)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    folder.rename(tmp_path / "away")
    packed, draw = path.read_bytes(), np.random.default_rng(0)
    for place in draw.integers(20, len(packed), 60):
        damaged = bytearray(packed)
        damaged[place] ^= 1 << draw.integers(8)
        path.write_bytes(damaged)
        if unpacks(damaged):  # a few bits mean nothing
            continue
        with pytest.raises(DataError, match=r"cannot read .*cifar-100-python\.tar\.gz: .*; get the official archive"):
            load("cifar100", tmp_path)


def test_images_are_images() -> None:
    assert all(TASKS[name].images for name in ("digits", "fashion_mnist", "cifar10", "cifar100"))
    assert not TASKS["movie"].images
    assert Images.__dataclass_fields__.keys() == {"pixels", "label"}


@pytest.mark.parametrize("folder", [".", "cifar-100-python", "cifar100"])
def test_it_is_read_anew_when_the_archive_changes(folder: str, tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar100", train=100, test=20, classes=100)
    source, task = Source(cache_dir=Path("/nowhere"), data_dir=tmp_path / "given"), TASKS["cifar100"]
    (tmp_path / "given").mkdir()
    (tmp_path / "cifar-100-python").rename(tmp_path / "given" / "cifar-100-python")
    if folder != "cifar-100-python":
        for name in ("train", "test"):
            (tmp_path / "given" / folder).mkdir(exist_ok=True)
            (tmp_path / "given" / "cifar-100-python" / name).rename(tmp_path / "given" / folder / name)
    first = load_task(task, source)
    assert load_task(task, source) is first
    write_cifar(tmp_path, "cifar100", train=90, test=20, classes=100)
    (tmp_path / "cifar-100-python" / "train").replace(tmp_path / "given" / folder / "train")
    assert sum(sizes(load_task(task, source))) == sum(sizes(first)) - 10
