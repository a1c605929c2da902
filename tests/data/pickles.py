"""CIFAR's archives in miniature, byte for byte as Python 2 wrote the real ones (protocol 2), or as Python 3 would."""

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np


def text(value: str | bytes) -> bytes:
    """A `str` of Python 2: bytes without an encoding."""
    content = value.encode("latin-1") if isinstance(value, str) else value
    if len(content) < 256:
        return b"U" + bytes([len(content)]) + content
    return b"T" + struct.pack("<i", len(content)) + content


def whole(value: int) -> bytes:
    return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)


def array(values: np.ndarray) -> bytes:
    """An array as NumPy's `__reduce__` gives it: a call that makes an empty one, and a state."""
    empty = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
    dtype = b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"".join(map(whole, values.shape)) + b"\x86"
    return empty + b"(K\x01" + shape + dtype + b"\x89" + text(values.tobytes()) + b"tb"


def batch(pixels: np.ndarray, labels: list[int], *, key: str) -> bytes:
    """A file of the archive: names, labels and rows of pixels, all red first."""
    rows = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    names = b"](" + b"".join(text(f"image_{number}.png") for number in range(len(labels))) + b"e"
    listed = b"](" + b"".join(map(whole, labels)) + b"e"
    return (
        b"\x80\x02}q\x00("
        + (text("filenames") + names)
        + (text("batch_label") + text("training batch 1 of 1"))
        + (text(key) + listed)
        + (text("data") + array(rows))
        + b"u."
    )


def batch_of_python_3(pixels: np.ndarray, labels: list[int], *, key: str) -> bytes:
    """The same as Python 3 writes it in protocol 2."""
    rows: Any = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1))
    return pickle.dumps({key: labels, "data": rows}, protocol=2)


def write_cifar(folder: Path, name: str, *, train: int, test: int, classes: int, write: Any = batch) -> None:
    """A whole archive of random images below `folder`."""
    draw = np.random.default_rng(0)
    key = "labels" if name == "cifar10" else "fine_labels"
    place = folder / ("cifar-10-batches-py" if name == "cifar10" else "cifar-100-python")
    place.mkdir(parents=True)
    trains = [f"data_batch_{number}" for number in range(1, 6)] if name == "cifar10" else ["train"]
    for file, count in [*((file, train) for file in trains), ("test_batch" if name == "cifar10" else "test", test)]:
        pixels = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        (place / file).write_bytes(write(pixels, [number % classes for number in range(count)], key=key))
