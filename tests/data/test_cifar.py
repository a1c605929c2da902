from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import Source, TaskData, load_task
from atlas_fl.errors import DataError
from tests.data.images import as_images


def load(name: str, data_dir: Path | None) -> TaskData:
    return TASKS[name].load(Source(cache_dir=Path("/nowhere"), data_dir=data_dir, validation_share=0.1))


def sizes(data: TaskData) -> list[int]:
    return [len(part) for part in (data.train, data.validation, data.test)]


def same(left: TaskData, right: TaskData) -> bool:
    pairs = [(as_images(getattr(left, s)), as_images(getattr(right, s))) for s in ("train", "test")]
    return all((one.pixels == two.pixels).all() and (one.label == two.label).all() for one, two in pairs)


def test_the_classes_are_those_of_the_data_sets() -> None:
    ten, hundred = TASKS["cifar10"].label_names, TASKS["cifar100"].label_names
    assert (len(ten), len(set(hundred)), TASKS["cifar100"].images) == (10, 100, True)
    assert list(hundred) == sorted(hundred)
    assert (hundred[0], hundred[23], hundred[99], ten[9]) == ("apple", "cloud", "worm", "truck")


def write_tables(folder: Path, count: int) -> None:
    columns = datasets.Features(img=datasets.Image(), fine_label=datasets.Value("int64"))
    folder.mkdir(exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (3 * count, 32, 32, 3), dtype=np.uint8)
    for split, part in (("train", pixels[count:]), ("test", pixels[:count])):
        rows = {"img": [Image.fromarray(image) for image in part], "fine_label": [i % 100 for i in range(len(part))]}
        datasets.Dataset.from_dict(rows, features=columns).to_parquet(folder / f"{split}.parquet")


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


@pytest.mark.parametrize(
    ("shape", "label", "message"),
    [((32, 32), 100, "is out of range; it has 100 classes from 0 on"), ((16, 16), 0, "is 16 x 16 and not 32 x 32")],
)
def test_another_label_or_size_is_one_line(shape: tuple[int, int], label: int, message: str, tmp_path: Path) -> None:
    image = Image.fromarray(np.zeros((*shape, 3), dtype=np.uint8))
    columns = datasets.Features(img=datasets.Image(), fine_label=datasets.Value("int64"))
    rows = datasets.Dataset.from_dict({"img": [image], "fine_label": [label]}, features=columns)
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "cifar100")
    with pytest.raises(DataError, match=rf"train of cifar100 {message}"):
        load("cifar100", tmp_path)


def test_a_table_that_changes_is_read_anew(tmp_path: Path) -> None:
    source, task = Source(cache_dir=Path("/nowhere"), data_dir=tmp_path), TASKS["cifar100"]
    for count in (20, 30):
        write_tables(tmp_path / "cifar100", count)
        assert len(load_task(task, source).test) == count
