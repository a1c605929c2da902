"""A clustering with one client more, placed beside the clusters that there are; nobody else's place changes."""

from dataclasses import replace

import numpy as np

from atlas_fl.clustering.pca import embed
from atlas_fl.clustering.result import Clustering
from atlas_fl.clustering.search import mean_sketch
from atlas_fl.clustering.similarity import corrected_similarity, cross_similarity, prepare, reliability
from atlas_fl.errors import ConfigError


def with_client(clustering: Clustering, sketches: np.ndarray, *, label: int) -> Clustering:
    """The clustering of n clients and one that came later, under this label.

    `sketches` (2, n + 1, d) are both halves of all of them, the newcomer's last; its similarities are measured as those
    of the others were (noise-corrected, less the same offsets) and stand beside theirs. What a later client is
    compared with stays what it was. Raises `ConfigError` where the sketches are not of these clients.
    """
    dim, size = clustering.offsets.shape[1], len(clustering.labels) + 1
    if sketches.shape != (2, size, dim):
        raise ConfigError(f"sketches of shape {sketches.shape} beside clusters of {size - 1} clients and {dim} numbers")
    left, right = (prepare(half, offset=mean) for half, mean in zip(sketches, clustering.offsets, strict=True))
    cross = cross_similarity(left, right)
    own, floor = reliability(cross), 0.0 if clustering.settings is None else clustering.settings.min_reliability
    decided = np.append(clustering.reliability >= floor, own[-1] >= floor)
    found = corrected_similarity(cross, floor=max(floor, 0.0))[-1] * (decided & decided[-1])
    found[-1] = 1.0
    similarity = np.block([[clustering.similarity, found[:-1, None]], [found[None, :]]])
    points = embed(mean_sketch(left, right), components=2).points
    return replace(
        clustering,
        labels=(*clustering.labels, label),
        similarity=similarity,
        reliability=np.append(clustering.reliability, own[-1]),
        points=np.pad(points, ((0, 0), (0, 2 - points.shape[1]))),
    )
