"""Tables from disk: csv, tsv, jsonl, parquet, and folders of `datasets.save_to_disk`, as columns of plain values."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from atlas_fl.errors import DataError
from atlas_fl.storage.folder_access import check_regular
from atlas_fl.storage.jsonl import from_json

Table: TypeAlias = Mapping[str, Sequence[Any]]
"""Columns of equal length by name."""

SPLITS: Mapping[str, Sequence[str]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "validation_matched"),
    "test": ("test", "test_matched"),
}
"""Names that the files and folders of a split may have, in any case; MNLI has the last of each."""
LONGEST_CELL = 1 << 30
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
        table = reader(path, class_names=class_names) if reader is _read_parquet else reader(path)
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: byte {error.start} is no UTF-8; save the file as UTF-8") from error
    except (OSError, ValueError, RecursionError, csv.Error) as error:
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


def column(table: Table, name: str, *, origin: object) -> Sequence[Any]:
    """The values of a column; a `DataError` that names the columns that exist, or the first row without a value."""
    if name not in table:
        raise DataError(f"{origin} has no column {name!r}; it has {', '.join(map(repr, table))}")
    for number, value in enumerate(table[name], start=1):
        if _is_missing(value):
            raise DataError(f"row {number} of {origin} has no value in column {name!r}; fill it or remove the row")
        if not isinstance(value, str | int | float):
            kind = type(value).__name__
            raise DataError(f"row {number} of {origin} holds a {kind} in column {name!r}; give a text or a number")
    return table[name]


def _is_missing(value: object) -> bool:
    if isinstance(value, str):
        return not value.strip()
    # what pandas has for a missing value of some types is of a type of its own
    of_pandas = type(value).__name__ in ("NAType", "NaTType")
    return value is None or of_pandas or (isinstance(value, float) and math.isnan(value))


def classes(table: Table, name: str, *, origin: object) -> Sequence[Any]:
    """The values of a column of labels; a `DataError` names the first that only says that there is none."""
    values = column(table, name, origin=origin)
    for number, value in enumerate(values, start=1):
        if isinstance(value, str) and value.strip().lower() in _NO_VALUE:
            raise DataError(
                f"row {number} of {origin} has {value.strip()!r} in column {name!r}, which stands for a missing label;"
                " fill it or remove the row (a class of that name needs another one)"
            )
    return values


def texts(table: Table, name: str, *, origin: object) -> tuple[str, ...]:
    """The values of a column as texts; a `DataError` that names the first that no file could hold."""
    values = tuple(str(value) for value in column(table, name, origin=origin))
    for number, text in enumerate(values, start=1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"row {number} of {origin} holds half a character in column {name!r} ({error.reason}); mend the row"
            ) from error
    return values


def from_datasets(data: Mapping[str, Any], *, class_names: bool = False) -> dict[str, Table]:
    """Tables of a `datasets.DatasetDict` by split, with the names of classes for their numbers where asked for."""
    import datasets  # its objects are here already

    tables = {}
    for name, rows in data.items():
        table: Table = rows.with_format(None)[:]
        kinds = rows.features.items() if class_names else ()
        names = {column: kind.names for column, kind in kinds if isinstance(kind, datasets.ClassLabel)}
        split = next((split for split, known in SPLITS.items() if name.lower() in known), name)
        tables[split] = _with_class_names(table, names)
    return tables


def _with_class_names(table: Table, names: Mapping[str, Sequence[str]]) -> Table:
    """The table with the name of a class in the place of its number; without one (-1) a row has no value."""

    def name_of(column: str, number: Any) -> str | None:
        known = names[column]
        return known[number] if isinstance(number, int) and 0 <= number < len(known) else None

    named = {column: [name_of(column, number) for number in table[column]] for column in names if column in table}
    return {**table, **named}


def _read_csv(path: Path) -> Table:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file, _long_cells():
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise ValueError("two columns of the header have one name")
        rows = []
        for row in reader:
            if row and len(row) != len(header):
                raise ValueError(f"line {reader.line_num} has {len(row)} cells and the header has {len(header)}")
            if row:
                rows.append(row)
    return {name: [row[index] for row in rows] for index, name in enumerate(header)}


@contextmanager
def _long_cells() -> Iterator[None]:
    """Cells of any length: the module's own limit of 128 kB is below a long document."""
    limit = csv.field_size_limit(LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _read_jsonl(path: Path) -> Table:
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is no JSON ({error.msg})") from error
            except ValueError:  # Python reads no whole number of more than 4,300 digits
                raise ValueError(f"line {number} holds a number of thousands of digits") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read_parquet(path: Path, *, class_names: bool = False) -> Table:
    arrow = import_module("pyarrow")  # half a second that other commands need not pay
    batches: list[Any] = []
    unpacked = 0
    try:
        with import_module("pyarrow.parquet").ParquetFile(path) as file:
            schema = file.schema_arrow
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                batches.append(batch)
                unpacked += batch.nbytes
                if unpacked > MOST_UNPACKED_BYTES:
                    raise ValueError(f"its values take more than the {MOST_UNPACKED_BYTES:,} bytes that are read")
        table: Table = arrow.Table.from_batches(batches, schema).to_pandas().to_dict("list")
    except (arrow.ArrowException, MemoryError, OverflowError) as error:
        raise ValueError(str(error) or "its values take more memory than there is") from None
    return _with_class_names(table, _noted_class_names(schema)) if class_names else table


def _noted_class_names(schema: Any) -> dict[str, Sequence[str]]:
    """Names of the classes by column, where `datasets` has written the file with a `ClassLabel`."""
    noted = (schema.metadata or {}).get(b"huggingface")
    try:
        features = from_json(noted)["info"]["features"] if noted else {}
        return {
            column: list(feature["names"])
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("what datasets has noted in it of its columns is damaged") from error


READERS: dict[str, Callable[..., Table]] = {
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
