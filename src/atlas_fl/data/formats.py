"""Rows of csv, tsv, json, jsonl (each also `.gz`), xlsx and parquet files as they are read, one after another.

Encodings and separators are found where none is given. Rows of a csv, tsv or xlsx file are numbered as a spreadsheet
shows them, with the header as row 1 and empty rows counted; those of jsonl are its lines, those of json and parquet its
records from 1 on. LEAF's json (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018) has the columns user, x
and y.
"""

import csv
import gzip
import json
import re
import warnings
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE, getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias, get_args
from zipfile import BadZipFile, ZipFile

from atlas_fl.errors import ConfigError, DataError, did_you_mean, first_of
from atlas_fl.storage.extras import install_command
from atlas_fl.storage.folder_access import free_bytes, memory_bytes

Missing: TypeAlias = Literal["error", "skip"]
"""Treatment of rows without a value in a column that is read."""
MISSING: tuple[Missing, ...] = get_args(Missing)
SEPARATORS: Mapping[str, str] = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
"""Separators that are looked for, by the word that `sep=` may have for them."""
MOST_CELL = 1 << 24
"""Most characters of a line or a cell; more are a quote that nobody closed, or a bomb."""
MOST_PACKED = 200
"""Most bytes that one byte of a packed file stands for; text has at most some twenty."""
LEAST_PACKED_BYTES = 1 << 28
"""Unpacked bytes that are read of any file, whatever it packs."""
_BATCH_ROWS = 256
"""Rows of a parquet file that are unpacked at once."""
_HEAD_LINES = 20
_MARKS = {BOM_UTF32_LE: "utf-32", BOM_UTF32_BE: "utf-32", BOM_UTF16_LE: "utf-16", BOM_UTF16_BE: "utf-16"}
"""Encodings by the mark at the beginning of a file; that of UTF-32 begins with that of UTF-16."""
_OTHERS = {
    b"PK\x03\x04": "a zip file; name it .xlsx if it is one of Excel, else unpack it",
    b"\x1f\x8b": "packed by gzip; add .gz to its name",
    b"\xd0\xcf\x11\xe0": "a file of old or encrypted Excel; save it as xlsx without a password",
    b"PAR1": "a parquet file; name it .parquet",
}
"""Kinds of files that have been given the name of another, by their first bytes."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options of a table, and which of its rows and columns are read."""

    columns: tuple[tuple[str, str], ...] = ()
    """(name, kind of `tables.CHECKS`) of each column; none stands for all columns as they are."""
    sep: str | None = None
    encoding: str | None = None
    missing: Missing = "error"
    rows: int | None = None
    """Most rows, drawn evenly from all."""
    hint: str = ""
    """End of the message where a column is not there."""
    class_names: bool = False
    """A column that `datasets` has written as a `ClassLabel` has the names of classes, not numbers."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(name for name, _ in self.columns)


class Header(NamedTuple):
    """Names of all columns."""

    names: Sequence[str]


class Row(NamedTuple):
    """Values by column; none where the row is empty."""

    number: int
    values: Mapping[str, Any]


class Flaw(NamedTuple):
    """Reason why a row cannot be read."""

    number: int
    reason: str


class Note(NamedTuple):
    """Remark on a file."""

    text: str


Item: TypeAlias = Header | Row | Flaw | Note


def ending_of(path: Path) -> str:
    """The ending that says how a file is read, such as `.csv` or `.csv.gz`."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return before + last if last == ".gz" else last


def check_columns(names: Sequence[str], reading: Reading, *, origin: object, hint: str = "") -> None:
    """A `DataError` with the nearest name if a column that is read is not there, or is there twice."""
    for name in reading.names or filter(None, names):
        if name not in names:
            has = f"{did_you_mean(name, names)} it has {first_of(list(map(repr, names))) or 'none'}"
            raise DataError(f"{origin} has no column {name!r}{has}{hint}{reading.hint}")
        if list(names).count(name) > 1:
            raise DataError(f"{origin} has two columns {name!r} in its header; rename one")


