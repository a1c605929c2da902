"""A user's own images: a folder of one folder a class, or of such folders for train and test, without code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.errors import ConfigError, DataError, shown, unknown
from atlas_fl.io.regular import check_regular
from atlas_fl.tasks.images import Images, Pixels
from atlas_fl.tasks.spec import Source, Task, TaskData
from atlas_fl.tasks.splits import arrange, split_rows

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
BROKEN = ("refuse", "skip")
FORM = "name=path[,size=PIXELS][,broken=refuse|skip]"
_WIDE = ("I", "F")
"""Pillow's modes of more than eight bits, which would be cut off at 255."""
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test",)}


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of images and how they are read."""

    splits: Mapping[str, Path]
    """The folder of classes of every split; `all` where there is one for all."""
    label_names: tuple[str, ...]
    size: int | None = None
    """Pixels of a side that images are brought to; None takes them as they are."""
    skip_broken: bool = False


def holds_images(path: Path) -> bool:
    """Whether a folder holds folders with images, for splits or classes."""
    return any(_files(place) for place in _split_folders(path).values() for place in _folders(place))


def folder_task(name: str, path: Path, options: Mapping[str, str]) -> Task:
    """The task of `name=path,size=..,broken=..`; a class is a folder, in the order of the names.

    Folders train and test, and validation where there is one, keep their splits (`splits.arrange`); one folder of
    classes is cut into splits (`splits.split_rows`). With `size` every image is scaled so that its shorter side is so
    long, and cropped in the middle; without, all must be of one size. A file that cannot be read is an error that names
    it, or is left out with `broken=skip`. Images are read when the task is loaded.
    """
    for key in options:
        if key not in ("size", "broken"):
            raise unknown("option of a task of images", key, ("size", "broken"))
    size, broken = options.get("size"), options.get("broken", BROKEN[0])
    if size is not None and not (size.isdecimal() and len(size) <= 4 and 0 < int(size) <= 4096):
        told = f"size={shown(size)} of task {name!r}"
        raise ConfigError(f"{told} is no number of pixels from 1 to 4096; the form is {FORM}")
    if broken not in BROKEN:
        raise unknown("value of broken=", broken, BROKEN)
    splits = _split_folders(path)
    classes = sorted({place.name for folder in splits.values() for place in _folders(folder) if _files(place)})
    if len(classes) < 2:
        raise DataError(f"{path} has images of one class only ({classes[0]!r}); a task needs a folder for each of two")
    folder = Folder(
        splits=splits,
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
        load=partial(_load, name=name, folder=folder),
    )


def _load(source: Source, *, name: str, folder: Folder) -> TaskData:
    read = {split: _read(place, folder) for split, place in folder.splits.items()}
    unread = tuple(str(file) for entries in read.values() for pixels, _, file in entries if pixels is None)
    found = _all_of_one_kind({split: _readable(entries) for split, entries in read.items()})
    names, share = folder.label_names, source.validation_share
    if "all" in found:
        data = split_rows(found["all"], name=name, label_names=names, validation_share=share)
    elif "train" in found:
        data = arrange(found, name=name, label_names=names, validation_share=share)
    else:
        raise DataError(f"the folders of task {name!r} have no train split; they are {', '.join(found)}")
    return replace(data, unread=unread)


def _readable(entries: Sequence[tuple[Pixels | None, int, Path]]) -> list[tuple[Pixels, int, Path]]:
    return [(pixels, label, file) for pixels, label, file in entries if pixels is not None]


def _folders(path: Path) -> list[Path]:
    # what begins with a dot is a program's own
    shown = (place for place in path.iterdir() if place.is_dir() and not place.name.startswith("."))
    return sorted(shown) if path.is_dir() else []


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix.lower() in ENDINGS)


def _split_folders(path: Path) -> dict[str, Path]:
    found = {
        split: place for split, names in _SPLITS.items() for place in _folders(path) if place.name.lower() in names
    }
    return found if "train" in found else {"all": path}


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
    return {split: _stacked(entries, shape=(*first.shape[:2], channels)) for split, entries in splits.items()}


def _stacked(entries: Sequence[tuple[Pixels, int, Any]], *, shape: tuple[int, int, int]) -> Images:
    pixels = np.empty((len(entries), *shape), dtype=np.uint8)
    for place, (image, _, _) in enumerate(entries):
        pixels[place] = image  # a grey image becomes three equal channels
    return Images(pixels=pixels, label=np.asarray([label for _, label, _ in entries], dtype=np.int64))
