"""Federations as rules know them, of which a test says what matters to it."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from atlas_fl.aggregation.matrices import Federation


def federation_of(
    clients: Iterable[str], *, weights: Any = None, clusters: Any = None, tasks: Iterable[str] = (), **fields: Any
) -> Federation:
    """Clients of one task and one cluster without edges, each of one example, unless told otherwise."""
    names = tuple(clients)
    n = len(names)
    return Federation(
        clients=names,
        weights=np.ones(n) if weights is None else np.array(weights, dtype=np.float64),
        clusters=np.zeros(n, np.int64) if clusters is None else np.array(clusters),
        head_groups=tuple(tasks) or ("t",) * n,
        **{"adjacency": np.zeros((n, n)), **fields},
    )