@contextmanager
def long_cells() -> Iterator[None]:
    """The bound of Python's csv reader, which is one for the process, at `MOST_CELL`."""
    before = csv.field_size_limit(MOST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def most_bytes() -> int:
    """Half of the memory that is free: cleaning rows takes about what they do."""
    return (free_bytes() or memory_bytes()) // 2


def _unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    raw.seek(0)
    return gzip.open(raw) if path.suffix.lower() == ".gz" else raw


def _encoding(raw: IO[bytes], path: Path, given: str | None) -> tuple[str, str]:
    """The encoding of a file, and a note where it is a guess.

    UTF-8 unless a mark, the place of zero bytes, or a byte that cannot be in it says otherwise.
    """
    binary = _unpacked(raw, path)
    head = binary.read(1 << 16)
    if other := next((told for first, told in _OTHERS.items() if head.startswith(first)), None):
        raise ValueError(f"it is {other}")
    if given is not None:
        return given, ""
    if mark := next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), None):
        return mark, ""
    zeros = [head[place::2].count(0) for place in (0, 1)]
    if 4 * max(zeros) > len(head):
        return ("utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"), ""
    decoder, place, has_others = getincrementaldecoder("utf-8")(), 0, False
    try:
        while head:
            decoder.decode(head)
            place, has_others = place + len(head), has_others or not head.isascii()
            head = binary.read(1 << 20)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # the decoder keeps the beginning of a character that two pieces share
        place += error.start - (len(error.object) - len(head))
        byte = f"byte {place:,} is no UTF-8"
        if has_others or not error.object[: error.start].isascii():
            raise ValueError(f"{byte} and characters before it are; mend it, or give encoding=cp1252") from None
        return "cp1252", f"read as cp1252, since {byte}; encoding= names another"
    return "utf-8-sig", ""


@contextmanager
def _opened(raw: IO[bytes], path: Path, encoding: str) -> Iterator[TextIOWrapper]:
    text = TextIOWrapper(_unpacked(raw, path), encoding=encoding, newline="")  # type: ignore[arg-type]
    try:
        yield text
    finally:
        text.detach()  # whoever opened the file closes it


def _lines(raw: IO[bytes], path: Path, encoding: str) -> Iterator[str]:
    """Lines of bounded length, with their ends."""
    most = max(LEAST_PACKED_BYTES, MOST_PACKED * path.stat().st_size)
    with _opened(raw, path, encoding) as text:
        for line in iter(lambda: text.readline(MOST_CELL + 1), ""):
            if len(line) > MOST_CELL:
                raise ValueError(f"a line has more than {MOST_CELL:,} characters; is it a table?")
            if text.buffer is not raw and text.buffer.tell() > most:
                raise ValueError(f"it unpacks to more than {most:,} bytes, {MOST_PACKED} times its size; unpack it")
            yield line


def _read_csv(raw: IO[bytes], path: Path, reading: Reading) -> Iterator[Item]:
    encoding, note = _encoding(raw, path, reading.encoding)
    yield Note(note)
    lines = _lines(raw, path, encoding)
    head = list(islice(lines, _HEAD_LINES))
    said = re.fullmatch(r'"?sep=(.)"?\s*', head[0]) if head else None  # Excel's word for its separator is no row
    head = head[1:] if said else head
    sep = reading.sep or (said.group(1) if said else _separator(head, path, reading.names))
    records = _records(csv.reader(chain(head, lines), delimiter=sep, strict=True))
    yield from _by_header(records, path, reading, sep=sep)


def _separator(head: Sequence[str], path: Path, wanted: Sequence[str]) -> str:
    """The separator with which the header has most of the wanted columns, and most columns."""
    found = {sep: _first_cells(head, sep) for sep in SEPARATORS.values()}
    usual = "\t" if ending_of(path).startswith(".tsv") else ","
    return max(found, key=lambda sep: (len(found[sep] & {*wanted}), len(found[sep]), sep == usual))


def _first_cells(head: Sequence[str], sep: str) -> set[str]:
    filled = (line for line in head if line.strip())
    try:
        return {cell.strip() for cell in next(csv.reader(filled, delimiter=sep, strict=True), [])}
    except csv.Error:
        return set()


def _records(reader: Iterator[list[str]]) -> Iterator[tuple[int, Sequence[Any] | str]]:
    """Numbered rows of cells; the reason in the place of the last where its quotes are wrong."""
    number = 0
    while True:
        number += 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            behind = "expected after" in str(error)
            yield (
                number,
                (
                    "has text behind a cell in quotes; write a quote inside quotes twice"
                    if behind
                    else "begins a cell in quotes that does not end; close it"
                )
                + " (rows below are not looked at)",
            )
            return
        if cells is None:
            return
        yield number, cells


