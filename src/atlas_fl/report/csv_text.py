"""CSV: the one writer of it, with texts that no spreadsheet takes for formulas.

A spreadsheet runs a cell that begins with =, +, - or @, also after a tab or the end of a line. Names of clients,
classes and runs come from whoever made the data or the run; such a text is written with an apostrophe before it, by
which spreadsheets show it as it is. Numbers stay numbers.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from io import StringIO

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_NUMBERS = re.compile(r"([-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?( |$))+")


def escape_cell(value: object) -> object:
    """The value as a cell holds it: a text that begins a formula, or would be read as one that was escaped, escaped.

    >>> [escape_cell(value) for value in ("=1+1", "-0.5", -0.5, "movie-0", "--lr 0.1", "'=x")]
    ["'=1+1", '-0.5', -0.5, 'movie-0', "'--lr 0.1", "''=x"]
    """
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBERS.fullmatch(value):
        return f"'{value}"
    return value


def unescape_cell(text: str) -> str:
    """The text that `escape_cell` has written.

    >>> unescape_cell("'--lr 0.1"), unescape_cell("'tis")
    ('--lr 0.1', "'tis")
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def format_csv(rows: Iterable[Mapping[str, object]]) -> str:
    """The rows below the names of all their entries; numbers in full precision, None empty; empty without a row."""
    records = list(rows)
    names = list(dict.fromkeys(name for record in records for name in record))
    lines = []
    table: list[list[object]] = [[*names]] if records else []
    table += [[record.get(name) for name in names] for record in records]
    for row in table:
        line = StringIO()
        # a text with a carriage return is put in quotes only where that ends lines
        csv.writer(line, lineterminator="\r\n").writerow([escape_cell(value) for value in row])
        lines.append(line.getvalue().removesuffix("\r\n"))
    return "\n".join([*lines, ""])
