"""Randomness as an argument: every generator is derived from the run's seed and a path of names.

A resumed run needs no generator state, because `generator(seed, "round", 3, "client", "movie-0")`
is the same stream whenever and wherever it is asked for.
"""

from hashlib import blake2b

import numpy as np
import torch


def derive_seed(seed: int, *path: object) -> int:
    """A 63-bit seed that depends on every part of the path and on nothing else."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in path)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *path: object) -> np.random.Generator:
    """A NumPy generator for this path."""
    return np.random.default_rng(derive_seed(seed, *path))


def torch_generator(seed: int, *path: object, device: str = "cpu") -> torch.Generator:
    """A PyTorch generator for this path; draws on the CPU are the same on every machine."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *path))
