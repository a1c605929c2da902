"""Pickles are read as data: the official format, Python 3's, and nothing that would run."""

import pickle
import pickletools
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.data.cifar import read_pickled
from atlas_fl.errors import DataError
from tests.data.pickles import batch, batch_of_python_3


def read(content: bytes) -> object:
    return read_pickled(content, origin="the file")


def test_the_miniature_is_a_pickle_of_protocol_2() -> None:
    content = batch(np.zeros((1, 32, 32, 3), dtype=np.uint8), [300], key="labels")
    names = [opcode.name for opcode, _, _ in pickletools.genops(content)]
    assert names[0] == "PROTO" and names[-1] == "STOP" and {"BINSTRING", "REDUCE", "BUILD"} <= set(names)


@pytest.mark.parametrize("write", [batch, batch_of_python_3])
def test_arrays_and_labels_come_back(write) -> None:
    pixels = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    held = read(write(pixels, [5, 300], key="labels"))
    assert isinstance(held, dict)
    assert held["labels"] == [5, 300]
    assert held["data"].dtype == np.uint8
    assert (held["data"] == pixels.transpose(0, 3, 1, 2).reshape(2, -1)).all()


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2, 70000, 2**40], "b": (), "c": (1, (2, 3), (4, 5, 6), (7, 8, 9, 10)), "d": None},
        [True, False, 0.5, "ünï", [], {}, {1: {2: 3}}],
        {"x": [["same"]] * 3},
    ],
)
def test_plain_data_is_what_it_was(value: object) -> None:
    assert read(pickle.dumps(value, protocol=2)) == value


def test_an_array_by_columns_keeps_its_order() -> None:
    values = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    assert (read(pickle.dumps(values, protocol=2)) == values).all()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_what_would_be_called_is_not(tmp_path: Path) -> None:
    content = pickle.dumps({"data": Evil(tmp_path / "ran")}, protocol=2)
    with pytest.raises(DataError, match=r"cannot read the file: .*; it is damaged or holds more than data"):
        read(content)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02cos\nsystem\nU\x02ls\x85R.", "it would call os.system"),
        (b"\x80\x02cos\nsystem\n)\x81.", "opcode NEWOBJ is none of plain data"),
        (pickle.dumps(OrderedDict(a=1), protocol=2), "it would call collections.OrderedDict"),
        (pickle.dumps(Fraction(1, 2), protocol=2), "it would call fractions.Fraction"),
        (pickle.dumps(np.arange(3.0), protocol=2), "an array of 'f8' and not of uint8"),
        (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x01\x85U\x02f4\x89U\x04abcdtb.",
            "an array of 'f4' and not of uint8",
        ),
        (b"\x80\x02}U\x01ab.", "it would change a dict"),
        (b"\x80\x02(.", "cannot read the file"),
        (b"\x80\x02R.", "a value is missing"),
        (b"\x80\x02h\x07.", "cannot read the file: 7"),
        (b"", "pickle exhausted"),
        (b"\x1f\x8b\x08", "cannot read the file"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01\x8a\x0a" + b"\x7f" * 10 + b"\x85", "cannot read"),
        (batch(np.zeros((1, 4, 4, 3), dtype=np.uint8), [1], key="labels")[:-40], "cannot read the file"),
    ],
)
def test_all_else_is_one_line(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(content)
    assert "\n" not in str(caught.value)


def test_lists_that_name_each_other_take_no_longer_than_their_file() -> None:
    twice = [b"]q" + bytes([k]) + 2 * (b"h" + bytes([k - 1]) + b"a") for k in range(1, 60)]
    found = read(b"\x80\x02](]q\x00" + b"".join(twice) + b"e.")
    assert isinstance(found, list)
    assert len(found) == 60
