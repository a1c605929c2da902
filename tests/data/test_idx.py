import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.data.image_sets import read_idx
from atlas_fl.errors import DataError

BY_HAND = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])


def test_two_rows_of_three_by_hand(tmp_path: Path) -> None:
    (tmp_path / "t.gz").write_bytes(gzip.compress(BY_HAND))
    assert read_idx(tmp_path / "t.gz").tolist() == [[1, 2, 3], [4, 5, 6]]


def test_sizes_are_big_endian(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 1]) + struct.pack(">I", 300) + bytes(300)))
    assert read_idx(path).shape == (300,)
    assert read_idx(path).dtype == np.uint8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BY_HAND[:-1], "is cut off: it tells of 2 x 3 values and holds 5"),
        (BY_HAND + b"x", "is cut off: it tells of 2 x 3 values and holds 7"),
        (b"", "is no IDX file of bytes"),
        (BY_HAND[:9], "is no IDX file of bytes"),
        (bytes([0, 0, 13]) + BY_HAND[3:], "is no IDX file of bytes"),
        (bytes([0, 0, 8, 0]), "is no IDX file of bytes"),
    ],
)
def test_a_wrong_file_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "t")


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(BY_HAND)
    for content in (packed[:-6], b"not packed", packed[:12] + b"\xff" + packed[13:]):
        (tmp_path / "t.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"cannot read .*t\.gz: .*; get the file again"):
            read_idx(tmp_path / "t.gz")
    with pytest.raises(DataError, match=r"cannot read .*none\.gz"):
        read_idx(tmp_path / "none.gz")
