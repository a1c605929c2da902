"""CIFAR-10 and CIFAR-100 from the original Python archives or the hub; pickles are read without running them.

A pickle is a program: to load one is to do what its writer says. The archives of CIFAR are pickles, so the opcodes are
read one by one here, as `pickletools` splits them, and only those that build numbers, texts, lists, dictionaries and
arrays of uint8 are known; a name that would be called is compared with a table of four and never looked up.

A. Krizhevsky, Learning multiple layers of features from tiny images, 2009.
"""

import pickletools
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
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
from atlas_fl.data.task import Examples, Images, Source, Task, TaskData, concatenate
from atlas_fl.errors import DataError


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """State of the reader after the opcodes so far."""

    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    """Heights of the stack that were marked."""
    memo: dict[int, Any] = field(default_factory=dict)

    def take(self, count: int | None) -> list[Any]:
        """The topmost values, or all above the topmost mark; they are taken off."""
        start = self.marks.pop() if count is None else len(self.stack) - count
        if start < 0:
            raise ValueError("a value is missing")
        values = self.stack[start:]
        del self.stack[start:]
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
        (value,) = machine.stack
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise DataError(
            f"cannot read {origin}: {_reason(error)}; it is damaged or holds more than data, get the official archive"
        ) from error
    return value


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _constant(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(make())


def _tuple(count: int | None) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(tuple(machine.take(count)))


def _extend(count: int | None) -> Callable[[_Machine, Any], None]:
    def extend(machine: _Machine, _: Any) -> None:
        values = machine.take(count)
        machine.stack[-1].extend(values)

    return extend


def _update(count: int | None) -> Callable[[_Machine, Any], None]:
    def update(machine: _Machine, _: Any) -> None:
        pairs = machine.take(count)
        machine.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    return update


def _mark(machine: _Machine, _: Any) -> None:
    machine.marks.append(len(machine.stack))


def _put(machine: _Machine, argument: Any) -> None:
    machine.memo[int(argument)] = machine.stack[-1]


def _get(machine: _Machine, argument: Any) -> None:
    machine.stack.append(machine.memo[int(argument)])


def _reduce(machine: _Machine, _: Any) -> None:
    name, arguments = machine.take(2)
    if name not in _CALLS:
        raise ValueError(f"it would call {'.'.join(str(name).split())}")
    machine.stack.append(_CALLS[name](*arguments))


def _build(machine: _Machine, _: Any) -> None:
    (state,) = machine.take(1)
    target = machine.stack[-1]
    if isinstance(target, np.ndarray):
        _, shape, dtype, by_column, data = state
        if not isinstance(dtype, np.dtype):
            raise ValueError(f"an array of {dtype!r} and not of uint8")
        content = data if isinstance(data, bytes) else data.encode("latin-1")
        values = np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if by_column else "C")
        target.resize(values.shape, refcheck=False)
        target[...] = values
    elif not isinstance(target, np.dtype):  # that of uint8 has nothing to be told
        raise ValueError(f"it would change a {type(target).__name__}")


def _empty_array(*_: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.empty(0, dtype=np.uint8)


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin-1")


def _dtype(code: str, *_: Any) -> np.dtype[np.uint8]:
    if code != "u1":
        raise ValueError(f"an array of {code!r} and not of uint8")
    return np.dtype(np.uint8)


_CALLS: dict[str, Callable[..., Any]] = {
    "numpy.core.multiarray _reconstruct": _empty_array,
    "numpy._core.multiarray _reconstruct": _empty_array,
    "numpy dtype": _dtype,
    "_codecs encode": _encode,
}
"""Stand-ins for functions, by module and name as `pickletools` gives them."""

_PUSHED = (
    *("BININT", "BININT1", "BININT2", "LONG1", "INT", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "BINFLOAT"),
    "GLOBAL",
)

_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_PUSHED, _push),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _get),
    **dict.fromkeys(("PROTO", "STOP"), lambda *_: None),
    "MARK": _mark,
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_LIST": _constant(list),
    "EMPTY_TUPLE": _constant(tuple),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": _tuple(None),
    "APPEND": _extend(1),
    "APPENDS": _extend(None),
    "SETITEM": _update(2),
    "SETITEMS": _update(None),
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
    """One of the two data sets: the names of its files and columns."""

    name: str
    title: str
    archive: str
    """Folder of the Python archive."""
    tar: str
    """File of the Python archive."""
    files: Mapping[str, tuple[str, ...]]
    """Files of the archive by split."""
    key: str
    """Name of the labels in the archive."""
    label_column: str
    """Column of the labels in the hub's tables."""
    label_names: tuple[str, ...]

    @property
    def file_names(self) -> list[str]:
        """Files of the archive of all splits."""
        return [name for names in self.files.values() for name in names]

    @property
    def published(self) -> Published:
        """The data set as the hub knows it."""
        return Published(
            title=self.title,
            repository=f"uoft-cs/{self.name}",
            config=self.name if self.name == "cifar100" else "plain_text",
            folder=self.name,
            files=f"{{train,test}}.parquet (or a save_to_disk folder), or with DIR/{self.archive} or DIR/{self.tar}",
        )


