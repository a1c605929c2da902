"""The rows of a mixing matrix, sorted so that equal work is done once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float64
from scipy.sparse.csgraph import connected_components


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Rows of M with the same support: their sources are stacked once."""

    sources: tuple[int, ...]
    """Clients with a weight in these rows."""
    rows: Float64[np.ndarray, "distinct sources"]
    """The distinct rows, on the sources alone."""
    targets: tuple[tuple[int, ...], ...]
    """For each distinct row the clients that receive it."""

    @cached_property
    def everyone(self) -> tuple[int, ...]:
        """Sources and targets, in order."""
        return tuple(sorted({*self.sources, *(k for targets in self.targets for k in targets)}))


def groups_of(matrix: Float64[np.ndarray, "n n"]) -> tuple[Group, ...]:
    """The rows that are not those of the identity, grouped by support; equal rows appear once."""
    unmoved = np.flatnonzero((matrix == np.eye(len(matrix))).all(axis=1)).tolist()
    equal: dict[bytes, list[int]] = {}
    for k in sorted(set(range(len(matrix))).difference(unmoved)):
        equal.setdefault(matrix[k].tobytes(), []).append(k)
    by_support: dict[tuple[int, ...], list[list[int]]] = {}
    for clients in equal.values():
        by_support.setdefault(tuple(np.flatnonzero(matrix[clients[0]]).tolist()), []).append(clients)
    return tuple(
        Group(
            sources=sources,
            rows=matrix[[clients[0] for clients in targets]][:, list(sources)],
            targets=tuple(map(tuple, targets)),
        )
        for sources, targets in by_support.items()
    )


def components_of(matrix: Float64[np.ndarray, "n n"]) -> tuple[int, ...]:
    """A number for each client: equal where models flow between the two, directly or through others."""
    return tuple(connected_components(matrix != 0, directed=False)[1].tolist())
