"""CSV in which no text is a formula, and from which every text is read back."""

import csv
from io import StringIO

import pytest

from atlas_fl.report.csv_text import format_csv, unescape_cell

FORMULAS = ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "--lr 0.1", "'=1", "''=1", "=")
PLAIN = ("movie-0", "", "'tis", "-0.5", "1e-3", "-0.1 0.2 -3", "a=1", "-7")


@pytest.mark.parametrize("text", FORMULAS + PLAIN)
def test_a_text_that_begins_a_formula_is_escaped_and_read_back(text: str) -> None:
    written = format_csv([{"name": text, "value": -0.25}])
    _, (cell, number) = csv.reader(StringIO(written, newline=""))
    assert cell.startswith("'") if text in FORMULAS else cell == text
    assert (unescape_cell(cell), number) == (text, "-0.25")


def test_rows_have_the_names_of_all_and_are_empty_where_one_lacks_them() -> None:
    assert format_csv([{"=x": None, "y": 3}, {"z": 4}]) == "'=x,y,z\n,3,\n,,4\n"
    assert format_csv([]) == ""
    rows = [{"client": 'a "b", c', "score": 0.1 + 0.2}, {"client": "d\ne"}]
    assert list(csv.reader(StringIO(format_csv(rows)))) == [
        ["client", "score"],
        ['a "b", c', "0.30000000000000004"],
        ["d\ne", ""],
    ]
