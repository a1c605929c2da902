"""Sketches of fingerprints: what leaves the client instead of a gradient as large as the model.

CountSketch (Charikar, Chen and Farach-Colton 2002; as feature hashing, Weinberger et al. 2009): every coordinate is
added with a random sign to one of `dim` buckets. Inner products are kept without bias, with variance
`(|x|^2 |y|^2 + <x,y>^2 - 2 sum x_i^2 y_i^2) / dim`, so cosines are right to about `1 / sqrt(dim)`: .03 at 1024.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from atlas_fl.errors import ConfigError, DataError
from atlas_fl.rng import seed_of

CHUNK = 1 << 18
"""Coordinates that are hashed at once: 2 MB of scratch for each array, however large the tensor."""


def sketch(tensors: Mapping[str, torch.Tensor], *, dim: int, seed: int) -> np.ndarray:
    """The sketch, float32 (dim,) of unit norm, of tensors that are each divided by their L2 norm first.

    A function of (seed, key, size) and the values alone: clients on other machines and library versions agree
    without exchanging anything. A tensor of zeros adds nothing.
    Raises ConfigError for `dim` below 2 and DataError for NaN, infinity or when every tensor is zero.
    """
    return joined(sketch_parts(tensors, dim=dim, seed=seed).values())


def sketch_parts(tensors: Mapping[str, torch.Tensor], *, dim: int, seed: int) -> dict[str, np.ndarray]:
    """What every tensor adds to their sketch before it is divided by its norm, float64 (dim,), by name.

    A sketch is linear: tensors that lie on two machines are sketched there, and `joined` here.
    Raises ConfigError for `dim` below 2 and DataError for NaN or infinity.
    """
    if dim < 2:
        raise ConfigError(f"sketch_dim {dim} is too small; at least 2, 1024 is usual")
    return {
        key: _unit_sketch(key, tensor, dim=dim, seed=seed_of(seed, "sketch", key, tensor.numel()))
        for key, tensor in tensors.items()
    }


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The sketch of tensors with these parts, float32 (dim,) of unit norm; summed in their order, which decides on the
    last bits.

    Raises DataError when every tensor is zero.
    """
    ordered = list(parts)
    total = np.zeros(len(ordered[0]) if ordered else 0)
    for part in ordered:
        total += part
    norm = float(np.linalg.norm(total))
    if norm == 0.0:
        raise DataError("the fingerprint is zero in every tensor; use more batches or warm-up steps")
    return np.asarray((total / norm).astype(np.float32))


def _unit_sketch(key: str, tensor: torch.Tensor, *, dim: int, seed: int) -> np.ndarray:
    """The sketch of one tensor over its L2 norm: linear, so both come out of one pass."""
    total, square_sum = np.zeros(dim), 0.0
    for start, values in _chunks(tensor):
        square_sum += float(values @ values)
        hashes = _hashes(seed, start, len(values))
        signs = 1.0 - 2.0 * (hashes & np.uint64(1))
        buckets = ((hashes >> np.uint64(1)) % np.uint64(dim)).astype(np.int64)
        total += np.bincount(buckets, weights=signs * values, minlength=dim)
    if not math.isfinite(square_sum):
        raise DataError(f"fingerprint tensor {key!r} holds NaN or infinity; lower the learning rate or check the data")
    return total / math.sqrt(square_sum) if square_sum > 0 else total


def _chunks(tensor: torch.Tensor) -> Iterator[tuple[int, np.ndarray]]:
    """Start and float64 values of each piece; a view of the tensor where it is contiguous."""
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield start, flat[start : start + CHUNK].to(device="cpu", dtype=torch.float64).numpy()


def _hashes(seed: int, start: int, count: int) -> np.ndarray:
    """uint64 (count,): SplitMix64 (Steele, Lea and Flood 2014) of the coordinate's index.

    A hash and not a generator, because the streams of generators may change between library versions.
    """
    state = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
