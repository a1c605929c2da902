import doctest

import pytest

from atlas_fl.report import format


def test_the_examples_in_the_docstrings_hold() -> None:
    found = doctest.testmod(format)
    assert found.attempted == 3
    assert found.failed == 0


@pytest.mark.parametrize(
    ("count", "text"), [(9_949, "9.9 kB"), (9_951, "10 kB"), (999_499, "999 kB"), (999_500, "1.0 MB")]
)
def test_units_change_where_the_digits_would(count: int, text: str) -> None:
    assert format.human_bytes(count) == text


def test_what_is_unknown_is_a_dash() -> None:
    assert format.number(None, 3) == "-"
    assert format.number(0.0, 2, sign=True) == "+0.00"
