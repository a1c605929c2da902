import numpy as np
import pytest

from atlas_fl.data.cleaning import check_no_leak, clean, deduplicate, keys, without
from atlas_fl.data.task import Rows, TaskData
from atlas_fl.errors import DataError


def rows(*text: str, label: list[int] | None = None, pair: tuple[str, ...] | None = None) -> Rows:
    return Rows(text=text, pair=pair, label=np.asarray(label or [0] * len(text), dtype=np.int64))


def test_case_and_spacing_do_not_make_another_text() -> None:
    assert list(keys(rows("A  good\tfilm ", "a good film", "a goodfilm"))) == [
        "a good film",
        "a good film",
        "a goodfilm",
    ]


def test_a_pair_is_the_same_only_if_both_texts_are() -> None:
    found = list(keys(rows("a", "A", "a b", "a", pair=("x", "X ", "x", "b x"))))
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_deduplicate_keeps_the_first_and_drops_contradictions() -> None:
    kept = deduplicate(rows("One", "two", "one ", "TWO", "three", label=[1, 0, 1, 1, 0]))
    assert kept.text == ("One", "three")
    assert kept.label.tolist() == [1, 0]


def test_without_removes_what_others_hold() -> None:
    assert without(rows("a", "B", "c"), rows("b"), rows("C")).text == ("a",)


def test_clean_gives_a_shared_text_to_the_test_first() -> None:
    data = clean(TaskData(train=rows("a", "b", "c", "c"), validation=rows("B", "d"), test=rows("D", "A ")))
    assert (data.train.text, data.validation.text, data.test.text) == (("c",), ("B",), ("D", "A "))
    check_no_leak(data.splits)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            (rows("a", "Same  text"), rows("same text"), rows("c")),
            "1 texts are in train and in validation, such as 'Same  text'",
        ),
        ((rows("a"), rows("b"), rows("A")), "1 texts are in train and in test, such as 'a'"),
        ((rows("x"), rows("b", "c"), rows("C", "B")), "2 texts are in validation and in test, such as 'b'"),
    ],
)
def test_a_leak_fails_loudly_with_an_example(splits: tuple[Rows, Rows, Rows], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_no_leak(dict(zip(("train", "validation", "test"), splits)))


def test_a_leak_of_a_pair_shows_both_texts() -> None:
    first = rows("Q", pair=("answer",))
    with pytest.raises(DataError, match=r"'Q \| answer'"):
        check_no_leak({"train": first, "validation": rows("z", pair=("z",)), "test": first})


def test_equal_first_texts_with_other_pairs_are_no_leak() -> None:
    check_no_leak({"train": rows("q", pair=("1",)), "test": rows("q", pair=("2",))})
