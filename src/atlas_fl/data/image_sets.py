"""Image tasks: digits, Fashion-MNIST (IDX files), and images of the hub (CIFAR-10 and CIFAR-100, `data.hub`).

IDX: Y. LeCun, C. Cortes and C. Burges, The MNIST database of handwritten digits, 1998: two zero bytes, the type (8 is
uint8), the number of dimensions, each as big-endian uint32, then the values; packed with gzip.
digits: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI 1998, as scikit-learn ships it.
Fashion-MNIST: H. Xiao, K. Rasul and R. Vollgraf, arXiv:1708.07747 (MIT licence).
CIFAR: A. Krizhevsky, Learning multiple layers of features from tiny images, 2009. Its Python archives are pickles,
which can run code, and are not opened.
"""

import gzip
import zlib
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.data.cleaning import arrange
from atlas_fl.data.task import Images, Pixels, Source, Task, TaskData
from atlas_fl.errors import DataError
from atlas_fl.storage.assets import assets

_UINT8 = 8


def read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array of a file; a `DataError` if it is missing, cut off or of another format."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())[:120]}; get the file again") from error
    num_dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * num_dimensions
    if len(content) < start or content[:3] != bytes([0, 0, _UINT8]) or not num_dimensions:
        raise DataError(f"{path} is no IDX file of bytes; get the file again")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) - start != prod(shape):
        sizes = " x ".join(map(str, shape))
        raise DataError(f"{path} is cut off: it tells of {sizes} values and holds {len(content) - start}; get it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


FASHION = "fashion-mnist"
"""Name of the package in `atlas fetch vision`."""
_CLOTHES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def load_digits(source: Source) -> TaskData:
    """The splits of 1,797 digits, 8 x 8 and grey."""
    from sklearn import datasets  # half a second that other commands need not pay

    digits = datasets.load_digits()
    # its values run from 0 to 16
    pixels: Pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    images = Images(pixels=pixels, label=digits.target.astype(np.int64))
    return arrange({"all": images}, name="digits", validation_share=source.validation_share)


def load_fashion(source: Source) -> TaskData:
    """The splits of Fashion-MNIST, 28 x 28 and grey: its own test split, and a validation split cut from its train.

    A `DataError` says where the files were looked for and how to get them.
    """
    folders = _fashion_folders(source)
    folder = next((folder for folder in folders if (folder / "train-images-idx3-ubyte.gz").is_file()), None)
    if folder is None:
        raise DataError(
            f"Fashion-MNIST is in none of {', '.join(map(str, folders))}; run `atlas fetch vision`, or install the"
            " Debian package dataset-fashion-mnist, or give --data-dir DIR with its four files in DIR/fashion_mnist"
        )
    splits = {"train": _read_fashion(folder, "train"), "test": _read_fashion(folder, "t10k")}
    return arrange(splits, name="fashion_mnist", validation_share=source.validation_share)


def _fashion_folders(source: Source) -> tuple[Path, ...]:
    """Folders that the files may be in, in the order in which they are looked for."""
    own = () if source.data_dir is None else (source.data_dir / "fashion_mnist",)
    return (*own, *assets()[FASHION].folders(source.cache_dir)[::-1])


def _read_fashion(folder: Path, start: str) -> Images:
    images, labels = (read_idx(folder / f"{start}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    if images.ndim != 3 or labels.shape != images.shape[:1] or labels.max(initial=0) >= len(_CLOTHES):
        raise DataError(f"the images and labels of {start} in {folder} do not belong together; get both again")
    return Images(pixels=images[..., None], label=labels.astype(np.int64))


_SIDE = 32


def decode_image(value: Any, *, origin: str) -> Pixels:
    """The pixels of an image of a table of the hub; a `DataError` if it is none of 32 x 32."""
    from PIL import Image

    try:
        # the hub's files hold encoded images, which `datasets` may have decoded already
        image = Image.open(BytesIO(value["bytes"])) if isinstance(value, dict) else value
        array: Pixels = np.asarray(image.convert("RGB"))
    except (OSError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"an image of {origin} cannot be read: {reason}; get it again") from error
    if array.shape != (_SIDE, _SIDE, 3):
        raise DataError(f"an image of {origin} is {array.shape[0]} x {array.shape[1]} and not {_SIDE} x {_SIDE}")
    return array


VISION: tuple[Task, ...] = (
    Task(
        name="digits",
        num_labels=10,
        images=True,
        label_names=tuple(map(str, range(10))),
        note="handwritten digits of scikit-learn, 8 x 8, grey",
        load=load_digits,
        files=lambda _: (),  # a part of scikit-learn
    ),
    Task(
        name="fashion_mnist",
        num_labels=10,
        images=True,
        label_names=_CLOTHES,
        note="pictures of clothes, 28 x 28, grey; embedded (`atlas fetch vision`)",
        load=load_fashion,
        files=lambda source: [folder / name for folder in _fashion_folders(source) for name in assets()[FASHION].files],
    ),
)
