"""A user's own data as a task (`--task`): a csv, tsv, jsonl or parquet file, or a folder of images by class."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.data.cache import DATA_CACHE
from atlas_fl.data.cleaning import arrange, split_rows
from atlas_fl.data.tables import (
    READERS,
    SPLITS,
    Table,
    classes,
    column,
    files_of_no_split,
    read_folder,
    read_table,
    texts,
)
from atlas_fl.data.task import METRICS, Images, Labels, Metric, Pixels, Rows, Source, Task, TaskData
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
        return _load(source, self)


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
    classes = sorted(
        {class_folder.name for folder in splits.values() for class_folder in _folders(folder) if _files(class_folder)}
    )
    if len(classes) < 2:
        raise DataError(f"{path} has images of one class only ({classes[0]!r}); a task needs a folder for each of two")
    folder = Folder(
        name=name,
        splits=tuple(splits.items()),
        left_out=() if "all" in splits else tuple(one for one in _folders(path) if one not in splits.values()),
        label_names=tuple(classes),
        size=None if size is None else int(size),
        skip_broken=broken == BROKEN[1],
    )
    return Task(
        name=name,
        num_labels=len(classes),
        images=True,
        label_names=folder.label_names,
        note=f"your own images: {path}",
        load=folder,
        files=lambda _: (path,),
    )


def _load(source: Source, folder: Folder) -> TaskData:
    name = folder.name
    read = {split: _read(split_folder, folder) for split, split_folder in folder.splits}
    unread = tuple(str(file) for entries in read.values() for pixels, _, file in entries if pixels is None)
    unread += tuple(map(str, folder.left_out))
    readable = _all_of_one_kind(
        {
            split: [(pixels, label, file) for pixels, label, file in entries if pixels is not None]
            for split, entries in read.items()
        }
    )
    names, share = folder.label_names, source.validation_share
    if "all" in readable:
        data = split_rows(readable["all"], name=name, label_names=names, validation_share=share)
    elif "train" in readable:
        data = arrange(readable, name=name, label_names=names, validation_share=share)
    else:
        raise DataError(f"the folders of task {name!r} have no train split; they are {', '.join(readable)}")
    return replace(data, unread=unread)


def _folders(path: Path) -> list[Path]:
    # what begins with a dot is a program's own
    shown = (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(shown) if path.is_dir() else []


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix.lower() in ENDINGS)


def _split_folders(path: Path) -> dict[str, Path]:
    """The folder of every split; `all` where no folder is named train, and one is for all of them."""
    folders: dict[str, Path] = {}
    for split, names in SPLITS.items():
        named = [folder for folder in _folders(path) if folder.name.lower() in names]
        if len(named) > 1:
            found = ", ".join(folder.name for folder in named)
            raise DataError(f"{path} holds the {split} split more than once ({found}); keep one")
        if named:
            folders[split] = named[0]
    return folders if "train" in folders else {"all": path}


def _read(path: Path, folder: Folder) -> list[tuple[Pixels | None, int, Path]]:
    """Every image of a split with its class and file; None for one that is broken and is to be skipped."""
    return [
        (_pixels(file, folder), label, file)
        for label, name in enumerate(folder.label_names)
        for file in (_files(path / name) if (path / name).is_dir() else [])
    ]


def _pixels(file: Path, folder: Folder) -> Pixels | None:
    """An image, uint8 (height, width, 1 or 3); None where it is broken and is to be skipped."""
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
            if folder.size is not None:
                image = ImageOps.fit(image, (folder.size, folder.size), Image.Resampling.BICUBIC)
            array: Pixels = np.asarray(image)
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        if folder.skip_broken:
            return None
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"cannot read the image {file}: {reason}; mend or remove it, or leave out such files with broken=skip"
        ) from error
    return array[..., None] if grey else array


def _all_of_one_kind(splits: Mapping[str, Sequence[tuple[Pixels, int, Path]]]) -> dict[str, Images]:
    """The splits as `Images`: all grey or, where one has colours, all in three channels."""
    every = [entry for entries in splits.values() for entry in entries]
    if not every:
        raise DataError("no image of the folder could be read; give it images that Pillow reads")
    first, _, file = every[0]
    other = next((entry for entry in every if entry[0].shape[:2] != first.shape[:2]), None)
    if other is not None:
        (h, w), (y, x) = first.shape[:2], other[0].shape[:2]
        raise DataError(
            f"images are of different sizes: {file} is {w} x {h} pixels and {other[2]} is {x} x {y}; add size="
            f"{min(h, w)} to the task to bring them to one"
        )
    channels = max(pixels.shape[2] for pixels, _, _ in every)
    return {split: _stack_images(entries, shape=(*first.shape[:2], channels)) for split, entries in splits.items()}


def _stack_images(entries: Sequence[tuple[Pixels, int, Any]], *, shape: tuple[int, int, int]) -> Images:
    pixels = np.empty((len(entries), *shape), dtype=np.uint8)
    for index, (image, _, _) in enumerate(entries):
        pixels[index] = image  # a grey image becomes three equal channels
    return Images(pixels=pixels, label=np.asarray([label for _, label, _ in entries], dtype=np.int64))


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
    labelled = columns.target is None
    rows, names = (
        _labelled_rows(tables, columns, origin=path) if labelled else (_prompted_rows(tables, columns, origin=path), ())
    )
    if path.is_dir():
        data = arrange(rows, name=name, labelled=labelled, label_names=names)
        data = replace(data, unread=files_of_no_split(path))
    else:
        data = split_rows(rows["all"], name=name, labelled=labelled, label_names=names)
    return data, names


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
    tables: Mapping[str, Table], columns: Columns, *, origin: Path
) -> tuple[dict[str, Rows], tuple[str, ...]]:
    origins = {split: str(origin) if split == "all" else f"{split} of {origin}" for split in tables}
    rows = {split: _unlabelled_rows(table, columns, origin=origins[split]) for split, table in tables.items()}
    regression = columns.metric == "pearson"
    values_of = column if regression else classes  # of a value that is no number the message says more
    values_by_split = {split: values_of(table, columns.label, origin=origins[split]) for split, table in tables.items()}
    encoded: Mapping[str, Labels]
    if regression:
        names: tuple[str, ...] = ()
        encoded = {split: _values(values, origin=origins[split]) for split, values in values_by_split.items()}
    else:
        names = _class_names(
            [value for values in values_by_split.values() for value in values], columns.label, origin=origin
        )
        number = {name: index for index, name in enumerate(names)}
        encoded = {
            split: np.asarray([number[_word(value)] for value in values_by_split[split]], dtype=np.int64)
            for split in values_by_split
        }
    return {split: replace(rows[split], label=encoded[split]) for split in rows}, names


def _prompted_rows(tables: Mapping[str, Table], columns: Columns, *, origin: Path) -> dict[str, Rows]:
    """The texts that a model is to write, behind their prompts unless text= and target= are one column."""
    assert columns.target is not None
    rows: dict[str, Rows] = {}
    for split, table in tables.items():
        source = str(origin) if split == "all" else f"{split} of {origin}"
        target = texts(table, columns.target, origin=source)
        words = np.asarray([len(text.split()) for text in target], dtype=np.float32)
        if columns.target == columns.text:
            rows[split] = Rows(text=target, label=words)
        elif columns.text in table:
            rows[split] = Rows(text=texts(table, columns.text, origin=source), pair=target, label=words)
        else:
            raise DataError(
                f"{source} has no column {columns.text!r} to write {columns.target!r} after; it has"
                f" {', '.join(map(repr, table))}; name one with text=, or say text={columns.target} for no prompt"
            )
    return rows


def _unlabelled_rows(table: Table, columns: Columns, *, origin: str) -> Rows:
    text = texts(table, columns.text, origin=origin)
    pair = None if columns.pair is None else texts(table, columns.pair, origin=origin)
    return Rows(text=text, pair=pair, label=np.zeros(len(text), dtype=np.int64))


def _class_names(values: Sequence[Any], label: str, *, origin: Path) -> tuple[str, ...]:
    words = {_word(value) for value in values}
    # `01` and `1` are two classes and one number: without the word beside it the order would be that of a set
    are_whole = all(re.fullmatch(_WHOLE_NUMBER, word) for word in words)
    names = sorted(words, key=lambda word: (int(word), word)) if are_whole else sorted(words)
    if len(names) < 2:
        only = short_repr(names[0])
        raise DataError(f"column {label!r} of {origin} has one class only ({only}); a task needs two or more")
    if len(names) > max(2, len(values) // 2):
        raise DataError(
            f"column {label!r} of {origin} has {len(names)} different values in {len(values)} rows, which is no set "
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
