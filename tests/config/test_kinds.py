"""Conversion by hand and as a law: what is written as words is read back as the same value."""

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.config.settings import settings
from atlas_fl.config.values import convert_value, describe, from_text, from_words, parse_integer, to_words
from atlas_fl.errors import short_repr

LETTER = Literal["A", "B", "head"]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (True, bool, True),
        ("x", str, "x"),
        ("none", int | None, None),
        (None, str | None, None),
        (["A", "head"], tuple[LETTER, ...], ("A", "head")),
        ([2, 5], tuple[int, int], (2, 5)),
        ([], tuple[str, ...], ()),
    ],
)
def test_values_of_a_file_are_read_as_their_kind(value: object, kind: Any, expected: object) -> None:
    found = convert_value(value, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (True, int, "True is not a whole number"),
        (1, bool, "1 is not true or false"),
        (1.0, int, "1.0 is not a whole number"),
        ("1", float, "'1' is not a number"),
        (1, str, "1 is not a text"),
        (True, float, "True is not a number"),
        ("C", LETTER, "'C' is not one of A, B, head$"),
        ("Haed", LETTER, r"'Haed' is not one of A, B, head; did you mean 'head'\?$"),
        (["haed"], tuple[LETTER, ...], r"'haed' is not one of A, B, head; did you mean 'head'\?$"),
        (["C"], tuple[LETTER, ...], "'C' is not one of A, B, head"),
        ("A", tuple[LETTER, ...], "'A' is not a list, each one of A, B, head"),
        ([1, 2, 3], tuple[int, int], r"\[1, 2, 3\] is not 2 times a whole number"),
        ({"a": 1}, int | None, "{'a': 1} is not a whole number"),
        (10**400, float, "10000+... is not a number"),
    ],
)
def test_a_value_of_another_kind_is_refused(value: object, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_value(value, kind)


@pytest.mark.parametrize(
    ("words", "kind", "expected"),
    [
        (["0.5"], float, 0.5),
        (["-1"], int, -1),
        (["None"], int | None, None),
        (["7"], int | None, 7),
        (["ON"], bool, True),
        (["none"], tuple[str, ...], ()),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        (["none"], str, "none"),
    ],
)
def test_words_of_a_command_line_are_read_as_their_kind(words: list[str], kind: Any, expected: object) -> None:
    assert from_words(words, kind) == expected


def test_the_parts_of_a_list_in_one_text_are_joined_by_plus() -> None:
    assert from_text("A+head", tuple[LETTER, ...]) == ("A", "head")
    assert from_text("2+4", tuple[int, int]) == (2, 4)
    assert from_text("a+b", str) == "a+b"


@pytest.mark.parametrize("words", [["x"], ["1.5"], [""], ["1", "x"], ["1", "2", "3"]])
def test_words_that_spell_no_value_are_refused_with_what_is_allowed(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"is not .*a whole number"):
        from_words(words, tuple[int, int] if len(words) > 1 else int)


@given(data=st.data())
def test_words_of_every_value_are_read_back_as_it(data: st.DataObject) -> None:
    values: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(10**15), 10**15),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        LETTER: st.sampled_from(["A", "B", "head"]),
    }
    values |= {kind | None: st.none() | values[kind] for kind in (int, float)}
    values |= {tuple[kind, ...]: st.lists(values[kind]).map(tuple) for kind in (int, float, LETTER)}  # type: ignore[valid-type]
    kind = data.draw(st.sampled_from(list(values)))
    value = data.draw(values[kind])
    assert from_words(to_words(value), kind) == value


def test_every_kind_of_a_setting_has_words() -> None:
    words = {setting.name: describe(setting.kind) for setting in settings().values()}
    assert words["eta"] == "a number"
    assert words["max_length"] == "a whole number, or none"
    assert words["share"] == "a list, each one of A, B, head"
    assert words["k_range"] == "2 times a whole number"


def test_numbers_have_one_spelling() -> None:
    assert [parse_integer(text) for text in ("8", "08", "+8", "8.0", "٨", "", "9" * 40)] == [8, *[None] * 6]


def test_a_shown_value_is_short_and_on_one_line() -> None:
    assert short_repr("a\nb") == r"'a\nb'"
    assert len(short_repr("x" * 10_000)) < 100
    assert short_repr([10**5000]) == "a number of thousands of digits"
