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
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from importlib import import_module
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, cast, get_args
from zipfile import BadZipFile, ZipFile

from atlas_fl.errors import DataError, did_you_mean, first_of
from atlas_fl.frozen import Frozen
from atlas_fl.storage.extras import import_extra
from atlas_fl.storage.folder_access import free_bytes, memory_bytes

Missing: TypeAlias = Literal["error", "skip"]
"""Treatment of rows without a value in a column that is read."""
MISSING: tuple[Missing, ...] = get_args(Missing)
SEPARATORS: Mapping[str, str] = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
"""Separators that are looked for, by the word that `sep=` may have for them."""
MOST_CELL = 1 << 24
"""Most characters of a line or a cell; more are a quote that nobody closed, or a bomb."""
_USUAL_CELL = csv.field_size_limit()
MOST_PACKED = 200
"""Most bytes that one byte of a packed file stands for; text has at most some twenty."""
_LEAST_PACKED_BYTES = 1 << 28
"""Unpacked bytes that are read of any file, whatever it packs."""
_BATCH_ROWS = 256
"""Rows of a parquet file that are unpacked at once."""
_HEAD_LINES = 20
FAULTS = (OSError, ValueError, RecursionError, EOFError, LookupError, TypeError, SyntaxError, BadZipFile, zlib.error)
"""Errors of the readers for a damaged file."""
_ZIP = b"PK\x03\x04"
_OTHERS = {
    _ZIP: "a zip file; name it .xlsx if it is Excel's, else unpack it",
    b"\x1f\x8b": "packed by gzip; add .gz to its name",
    b"\xd0\xcf\x11\xe0": "a file of old or encrypted Excel; save it as xlsx without a password",
    b"PAR1": "a parquet file; name it .parquet",
}
"""Kinds of files that have been given the name of another, by their first bytes."""

Item: TypeAlias = tuple[int, Mapping[str, Any] | str]
"""The number of a row and its values by column, none where it is empty, or the reason why it cannot be read; or 0 and a
remark on the file."""


MAY_LACK = ("input", "prompt")
"""Kinds of columns that a table may lack."""


class Reading(Frozen):
    """Options of a table, and which of its rows and columns are read."""

    columns: tuple[tuple[str, str], ...] = ()
    """(name, kind of `tables.CHECKS`) of each column; none stands for all columns as they are."""
    sep: str | None = None
    encoding: str | None = None
    missing: Missing = "error"
    rows: int | None = None
    """Most rows, drawn evenly from all."""
    hint: str = ""
    """End of the message where a column is not there; empty where no user has named the columns."""
    options: Mapping[str, str] = field(default_factory=dict)
    """By column, the option that names it, of those beside text and label."""
    class_names: bool = False
    """A column that `datasets` has written as a `ClassLabel` has the names of classes, not numbers."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.columns))

    def names_in(self, names: Sequence[str]) -> list[str]:
        """The columns that are read, without those that may lack and do."""
        may_lack = {name for name, kind in self.columns if kind in MAY_LACK}
        return [name for name in self.names if name in names or name not in may_lack]


Format: TypeAlias = Callable[[BinaryIO, Path, Reading], Iterator[Item]]


def ending_of(path: Path) -> str:
    """The ending that says how a file is read, such as `.csv` or `.csv.gz`."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return before + last if last == ".gz" else last


def check_columns(names: Sequence[str], reading: Reading, *, origin: object, hint: str = "") -> None:
    """A `DataError` with the nearest name if a column that is read is not there, or is there twice."""
    for name in reading.names_in(names) or filter(None, names):
        if name not in names:
            has = f"{did_you_mean(name, names)} it has {first_of(list(map(repr, names)))}"
            own = f"; {reading.options[name]}= names it" if name in reading.options else reading.hint
            raise DataError(f"{origin} has no column {name!r}{has}{hint}{own}")
        if list(names).count(name) > 1:
            raise DataError(f"{origin} has two columns {name!r} in its header; rename one")


def most_bytes() -> int:
    """Half of the memory that is free: cleaning rows takes about what they do."""
    return (free_bytes() or memory_bytes()) // 2


def _of_text(parse: Callable[[Iterator[str], Path, Reading], Iterator[Item]]) -> Format:
    """The format that this function parses the lines of; JSON is parsed whole and has to fit into memory."""

    def read(raw: BinaryIO, path: Path, reading: Reading) -> Iterator[Item]:
        encoding, remark = _encoding(_unpacked(raw, path), reading.encoding)
        yield 0, remark
        most = most_line = most_bytes() // 4  # bytes, text, and values at twice its size
        if parse is not _parse_json:
            most, most_line = max(_LEAST_PACKED_BYTES, MOST_PACKED * path.stat().st_size), MOST_CELL
        text = TextIOWrapper(_unpacked(raw, path), encoding=encoding, newline="")
        try:
            yield from parse(_bounded_lines(text, most_line=most_line, most_bytes=most), path, reading)
        finally:
            text.detach()  # whoever opened the file closes it

    return read


