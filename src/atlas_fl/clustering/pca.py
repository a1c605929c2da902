"""Principal components of the clients' sketches, on the server."""

from dataclasses import dataclass

import numpy as np
from sklearn.decomposition import IncrementalPCA

LOW_VARIANCE = 0.8
"""Explained variance below which the components are called too few."""


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Clients as points."""

    points: np.ndarray
    """Coordinates, float64 (n, components)."""
    explained_variance: float
    """Share of the variance that the components hold; 1 where there is none to explain."""

    @property
    def components(self) -> int:
        """Number of components kept: at most n - 1, the rank of n centred sketches."""
        return int(self.points.shape[1])


def embed(sketches: np.ndarray, *, components: int = 64, incremental: bool = False) -> Embedding:
    """Principal components of sketches (n, d): min(components, n - 1, d) of them, never padded.

    `incremental` fits in batches (scikit-learn's IncrementalPCA), for more clients than one decomposition holds;
    with no more clients than one batch it gives the same points. Signs are fixed: the largest entry is positive.
    """
    rows = np.asarray(sketches, dtype=np.float64)
    centred = rows - rows.mean(axis=0)
    kept = min(components, rows.shape[0] - 1, rows.shape[1])
    variance = float(np.square(centred).sum())
    if kept < 1 or variance < 1e-18 * rows.size:
        return Embedding(points=np.zeros((rows.shape[0], max(kept, 0))), explained_variance=1.0)
    points = _in_batches(rows, kept) if incremental else _at_once(centred, kept)
    largest = points[np.abs(points).argmax(axis=0), np.arange(kept)]
    explained = float(np.square(points).sum()) / variance
    return Embedding(points=points * np.where(largest < 0, -1.0, 1.0), explained_variance=min(explained, 1.0))


def _at_once(centred: np.ndarray, kept: int) -> np.ndarray:
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    return np.asarray(left[:, :kept] * singular[:kept])


def _in_batches(rows: np.ndarray, kept: int) -> np.ndarray:
    model = IncrementalPCA(n_components=kept, batch_size=max(256, 4 * kept))
    return np.asarray(model.fit_transform(rows), dtype=np.float64)
