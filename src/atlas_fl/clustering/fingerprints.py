"""FINGERPRINTS: what is sketched of a client's batch gradients, by the name of `--fingerprint`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_UPS = ("delta",)
"""Fingerprints that are no statistic of gradients: a short training of adapters."""


@dataclass(frozen=True, kw_only=True)
class GradientFingerprint:
    """A statistic of a client's batch gradients g_1, ..., g_n, by tensor: `total(sum_i each(g_i))`, up to a factor."""

    each: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor] = torch.positive
    centre: bool = False
    """Subtract the mean over clients from their sketches, which have much in common."""


FINGERPRINTS: dict[str, GradientFingerprint] = {
    "gradient": GradientFingerprint(each=torch.positive),
    # Fisher information is positive everywhere; what tells clients apart is its difference from the mean.
    "fisher": GradientFingerprint(each=torch.square, total=torch.sqrt, centre=True),
}
