"""Tables from disk: csv, tsv, jsonl, parquet, and folders of `datasets.save_to_disk`, as columns of plain values."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from atlas_fl.errors import DataError, short_repr
from atlas_fl.storage.folder_access import check_regular

Table: TypeAlias = Mapping[str, Sequence[Any]]
"""Columns of equal length by name."""

SPLITS: Mapping[str, Sequence[str]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "validation_matched"),
    "test": ("test", "test_matched"),
}
"""Names that the files and folders of a split may have, in any case; MNLI has the last of each."""
MOST_UNPACKED_BYTES = 1 << 30
"""Most bytes of an unpacked parquet file: one of some kilobytes may say the same text a million times."""
_BATCH_ROWS = 256
"""Rows that are unpacked at once to count them."""
_NO_VALUE = frozenset({"nan", "null", "<na>", "#n/a", "nat"})
"""Words that programs write where a value is missing."""


def read_table(path: Path, *, class_names: bool = False) -> Table:
    """Columns of a file; a `DataError` if it is missing, empty, damaged or of an unknown kind.

    With `class_names` a column that `datasets` has written as a `ClassLabel` has the names of classes, not numbers.
    """
    if not path.exists():
        raise DataError(f"there is no file {path}; check the path")
    if path.is_dir():
        raise DataError(f"{path} is a folder and no file; give the file, or rename the folder")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} is of no kind that can be read; give a file that ends in {', '.join(READERS)}")
    try:
        check_regular(path)
        table = reader(path)
        if class_names and reader is _read_parquet:
            table = _with_class_names(table, _noted_class_names(path))
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: byte {error.start} is no UTF-8; save the file as UTF-8") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"cannot read {path}: {reason}; mend the file or save it as jsonl or parquet") from error
    if not any(len(values) for values in table.values()):
        raise DataError(f"{path} is empty; give it a header and at least one row")
    return table


def read_folder(folder: Path, *, class_names: bool = False) -> dict[str, Table]:
    """Tables of a folder by split: `<name>.<ending>`, its shards `<name>-*.<ending>`, or a saved `DatasetDict`."""
    if _is_saved(folder):
        return _read_saved(folder, class_names=class_names)
    files = {split: _split_files(folder, split) for split in SPLITS}
    return {
        split: _concatenate([read_table(path, class_names=class_names) for path in paths])
        for split, paths in files.items()
        if paths
    }


def files_of_no_split(folder: Path) -> tuple[str, ...]:
    """Tables in a folder that `read_folder` does not read, since their names are of no split."""
    if _is_saved(folder):
        return ()
    read = {path for split in SPLITS for path in _split_files(folder, split)}
    return tuple(str(path) for path in _tables_in(folder) if path not in read)


def column(table: Table, name: str, *, origin: object, of_classes: bool = False) -> Sequence[Any]:
    """The values of a column; a `DataError` names the columns that exist, or the first row that is not allowed.

    A class is not called as programs call a missing value.
    """
    if name not in table:
        raise DataError(f"{origin} has no column {name!r}; it has {', '.join(map(repr, table))}")
    for row, value in enumerate(table[name], start=1):
        if not _is_allowed(value) or (of_classes and str(value).strip().lower() in _NO_VALUE):
            raise DataError(
                f"row {row} of {origin} has {short_repr(value)} in column {name!r}; allowed:"
                f" {'the name or number of a class' if of_classes else 'a text or a number'}; mend the row or remove it"
            )
    return table[name]


def _is_allowed(value: object) -> bool:
    """Return whether a value is a number or a text that a file can hold, and not blank."""
    if not isinstance(value, str):  # what pandas has for missing values of some types is no number either
        return isinstance(value, int) or (isinstance(value, float) and not math.isnan(value))
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return bool(value.strip())


def texts(table: Table, name: str, *, origin: object) -> tuple[str, ...]:
    """The values of a column as texts."""
    return tuple(str(value) for value in column(table, name, origin=origin))


def from_datasets(data: Mapping[str, Any], *, class_names: bool = False) -> dict[str, Table]:
    """Tables of a `datasets.DatasetDict` by split, with the names of classes for their numbers where asked for."""
    tables = {}
    for name, rows in data.items():
        table: Table = rows.with_format(None)[:]
        split = next((split for split, known in SPLITS.items() if name.lower() in known), name)
        tables[split] = _with_class_names(table, _class_names(rows.features)) if class_names else table
    return tables


def _class_names(features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Names of the classes by column, of the features of a `datasets.Dataset`."""
    import datasets  # two seconds that other commands need not pay

    return {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}


