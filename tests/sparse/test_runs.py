import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.errors import ProtocolError
from atlas_fl.sparse.codec import decode_runs, encode_runs
from tests.examples import examples


def test_runs_by_hand() -> None:
    """Two zeros, three ones, 300 zeros; 300 is 44 + 2 * 128, low digits first."""
    bits = np.array([0, 0, 1, 1, 1] + [0] * 300, bool)
    assert encode_runs(bits).tolist() == [2, 3, 44 + 128, 2]
    assert encode_runs(np.ones(2, bool)).tolist() == [0, 2]
    assert encode_runs(np.zeros(0, bool)).tolist() == []
    assert decode_runs(np.array([0, 2], np.uint8), 2).tolist() == [True, True]


@given(st.lists(st.integers(1, 2**17), max_size=6), st.booleans())
@examples(60)
def test_bits_come_back(lengths: list[int], first: bool) -> None:
    bits = np.repeat((np.arange(len(lengths)) + first) % 2 == 1, lengths)
    assert np.array_equal(decode_runs(encode_runs(bits), len(bits)), bits)


@given(st.binary(max_size=30), st.integers(0, 40))
@examples(200)
def test_any_bytes_give_so_many_bits_or_an_error(payload: bytes, total: int) -> None:
    try:
        bits = decode_runs(np.frombuffer(payload, np.uint8), total)
    except ProtocolError:
        return
    assert len(bits) == total


def test_cut_off_or_too_long_runs_are_refused() -> None:
    with pytest.raises(ProtocolError, match="do not add up to its 4 bits"):
        decode_runs(np.array([1, 2], np.uint8), 4)
    with pytest.raises(ProtocolError, match="cut off"):
        decode_runs(np.array([3, 129], np.uint8), 4)
    with pytest.raises(ProtocolError, match="cut off"):
        decode_runs(np.array([255] * 9 + [1], np.uint8), 4)
    with pytest.raises(ProtocolError, match="add up"):
        decode_runs(np.array(([255] * 7 + [127]) * 200, np.uint8), 4)