def _is_blank(cell: object) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _by_header(
    records: Iterable[tuple[int, Sequence[Any] | str]],
    path: Path,
    reading: Reading,
    *,
    sep: str | None = None,
) -> Iterator[Item]:
    """Rows of cells under the first that is not empty. Without a `sep` the last cells may be absent, as in Excel."""
    places: dict[str, int] = {}
    width = 0
    for number, cells in records:
        if isinstance(cells, str):
            yield Flaw(number, cells)
        elif all(map(_is_blank, cells)):
            yield Row(number, {})
        elif not places:
            names = ["" if cell is None else str(cell).strip() for cell in cells]
            check_columns(names, reading, origin=path, hint=_header_hint(names, sep))
            yield Header(names)
            width = len(names)
            places = {name: names.index(name) for name in reading.names or names}
        elif len(cells) > width and not all(map(_is_blank, cells[width:])):
            yield Flaw(number, f"has {len(cells)} cells under a header of {width} (a text with {sep!r} needs quotes)")
        elif sep and len(cells) <= max(places.values()):
            yield Flaw(number, f"has {len(cells)} cells under a header of {width} (a text of two lines needs quotes)")
        else:
            yield Row(number, {name: cells[place] for name, place in places.items() if place < len(cells)})


def _header_hint(names: Sequence[str], sep: str | None) -> str:
    """Reasons why a header may lack a column: another separator, or no header at all."""
    is_data = any(not name or len(name) > 40 or re.fullmatch(r"-?[\d.,]+", name) for name in names)
    other = "; where cells are not separated by one of , ; | and tab, name what separates them with sep="
    none = "; where the file has no header, put the names of its columns into a first row"
    return other * (len(names) == 1 and sep is not None) + none * is_data


def _read_jsonl(raw: IO[bytes], path: Path, reading: Reading) -> Iterator[Item]:
    encoding, note = _encoding(raw, path, reading.encoding)
    yield Note(note)
    yield from _json_rows(_lines(raw, path, encoding))


def _json_rows(lines: Iterable[str]) -> Iterator[Item]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            yield Row(number, {})
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:  # Python reads no whole number of more than 4,300 digits either
            yield Flaw(number, f"is no JSON ({str(error).partition(';')[0]})")
            continue
        yield _json_row(number, values)


def _json_row(number: int, values: object) -> Item:
    return Row(number, values) if isinstance(values, dict) else Flaw(number, "is no JSON object")


def _read_json(raw: IO[bytes], path: Path, reading: Reading) -> Iterator[Item]:
    encoding, note = _encoding(raw, path, reading.encoding)
    yield Note(note)
    most = most_bytes() // 3  # the text, and its values at twice its size
    with _opened(raw, path, encoding) as text:
        first, second = (text.readline(most) for _ in range(2))
        if not _is_lines(first, second):
            text_of_all = first + second + text.read(most)
            if len(text_of_all) > most:
                raise ValueError(f"JSON is read whole and has more than {most:,} characters; save it as jsonl")
            document = json.loads(text_of_all) if text_of_all.strip() else []
            records = _json_records(document, reading.names)
            yield from (_json_row(number, values) for number, values in enumerate(records, start=1))
            return
    yield from _json_rows(_lines(raw, path, encoding))


def _is_lines(first: str, second: str) -> bool:
    """Return whether the first two lines of a file are those of JSON lines, under the name of JSON."""
    try:
        return isinstance(json.loads(first), dict) and bool(second.strip())
    except (ValueError, RecursionError):
        return False


