"""CIFAR-10 and CIFAR-100 from the original Python archives or the hub; pickles are read without running them.

A pickle is a program: to load one is to do what its writer says. The archives of CIFAR are pickles, so the opcodes are
read one by one here, as `pickletools` splits them, and only those that build numbers, texts, lists, dictionaries and
arrays of uint8 are known; a name that would be called is compared with a table of three and never looked up.

A. Krizhevsky, Learning multiple layers of features from tiny images, 2009.
"""

import pickletools
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from lzma import LZMAError
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.data.cleaning import arrange
from atlas_fl.data.hub import Published, find_tables, missing_split, source_files
from atlas_fl.data.tables import Table, column
from atlas_fl.data.task import Images, Source, Task, TaskData
from atlas_fl.errors import DataError

_MARK = object()


@dataclass(frozen=True, kw_only=True)
class _Name:
    """A function or class that the file names."""

    module: str
    name: str


@dataclass(kw_only=True)
class _Array:
    """An array of which the values are still to come."""

    values: Any = None


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """State of the reader after the opcodes so far."""

    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def above_mark(self) -> list[Any]:
        """Take off the values above the topmost mark, and the mark, and return them."""
        mark = max(index for index, value in enumerate(self.stack) if value is _MARK)
        values = self.stack[mark + 1 :]
        del self.stack[mark:]
        return values

    def last(self, count: int) -> list[Any]:
        """The topmost values; they are taken off."""
        values = self.stack[-count:]
        del self.stack[-count:]
        if len(values) < count:
            raise ValueError("a value is missing")
        return values


def read_pickled(content: bytes, *, origin: object) -> Any:
    """The plain data of a pickle; arrays of uint8 as NumPy arrays, texts of Python 2 as str with one letter a byte.

    Raises:
        DataError: the file is damaged, or holds anything but plain data.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name not in _OPCODES:
                raise ValueError(f"opcode {opcode.name} is none of plain data")
            _OPCODES[opcode.name](machine, argument)
        (built,) = machine.stack
        return _plain_value(built, {})
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"cannot read {origin}: {reason}; it is damaged or holds more than data, get the official archive"
        ) from error


def _plain_value(built: Any, plain_by_id: dict[int, Any]) -> Any:
    """The value itself; `plain_by_id` has lists and dictionaries by identity: a small file may name one very often."""
    if id(built) in plain_by_id:
        return plain_by_id[id(built)]
    if isinstance(built, _Array):
        return built.values
    if isinstance(built, list):
        return plain_by_id.setdefault(id(built), [_plain_value(value, plain_by_id) for value in built])
    if isinstance(built, dict):
        return plain_by_id.setdefault(
            id(built), {key: _plain_value(value, plain_by_id) for key, value in built.items()}
        )
    if built is _MARK or isinstance(built, _Name):
        raise ValueError("it ends in the middle")
    return built


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _constant(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(make())


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(tuple(machine.last(count)))


def _put(machine: _Machine, argument: Any) -> None:
    machine.memo[int(argument)] = machine.stack[-1]


def _get(machine: _Machine, argument: Any) -> None:
    machine.stack.append(machine.memo[int(argument)])


def _set_items(machine: _Machine, pairs: list[Any]) -> None:
    machine.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))


def _name(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(_Name(module=module, name=name))


def _reduce(machine: _Machine, _: Any) -> None:
    called, arguments = machine.last(2)
    if not isinstance(called, _Name) or (called.module, called.name) not in _CALLS:
        raise ValueError(f"it would call {getattr(called, 'module', called)}.{getattr(called, 'name', '')}")
    machine.stack.append(_CALLS[called.module, called.name](*arguments))


def _build(machine: _Machine, _: Any) -> None:
    (state,) = machine.last(1)
    target = machine.stack[-1]
    if isinstance(target, _Array):
        _, shape, dtype, by_column, data = state
        if not isinstance(dtype, np.dtype):
            raise ValueError(f"an array of {dtype!r} and not of uint8")
        content = data if isinstance(data, bytes) else data.encode("latin-1")
        values = np.frombuffer(content, dtype=dtype)
        target.values = values.reshape(shape, order="F" if by_column else "C")
    elif not isinstance(target, np.dtype):  # that of uint8 has nothing to be told
        raise ValueError(f"it would change a {type(target).__name__}")


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin-1")


def _dtype(code: str, *_: Any) -> np.dtype[np.uint8]:
    if code != "u1":
        raise ValueError(f"an array of {code!r} and not of uint8")
    return np.dtype(np.uint8)


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}

_PUSHED = ("BININT", "BININT1", "BININT2", "LONG1", "INT", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "BINFLOAT")

_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_PUSHED, _push),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _get),
    **dict.fromkeys(("PROTO", "STOP"), lambda *_: None),
    "MARK": _constant(lambda: _MARK),
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_LIST": _constant(list),
    "EMPTY_TUPLE": _constant(tuple),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.above_mark())),
    "APPEND": lambda machine, _: machine.stack[-2].append(machine.stack.pop()),
    "APPENDS": lambda machine, _: (lambda found: machine.stack[-1].extend(found))(machine.above_mark()),
    "SETITEM": lambda machine, _: (lambda pair: _set_items(machine, pair))(machine.last(2)),
    "SETITEMS": lambda machine, _: (lambda pairs: _set_items(machine, pairs))(machine.above_mark()),
    "GLOBAL": _name,
    "REDUCE": _reduce,
    "BUILD": _build,
}


_SIDE = 32
_TEN = "airplane automobile bird cat deer dog frog horse ship truck"
_HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
wolf woman worm
"""


