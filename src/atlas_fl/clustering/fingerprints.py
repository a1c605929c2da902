"""FINGERPRINTS: statistics of a client's batch gradients that are sketched, by the name of `--fingerprint`."""

from collections.abc import Callable

import torch
from torch import Tensor

from atlas_fl.frozen import Frozen

EMBEDDING = "embedding"
WITHOUT_GRADIENTS = ("delta", EMBEDDING)
"""Fingerprints that are no statistic of gradients: a short training of adapters, and the mean of the texts' embeddings
by the frozen model (`client.embeddings`)."""


class GradientFingerprint(Frozen):
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


def is_centred(fingerprint: str) -> bool:
    """Return whether the mean over clients is subtracted from sketches of this kind."""
    known = FINGERPRINTS.get(fingerprint)
    return fingerprint == EMBEDDING or (known is not None and known.centre)
