"""Strict JSON and append-only JSON lines.

NaN and Infinity are no JSON: other readers fail on them or read them as null, so they are refused when written.
A file of lines knows its length in bytes. A checkpoint records that length, and a resumed run cuts the file back to
it, so that the rows of rounds that will be repeated are not there twice.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from atlas_fl.errors import CheckpointError, DataError
from atlas_fl.storage import folder_access

LINE_WIDTH = 120
MOST_DEPTH = 64
"""Most lists and mappings inside each other: what is written here has less than ten, and its readers are recursive."""
MOST_CONTAINERS, MOST_ENTRIES = 2_000_000, 20_000_000
"""Most lists and mappings, and most entries in them: a few bytes of text make hundreds in memory."""
_TEXTS = re.compile(r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)
"""The texts of JSON; the last one may lack its end."""
_OTHER_CHARACTERS = re.compile(r"[^\[\]{}]+")
SEAL = "sha256"
"""The entry of a sealed file: the SHA-256 over all its other entries."""


def _to_builtin(value: object) -> object:
    """NumPy's numbers and arrays as Python's; `json` asks for what it does not know."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value; give numbers, text, lists and mappings")


def _find_undefined(value: object, path: str = "") -> str:
    """Place of a NaN or an infinity, as `key[index].key`; empty where there is none."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(value, float) and not math.isfinite(value):
        return f"{path or 'the value'} is {value}"
    items: Iterable[tuple[str, object]] = ()
    if isinstance(value, Mapping):
        items = ((f"{path}.{key}".lstrip("."), entry) for key, entry in value.items())
    elif isinstance(value, list | tuple):
        items = ((f"{path}[{index}]", entry) for index, entry in enumerate(value))
    return next((message for where, entry in items if (message := _find_undefined(entry, where))), "")


def to_json(value: object) -> str:
    """The value as strict JSON on one line; mappings keep their order, NumPy numbers and arrays are allowed.

    Raises:
        DataError: a number is NaN or infinite; the message says which.
    """
    try:
        return _ENCODER.encode(value)
    except ValueError:
        where = _find_undefined(value) or "the value refers to itself"
        raise DataError(f"{where}; strict JSON holds finite numbers only: leave undefined values out") from None


def from_json(text: str | bytes) -> Any:
    """Value of strict JSON; all JSON is read by this function.

    Raises:
        ValueError: no JSON in UTF-8, NaN or an infinity in it, or more and deeper lists than anything that is written
            here (`json.JSONDecodeError` is a ValueError too).
    """
    decoded = text if isinstance(text, str) else text.decode()
    _check_bounds(decoded)
    try:
        return _DECODER.decode(decoded)
    except RecursionError:  # unfinished ones, deeper than Python goes
        raise ValueError(_TOO_DEEP) from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=_to_builtin)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_TOO_DEEP = f"its lists are nested more than {MOST_DEPTH} deep"


def _check_bounds(text: str) -> None:
    """Raise ValueError for JSON with too many lists and mappings, or too deep ones; counted without reading it."""
    containers = text.count("[") + text.count("{")
    if containers <= MOST_DEPTH and len(text) <= MOST_ENTRIES:
        return
    if text.count(",") > MOST_ENTRIES or containers > MOST_CONTAINERS:
        raise ValueError(f"more than {MOST_CONTAINERS:,} lists, or {MOST_ENTRIES:,} entries in them")
    brackets = _OTHER_CHARACTERS.sub("", _TEXTS.sub("", text)).replace("{", "[").replace("}", "]")
    for _ in range(MOST_DEPTH):
        brackets = brackets.replace("[]", "")
    if "[]" in brackets:
        raise ValueError(_TOO_DEEP)


def drop_undefined(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without its undefined entries: None, NaN and infinite numbers."""
    return {
        key: value
        for key, value in row.items()
        if value is not None and not (isinstance(value, float | np.floating) and not math.isfinite(value))
    }


def format_json(value: Any, indent: int = 0) -> str:
    """JSON for people: one entry a line, save for what fits on a line and for lists of numbers.

    Raises:
        DataError: a number is NaN or infinite.
    """
    flat = to_json(value)
    simple = isinstance(value, list) and not any(isinstance(entry, list | dict) for entry in value)
    if simple or not isinstance(value, list | dict) or indent + len(flat) <= LINE_WIDTH:
        return flat
    pad, end = " " * (indent + 2), " " * indent
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + format_json(entry, indent + 2) for entry in value) + f"\n{end}]"
    lines = [f"{pad}{to_json(key)}: {format_json(entry, indent + 2)}" for key, entry in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{end}}}"


