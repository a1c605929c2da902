import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from atlas_fl.data import image_sets
from atlas_fl.data.cleaning import check_no_leak
from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import Source, TaskData, load_task
from atlas_fl.errors import DataError
from atlas_fl.storage.assets import assets
from tests.data.images import as_images


def load(name: str, **source: object) -> TaskData:
    return TASKS[name].load(Source(**{"cache_dir": Path("/nowhere"), **source}))


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


def use_system_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = assets()["fashion-mnist"]
    monkeypatch.setattr(image_sets, "assets", lambda: {known.name: replace(known, system_dir=str(folder))})


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A miniature of the four files; what the machine has does not count."""
    use_system_dir(tmp_path / "none", monkeypatch)
    folder, draw = tmp_path / "fashion_mnist", np.random.default_rng(0)
    folder.mkdir()
    for start, count in (("train", 50), ("t10k", 20)):
        write_idx(folder / f"{start}-images-idx3-ubyte.gz", draw.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        write_idx(folder / f"{start}-labels-idx1-ubyte.gz", (np.arange(count) % 10).astype(np.uint8))
    return folder


def test_digits_are_those_of_scikit_learn_on_the_scale_of_bytes() -> None:
    data = load("digits")
    check_no_leak(data.splits)
    assert as_images(data.train).size == (8, 8, 1)
    assert len(data.train) + len(data.validation) + len(data.test) == 1797
    held = {image.tobytes(): label for image, label in zip(as_images(data.test).pixels, data.test.label)}
    found = load_digits()
    for image, label in zip(found.images[:200], found.target[:200]):
        assert held.get(np.rint(image * 15.9375).astype(np.uint8).tobytes(), label) == label
    assert as_images(data.train).pixels.max() == 255


def test_fashion_keeps_its_test_split_in_its_order(fashion: Path) -> None:
    data = load("fashion_mnist", data_dir=fashion.parent, validation_share=0.2)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [40, 10, 20]
    assert data.test.label.tolist() == [i % 10 for i in range(20)]
    expected = np.random.default_rng(0).integers(0, 256, (70, 28, 28), dtype=np.uint8)[50:]
    assert (as_images(data.test).pixels[..., 0] == expected).all()


def test_fashion_is_found_in_the_cache_on_the_machine_and_in_a_directory(fashion: Path, tmp_path, monkeypatch) -> None:
    with pytest.raises(DataError, match=r"Fashion-MNIST is in none of .*; run `atlas fetch vision`, or install the"):
        load("fashion_mnist", cache_dir=tmp_path)
    (tmp_path / "fashion-mnist").symlink_to(fashion)
    assert len(load("fashion_mnist", cache_dir=tmp_path).test) == 20
    assert len(load("fashion_mnist", data_dir=fashion.parent).test) == 20
    use_system_dir(fashion, monkeypatch)
    assert len(load("fashion_mnist").test) == 20


def test_a_missing_or_foreign_file_of_fashion_is_named(fashion: Path) -> None:
    write_idx(fashion / "t10k-labels-idx1-ubyte.gz", np.zeros(19, dtype=np.uint8))
    with pytest.raises(DataError, match=r"the images and labels of t10k in .* do not belong together"):
        load("fashion_mnist", data_dir=fashion.parent)
    write_idx(fashion / "t10k-labels-idx1-ubyte.gz", np.full(20, 10, dtype=np.uint8))
    with pytest.raises(DataError, match="do not belong together"):
        load("fashion_mnist", data_dir=fashion.parent)
    (fashion / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"cannot read .*t10k-labels-idx1-ubyte\.gz: .*; get the file again"):
        load("fashion_mnist", data_dir=fashion.parent)


def test_fashion_is_read_anew_when_a_file_changes(fashion: Path) -> None:
    source, task = Source(cache_dir=Path("/nowhere"), data_dir=fashion.parent), TASKS["fashion_mnist"]
    first = load_task(task, source)
    assert load_task(task, source) is first
    write_idx(fashion / "t10k-labels-idx1-ubyte.gz", np.zeros(20, dtype=np.uint8))
    assert set(load_task(task, source).test.label.tolist()) == {0}
