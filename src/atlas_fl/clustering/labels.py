"""Settings of a clustering, and cluster labels that do not depend on the order of clients.

`ClusteringSettings` holds every number of a clustering in one place, because the plan records all of them.
`stable_labels` keeps the meaning of labels when clients are clustered again.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from atlas_fl.frozen import Frozen


class ClusteringSettings(Frozen):
    """Settings of a clustering, which `config.validation` has checked."""

    seed: int
    """Seed of k-means and of the rotations."""
    clusters: str = "auto"
    """`auto`, a number of clusters, or `oracle` where they are the true tasks."""
    cluster_by: str = "corrected"
    """A name of METHODS."""
    k_range: tuple[int, int] = (2, 5)
    """Smallest and largest k of the search."""
    min_cluster_size: int = 1
    """Clusters below this size are merged into their nearest."""
    pca_components: int = 64
    """Most principal components."""
    incremental_pca: bool = False
    """Fit the components in batches of clients."""
    threshold: float = 0.6
    """Noise-corrected similarity from which clients share a cluster."""
    min_reliability: float = 0.1
    """Agreement of its halves below which a client is undecided: three standard deviations of the noise of a sketch
    of 1024. With -1 nobody is."""
    centre: bool = False
    """Subtract the mean over clients; the `fisher` fingerprint needs it."""
    stability: float = 0.0
    """Weight of the previous clustering when clients are clustered again, in [0, 1)."""
    draws: int = 99
    """Random rotations of the test for structure; 19 are the fewest for a 5% level."""

    @property
    def fixed_k(self) -> int | None:
        """The number of clusters that was asked for, if any."""
        return None if self.clusters in ("auto", "oracle") else int(self.clusters)


UNDECIDED = -1
"""Label of a client that is in no cluster."""


def stable_labels(previous: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """The new labels renamed so that as many clients as possible keep their label (Hungarian matching, Kuhn 1955).

    Both are of the same clients in the same order. A new cluster with no counterpart gets the smallest label that
    neither clustering's matched clusters nor `previous` use; undecided clients (-1) stay so and match nothing.
    """
    before, after = np.asarray(previous), np.asarray(new)
    old_names, new_names = decided_labels(previous), decided_labels(new)
    overlap = np.array([[np.sum((before == old) & (after == name)) for name in new_names] for old in old_names])
    renamed = {UNDECIDED: UNDECIDED}
    if overlap.size:
        for row, column in zip(*linear_sum_assignment(overlap, maximize=True), strict=True):
            if overlap[row, column] > 0:
                renamed[new_names[column]] = old_names[row]
    fresh = iter(label for label in range(len(old_names) + len(new_names) + 1) if label not in set(old_names))
    return tuple(renamed[label] if label in renamed else renamed.setdefault(label, next(fresh)) for label in new)


def decided_labels(labels: Sequence[int]) -> list[int]:
    """The labels in use, ascending, without that of undecided clients."""
    return sorted({int(label) for label in labels} - {UNDECIDED})


def number_by_first_client(labels: np.ndarray) -> tuple[int, ...]:
    """The same partition with clusters numbered 0, 1, ... in the order of their first client; -1 stays."""
    names: dict[int, int] = {UNDECIDED: UNDECIDED}
    return tuple(names.setdefault(int(label), len(names) - 1) for label in labels)


def name_labels(labels: np.ndarray, *, previous: Sequence[int] | None) -> tuple[int, ...]:
    """The labels numbered by first clients, and with `previous` ones renamed to keep these (`stable_labels`)."""
    numbered = number_by_first_client(labels)
    return numbered if previous is None else stable_labels(previous, numbered)
