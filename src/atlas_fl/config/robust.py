"""The settings of robust aggregation: how large an update and a weight may be, and what withstands hostile clients."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RobustConfig:
    """Robust aggregation: what an update, or a claim of examples, may do to the others."""

    norm_bound: Literal["refuse", "clip", "off"] = "refuse"
    """What happens to an update whose change is more than `--max-norm-ratio` times the median norm of the round: it is
    refused, or scaled down to that."""
    max_norm_ratio: float = 10.0
    """Largest norm of a client's change, as a multiple of the median over the clients that trained in the round, of
    heads over those of the same task; compared from three clients on."""
    max_share: float = 0.5
    """Largest share of a weighted average that one client's examples may give it, where three or more are averaged; 1
    leaves the shares as they are."""
    within: Literal["all", "clusters"] = "all"
    """Where `median`, `trimmed_mean`, `krum`, `multi_krum` and `geometric_median` are applied: over all clients, or
    inside each cluster."""
    trim: float = 0.2
    """Share of the clients whose values `trimmed_mean` leaves out at each end, rounded up."""
    byzantine: int = 1
    """Hostile clients that `krum` and `multi_krum` expect among those that are aggregated."""