@dataclass(frozen=True, kw_only=True)
class Cifar:
    """One of the two data sets: what its files and columns are called."""

    name: str
    title: str
    archive: str
    """Folder of the Python archive, and the archive's name without `.tar.gz`."""
    files: Mapping[str, tuple[str, ...]]
    """Files of the archive by split."""
    key: str
    """Name of the labels in the archive."""
    columns: tuple[str, str]
    """Image and label in the hub's tables."""
    label_names: tuple[str, ...]


CIFAR10 = Cifar(
    name="cifar10",
    title="CIFAR-10",
    archive="cifar-10-batches-py",
    files={"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
    key="labels",
    columns=("img", "label"),
    label_names=tuple(_TEN.split()),
)
CIFAR100 = Cifar(
    name="cifar100",
    title="CIFAR-100",
    archive="cifar-100-python",
    files={"train": ("train",), "test": ("test",)},
    key="fine_labels",
    columns=("img", "fine_label"),
    label_names=tuple(_HUNDRED.split()),
)
_TARS = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


def cifar_task(cifar: Cifar) -> Task:
    """The task of one of the two data sets."""
    return Task(
        name=cifar.name,
        num_labels=len(cifar.label_names),
        images=True,
        label_names=cifar.label_names,
        note=f"{cifar.title}, photographs, 32 x 32; from the hub, its cache, or the Python archive in --data-dir",
        load=partial(load_cifar, cifar=cifar),
        files=partial(cifar_files, cifar=cifar),
    )


def load_cifar(source: Source, *, cifar: Cifar) -> TaskData:
    """Its own test split, and a validation split cut from its train; a `DataError` names the ways to supply it."""
    splits = _read_archive(source, cifar)
    if splits is None:
        folder = None if source.data_dir is None else source.data_dir / cifar.name
        tables = find_tables(_hub_source(cifar), folder)
        splits = {split: _of_table(table, cifar, origin=f"{split} of {cifar.title}") for split, table in tables.items()}
    if "train" not in splits:
        raise missing_split(cifar.title, tuple(splits))
    return arrange(splits, name=cifar.name, validation_share=source.validation_share)


def cifar_files(source: Source, *, cifar: Cifar) -> tuple[Path, ...]:
    """Files that are read: the Python archive, unpacked or not, of the user's directory; else the hub's tables."""
    if source.data_dir is None:
        return source_files(_hub_source(cifar), None)
    folder = source.data_dir
    names = [name for names in cifar.files.values() for name in names]
    archived = [
        folder / _TARS[cifar.name],
        *(parent / name for parent in (folder / cifar.archive, folder) for name in names),
    ]
    if any(path.exists() for path in archived):
        return (*archived, folder / cifar.name)
    return (*archived, *source_files(_hub_source(cifar), folder / cifar.name))


def _hub_source(cifar: Cifar) -> Published:
    return Published(
        title=cifar.title,
        repository=f"uoft-cs/{cifar.name}",
        config=cifar.name if cifar.name == "cifar100" else "plain_text",
        splits=("train", "validation", "test"),
        files=f"{{train,test}}.parquet (or a save_to_disk folder), or with DIR/{cifar.archive} or DIR/"
        f"{_TARS[cifar.name]}",
    )


def _read_archive(source: Source, cifar: Cifar) -> dict[str, Images] | None:
    """The splits of the Python archive, unpacked or not; None where the user's directory holds neither."""
    if source.data_dir is None:
        return None
    tar = source.data_dir / _TARS[cifar.name]
    for folder in (source.data_dir / cifar.archive, source.data_dir / cifar.name, source.data_dir):
        if all((folder / name).is_file() for names in cifar.files.values() for name in names):
            return {
                split: _concatenate(
                    [_batch((folder / name).read_bytes(), cifar, origin=folder / name) for name in names]
                )
                for split, names in cifar.files.items()
            }
    return _of_tar(tar, cifar) if tar.is_file() else None


def _of_tar(path: Path, cifar: Cifar) -> dict[str, Images]:
    try:
        with ExitStack() as stack:
            archive = stack.enter_context(tarfile.open(path))
            _read_to_end(archive)
            batches_by_split: dict[str, list[Images]] = {split: [] for split in cifar.files}
            for split, names in cifar.files.items():
                for name in names:
                    file = archive.extractfile(f"{cifar.archive}/{name}")
                    if file is None:
                        raise KeyError(name)
                    batches_by_split[split].append(_batch(file.read(), cifar, origin=f"{name} in {path}"))
    except (tarfile.TarError, OSError, EOFError, KeyError, zlib.error, LZMAError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"cannot read {path}: {reason}; get the official archive again") from error
    return {split: _concatenate(batches) for split, batches in batches_by_split.items()}


def _read_to_end(archive: tarfile.TarFile) -> None:
    """Raise an error where what packed the archive finds its checksum wrong, which it compares at the very end."""
    archive.getmembers()
    while archive.fileobj is not None and archive.fileobj.read(1 << 20):
        pass


def _batch(content: bytes, cifar: Cifar, *, origin: object) -> Images:
    unpickled = read_pickled(content, origin=origin)
    data, label = (unpickled.get("data"), unpickled.get(cifar.key)) if isinstance(unpickled, dict) else (None, None)
    if not isinstance(data, np.ndarray) or data.shape[1:] != (3 * _SIDE**2,) or not isinstance(label, list):
        raise DataError(f"{origin} holds no images of {cifar.title} with {cifar.key!r}; get the official archive")
    # a row is all of red, then green, then blue
    pixels = np.ascontiguousarray(data.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))
    return Images(pixels=pixels, label=_labels(label, len(pixels), cifar, origin=origin))