def _with_class_names(table: Table, names: Mapping[str, Sequence[str]]) -> Table:
    """The table with the name of a class in the place of its number; without one (-1) a row has no value."""
    named = {
        column: [
            known[number] if isinstance(number, int) and 0 <= number < len(known) else None for number in table[column]
        ]
        for column, known in names.items()
    }
    return {**table, **named}


def _read_csv(path: Path) -> Table:
    pandas = import_module("pandas")  # half a second that other commands need not pay
    try:
        cells = pandas.read_csv(
            path,
            sep="\t" if path.suffix.lower() == ".tsv" else ",",
            header=None,
            dtype=str,
            keep_default_na=False,
            encoding="utf-8-sig",
        )
    except pandas.errors.EmptyDataError:
        return {}
    header = cells.iloc[0].tolist()
    if len(set(header)) != len(header):
        raise ValueError("two columns of the header have one name")
    return {name: cells[index][1:].tolist() for index, name in enumerate(header)}


def _read_jsonl(path: Path) -> Table:
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # Python reads no whole number of more than 4,300 digits either
                raise ValueError(f"line {number} is no JSON ({str(error).partition(';')[0]})") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read_parquet(path: Path) -> Table:
    arrow = import_module("pyarrow")  # half a second that other commands need not pay
    batches: list[Any] = []
    unpacked = 0
    try:
        with import_module("pyarrow.parquet").ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                batches.append(batch)
                unpacked += batch.nbytes
                if unpacked > MOST_UNPACKED_BYTES:
                    raise ValueError(f"its values take more than the {MOST_UNPACKED_BYTES:,} bytes that are read")
        table: Table = arrow.Table.from_batches(batches, file.schema_arrow).to_pandas().to_dict("list")
    except (arrow.ArrowException, MemoryError, OverflowError) as error:
        raise ValueError(str(error) or "its values take more memory than there is") from None
    return table


def _noted_class_names(path: Path) -> dict[str, Sequence[str]]:
    """Names of the classes by column, where `datasets` has written the file with a `ClassLabel`."""
    schema = import_module("pyarrow.parquet").read_schema(path)
    if b"huggingface" not in (schema.metadata or {}):
        return {}
    try:
        return _class_names(import_module("datasets").Features.from_arrow_schema(schema))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("what datasets has noted in it of its columns is damaged") from error


READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _read_saved(folder: Path, *, class_names: bool) -> dict[str, Table]:
    import datasets  # two seconds that other commands need not pay

    try:
        loaded = datasets.load_from_disk(str(folder))
        data = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        return from_datasets(data, class_names=class_names)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"cannot read {folder}: {reason}; save it again with datasets' save_to_disk") from error


def _tables_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in READERS)


def find_split(paths: Sequence[Path], split: str, *, origin: Path) -> list[Path]:
    """The path that has a name of this split, if there is one; a `DataError` where there are two."""
    named = [path for path in paths if path.stem.lower() in SPLITS[split]]
    if len(named) > 1:
        names = ", ".join(path.name for path in named)
        raise DataError(f"{origin} holds the {split} split more than once ({names}); keep one")
    return named


def _split_files(folder: Path, split: str) -> list[Path]:
    tables = _tables_in(folder)
    beginnings = tuple(f"{name}-" for name in SPLITS[split])
    shards = [path for path in tables if path.stem.lower().startswith(beginnings)]
    return find_split(tables, split, origin=folder) or shards


def _concatenate(tables: Sequence[Table]) -> Table:
    def rows_of(name: str) -> Iterable[Any]:
        for table in tables:
            yield from table.get(name, [None] * len(next(iter(table.values()))))

    return {name: list(rows_of(name)) for name in dict.fromkeys(name for table in tables for name in table)}
