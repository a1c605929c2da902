"""Clients in blocks: matrices of very many clients hold numbers inside a block alone, as sparse arrays."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from scipy.sparse import block_array, csr_array, triu
from scipy.sparse.csgraph import connected_components

MOST_EXACT = 1000
"""Clients up to which similarities are those of all pairs, and all are clustered together."""
MOST_PREDICTED = 300
"""Clients up to which a prediction is from all of them; its seconds grow with their number to the power of 3.3."""
MOST_IN_BLOCK = 128
"""Clients of a block; the mean of so many has the noise of one over 128."""

Matrix: TypeAlias = np.ndarray | csr_array
"""(n, n): of all pairs, or sparse and of the pairs inside blocks."""


def blocks_of(labels: np.ndarray, *, most: int = MOST_IN_BLOCK) -> list[np.ndarray]:
    """Places of the clients in blocks of at most so many, by clusters; undecided ones (-1) are in none.

    A larger cluster is cut into equal parts, smaller ones share a block.
    """
    order = np.argsort(labels, kind="stable")
    order = order[labels[order] >= 0]
    blocks: list[np.ndarray] = []
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        for part in np.array_split(members, max(1, -(-len(members) // most))):
            if blocks and len(blocks[-1]) + len(part) <= most:
                blocks[-1] = np.concatenate([blocks[-1], part])
            else:
                blocks.append(part)
    return blocks


def from_blocks(blocks: Sequence[np.ndarray], matrices: Sequence[np.ndarray], size: int) -> csr_array:
    """The sparse matrix (size, size) with these matrices at the places of the blocks."""
    rows = np.concatenate([np.repeat(block, len(block)) for block in blocks])
    columns = np.concatenate([np.tile(block, len(block)) for block in blocks])
    values = np.concatenate([np.ravel(matrix) for matrix in matrices])
    matrix = csr_array((values, (rows, columns)), shape=(size, size))
    matrix.eliminate_zeros()
    return matrix


def by_blocks(matrix: Matrix, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Matrix:
    """The matrix that a function makes of (the numbers of a block, their places), block by block; of all in one.

    Blocks of a sparse matrix are places between which numbers stand, directly or through others.
    """
    if isinstance(matrix, np.ndarray):
        return function(matrix, np.arange(len(matrix)))
    matrix, labels = csr_array(matrix), connected_components(matrix, directed=False)[1]
    blocks = np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels))[:-1])
    return from_blocks(blocks, [function(dense(matrix, block), block) for block in blocks], len(labels))


def take(matrix: Matrix, places: np.ndarray) -> Matrix:
    """The rows and columns of these places."""
    return matrix[np.ix_(places, places)] if isinstance(matrix, np.ndarray) else matrix[places][:, places]


def dense(matrix: Matrix, places: np.ndarray) -> np.ndarray:
    """The same as an array."""
    inside = take(matrix, places)
    return inside if isinstance(inside, np.ndarray) else np.asarray(inside.toarray())


def grow(matrix: Matrix, numbers: np.ndarray) -> Matrix:
    """The matrix (n + 1, n + 1) with these numbers (n + 1,) as its last row and column."""
    row, column = numbers[None, :-1], numbers[:-1, None]
    if isinstance(matrix, np.ndarray):
        return np.block([[matrix, column], [row, numbers[-1:, None]]])
    return csr_array(block_array([[matrix, csr_array(column)], [csr_array(row), csr_array(numbers[-1:, None])]]))


def pairs_inside(matrix: Matrix, places: np.ndarray) -> np.ndarray:
    """The numbers of all pairs of these places; of a sparse matrix those of the pairs that it holds."""
    inside = take(matrix, places)
    if isinstance(inside, np.ndarray):
        return np.asarray(inside[np.triu_indices(len(places), 1)])
    return np.asarray(triu(inside, 1).data)


def to_plain(matrix: Matrix) -> Any:
    """The matrix as plain data for strict JSON: rows, or for a sparse one the three lists of its CSR format."""
    if isinstance(matrix, np.ndarray):
        return matrix.tolist()
    return {name: getattr(matrix, name).tolist() for name in ("data", "indices", "indptr")}


def from_plain(data: Any) -> Matrix:
    """The inverse of `to_plain`."""
    if not isinstance(data, dict):
        return np.array(data, dtype=np.float64)
    parts = (np.array(data["data"], np.float64), np.array(data["indices"]), np.array(data["indptr"]))
    return csr_array(parts, shape=(len(parts[2]) - 1,) * 2)
