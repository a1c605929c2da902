"""Arrays of uint8 in the IDX format of MNIST and its likes, packed with gzip or not.

Y. LeCun, C. Cortes and C. Burges, The MNIST database of handwritten digits, 1998: two zero bytes, the type (8 is
uint8), the number of dimensions, each as big-endian uint32, then the values.
"""

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.errors import DataError

_UINT8 = 8


def read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array of a file; a `DataError` if it is missing, cut off or of another format."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())[:120]}; get the file again") from error
    num_dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * num_dimensions
    if len(content) < start or content[:3] != bytes([0, 0, _UINT8]) or not num_dimensions:
        raise DataError(f"{path} is no IDX file of bytes; get the file again")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) - start != prod(shape):
        told = " x ".join(map(str, shape))
        raise DataError(f"{path} is cut off: it tells of {told} values and holds {len(content) - start}; get it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
