import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.errors import CheckpointError, DataError
from atlas_fl.storage.jsonl import (
    append_rows,
    drop_undefined,
    format_json,
    from_json,
    read_json,
    read_rows,
    read_sealed,
    to_json,
    truncate_to,
    write_json,
    write_sealed,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@given(JSON)
def test_both_layouts_read_back_as_the_same_value(value: object) -> None:
    assert from_json(to_json(value)) == value
    assert json.loads(format_json(value)) == value
    assert "\n" not in to_json(value)


def test_numpy_values_become_plain_numbers() -> None:
    row = {"a": np.float32(0.5), "b": np.int64(3), "c": np.array([[1, 2]]), "d": np.bool_(True), "e": (1, 2)}
    assert from_json(to_json(row)) == {"a": 0.5, "b": 3, "c": [[1, 2]], "d": True, "e": [1, 2]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"round": 1, "loss": math.nan},
            "loss is nan; strict JSON holds finite numbers only: leave undefined values out",
        ),
        ({"rows": [{"x": 1.0}, {"x": -math.inf}]}, r"rows\[1\]\.x is -inf; strict JSON"),
        ({"m": np.array([[0.0, np.inf]])}, r"m\[0\]\[1\] is inf; strict JSON"),
        (np.float32("nan"), "the value is nan; strict JSON"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_and_named(value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_json(value)


def test_reading_refuses_what_is_no_json() -> None:
    with pytest.raises(ValueError, match="NaN is no JSON number"):
        from_json('{"loss": NaN}')
    with pytest.raises(TypeError, match="set is no JSON value"):
        to_json({"x": {1}})


def test_undefined_entries_are_left_out() -> None:
    row = {"loss": math.nan, "mcc": None, "f1": np.float32("inf"), "accuracy": 0.0, "task": "movie"}
    assert drop_undefined(row) == {"accuracy": 0.0, "task": "movie"}


def test_a_document_is_laid_out_for_people(tmp_path) -> None:
    write_json(tmp_path / "deep" / "plan.json", {"a": {"matrix": [list(range(60)), [1]], "b": "x" * 100}, "c": []})
    lines = (tmp_path / "deep" / "plan.json").read_text().splitlines()
    assert lines[:3] == ["{", '  "a": {', '    "matrix": [']
    assert lines[4] == "      [1]"
    assert lines[-2:] == ['  "c": []', "}"]


def test_a_refused_document_leaves_the_old_one(tmp_path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"round": 1})
    with pytest.raises(DataError, match="round is nan"):
        write_json(path, {"round": math.nan})
    assert read_json(path) == {"round": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_damaged_document_is_named(tmp_path) -> None:
    (tmp_path / "plan.json").write_text('{"clients": [')
    with pytest.raises(CheckpointError, match=r"damaged file .*plan.json: .*; restore it or repeat the run"):
        read_json(tmp_path / "plan.json")
    with pytest.raises(CheckpointError, match=r"no file .*none.json; the run did not write it"):
        read_json(tmp_path / "none.json")


def test_appending_returns_the_length_and_keeps_the_rows(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = append_rows(path, [{"round": 1}, {"round": 2}])
    assert first == len('{"round": 1}\n') * 2 == path.stat().st_size
    assert append_rows(path, []) == first
    assert append_rows(path, [{"name": "ü"}]) == path.stat().st_size
    assert read_rows(path) == [{"round": 1}, {"round": 2}, {"name": "ü"}]


def test_a_refused_row_leaves_the_file_as_it_was(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    length = append_rows(path, [{"round": 1}])
    with pytest.raises(DataError, match="loss is inf"):
        append_rows(path, [{"round": 2}, {"loss": math.inf}])
    assert path.stat().st_size == length


def test_cutting_back_and_repeating_gives_the_undisturbed_file(tmp_path) -> None:
    rows = [{"round": at, "loss": 1 / at} for at in range(1, 7)]
    append_rows(tmp_path / "whole.jsonl", rows)
    offset = append_rows(tmp_path / "cut.jsonl", rows[:3])
    append_rows(tmp_path / "cut.jsonl", rows[3:5])
    with (tmp_path / "cut.jsonl").open("a") as file:
        file.write('{"round": 6, "lo')  # killed while writing
    truncate_to(tmp_path / "cut.jsonl", offset)
    append_rows(tmp_path / "cut.jsonl", rows[3:])
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_lost_rows_are_not_passed_over(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    truncate_to(path, 0)
    assert not path.exists()
    with pytest.raises(CheckpointError, match=r"ledger.jsonl holds 0 bytes, its checkpoint 12: rows are lost"):
        truncate_to(path, 12)


def test_an_unfinished_last_line_is_no_row_and_a_damaged_one_is_named(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"round": 1}\n{"round": 2')
    assert read_rows(path) == [{"round": 1}]
    path.write_bytes(b'{"round": 1}\n{"rou\n{"round": 3}\n')
    with pytest.raises(CheckpointError, match=r"damaged line 2 of .*metrics.jsonl"):
        read_rows(path)
    assert read_rows(tmp_path / "none.jsonl") == []


def test_a_sealed_file_of_another_version_is_refused_by_the_entry_that_it_lacks(tmp_path) -> None:
    write_sealed(tmp_path / "state.json", {"round": 1, "tensors_sha256": "0"})
    assert read_sealed(tmp_path / "state.json", "round")["round"] == 1
    with pytest.raises(CheckpointError, match="it lacks 'files', or is of another version; restore it from a copy"):
        read_sealed(tmp_path / "state.json", "round", "files")


def test_a_sealed_file_that_is_altered_is_found_or_says_the_same(tmp_path) -> None:
    path, content = tmp_path / "heard.json", {"heard": ["movie-0", "trec-1"], "share": 0.1}
    write_sealed(path, content)
    assert read_sealed(path) == content
    written = path.read_bytes()
    for place in range(8 * len(written)):
        changed = bytearray(written)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            assert read_sealed(path) == content
        except CheckpointError as error:
            assert str(path) in str(error)
