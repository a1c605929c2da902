"""Generators of a client's own draws, from its secret or the run's seed; `local_training` and `batching` draw.

Who knows which example is in which step can solve for single examples from the updates of some rounds. So a client that
has a secret draws from that, and from nothing that a server sends but the numbers of the question itself: the same
question asked again is answered alike, another one (another round, other sizes) from an independent draw. A simulation
without secrets draws from the run's seed, and so is a function of its config.

Public on purpose are the initialisation of adapters and heads, the projections of sketches, random masks of weights,
which clients a round asks, and dropout above a cut: a server has to know them, and none of them selects an example.
"""

from typing import Literal, TypeAlias

import numpy as np
import torch

from atlas_fl.frozen import Frozen
from atlas_fl.rng import Seed, derive_secret, derive_seed, generator, secret_normals, torch_generator

Use: TypeAlias = Literal[
    "order", "subset", "halves", "gradients", "augment", "dropout", "sensitivity", "term", "trainer", "update", "noise"
]
"""Use of a draw; draws of two uses are independent."""


def secret_of_question(secret: bytes, question: str) -> bytes:
    """A client's secret for one question, whose draws are independent of those for any other."""
    return derive_secret(secret, "private", question)


class Draws(Frozen):
    """Where one client's draws come from."""

    client: str
    seed: int
    """The run's, which the server knows; looked at where there is no secret."""
    secret: bytes | None
    """The client's own."""

    def generator(self, use: Use, *path: object, asked: tuple[object, ...] = ()) -> np.random.Generator:
        """A NumPy generator for this use and path.

        With a secret also for the sizes that were `asked` for: draws for two sizes, of which one begins like the other,
        would tell their difference.
        """
        if self.secret is None:
            return generator(self.seed, use, self.client, *path)
        return generator(self.secret, use, self.client, *path, *asked)

    def torch_generator(self, use: Use, *path: object) -> torch.Generator:
        """A PyTorch generator of the CPU for this use and path."""
        return torch_generator(self.seed if self.secret is None else self.secret, use, self.client, *path)

    def normals(self, use: Use, *path: object, count: int) -> torch.Tensor:
        """Standard normal numbers for this use and path, (count,) float32; of a secret by SHAKE-256."""
        if self.secret is None:
            return torch.randn(count, generator=self.torch_generator(use, *path))
        values = secret_normals(derive_secret(self.secret, use, self.client, *path), count)
        return torch.from_numpy(values.astype(np.float32))

    def derive(self, use: Use) -> Seed:
        """A seed for this use, to be derived from further."""
        if self.secret is None:
            return derive_seed(self.seed, use, self.client)
        return derive_secret(self.secret, use, self.client)
