"""Randomness as an argument: every generator is derived from a seed and a path of names.

A resumed run needs no generator state, because `generator(seed, "round", 3, "client", "movie-0")`
is the same stream whenever and wherever it is asked for. The seed is a run's, which all know who know its config, or a
secret of 32 bytes: who lacks that can tell no stream of it from another.
"""

from hashlib import blake2b, shake_256
from typing import TypeAlias

import numpy as np
import torch

Seed: TypeAlias = int | bytes
"""A run's seed, which is public, or a secret."""


def derive_seed(seed: int, *path: object) -> int:
    """A 63-bit seed that depends on every part of the path and on nothing else."""
    return int.from_bytes(blake2b(_encode_path(str(seed), *path), digest_size=8).digest(), "big") >> 1


def derive_secret(secret: bytes, *path: object) -> bytes:
    """A secret of 32 bytes for this path; whoever has it learns nothing of `secret`, or of the secret of another."""
    return blake2b(_encode_path(*path), key=secret, person=b"draws", digest_size=32).digest()


def generator(seed: Seed, *path: object) -> np.random.Generator:
    """A NumPy generator for this path."""
    if isinstance(seed, bytes):
        return np.random.default_rng(int.from_bytes(derive_secret(seed, *path), "big"))
    return np.random.default_rng(derive_seed(seed, *path))


def torch_generator(seed: Seed, *path: object, device: str = "cpu") -> torch.Generator:
    """A PyTorch generator for this path; draws on the CPU are the same on every machine. A secret's are of the CPU."""
    if isinstance(seed, bytes):
        return _with_state_of(derive_secret(seed, *path))
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *path))


def secret_normals(secret: bytes, count: int) -> np.ndarray:
    """So many standard normal numbers of SHAKE-256 under this secret, (count,) float64; the largest there is is 8.6.

    Who sees some of them cannot compute the others, as of a Mersenne twister.
    """
    pairs = (count + 1) // 2
    words = np.frombuffer(shake_256(secret).digest(16 * pairs), "<u8").reshape(2, pairs)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def secret_skellam(secret: bytes, variance: float, count: int) -> np.ndarray:
    """So many differences of two Poisson numbers, of this variance of 2,000 or more, (count,) int64."""
    plus, minus = (_secret_poisson(derive_secret(secret, sign), variance / 2, count) for sign in "+-")
    return np.asarray(plus - minus, np.int64)


def _secret_poisson(secret: bytes, mean: float, count: int) -> np.ndarray:
    """So many Poisson numbers of SHAKE-256 under this secret, (count,) float64, by rejection (Hörmann 1993, PTRS).

    The logarithm of their chance is that of Loader's expansion, since that of NumPy is off by .06 for a mean of 10^13.
    """
    slope = 0.931 + 2.53 * np.sqrt(mean)
    shift, scale, surely = 0.02483 * slope - 0.059, 1.1239 + 1.1328 / (slope - 3.4), 0.9277 - 3.6224 / (slope - 2)
    draws, drawn = np.zeros(0), 0
    while len(draws) < count:
        pairs, drawn = 2 * (count - len(draws)) + 16, drawn + 1
        words = np.frombuffer(shake_256(derive_secret(secret, drawn)).digest(16 * pairs), "<u8").reshape(2, pairs)
        u, v = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        u -= 0.5
        edge = 0.5 - np.abs(u)
        k = np.maximum(np.floor((2 * shift / edge + slope) * u + mean + 0.43), 1.0)  # there is no 0 at such means
        off = (k - mean) / mean
        chance = -mean * ((1 + off) * np.log1p(off) - off) - 0.5 * np.log(2 * np.pi * k) - 1 / (12 * k)
        is_taken = (np.log(v * scale / (shift / edge**2 + slope)) <= chance) & ((edge >= 0.013) | (v <= edge))
        draws = np.concatenate([draws, k[is_taken | ((edge >= 0.07) & (v <= surely))]])
    return draws[:count]


def _encode_path(first: object, *path: object) -> bytes:
    return "\x1f".join([str(first), *(f"{type(part).__name__}:{part}" for part in path)]).encode()


_WORDS, _FIRST_WORD = 624, 24
"""Words of a Mersenne twister's state, and the byte at which they begin in PyTorch's, eight bytes each."""


def _with_state_of(secret: bytes) -> torch.Generator:
    """A generator of the CPU whose whole state follows from the secret: `manual_seed` looks at 32 bits of a seed."""
    made = torch.Generator()
    state = made.get_state()
    words = np.frombuffer(shake_256(secret).digest(4 * _WORDS), "<u4").astype("<u8")
    state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS] = torch.from_numpy(words.view(np.uint8))
    made.set_state(state)
    return made