def _labels(values: Sequence[Any], count: int, cifar: Cifar, *, origin: object) -> np.ndarray[Any, np.dtype[np.int64]]:
    label = np.asarray(values)
    has_form = label.dtype.kind in "iu" and label.shape == (count,)
    if not has_form or label.min(initial=0) < 0 or label.max(initial=0) >= len(cifar.label_names):
        raise DataError(
            f"the labels of {origin} are not {count} whole numbers from 0 to {len(cifar.label_names) - 1}; get it again"
        )
    return label.astype(np.int64)


def _of_table(table: Table, cifar: Cifar, *, origin: str) -> Images:
    image, label = cifar.columns
    if image not in table:
        raise DataError(f"{origin} has no column {image!r}; it has {', '.join(map(repr, table))}")
    pixels = np.stack([_decode(value, origin=origin) for value in table[image]])
    return Images(pixels=pixels, label=_labels(column(table, label, origin=origin), len(pixels), cifar, origin=origin))


def _decode(value: Any, *, origin: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from PIL import Image

    try:
        # the hub's files hold encoded images, which `datasets` may have decoded already
        image = Image.open(BytesIO(value["bytes"])) if isinstance(value, dict) else value
        array = np.asarray(image.convert("RGB"))
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"an image of {origin} cannot be read: {' '.join(str(error).split())[:120]}") from error
    if array.shape != (_SIDE, _SIDE, 3):
        raise DataError(f"an image of {origin} is {array.shape[0]} x {array.shape[1]} and not {_SIDE} x {_SIDE}")
    return array


def _concatenate(batches: Sequence[Images]) -> Images:
    return Images(
        pixels=np.concatenate([batch.pixels for batch in batches]),
        label=np.concatenate([batch.label for batch in batches]),
    )