CIFAR10 = Cifar(
    name="cifar10",
    title="CIFAR-10",
    archive="cifar-10-batches-py",
    tar="cifar-10-python.tar.gz",
    files={"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
    key="labels",
    label_column="label",
    label_names=tuple(_TEN.split()),
)
CIFAR100 = Cifar(
    name="cifar100",
    title="CIFAR-100",
    archive="cifar-100-python",
    tar="cifar-100-python.tar.gz",
    files={"train": ("train",), "test": ("test",)},
    key="fine_labels",
    label_column="fine_label",
    label_names=tuple(_HUNDRED.split()),
)


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
        tables = find_tables(cifar.published, source)
        splits = {split: _of_table(table, cifar, origin=f"{split} of {cifar.title}") for split, table in tables.items()}
    if "train" not in splits:
        raise missing_split(cifar.title, tuple(splits))
    return arrange(splits, name=cifar.name, validation_share=source.validation_share)


def cifar_files(source: Source, *, cifar: Cifar) -> tuple[Path, ...]:
    """Files that are read: the Python archive, unpacked or not, of the user's directory; else the hub's tables."""
    archived: list[Path] = []
    if source.data_dir is not None:
        parents = (source.data_dir / cifar.archive, source.data_dir / cifar.name, source.data_dir)
        archived = [source.data_dir / cifar.tar, *(parent / name for parent in parents for name in cifar.file_names)]
        if any(path.exists() for path in archived):
            return tuple(archived)
    return (*archived, *source_files(cifar.published, source))


def _read_archive(source: Source, cifar: Cifar) -> dict[str, Examples] | None:
    """The splits of the Python archive, unpacked or not; None where the user's directory holds neither."""
    if source.data_dir is None:
        return None
    for folder in (source.data_dir / cifar.archive, source.data_dir / cifar.name, source.data_dir):
        if all((folder / name).is_file() for name in cifar.file_names):
            contents = {name: (folder / name).read_bytes() for name in cifar.file_names}
            return _of_contents(contents, cifar, origin=folder)
    tar = source.data_dir / cifar.tar
    return _of_contents(_unpack(tar, cifar), cifar, origin=tar) if tar.is_file() else None


def _unpack(path: Path, cifar: Cifar) -> dict[str, bytes]:
    """The content of each file of the data set in this archive."""
    contents = {}
    try:
        with tarfile.open(path) as archive:
            _read_to_end(archive)
            for name in cifar.file_names:
                file = archive.extractfile(f"{cifar.archive}/{name}")
                if file is None:
                    raise KeyError(name)
                contents[name] = file.read()
    except (tarfile.TarError, OSError, EOFError, KeyError, zlib.error, LZMAError) as error:
        raise DataError(f"cannot read {path}: {_reason(error)}; get the official archive again") from error
    return contents


def _read_to_end(archive: tarfile.TarFile) -> None:
    """Raise an error where what packed the archive finds its checksum wrong, which it compares at the very end."""
    archive.getmembers()
    while archive.fileobj is not None and archive.fileobj.read(1 << 20):
        pass


def _of_contents(contents: Mapping[str, bytes], cifar: Cifar, *, origin: Path) -> dict[str, Examples]:
    return {
        split: concatenate([_batch(contents[name], cifar, origin=f"{name} in {origin}") for name in names])
        for split, names in cifar.files.items()
    }


def _batch(content: bytes, cifar: Cifar, *, origin: str) -> Images:
    unpickled = read_pickled(content, origin=origin)
    data, label = (unpickled.get("data"), unpickled.get(cifar.key)) if isinstance(unpickled, dict) else (None, None)
    if not isinstance(data, np.ndarray) or data.shape[1:] != (3 * _SIDE**2,) or not isinstance(label, list):
        raise DataError(f"{origin} holds no images of {cifar.title} with {cifar.key!r}; get the official archive")
    # a row is all of red, then green, then blue
    pixels = np.ascontiguousarray(data.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))
    return Images(pixels=pixels, label=_labels(label, len(pixels), cifar, origin=origin))


def _labels(values: Sequence[Any], count: int, cifar: Cifar, *, origin: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    classes = range(len(cifar.label_names))
    if len(values) != count or not all(type(value) is int and value in classes for value in values):
        raise DataError(f"the labels of {origin} are not {count} whole numbers from 0 to {classes[-1]}; get it again")
    return np.asarray(values, dtype=np.int64)


def _of_table(table: Table, cifar: Cifar, *, origin: str) -> Images:
    if "img" not in table:
        raise DataError(f"{origin} has no column 'img'; it has {', '.join(map(repr, table))}")
    pixels = np.stack([_decode(value, origin=origin) for value in table["img"]])
    labels = column(table, cifar.label_column, origin=origin)
    return Images(pixels=pixels, label=_labels(labels, len(pixels), cifar, origin=origin))


def _decode(value: Any, *, origin: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from PIL import Image

    try:
        # the hub's files hold encoded images, which `datasets` may have decoded already
        image = Image.open(BytesIO(value["bytes"])) if isinstance(value, dict) else value
        array = np.asarray(image.convert("RGB"))
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"an image of {origin} cannot be read: {_reason(error)}") from error
    if array.shape != (_SIDE, _SIDE, 3):
        raise DataError(f"an image of {origin} is {array.shape[0]} x {array.shape[1]} and not {_SIDE} x {_SIDE}")
    return array