def _unpacked(raw: BinaryIO, path: Path) -> BinaryIO:
    raw.seek(0)
    return cast(BinaryIO, gzip.open(raw)) if path.suffix.lower() == ".gz" else raw


def _bounded_lines(text: TextIOWrapper, *, most_line: int, most_bytes: int) -> Iterator[str]:
    """Lines with their ends; a ValueError where one, or all together, are longer than they may be."""
    binary = cast(BinaryIO, text.buffer)
    for line in iter(lambda: text.readline(most_line + 1), ""):
        if len(line) > most_line or binary.tell() > most_bytes:
            raise ValueError(f"it has a line of more than {most_line:,} characters, or more than {most_bytes:,} bytes")
        yield line


def _encoding(binary: BinaryIO, given: str | None) -> tuple[str, str]:
    """The encoding of a file, and a remark where it is a guess.

    UTF-8 unless a mark, the place of zero bytes, or a byte that cannot be in it says otherwise.
    """
    head = binary.read(1 << 16)
    if other := next((told for first, told in _OTHERS.items() if head.startswith(first)), None):
        raise ValueError(f"it is {other}")
    if given is not None or head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return given or "utf-16", ""
    zeros = [head[place::2].count(0) for place in (0, 1)]
    if 4 * max(zeros) > len(head):
        return "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le", ""
    decoder, place, lines, is_ascii = getincrementaldecoder("utf-8")(), 0, 1, True
    try:
        while head:
            decoder.decode(head)
            place, lines, is_ascii = place + len(head), lines + _line_ends(head), is_ascii and head.isascii()
            head = binary.read(1 << 20)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # the decoder keeps the beginning of a character that two pieces share
        place += error.start - (len(error.object) - len(head))
        if not is_ascii or not error.object[: error.start].isascii():
            both = f"byte {place:,} is no UTF-8 and characters before it are"
            raise ValueError(f"{both}; save it in one encoding, or add encoding=cp1252") from None
        line = lines + _line_ends(error.object[: error.start])
        return "cp1252", f"read as cp1252, since line {line:,} is no UTF-8; encoding= names another"
    return "utf-8-sig", ""


def _line_ends(head: bytes) -> int:
    """The number of line ends of Unix and Windows, or of an old Mac."""
    return head.count(b"\n") or head.count(b"\r")


def _parse_csv(lines: Iterator[str], path: Path, reading: Reading) -> Iterator[Item]:
    head = list(islice(lines, _HEAD_LINES))
    said = re.fullmatch(r'"?sep=(.)"?\s*', head[0]) if head else None  # Excel's word for its separator is no row
    head = head[1:] if said else head
    sep = reading.sep or (said[1] if said else _separator(head, path, reading.names))
    csv.field_size_limit(MOST_CELL)  # a bound of the process
    try:
        yield from _by_header(_records(csv.reader(chain(head, lines), delimiter=sep, strict=True)), path, reading, sep)
    finally:
        csv.field_size_limit(_USUAL_CELL)  # what another reader found may be this one's bound


def _separator(head: Sequence[str], path: Path, wanted: Sequence[str]) -> str:
    """The separator with which the header has most of the wanted columns, and most columns."""
    header = next(filter(str.strip, head), "")
    usual = "\t" if ending_of(path).startswith(".tsv") else ","
    found = {sep: {cell.strip() for cell in next(csv.reader([header], delimiter=sep))} for sep in SEPARATORS.values()}
    return max(found, key=lambda sep: (len(found[sep] & {*wanted}), len(found[sep]), sep == usual))


def _records(reader: Iterator[list[str]]) -> Iterator[tuple[int, Sequence[Any] | str]]:
    """Numbered rows of cells; where the quotes of one are wrong, the reason in the place of its cells, and no more."""
    number = 0
    try:
        for number, cells in enumerate(reader, start=1):
            yield number, cells
    except csv.Error as error:
        reason = str(error).replace("unexpected end of data", "the last is not closed")
        yield number + 1, f"wrong quotes ({reason}; a quote in quotes is written twice)"


def _is_blank(cell: object) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _by_header(
    records: Iterable[tuple[int, Sequence[Any] | str]], path: Path, reading: Reading, sep: str | None = None
) -> Iterator[Item]:
    """Rows of cells under the first that is not empty. Without a `sep` the last cells may be absent, as in Excel."""
    places: dict[str, int] = {}
    width = 0
    for number, cells in records:
        if isinstance(cells, str):
            yield number, cells
        elif all(map(_is_blank, cells)):
            yield number, {}
        elif not places:
            names = ["" if cell is None else str(cell).strip() for cell in cells]
            other = "; another separator than comma, semicolon, tab and pipe is named with sep="
            hint = f" in row {number}, its header" + other * (len(names) == 1)
            check_columns(names, reading, origin=path, hint=hint)
            width = len(names)
            places = {name: names.index(name) for name in reading.names_in(names) or names}
        elif sep and (len(cells) <= max(places.values()) or not all(map(_is_blank, cells[width:]))):
            yield number, f"{len(cells)} against {width} cells in the header (texts with {sep!r} or lines need quotes)"
        else:
            yield number, {name: cells[place] for name, place in places.items() if place < len(cells)}


