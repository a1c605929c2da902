"""A user's own data as a task (`--task`): a csv, tsv, jsonl or parquet file, or a folder of images by class."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.data.cache import DATA_CACHE
from atlas_fl.data.cleaning import arrange
from atlas_fl.data.tables import (
    READERS,
    SPLITS,
    Table,
    classes,
    column,
    files_of_no_split,
    find_split,
    read_folder,
    read_table,
    texts,
)
from atlas_fl.data.task import METRICS, Images, Labels, Metric, Pixels, Rows, Source, Task, TaskData, rows_to_write
from atlas_fl.errors import ConfigError, DataError, short_repr, unknown_name
from atlas_fl.storage.folder_access import check_regular

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
BROKEN = ("refuse", "skip")
FORM = "name=path[,size=PIXELS][,broken=refuse|skip]"
_WIDE = ("I", "F")
"""Pillow's modes of more than eight bits, which would be cut off at 255."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of images and how they are read."""

    name: str
    """Name of the task."""
    splits: tuple[tuple[str, Path], ...]
    """Every split with its folder of classes; `all` where there is one for all."""
    left_out: tuple[Path, ...] = ()
    """Folders beside those of the splits, whose names are of none."""
    label_names: tuple[str, ...]
    size: int | None = None
    """Pixels of a side that images are brought to; None takes them as they are."""
    skip_broken: bool = False

    def __call__(self, source: Source) -> TaskData:
        """The splits of the images."""
        images: dict[str, list[_Image]] = {}
        unread = []
        for split, folder in self.splits:
            images[split] = []
            for label, name in enumerate(self.label_names):
                for file in _files(folder / name):
                    try:
                        images[split].append(_Image(pixels=_pixels(file, self.size), label=label, file=file))
                    except DataError:
                        if not self.skip_broken:
                            raise
                        unread.append(str(file))
        splits = _stack_images(images)
        if not splits.keys() & {"all", "train"}:
            raise DataError(f"the folders of task {self.name!r} have no train split; they are {', '.join(splits)}")
        data = arrange(splits, name=self.name, label_names=self.label_names, validation_share=source.validation_share)
        return replace(data, unread=(*unread, *map(str, self.left_out)))


@dataclass(frozen=True, kw_only=True)
class _Image:
    """An image that was read."""

    pixels: Pixels
    label: int
    file: Path


def holds_images(path: Path) -> bool:
    """Return whether a folder holds folders with images, for splits or classes."""
    return any(_files(folder) for folder in _split_folders(path).values() for folder in _folders(folder))


def folder_task(name: str, path: Path, options: Mapping[str, str]) -> Task:
    """The task of `name=path,size=..,broken=..`; a class is a folder, in the order of the names.

    Folders train and test, and validation where there is one, keep their splits (`cleaning.arrange`); one folder of
    classes is cut into splits (`cleaning.split_rows`). With `size` every image is scaled so that its shorter side is so
    long, and cropped in the middle; without, all must be of one size. A file that cannot be read is an error that names
    it, or is left out with `broken=skip`. Images are read when the task is loaded.
    """
    for key in options:
        if key not in ("size", "broken"):
            raise unknown_name("option of a task of images", key, ("size", "broken"))
    size, broken = options.get("size"), options.get("broken", BROKEN[0])
    if size is not None and not (size.isdecimal() and len(size) <= 4 and 0 < int(size) <= 4096):
        given = f"size={short_repr(size)} of task {name!r}"
        raise ConfigError(f"{given} is no number of pixels from 1 to 4096; the form is {FORM}")
    if broken not in BROKEN:
        raise unknown_name("value of broken=", broken, BROKEN)
    splits = _split_folders(path)
    folders = [folder for split in splits.values() for folder in _folders(split)]
    label_names = sorted({folder.name for folder in folders if _files(folder)})
    if len(label_names) < 2:
        raise DataError(
            f"{path} has images of one class only ({label_names[0]!r}); a task needs a folder for each of two"
        )
    folder = Folder(
        name=name,
        splits=tuple(splits.items()),
        left_out=() if "all" in splits else tuple(one for one in _folders(path) if one not in splits.values()),
        label_names=tuple(label_names),
        size=None if size is None else int(size),
        skip_broken=broken == BROKEN[1],
    )
    return Task(
        name=name,
        num_labels=len(label_names),
        images=True,
        label_names=folder.label_names,
        note=f"your own images: {path}",
        load=folder,
        files=lambda _: (path,),
    )


def _folders(path: Path) -> list[Path]:
    # what begins with a dot is a program's own
    shown = (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(shown) if path.is_dir() else []


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix.lower() in ENDINGS) if path.is_dir() else []


