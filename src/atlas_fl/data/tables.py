"""Tables from disk: the files of `data.formats`, and folders of `datasets.save_to_disk`, as columns of plain values."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from sys import getsizeof
from typing import Any, TypeAlias

import numpy as np

from atlas_fl.data.formats import (
    FORMATS,
    TEXT_ENDINGS,
    Flaw,
    Header,
    Item,
    Note,
    Reading,
    Row,
    check_columns,
    class_names_of,
    ending_of,
    long_cells,
    most_bytes,
    with_class_names,
)
from atlas_fl.errors import DataError, short_repr
from atlas_fl.rng import generator
from atlas_fl.storage.folder_access import check_regular

Table: TypeAlias = Mapping[str, Sequence[Any]]
"""Columns of equal length by name."""

SPLITS: Mapping[str, Sequence[str]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "validation_matched"),
    "test": ("test", "test_matched"),
}
"""Names that the files and folders of a split may have, in any case; MNLI has the last of each."""
LARGEST_LABEL = float(np.finfo(np.float32).max)
MOST_TOLD = 10
"""Most problems of a file in a message."""
_NO_VALUE = frozenset({"nan", "null", "<na>", "#n/a", "nat"})
"""Words that programs write where a value is missing."""
_ABSENT = "no value"
_SEED = 0
"""Rows that are drawn belong to the data and not to the run, as splits do."""
_BYTES_BETWEEN_CHECKS = 1 << 24


def _text_fault(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return _ABSENT
    if not isinstance(value, str):  # what pandas has for missing values of some types is no number either
        return "" if isinstance(value, int | float) else "neither a text nor a number"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "half a character"
    return "a zero byte" if "\0" in value else "" if value.strip() else _ABSENT


def _class_fault(value: object) -> str:
    return _ABSENT if isinstance(value, str) and value.strip().lower() in _NO_VALUE else _text_fault(value)


def _number_fault(value: Any) -> str:
    try:
        return "" if abs(float(value)) <= LARGEST_LABEL else _class_fault(value) or "no number that float32 holds"
    except (OverflowError, TypeError, ValueError):
        return _class_fault(value) or "no number that float32 holds"


CHECKS: dict[str, Callable[[Any], str]] = {"text": _text_fault, "class": _class_fault, "number": _number_fault}
"""By kind of column, what a value is that may not be in it; empty for one that may. A class is not called as programs
call a missing value."""


def read_table(path: Path, *, class_names: bool = False) -> Table:
    """All columns of a file; a `DataError` if it is missing, empty, damaged or of an unknown kind.

    With `class_names` a column that `datasets` has written as a `ClassLabel` has the names of classes, not numbers.
    """
    return read_rows([path], Reading(class_names=class_names))[0]


READERS: dict[str, Callable[[Path], Table]] = dict.fromkeys(FORMATS, read_table)
"""By ending; those of `data.formats` are read row by row, those of plug-ins whole."""


def read_folder(folder: Path, *, reading: Reading | None = None) -> dict[str, tuple[Table, tuple[str, ...]]]:
    """Tables of a folder by split, with remarks on them: of `split_files`, or of a saved `DatasetDict`."""
    reading = reading or Reading()
    if not _is_saved(folder):
        return {split: read_rows(paths, reading) for split, paths in split_files(folder).items()}
    saved = {split: _dataset_items(rows, reading) for split, rows in _read_saved(folder).items()}
    return {split: _choose([(f"{split} of {folder}", items)], reading) for split, items in saved.items()}


def read_rows(paths: Sequence[Path], reading: Reading) -> tuple[Table, tuple[str, ...]]:
    """Columns of files, one after another, and remarks on them.

    Raises:
        DataError: a file cannot be read, or has no such column; all problems of its rows; or what is read of it would
            take more than half of the free memory.
    """
    with long_cells():
        return _choose([(str(path), _items(path, reading)) for path in paths], reading)


Progress: TypeAlias = tuple[Item, float]
"""Item of a file, and the share of the file that is read; 1 where only its end says."""


def _items(path: Path, reading: Reading) -> Iterator[Progress]:
    if not path.exists():
        raise DataError(f"there is no file {path}; check the path")
    if path.is_dir():
        raise DataError(f"{path} is a folder and no file; give the file, or rename the folder")
    ending = ending_of(path)
    if ending not in READERS:
        raise DataError(f"{path} is of no kind that can be read; give a file that ends in {', '.join(READERS)}")
    try:
        check_regular(path)
        if ending not in FORMATS:
            yield from ((item, 1.0) for item in _column_items(READERS[ending](path)))
            return
        size = path.stat().st_size
        with path.open("rb") as raw:
            for item in FORMATS[ending](raw, path, reading):
                yield item, raw.tell() / size if size and ending in TEXT_ENDINGS else 1.0
    except UnicodeError as error:
        raise DataError(f"cannot read {path}: {_undecoded(error, reading)}") from error
    except (OSError, ValueError, RecursionError, EOFError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"cannot read {path}: {reason}; mend the file or save it as jsonl or parquet") from error


def _undecoded(error: UnicodeError, reading: Reading) -> str:
    encoding = reading.encoding or getattr(error, "encoding", "utf-8")
    byte = f"the byte {error.object[error.start]:#x}" if isinstance(error, UnicodeDecodeError) else "its beginning"
    return f"{byte} is no {encoding}; name its encoding, such as encoding=cp1251, or save it as UTF-8"


def _column_items(table: Table) -> Iterator[Item]:
    yield Header(list(table))
    yield from (Row(number, dict(zip(table, values))) for number, values in enumerate(zip(*table.values()), start=1))


def _dataset_items(rows: Any, reading: Reading) -> Iterator[Progress]:
    yield Header(rows.column_names), 1.0
    known = class_names_of(rows.features) if reading.class_names else {}
    wanted = [name for name in reading.names if name in rows.column_names] or rows.column_names
    for number, values in enumerate(rows.with_format(None).select_columns(wanted), start=1):
        yield Row(number, with_class_names(values, known)), number / len(rows)


def _choose(sources: Iterable[tuple[str, Iterable[Progress]]], reading: Reading) -> tuple[Table, tuple[str, ...]]:
    """The rows of these sources in their order."""
    sources = list(sources)
    single = len(sources) == 1
    first = sources[0][0]
    chosen = _Chosen(reading=reading, origin=first if single else f"{first} and {len(sources) - 1} more")
    for origin, items in sources:
        header: Header | None = None
        names: dict[str, None] = {}
        for item, share in items:
            if isinstance(item, Header):
                header = item
                check_columns(item.names, reading, origin=origin)
            elif isinstance(item, Row) and header is None:
                names |= dict.fromkeys(item.values)
            chosen.add(item, origin="" if single else f"{origin} ")
            chosen.check_memory(share if single else 1.0)
        if names:
            check_columns(list(names), reading, origin=origin)
    return chosen.table(), tuple(chosen.notes())


@dataclass(kw_only=True, eq=False)
class _Chosen:
    """Rows that are kept of all that come, and what was wrong with others."""

    reading: Reading
    origin: str
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    """The place of each among all that could be kept, and its values, or one mapping of all its values."""
    count: int = 0
    """Rows that could be kept."""
    empty: int = 0
    skipped: int = 0
    flaws: list[str] = field(default_factory=list)
    """The first of them."""
    num_flaws: int = 0
    can_skip: bool = False
    remarks: list[str] = field(default_factory=list)
    most_bytes: int = field(default_factory=most_bytes)
    num_bytes: int = 0
    checked_bytes: int = 0
    rng: np.random.Generator = field(default_factory=lambda: generator(_SEED, "rows"))

    def add(self, item: Item, *, origin: str) -> None:
        """Take in one item of a file."""
        if isinstance(item, Note):
            self.remarks += [origin + item.text] * bool(item.text)
        elif isinstance(item, Flaw):
            self._tell(f"{origin}row {item.number:,} {item.reason}")
        elif isinstance(item, Row):
            self._add_row(item, origin=origin)

    def _add_row(self, row: Row, *, origin: str) -> None:
        if not row.values:
            self.empty += 1
            return
        values = [row.values.get(name) for name in self.reading.names] or [row.values]
        faults = [(fault, *at) for at in zip(self.reading.columns, values) if (fault := CHECKS[at[0][1]](at[1]))]
        if not faults:
            self._keep((self.count, *values))
        elif self.reading.missing == "skip" and all(fault == _ABSENT for fault, *_ in faults):
            self.skipped += 1
        else:
            fault, (name, _), value = faults[0]
            shown = f" ({short_repr(value)})" if fault != _ABSENT or str(value).strip() else ""
            self.can_skip |= fault == _ABSENT
            self._tell(f"{origin}row {row.number:,} has {fault} in {name!r}{shown}")

    def _keep(self, row: tuple[Any, ...]) -> None:
        most = self.reading.rows
        self.count += 1
        if most is None or len(self.rows) < most:
            self.rows.append(row)
            self.num_bytes += _size(row)
        elif (place := int(self.rng.integers(self.count))) < most:  # Vitter's algorithm R
            self.num_bytes += _size(row) - _size(self.rows[place])
            self.rows[place] = row

    def _tell(self, flaw: str) -> None:
        self.num_flaws += 1
        self.flaws += [flaw] * (len(self.flaws) < MOST_TOLD)

    def check_memory(self, share: float) -> None:
        """A `DataError` if the rows will take more than half of the memory that was free; asked every few megabytes."""
        if self.num_bytes < self.checked_bytes + _BYTES_BETWEEN_CHECKS:
            return
        self.checked_bytes = self.num_bytes
        expected = self.num_bytes / share if self.reading.rows is None else self.num_bytes
        if expected > self.most_bytes:
            most = int(len(self.rows) * self.most_bytes / self.num_bytes / 2)
            raise DataError(
                f"what is read of {self.origin} takes about {expected / 1e9:.2f} GB of memory, and half of what is free"
                f" is {self.most_bytes / 1e9:.2f} GB; add rows={most} to the task to draw so many rows evenly"
            )

    def table(self) -> Table:
        """Columns of the rows that are kept; a `DataError` tells all problems, or that there is no row."""
        if self.num_flaws:
            more = self.num_flaws - len(self.flaws)
            raise DataError(
                f"{self.origin} has {self.num_flaws:,} problem{'s' * (self.num_flaws > 1)}: {'; '.join(self.flaws)}"
                f"{f'; and {more:,} more' if more else ''}; mend the file"
                + ", or add missing=skip to the task to leave out rows without a value"
                * self.can_skip
            )
        if not self.rows:
            lacking = f"; {self.skipped:,} rows lack a value" * bool(self.skipped)
            raise DataError(f"{self.origin} is empty{lacking}; give it a header and at least one row")
        if self.reading.rows is not None:
            self.rows.sort(key=lambda row: int(row[0]))
        if self.reading.names:
            return {name: [row[place] for row in self.rows] for place, name in enumerate(self.reading.names, start=1)}
        names = dict.fromkeys(name for _, values in self.rows for name in values)
        return {name: [values.get(name) for _, values in self.rows] for name in names}

    def notes(self) -> Iterator[str]:
        """Remarks on what was read, and on what was not."""
        yield from self.remarks
        if self.empty:
            yield f"{self.empty:,} empty rows are skipped"
        if self.skipped:
            names = " or ".join(map(repr, self.reading.names))
            yield f"{self.skipped:,} rows without a value in {names} are skipped (missing=skip)"
        if self.count > len(self.rows):
            yield f"{len(self.rows):,} of {self.count:,} rows are drawn (rows=)"


def _size(row: Iterable[Any]) -> int:
    return getsizeof(row) + sum(getsizeof(value) for value in row)


def files_of_no_split(folder: Path) -> tuple[str, ...]:
    """Tables in a folder that `read_folder` does not read, since their names are of no split."""
    if _is_saved(folder):
        return ()
    read = {path for paths in split_files(folder).values() for path in paths}
    return tuple(str(path) for path in _tables_in(folder) if path not in read)


def column(table: Table, name: str, *, origin: object, of_classes: bool = False) -> Sequence[Any]:
    """The values of a column; a `DataError` names the columns that exist, or the first row that is not allowed."""
    check_columns(list(table), Reading(columns=((name, "text"),)), origin=origin)
    for row, value in enumerate(table[name], start=1):
        if CHECKS["class" if of_classes else "text"](value):
            raise DataError(
                f"row {row} of {origin} has {short_repr(value)} in column {name!r}; allowed:"
                f" {'the name or number of a class' if of_classes else 'a text or a number'}; mend the row or remove it"
            )
    return table[name]


def texts(table: Table, name: str, *, origin: object) -> tuple[str, ...]:
    """The values of a column as texts."""
    return tuple(str(value) for value in column(table, name, origin=origin))


def from_datasets(data: Mapping[str, Any], *, class_names: bool = False) -> dict[str, Table]:
    """Tables of a `datasets.DatasetDict` by split, with the names of classes for their numbers where asked for."""
    reading = Reading(class_names=class_names)
    return {
        split: _choose([(split, _dataset_items(rows, reading))], reading)[0] for split, rows in _by_split(data).items()
    }


def _by_split(data: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: split for split, names in SPLITS.items() for name in names}
    return {known.get(name.lower(), name): rows for name, rows in data.items()}


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _read_saved(folder: Path) -> dict[str, Any]:
    import datasets  # two seconds that other commands need not pay

    try:
        loaded = datasets.load_from_disk(str(folder))
        return _by_split(loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded})
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"cannot read {folder}: {reason}; save it again with datasets' save_to_disk") from error


def _tables_in(folder: Path) -> list[Path]:
    # what begins with a dot or with Excel's mark of an open file is a program's own
    paths = (path for path in folder.iterdir() if not path.name.startswith((".", "~$")))
    return sorted(path for path in paths if ending_of(path) in READERS)


def _stem(path: Path) -> str:
    ending = ending_of(path)
    return path.name.lower()[: -len(ending) if ending in READERS else None]


def find_split(paths: Sequence[Path], split: str, *, origin: Path) -> list[Path]:
    """The path that has a name of this split, if there is one; a `DataError` where there are two."""
    named = [path for path in paths if _stem(path) in SPLITS[split]]
    if len(named) > 1:
        names = ", ".join(path.name for path in named)
        raise DataError(f"{origin} holds the {split} split more than once ({names}); keep one")
    return named


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Tables of a folder by split: `<name>.<ending>`, its shards `<name>-*.<ending>`, or those in the folder `<name>`.

    Where no name is of a split, all tables are shards of one, which is to be cut (`all`).
    """
    tables = _tables_in(folder)
    folders = [path for path in folder.iterdir() if path.is_dir() and _tables_in(path)]
    files: dict[str, list[Path]] = {}
    for split, names in SPLITS.items():
        named = find_split([*tables, *folders], split, origin=folder)
        shards = [path for path in tables if _stem(path).startswith(tuple(f"{name}-" for name in names))]
        if paths := [file for path in named for file in (_tables_in(path) if path in folders else [path])] or shards:
            files[split] = paths
    return files or ({"all": tables} if tables else {})