def _parse_jsonl(lines: Iterator[str], _: Path, __: Reading) -> Iterator[Item]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            yield number, {}
            continue
        try:
            yield _json_row(number, json.loads(line))
        except (ValueError, RecursionError) as error:  # Python reads no whole number of more than 4,300 digits either
            yield number, f"no JSON ({re.split(': line|;', str(error))[0]})"


def _json_row(number: int, values: object) -> Item:
    return number, values if isinstance(values, dict) else "no JSON object"


def _parse_json(lines: Iterator[str], path: Path, reading: Reading) -> Iterator[Item]:
    head = list(islice(lines, 2))
    if len(head) == 2 and head[0].startswith("{") and head[0].rstrip().endswith("}") and head[1].strip():
        yield from _parse_jsonl(chain(head, lines), path, reading)  # JSON lines under the name of JSON
        return
    document = json.loads("".join([*head, *lines]) or "[]")
    yield from (_json_row(number, values) for number, values in enumerate(_json_records(document), start=1))


def _json_records(document: Any) -> Iterable[object]:
    """Rows of a list of objects, of an object with one such list, of columns as pandas and datasets write, of LEAF."""
    if not isinstance(document, dict):
        return document if isinstance(document, list) else [document]
    if {"users", "user_data"} <= document.keys():
        return _leaf_rows(document)
    values = list(document.values())
    if lists := [rows for rows in values if isinstance(rows, list) and rows and isinstance(rows[0], dict)]:
        return lists[0]
    columns = [list(column.values()) if isinstance(column, dict) else column for column in values]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        raise ValueError("it is neither a list of objects nor an object of columns of one length")
    return [dict(zip(document, row)) for row in zip(*columns)]


def _leaf_rows(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    by_user = dict(document["user_data"])
    for user in document["users"]:
        data = by_user.get(user)
        if not isinstance(data, dict) or len(data.get("x", "")) != len(data.get("y", "")):
            raise ValueError(f"user {user!r} of LEAF's format has no x and y of one length")
        for x, y in zip(data["x"], data["y"]):
            # of a tweet of Sent140 x is a list, with the text in the fifth place
            is_record = isinstance(x, list) and any(isinstance(part, str) for part in x)
            yield {"user": user, "x": x, "y": y} | {f"x.{i}": part for i, part in enumerate(x if is_record else ())}


def _read_xlsx(raw: BinaryIO, path: Path, reading: Reading) -> Iterator[Item]:
    reason = f"{path} is a sheet of Excel and needs"
    openpyxl = import_extra("openpyxl", extra="xlsx", asked=reason, remedy=", or save it as csv")
    if (first := raw.read(4)) != _ZIP:
        raise ValueError(f"it is {_OTHERS.get(first, 'no file of Excel')}")
    if sum(part.file_size for part in ZipFile(raw).infolist()) > most_bytes():
        raise ValueError("it unpacks to more than half of the free memory; save it as csv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # openpyxl speaks of styles and extensions that it drops
        sheets = openpyxl.load_workbook(raw, read_only=True, data_only=True).worksheets
    sheet = next((sheet for sheet in sheets if {*reading.names} <= _sheet_names(sheet)), sheets[0])
    yield 0, f"sheet {sheet.title!r} of {len(sheets)} is read" if len(sheets) > 1 else ""
    yield from _by_header(enumerate(_sheet_rows(sheet), start=1), path, reading)


def _sheet_rows(sheet: Any) -> Iterator[Sequence[Any]]:
    sheet.reset_dimensions()  # some programs write that a sheet has one cell
    yield from sheet.iter_rows(values_only=True)


def _sheet_names(sheet: Any) -> set[str]:
    header: Sequence[Any] = next((cells for cells in _sheet_rows(sheet) if not all(map(_is_blank, cells))), ())
    return {str(cell).strip() for cell in header}


def _read_parquet(raw: BinaryIO, path: Path, reading: Reading) -> Iterator[Item]:
    arrow = import_module("pyarrow")  # half a second that other commands need not pay
    try:
        with import_module("pyarrow.parquet").ParquetFile(raw) as file:
            check_columns(file.schema_arrow.names, reading, origin=path)
            known = _noted_class_names(file.schema_arrow) if reading.class_names else {}
            batches = file.iter_batches(
                batch_size=_BATCH_ROWS, columns=reading.names_in(file.schema_arrow.names) or None
            )
            rows = (values for batch in batches for values in batch.to_pylist())
            yield from ((number, with_class_names(values, known)) for number, values in enumerate(rows, start=1))
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
    named = {
        column: names[number] if isinstance(number := values[column], int) and 0 <= number < len(names) else None
        for column, names in known.items()
        if column in values
    }
    return {**values, **named}


_PARSERS = {".csv": _parse_csv, ".tsv": _parse_csv, ".json": _parse_json, ".jsonl": _parse_jsonl}
FORMATS: dict[str, Format] = {
    **{ending + packed: _of_text(parse) for packed in ("", ".gz") for ending, parse in _PARSERS.items()},
    ".xlsx": _read_xlsx,
    ".parquet": _read_parquet,
}
