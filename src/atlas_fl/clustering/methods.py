"""The registry of ways to cluster: each proposes, is tested by its own statistic, and knows what no structure means."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from atlas_fl.clustering import linkage
from atlas_fl.clustering.search import Proposal, best_silhouette, search
from atlas_fl.clustering.settings import Settings


class Propose(Protocol):
    """Clusters from both halves (n, d), (n, d) of decided clients."""

    def __call__(
        self, first: np.ndarray, second: np.ndarray, settings: Settings, *, previous: np.ndarray | None = None
    ) -> Proposal:
        """The proposal; `previous` are the labels (n,) of an earlier clustering."""
        ...


class Measure(Protocol):
    """A statistic of both halves (n, d), (n, d) of decided clients."""

    def __call__(self, first: np.ndarray, second: np.ndarray, settings: Settings) -> float:
        """The statistic."""
        ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to cluster."""

    propose: Propose
    """Clusters and the k table."""
    statistic: Measure
    """What the test for structure compares with rotated clients."""
    without_structure: Callable[[np.ndarray, np.ndarray, Settings, np.ndarray], np.ndarray]
    """Labels (n,) from the proposed ones when the verdict is "no structure"."""
    corrected: bool
    """Whether a new client is placed by corrected similarity, or else by the nearest centroid."""


def one_cluster(first: np.ndarray, second: np.ndarray, settings: Settings, labels: np.ndarray) -> np.ndarray:
    """Labels (n,) of one cluster for all."""
    del first, second, settings
    return np.zeros_like(labels)


K_SEARCH = Method(propose=search, statistic=best_silhouette, without_structure=one_cluster, corrected=False)

METHODS: dict[str, Method] = {
    "corrected": Method(
        propose=linkage.propose,
        statistic=linkage.separation,
        without_structure=linkage.without_structure,
        corrected=True,
    ),
    "atlas": K_SEARCH,
    "silhouette": K_SEARCH,
    "gap": K_SEARCH,
}
"""`cluster_by`: noise-corrected average linkage, and the k search by the rule of that name (`scores.RULES`)."""