def _json_records(document: Any, wanted: Sequence[str]) -> Iterable[object]:
    """Rows of a list of objects, of an object with one such list, of columns as pandas and datasets write, of LEAF."""
    if isinstance(document, list):
        return document
    if not isinstance(document, dict):
        raise ValueError("it is neither a list of objects nor an object of columns")
    if {"users", "user_data"} <= document.keys():
        return _leaf_rows(document)
    if {"columns", "data"} <= document.keys():
        return [dict(zip(document["columns"], row)) for row in document["data"]]
    lists = [values for values in document.values() if isinstance(values, list) and values]
    if len(lists) == 1 and isinstance(lists[0][0], dict):
        return lists[0]
    columns = {name: list(values.values()) if isinstance(values, dict) else values for name, values in document.items()}
    if not all(isinstance(values, list) for values in columns.values()):
        raise ValueError("it is neither a list of objects nor an object of columns")
    if not {*wanted} & columns.keys() and all(isinstance(values, dict) for values in document.values()):
        return list(document.values())
    if len({len(values) for values in columns.values()}) > 1:
        sizes = ", ".join(f"{name!r} {len(values):,}" for name, values in columns.items())
        raise ValueError(f"its columns have different numbers of values ({sizes})")
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _leaf_rows(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for user in document["users"]:
        data = document["user_data"].get(user)
        if not isinstance(data, dict) or len(data.get("x", "")) != len(data.get("y", "")):
            raise ValueError(f"user {user!r} of LEAF's format has no x and y of one length")
        for x, y in zip(data["x"], data["y"]):
            # of a tweet of Sent140 x is a list, with the text in the fifth place
            is_record = isinstance(x, list) and any(isinstance(part, str) for part in x)
            parts = {f"x.{place}": part for place, part in enumerate(x)} if is_record else {}
            yield {"user": user, "x": x, "y": y, **parts}


def _read_xlsx(raw: IO[bytes], path: Path, reading: Reading) -> Iterator[Item]:
    try:
        openpyxl = import_module("openpyxl")
    except ModuleNotFoundError:
        told = f"{path} is a sheet of Excel, which openpyxl reads; {install_command('xlsx')}, or save it as csv"
        raise ConfigError(told) from None
    try:
        with ZipFile(raw) as parts:
            if sum(part.file_size for part in parts.infolist()) > most_bytes():
                raise ValueError("it unpacks to more than half of the free memory; save it as csv")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # openpyxl speaks of styles and extensions that it drops
            book = openpyxl.load_workbook(raw, read_only=True, data_only=True)
    except (BadZipFile, KeyError, OSError, SyntaxError, TypeError, ValueError) as error:
        raw.seek(0)
        raise ValueError("it is " + _OTHERS.get(raw.read(4), f"no xlsx file ({error})")) from None
    sheets = book.worksheets
    sheet = next((one for one in sheets if {*reading.names} <= {*_sheet_names(one)}), sheets[0])
    if len(sheets) > 1:
        yield Note(f"sheet {sheet.title!r} is read, of {len(sheets)}")
    yield from _by_header(enumerate(_sheet_rows(sheet), start=1), path, reading)


def _sheet_rows(sheet: Any) -> Iterator[Sequence[Any]]:
    sheet.reset_dimensions()  # some programs write that a sheet has one cell
    yield from sheet.iter_rows(values_only=True)


def _sheet_names(sheet: Any) -> Sequence[str]:
    header: Sequence[Any] = next((cells for cells in _sheet_rows(sheet) if not all(map(_is_blank, cells))), ())
    return [str(cell).strip() for cell in header]


def _read_parquet(raw: IO[bytes], path: Path, reading: Reading) -> Iterator[Item]:
    arrow = import_module("pyarrow")  # half a second that other commands need not pay
    try:
        with import_module("pyarrow.parquet").ParquetFile(raw) as file:
            check_columns(file.schema_arrow.names, reading, origin=path)
            yield Header(file.schema_arrow.names)
            known = _noted_class_names(file.schema_arrow) if reading.class_names else {}
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(reading.names) or None):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, with_class_names(values, known))
    except (arrow.ArrowException, MemoryError, OverflowError) as error:
        raise ValueError(str(error) or "its values take more memory than there is") from None


def _noted_class_names(schema: Any) -> dict[str, Sequence[str]]:
    """Names of the classes by column, where `datasets` has written the file with a `ClassLabel`."""
    if b"huggingface" not in (schema.metadata or {}):
        return {}
    try:
        return class_names_of(import_module("datasets").Features.from_arrow_schema(schema))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("what datasets has noted in it of its columns is damaged") from error


def class_names_of(features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Names of the classes by column, of the features of a `datasets.Dataset`."""
    import datasets  # two seconds that other commands need not pay

    return {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}


def with_class_names(values: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    """The row with the name of a class in the place of its number; without one (-1) it has no value."""
    if not known:
        return values
    named = {
        column: names[values[column]] if isinstance(values[column], int) and 0 <= values[column] < len(names) else None
        for column, names in known.items()
        if column in values
    }
    return {**values, **named}


Format: TypeAlias = Callable[[IO[bytes], Path, Reading], Iterator[Item]]
_TEXTS: Mapping[str, Format] = {".csv": _read_csv, ".tsv": _read_csv, ".json": _read_json, ".jsonl": _read_jsonl}
TEXT_ENDINGS = frozenset([*_TEXTS, *(f"{ending}.gz" for ending in _TEXTS)])
FORMATS: dict[str, Format] = {
    **_TEXTS,
    **{f"{ending}.gz": read for ending, read in _TEXTS.items()},
    ".xlsx": _read_xlsx,
    ".parquet": _read_parquet,
}
