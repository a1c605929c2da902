"""The numbers of a clustering, in one place because the plan records every one of them."""

from collections.abc import Collection
from dataclasses import dataclass

from atlas_fl.errors import ConfigError, unknown


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How clients are clustered."""

    seed: int
    """Seed of k-means, of the gap's references and of the rotations."""
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


def check(settings: Settings, *, methods: Collection[str]) -> None:
    """Raises ConfigError for the first setting that is out of range, naming what is allowed."""
    if settings.clusters != "auto" and not (settings.clusters.isdecimal() and int(settings.clusters) > 0):
        raise ConfigError(f"clusters {settings.clusters!r} is neither auto nor a positive number")
    if settings.cluster_by not in methods:
        raise unknown("cluster_by", settings.cluster_by, methods)
    low, high = settings.k_range
    if not 2 <= low <= high:
        raise ConfigError(f"k_range {low} {high} is empty; it needs 2 <= smallest <= largest")
    ranges = {
        "min_cluster_size": (settings.min_cluster_size >= 1, "at least 1"),
        "pca_components": (settings.pca_components >= 1, "at least 1"),
        "threshold": (-1 < settings.threshold < 1, "between -1 and 1"),
        "min_reliability": (-1 <= settings.min_reliability < 1, "from -1 to below 1"),
        "stability": (0 <= settings.stability < 1, "from 0 to below 1"),
        "draws": (settings.draws >= 19, "at least 19, the fewest that can reach a level of 5%"),
    }
    for name, (fine, allowed) in ranges.items():
        if not fine:
            raise ConfigError(f"{name} {getattr(settings, name)} is out of range; allowed: {allowed}")