def _split_folders(path: Path) -> dict[str, Path]:
    """The folder of every split; `all` where no folder is named train, and one is for all of them."""
    folders = {split: folder for split in SPLITS for folder in find_split(_folders(path), split, origin=path)}
    return folders if "train" in folders else {"all": path}


def _pixels(file: Path, size: int | None) -> Pixels:
    """An image, uint8 (height, width, 1 or 3); a `DataError` says why it cannot be read."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        check_regular(file)
        with Image.open(file) as opened:
            # cameras write how they were held beside the pixels
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith(_WIDE):
                raise ValueError(f"its pixels are of mode {image.mode} and no bytes")
            grey = image.mode in ("1", "L", "LA")
            image = image.convert("L" if grey else "RGB")
            if size is not None:
                image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
            array: Pixels = np.asarray(image)
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"cannot read the image {file}: {reason}; mend or remove it, or leave out such files with broken=skip"
        ) from error
    return array[..., None] if grey else array


def _stack_images(splits: Mapping[str, Sequence[_Image]]) -> dict[str, Images]:
    """The splits as `Images`: all grey or, where one has colours, all in three channels."""
    images = [image for split in splits.values() for image in split]
    if not images:
        raise DataError("no image of the folder could be read; give it images that Pillow reads")
    height, width = images[0].pixels.shape[:2]
    for image in images:
        if image.pixels.shape[:2] != (height, width):
            y, x = image.pixels.shape[:2]
            raise DataError(
                f"images are of different sizes: {images[0].file} is {width} x {height} pixels and {image.file} is"
                f" {x} x {y}; add size={min(height, width)} to the task to bring them to one"
            )
    channels = max(image.pixels.shape[2] for image in images)
    stacked = {}
    for split, members in splits.items():
        pixels = np.empty((len(members), height, width, channels), dtype=np.uint8)
        for index, image in enumerate(members):
            pixels[index] = image.pixels  # a grey image becomes three equal channels
        stacked[split] = Images(pixels=pixels, label=np.asarray([image.label for image in members], dtype=np.int64))
    return stacked


LARGEST_LABEL = float(np.finfo(np.float32).max)
_FORM = "name=path[,text=COLUMN][,pair=COLUMN][,label=COLUMN][,metric=NAME][,target=COLUMN]"
_WHOLE_NUMBER = r"-?\d{1,4000}"
"""Longer ones are words: Python reads none of more than 4,300 digits."""
_OPTIONS = ("text", "pair", "label", "metric", "target")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Options of a task."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    metric: Metric = "accuracy"
    target: str | None = None
    """Column that the model is to write: after the text, or the text itself where both are one column."""


def parse_task(description: str) -> Task:
    """The task of `name=path,text=..,pair=..,label=..,metric=..`, or of `name=path,text=..,target=..`, read from disk.

    Labels are words or whole numbers, numbered in sorted order; with metric=pearson they are values. With target= there
    are none: the model writes that column after the text, or the text itself where target= names its column. One file
    is cut into splits (`cleaning.split_rows`); a folder with train, validation and test files keeps its own
    (`cleaning.arrange`). A folder of images by class is read by `folder_task`.
    The file or folder is read once for as long as it does not change (`cache.DataCache`).
    A `ConfigError` says what is wrong with the description, a `DataError` what is wrong with the data.
    """
    name, path, options = _parse_description(description)
    if path.is_dir() and holds_images(path):
        return folder_task(name, path, options)
    columns = _columns(name, options)
    key = (_read_task, name, path, columns, *READERS.values())
    data, names = DATA_CACHE.get(key, files=(path,), read=lambda: _read_task(name, path, columns))
    return Task(
        name=name,
        num_labels=(len(names) or 1) if columns.target is None else 0,
        metric=columns.metric,
        label_names=names,
        note=f"your own: {path}",
        load=lambda _: data,
    )


def _read_task(name: str, path: Path, columns: Columns) -> tuple[TaskData, tuple[str, ...]]:
    """The splits of a file or folder, and the names of the classes."""
    has_classes = columns.target is None and columns.metric != "pearson"
    if path.is_dir():
        tables = read_folder(path, class_names=has_classes)
        if "train" not in tables:
            raise DataError(
                f"{path} has no train split; name a file {' or '.join(f'train{ending}' for ending in READERS)}, or for"
                " images give a folder of them for each class, or such folders in train and test"
            )
    else:
        tables = {"all": read_table(path, class_names=has_classes)}
    origins = {split: str(path) if split == "all" else f"{split} of {path}" for split in tables}
    names: tuple[str, ...] = ()
    if columns.target is None:
        rows, names = _labelled_rows(tables, columns, origins=origins, path=path)
    else:
        rows = {
            split: _prompted_rows(table, columns, columns.target, origin=origins[split])
            for split, table in tables.items()
        }
    data = arrange(rows, name=name, labelled=columns.target is None, label_names=names)
    return replace(data, unread=files_of_no_split(path) if path.is_dir() else ()), names


def _parse_description(description: str) -> tuple[str, Path, dict[str, str]]:
    # A comma that no `word=` follows belongs to the path.
    first, *rest = re.split(r",(?=\w+=)", description)
    name, equals, path = first.partition("=")
    if not equals or not path or not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
        raise ConfigError(
            f"task {description!r} is not of the form {_FORM}, or {FORM} for images;"
            " a name is letters, digits, '_', '.', '-'"
        )
    options = dict(option.split("=", 1) for option in rest)
    if len(options) < len(rest):
        raise ConfigError(f"task {description!r} gives an option twice; the form is {_FORM}")
    for key, value in options.items():
        if not value:
            raise ConfigError(f"task option {key!r} of {name!r} is empty; the form is {_FORM}")
    return name, Path(path).expanduser(), options


def _columns(name: str, options: Mapping[str, str]) -> Columns:
    for key in options:
        if key not in _OPTIONS:
            raise unknown_name("task option", key, _OPTIONS)
    if "target" in options and (others := sorted({"pair", "label", "metric"} & options.keys())):
        raise ConfigError(
            f"task {name!r} has target= and {others[0]}=; what writes text has text= and target= alone, what has labels"
            " no target="
        )
    metric = options.get("metric", "accuracy")
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS)
    return Columns(**{key: value for key, value in options.items() if key != "metric"}, metric=metric)


def _labelled_rows(
    tables: Mapping[str, Table], columns: Columns, *, origins: Mapping[str, str], path: Path
) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """The rows by split, and the names of the classes; none of a regression."""
    rows = {}
    for split, table in tables.items():
        text = texts(table, columns.text, origin=origins[split])
        pair = None if columns.pair is None else texts(table, columns.pair, origin=origins[split])
        rows[split] = Rows(text=text, pair=pair, label=np.zeros(len(text), dtype=np.int64))
    labels: dict[str, Labels]
    if columns.metric == "pearson":
        values = {split: column(table, columns.label, origin=origins[split]) for split, table in tables.items()}
        labels = {split: _values(values[split], origin=origins[split]) for split in values}
        names: tuple[str, ...] = ()
    else:
        words = {
            split: [_word(value) for value in classes(table, columns.label, origin=origins[split])]
            for split, table in tables.items()
        }
        names = _class_names([word for split in words.values() for word in split], columns.label, origin=path)
        numbers = {name: number for number, name in enumerate(names)}
        labels = {split: np.asarray([numbers[word] for word in words[split]], dtype=np.int64) for split in words}
    return {split: replace(rows[split], label=labels[split]) for split in rows}, names


def _prompted_rows(table: Table, columns: Columns, target: str, *, origin: str) -> Rows:
    """The texts that a model is to write, behind their prompts unless text= and target= are one column."""
    written = texts(table, target, origin=origin)
    if target == columns.text:
        return rows_to_write(written)
    if columns.text not in table:
        raise DataError(
            f"{origin} has no column {columns.text!r} to write {target!r} after; it has"
            f" {', '.join(map(repr, table))}; name one with text=, or say text={target} for no prompt"
        )
    return rows_to_write(written, prompts=texts(table, columns.text, origin=origin))


def _class_names(labels: Sequence[str], column: str, *, origin: Path) -> tuple[str, ...]:
    words = set(labels)
    # `01` and `1` are two classes and one number: without the word beside it the order would be that of a set
    are_whole = all(re.fullmatch(_WHOLE_NUMBER, word) for word in words)
    names = sorted(words, key=lambda word: (int(word), word)) if are_whole else sorted(words)
    if len(names) < 2:
        only = short_repr(names[0])
        raise DataError(f"column {column!r} of {origin} has one class only ({only}); a task needs two or more")
    if len(names) > max(2, len(labels) // 2):
        raise DataError(
            f"column {column!r} of {origin} has {len(names)} different values in {len(labels)} rows, which is no set "
            "of classes; name the label column with label=, or ask for a regression with metric=pearson"
        )
    return tuple(names)


def _word(value: Any) -> str:
    """Name of a label's class: 1, 1.0 and, as csv files have it, `1.0` are one class in every kind of file."""
    word = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
    return re.sub(rf"^({_WHOLE_NUMBER})\.0*$", r"\1", word)


def _values(values: Sequence[Any], *, origin: object) -> Labels:
    numbers = []
    for row, value in enumerate(values, start=1):
        try:
            number = float(value)
        except (OverflowError, TypeError, ValueError):
            number = math.nan
        if not abs(number) <= LARGEST_LABEL:
            raise DataError(
                f"label {short_repr(value)} in row {row} of {origin} is no number that float32 holds, as metric=pearson"
                " needs"
            )
        numbers.append(number)
    return np.asarray(numbers, dtype=np.float32)