def encode_json(value: object) -> bytes:
    """The content of a file of strict JSON, laid out to be read by people.

    Raises:
        DataError: a number is NaN or infinite.
    """
    return (format_json(from_json(to_json(value))) + "\n").encode()


def write_json(path: Path, value: object, *, within: Path | None = None, mode: int = 0o666) -> str:
    """Write strict JSON in one step, laid out to be read by people; the file's SHA-256 as hexadecimal digits.

    No part of the path below `within` is a link (`storage.folder_access`); so it is for all readers and writers here.

    Raises:
        DataError: a number is NaN or infinite.
    """
    content = encode_json(value)
    folder_access.write_atomic(path, content, within=within, mode=mode)
    return sha256(content).hexdigest()


def read_json(path: Path, *, within: Path | None = None) -> Any:
    """Value of a JSON file.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    try:
        return from_json(folder_access.read_written(path, max_bytes=folder_access.MOST_JSON_BYTES, within=within))
    except ValueError as error:
        raise CheckpointError(f"damaged file {path}: {error}; restore it or repeat the run") from error


def content_sha256(content: Mapping[str, Any]) -> str:
    """SHA-256 over values and not over layout: what only looks different is the same content."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, content: Mapping[str, Any], *, within: Path | None = None, mode: int = 0o666) -> None:
    """Write a mapping as `write_json`, with the digest by which `read_sealed` finds it damaged.

    The digest has no key: who can write the file can forge it.

    Raises:
        DataError: a number is NaN or infinite.
    """
    plain = from_json(to_json(content))
    write_json(path, plain | {SEAL: content_sha256(plain)}, within=within, mode=mode)


def read_sealed(path: Path, *names: str, within: Path | None = None) -> dict[str, Any]:
    """The content of a sealed file, which has these entries, without its digest.

    Raises:
        CheckpointError: there is no such file, it is not what was written, or another version wrote it.
    """
    content = read_json(path, within=within)
    plain = {name: value for name, value in content.items() if name != SEAL} if isinstance(content, dict) else {}
    if not plain or content_sha256(plain) != content.get(SEAL):
        raise CheckpointError(f"damaged file {path}: it is not what was written; restore it from a copy, or run again")
    if missing := next((name for name in names if name not in plain), ""):
        raise CheckpointError(
            f"damaged file {path}: it lacks {missing!r}, or is of another version; restore it from a copy, or run again"
        )
    return plain


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]], *, running: Any = None) -> int:
    """Append one line a row and flush them to the disk; the length of the file in bytes afterwards.

    All rows are encoded before the first is written: a row that is refused leaves the file as it was. A `running`
    digest of `hashlib` takes the new lines too.

    Raises:
        DataError: a number is NaN or infinite.
    """
    lines = "".join([to_json(row) + "\n" for row in rows]).encode()
    is_new = not os.path.lexists(path)
    with folder_access.os_errors_with_path(path), folder_access.open_to_append(path) as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
        length = file.tell()
    if running is not None:
        running.update(lines)
    if is_new:
        with folder_access.opened_folder(path.parent) as folder:
            os.fsync(folder)
    return length


def truncate_to(path: Path, offset: int) -> None:
    """Cut a file of lines back to the length that a checkpoint recorded; offset 0 also allows that there is no file.

    Raises:
        CheckpointError: the file is shorter than that, so rows are missing.
    """
    length = path.stat().st_size if path.exists() else 0
    if length < offset:
        raise CheckpointError(f"{path} holds {length} bytes, its checkpoint {offset}: rows are lost; repeat the run")
    if length > offset:
        folder_access.cut_file(path, offset)


def read_rows(path: Path, *, length: int | None = None) -> list[dict[str, Any]]:
    """The rows of a file of lines, or of so many bytes of it; none where there is no file.

    A last line without its end is a write that was cut short and not a row yet.

    Raises:
        CheckpointError: another line is damaged; the message names it.
        OSError: it cannot be read, is a link or no regular file, or is too large.
    """
    try:
        content = folder_access.read_file(path, max_bytes=folder_access.MOST_ROWS_BYTES)
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(content[:length].split(b"\n")[:-1], start=1):
        try:
            row = from_json(line)
            if not isinstance(row, dict):
                raise ValueError(f"{row!r} is no row")
            rows.append(row)
        except ValueError as error:
            message = f"damaged line {number} of {path}: {error}; restore the file or repeat the run"
            raise CheckpointError(message) from error
    return rows
