"""Tables from disk: the files of `data.formats`, and folders of `datasets.save_to_disk`, as columns of plain values."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from sys import getsizeof
from typing import Any, TypeAlias

import numpy as np

from atlas_fl.data import formats
from atlas_fl.data.chat import choices_fault, conversation_fault, tools_fault, turns_fault
from atlas_fl.errors import DataError, first_of, short_repr
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
_ABSENT, _NO_NUMBER = "no value", "no number such as 0.5 that float32 holds"
_SEED = 0
"""Rows that are drawn belong to the data and not to the run, as splits do."""


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


def _labels_fault(value: Any) -> str:
    if isinstance(value, list | tuple):
        return next(filter(None, map(_class_fault, value)), "")
    if isinstance(value, str) and re.fullmatch(r"\[(['\"].*['\"])?\]", value.strip()):
        return "a list as a program prints it (write its labels with the character of multi= between, or save jsonl)"
    return "" if _text_fault(value) == _ABSENT else _class_fault(value)


def _number_fault(value: Any) -> str:
    try:
        return "" if abs(float(value)) <= LARGEST_LABEL else _class_fault(value) or _NO_NUMBER
    except (OverflowError, TypeError, ValueError):
        return _class_fault(value) or _NO_NUMBER


def split_of(value: Any) -> str | None:
    """The split that a cell or a name means, in any case; None where it means none."""
    word = str(value).strip().lower()
    return next((split for split, known in SPLITS.items() if word in known), None)


def time_of(value: Any) -> float | None:
    """The time of a cell: a number as it is, an ISO date as seconds, without a zone; None where it has none."""
    with suppress(OverflowError, TypeError, ValueError):
        number = float(value)
        return number if math.isfinite(number) else None
    with suppress(ValueError):
        moment = datetime.fromisoformat(str(value).strip())
        # no machine's own zone decides
        return (moment.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()
    return None


def _split_fault(value: Any) -> str:
    return _text_fault(value) or (
        "" if split_of(value) else "no split such as train, validation, valid, val, dev or test"
    )


def _time_fault(value: Any) -> str:
    if time_of(value) is not None:
        return ""
    return _class_fault(value) or "no number and no date such as 2026-03-31 or 2026-03-31T08:15"


CHECKS: dict[str, Callable[[Any], str]] = {
    "text": _text_fault,
    "class": _class_fault,
    "labels": _labels_fault,
    "number": _number_fault,
    "split": _split_fault,
    "time": _time_fault,
    "chat": conversation_fault,
    "turns": turns_fault,
    "choices": choices_fault,
    "tools": tools_fault,
    "optional": lambda value: _text_fault(value).replace(_ABSENT, ""),
    "input": lambda value: _text_fault(value).replace(_ABSENT, ""),
    "prompt": lambda value: turns_fault(value).replace(_ABSENT, ""),
}
"""By kind of column, what a value is that may not be in it; empty for one that may. A class is not called as programs
call a missing value, and the last two kinds may lack (`formats.MAY_LACK`)."""


def read_table(path: Path, *, class_names: bool = False) -> Table:
    """All columns of a file; a `DataError` if it is missing, empty, damaged or of an unknown kind.

    With `class_names` a column that `datasets` has written as a `ClassLabel` has the names of classes, not numbers.
    """
    return read_rows([path], formats.Reading(class_names=class_names))[0]


READERS: dict[str, Callable[[Path], Table]] = dict.fromkeys(formats.FORMATS, read_table)
"""By ending; those of `data.formats` are read row by row, those of plug-ins whole."""


def read_folder(folder: Path, reading: formats.Reading | None = None) -> tuple[dict[str, Table], tuple[str, ...]]:
    """Tables of a folder by split, of `split_files` or a saved `DatasetDict`, and remarks on them."""
    reading = reading or formats.Reading()
    unread: list[str] = []
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        saved = {split: _dataset_items(rows, reading) for split, rows in _read_saved(folder).items()}
        read = {split: _choose({f"{split} of {folder}": items}, reading) for split, items in saved.items()}
    else:
        files = split_files(folder)
        read = {split: read_rows(paths, reading) for split, paths in files.items()}
        unread = [str(path) for path in _tables_in(folder) if not any(path in paths for paths in files.values())]
    remarks = (remark for _, remarks in read.values() for remark in remarks)
    return {split: table for split, (table, _) in read.items()}, (*left_out_note(unread), *remarks)


def left_out_note(paths: Sequence[str], *, since: str = "whose names are of no split") -> tuple[str, ...]:
    """A remark on files that are not read, if there are any."""
    return (f"{len(paths):,} files are left out, {since}: {first_of(paths)}",) if paths else ()


def read_rows(paths: Sequence[Path], reading: formats.Reading) -> tuple[Table, tuple[str, ...]]:
    """Columns of files, one after another, and remarks on them.

    Raises:
        DataError: a file cannot be read, or has no such column; all problems of its rows; or what is read of it would
            take more than half of the free memory.
    """
    return _choose({str(path): _items(path, reading) for path in paths}, reading)


def _items(path: Path, reading: formats.Reading) -> Iterator[formats.Item]:
    if not path.exists():
        raise DataError(f"there is no file {path}; check the path")
    if path.is_dir():
        raise DataError(f"{path} is a folder and no file; give the file, or rename the folder")
    ending = formats.ending_of(path)
    if ending not in READERS:
        raise DataError(f"{path} is of no kind that can be read; give a file that ends in {', '.join(READERS)}")
    try:
        check_regular(path)
        if ending not in formats.FORMATS:
            table = READERS[ending](path)
            formats.check_columns(list(table), reading, origin=path)
            yield from _table_items(table)
            return
        with path.open("rb") as raw:
            yield from formats.FORMATS[ending](raw, path, reading)
    except UnicodeError as error:
        encoding = reading.encoding or getattr(error, "encoding", "utf-16").replace("charmap", "utf-8 or cp1252")
        flaw = f"it is not in {encoding}; name its encoding, such as encoding=cp1251, or save it as UTF-8"
        raise DataError(f"cannot read {path}: {flaw}") from error
    except formats.FAULTS as error:
        reason = " ".join(str(error).split())[:200]
        remedy = "" if ";" in reason else "; mend the file or save it as jsonl or parquet"
        raise DataError(f"cannot read {path}: {reason}{remedy}") from error


def _table_items(table: Table) -> Iterator[formats.Item]:
    return ((number, dict(zip(table, row))) for number, row in enumerate(zip(*table.values()), start=1))


def _dataset_items(rows: Any, reading: formats.Reading) -> Iterator[formats.Item]:
    formats.check_columns(rows.column_names, reading, origin="the data set")
    known = formats.class_names_of(rows.features) if reading.class_names else {}
    wanted = rows.with_format(None).select_columns(reading.names_in(rows.column_names) or rows.column_names)
    yield from ((at, formats.with_class_names(values, known)) for at, values in enumerate(wanted, start=1))


def _choose(sources: Mapping[str, Iterable[formats.Item]], reading: formats.Reading) -> tuple[Table, tuple[str, ...]]:
    """The rows of these sources, by their names in messages, in their order."""
    first, *more = sources
    chosen = _Chosen(reading=reading, origin=f"{first} and {len(more)} more" if more else first)
    for origin, items in sources.items():
        names: dict[str, None] = {}
        for number, values in items:
            chosen.add(number, values, origin=f"{origin} " if more else "")
            if not isinstance(values, str) and not values.keys() <= names.keys():
                names |= dict.fromkeys(values)
        if names:
            formats.check_columns(list(names), reading, origin=origin)
    return chosen.table()


@dataclass(kw_only=True, eq=False)
class _Chosen:
    """Rows that are kept of all that come, and what was wrong with others."""

    reading: formats.Reading
    origin: str
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    """The place of each among all that could be kept, and its values, or one mapping of all its values."""
    counts: Counter[str] = field(default_factory=Counter)
    flaws: dict[str, list[str]] = field(default_factory=dict)
    """The first rows that have problems, by problem."""
    remarks: list[str] = field(default_factory=list)
    most_bytes: int = field(default_factory=formats.most_bytes)
    num_bytes: int = 0
    rng: np.random.Generator = field(default_factory=lambda: generator(_SEED, "rows"))

    def add(self, number: int, values: Mapping[str, Any] | str, *, origin: str) -> None:
        """Take in one item of a file."""
        if isinstance(values, str):
            if number:
                self._tell(values, f"{origin}{number:,}")
            elif values:
                self.remarks.append(origin + values)
            return
        if not values:
            self.counts["empty"] += 1
            return
        chosen = [values.get(name) for name in self.reading.names] or [values]
        checked = ((CHECKS[kind](values.get(name)), name, values.get(name)) for name, kind in self.reading.columns)
        faults = [fault for fault in checked if fault[0]]
        if not faults:
            self._keep((self.counts["fit"], *chosen))
        elif self.reading.missing == "skip" and all(fault == _ABSENT for fault, *_ in faults):
            self.counts["skipped"] += 1
        else:
            fault, name, value = faults[0]
            self.counts["absent"] += fault == _ABSENT
            shown = f" ({short_repr(value)})" * (value is not None and bool(str(value).strip()))
            self._tell(f"{fault} in {name!r}{shown}", f"{origin}{number:,}")

    def _keep(self, row: tuple[Any, ...]) -> None:
        most = self.reading.rows
        self.counts["fit"] += 1
        if most is None or len(self.rows) < most:
            self.rows.append(row)
            self.num_bytes += _size(row)
        elif (place := int(self.rng.integers(self.counts["fit"]))) < most:  # Vitter's algorithm R
            self.num_bytes += _size(row) - _size(self.rows[place])
            self.rows[place] = row
        if self.num_bytes > self.most_bytes:  # half of the memory that was free
            raise DataError(
                f"the first {len(self.rows):,} rows of {self.origin} take {self.most_bytes / 1e9:.2f} GB of memory,"
                f" half of what is free; add rows={len(self.rows) // 2} to the task to draw so many rows evenly"
            )

    def _tell(self, flaw: str, row: str) -> None:
        self.counts["flaws"] += 1
        if self.counts["flaws"] <= MOST_TOLD:
            self.flaws.setdefault(flaw, []).append(row)

    def table(self) -> tuple[Table, tuple[str, ...]]:
        """Columns of the rows that are kept, and remarks; a `DataError` tells all problems, or that there is no row."""
        counts = self.counts
        if num := counts["flaws"]:
            flaws = "; ".join(f"{flaw} in row {', '.join(rows)}" for flaw, rows in self.flaws.items())
            more = f" and {num - MOST_TOLD:,} more" * (num > MOST_TOLD)
            skip = ", or add missing=skip to the task to leave out rows without a value" * bool(
                counts["absent"] and self.reading.hint
            )
            raise DataError(f"{self.origin} has {num:,} problem{'s' * (num > 1)}: {flaws}{more}; mend the file{skip}")
        if not self.rows:
            lacking = f"no row of {self.origin} has a value in each of {self._names()}"
            empty = f"{self.origin} is empty; give it a header and at least one row"
            raise DataError(lacking if counts["skipped"] else empty)
        notes = {
            f"empty rows skipped: {counts['empty']:,}": counts["empty"],
            f"rows without a value in {self._names('or')} skipped: {counts['skipped']:,}": counts["skipped"],
            f"{len(self.rows):,} of {counts['fit']:,} rows are drawn": counts["fit"] - len(self.rows),
        }
        remarks = (*self.remarks, *(remark for remark, count in notes.items() if count))
        rows = sorted(self.rows, key=itemgetter(0)) if self.reading.rows else self.rows
        if self.reading.names:
            return {name: [row[at] for row in rows] for at, name in enumerate(self.reading.names, start=1)}, remarks
        names = dict.fromkeys(name for _, values in rows for name in values)
        return {name: [values.get(name) for _, values in rows] for name in names}, remarks

    def _names(self, word: str = "and") -> str:
        names = [*map(repr, self.reading.names)]
        return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _size(row: Iterable[Any]) -> int:
    return getsizeof(row) + sum(map(getsizeof, row))


def column(table: Table, name: str, *, origin: object) -> Sequence[Any]:
    """The values of a column, texts or numbers; a `DataError` as of a file that is read."""
    return _choose({str(origin): _table_items(table)}, formats.Reading(columns=((name, "text"),)))[0][name]


def texts(table: Table, name: str, *, origin: object) -> tuple[str, ...]:
    """The values of a column as texts."""
    return tuple(str(value) for value in column(table, name, origin=origin))


def from_datasets(data: Mapping[str, Any], *, class_names: bool = False) -> dict[str, Table]:
    """Tables of a `datasets.DatasetDict` by split; with the names of its classes, or their numbers."""
    reading = formats.Reading(class_names=class_names)
    items = {split_of(name) or name: _dataset_items(rows, reading) for name, rows in data.items()}
    return {split: _choose({split: rows}, reading)[0] for split, rows in items.items()}


def _read_saved(folder: Path) -> dict[str, Any]:
    import datasets  # two seconds that other commands need not pay

    try:
        loaded = datasets.load_from_disk(str(folder))
        by_name = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        return {split_of(name) or name: rows for name, rows in by_name.items()}
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"cannot read {folder}: {reason}; save it again with datasets' save_to_disk") from error


def _tables_in(folder: Path) -> list[Path]:
    # what begins with a dot or with Excel's mark of an open file is a program's own
    paths = (path for path in folder.iterdir() if not path.name.startswith((".", "~$")))
    return sorted(path for path in paths if formats.ending_of(path) in READERS)


def _stem(path: Path) -> str:
    ending = formats.ending_of(path)
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
