"""Sketches of fingerprints, their principal components, and the noise-corrected similarity of clients.

A sketch leaves the client instead of a gradient as large as the model. CountSketch (Charikar, Chen and Farach-Colton
2002; as feature hashing, Weinberger et al. 2009) adds every coordinate with a random sign to one of `dim` buckets.
Inner products are kept without bias, with variance `(|x|^2 |y|^2 + <x,y>^2 - 2 sum x_i^2 y_i^2) / dim`, so cosines are
right to about `1 / sqrt(dim)`: .03 at 1024.

The server computes the principal components of the clients' sketches, and how similar two clients are with the noise of
their own fingerprints removed. Every client sends two sketches from disjoint halves of its examples. The cosine across
halves, c_kl, is free of the noise that the halves do not share. c_kk is the share of signal in a sketch, and Spearman's
correction for attenuation (1904) divides it out: `rho_kl = c_kl / sqrt(c_kk c_ll)` is 1 where two clients differ no
more than each differs from itself.
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch

from atlas_fl.clustering.blocks import MOST_EXACT
from atlas_fl.errors import DataError
from atlas_fl.frozen import Frozen
from atlas_fl.rng import derive_seed

CHUNK = 1 << 18
"""Coordinates that are hashed at once: 2 MB of scratch for each array, however large the tensor."""


def sketch(tensors: Mapping[str, torch.Tensor], *, dim: int, seed: int) -> np.ndarray:
    """The sketch, float32 (dim,) of unit norm, of tensors that are each divided by their L2 norm first.

    A function of (seed, key, size) and the values alone: clients on other machines and library versions agree
    without exchanging anything. A tensor of zeros adds nothing.
    Raises DataError for NaN, infinity or when every tensor is zero.
    """
    return combine_parts(sketch_parts(tensors, dim=dim, seed=seed).values())


def sketch_parts(tensors: Mapping[str, torch.Tensor], *, dim: int, seed: int) -> dict[str, np.ndarray]:
    """Addend of every tensor to their sketch before it is divided by its norm, float64 (dim,), by name.

    A sketch is linear: tensors that lie on two machines are sketched there, and put together by `combine_parts`.
    Raises DataError for NaN or infinity.
    """
    return {
        key: _unit_sketch(key, tensor, dim=dim, seed=derive_seed(seed, "sketch", key, tensor.numel()))
        for key, tensor in tensors.items()
    }


def combine_parts(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The sketch of tensors with these parts, float32 (dim,) of unit norm; summed in their order, which decides on the
    last bits.

    Raises DataError when every tensor is zero.
    """
    total = np.asarray(sum(parts))
    norm = float(np.linalg.norm(total))
    if norm == 0.0:
        raise DataError("the fingerprint is zero in every tensor; use more batches or warm-up steps")
    return np.asarray((total / norm).astype(np.float32))


def _unit_sketch(key: str, tensor: torch.Tensor, *, dim: int, seed: int) -> np.ndarray:
    """The sketch of one tensor over its L2 norm: linear, so both come out of one pass."""
    total, square_sum = np.zeros(dim), 0.0
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        values = flat[start : start + CHUNK].to(device="cpu", dtype=torch.float64).numpy()
        square_sum += float(values @ values)
        buckets, signs = _places(seed, start, len(values), dim)
        total += np.bincount(buckets, weights=signs * values, minlength=dim)
    if not math.isfinite(square_sum):
        raise DataError(f"fingerprint tensor {key!r} holds NaN or infinity; lower the learning rate or check the data")
    return total / math.sqrt(square_sum) if square_sum > 0 else total


@lru_cache(maxsize=64)  # 80 MB at most; one client after another hashes the same coordinates
def _places(seed: int, start: int, count: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(bucket, sign) of each coordinate: int32 (count,) below `dim`, and int8 (count,) of 1 and -1."""
    hashes = _hashes(seed, start, count)
    buckets = ((hashes >> np.uint64(1)) % np.uint64(dim)).astype(np.int32)
    return buckets, 1 - 2 * (hashes & np.uint64(1)).astype(np.int8)


def _hashes(seed: int, start: int, count: int) -> np.ndarray:
    """uint64 (count,): SplitMix64 (Steele, Lea and Flood 2014) of the coordinate's index.

    A hash and not a generator, because the streams of generators may change between library versions.
    """
    state = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


LOW_VARIANCE = 0.8
"""Explained variance below which the components are called too few."""


class PrincipalComponents(Frozen):
    """Clients as points."""

    points: np.ndarray
    """Coordinates, float64 (n, components)."""
    explained_variance: float
    """Share of the variance that the components hold; 1 where there is none to explain."""


def project_sketches(sketches: np.ndarray, *, components: int = 64, incremental: bool = False) -> PrincipalComponents:
    """Principal components of sketches (n, d): min(components, n - 1, d) of them, never padded.

    `incremental` fits in batches (scikit-learn's IncrementalPCA), for more clients than one decomposition holds;
    with no more clients than one batch it gives the same points. Signs are fixed: the largest entry is positive.
    """
    rows = np.asarray(sketches, dtype=np.float64)
    centred = rows - rows.mean(axis=0)
    num_components = min(components, rows.shape[0] - 1, rows.shape[1])
    variance = float(np.square(centred).sum())
    if num_components < 1 or variance < 1e-18 * rows.size:
        return PrincipalComponents(points=np.zeros((rows.shape[0], max(num_components, 0))), explained_variance=1.0)
    if incremental:
        from sklearn.decomposition import IncrementalPCA

        model = IncrementalPCA(n_components=num_components, batch_size=max(256, 4 * num_components))
        points = np.asarray(model.fit_transform(rows), dtype=np.float64)
    elif len(rows) > MOST_EXACT:  # linear in the clients
        from sklearn.decomposition import PCA

        points = np.asarray(PCA(num_components, svd_solver="covariance_eigh").fit_transform(rows))
    else:
        left, singular, _ = np.linalg.svd(centred, full_matrices=False)
        points = left[:, :num_components] * singular[:num_components]
    largest = points[np.abs(points).argmax(axis=0), np.arange(num_components)]
    explained = float(np.square(points).sum()) / variance
    return PrincipalComponents(points=points * np.where(largest < 0, -1.0, 1.0), explained_variance=min(explained, 1.0))


MIN_NORM = 1e-6
"""A row shorter than this beside unit sketches is rounding error of float32 and has no direction."""


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows of unit norm, float64 (n, d); a row of (nearly) nothing becomes zero."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(norms > MIN_NORM, rows / np.maximum(norms, MIN_NORM), 0.0)


def normalise_sketches(sketches: np.ndarray, *, offset: np.ndarray | float = 0.0) -> np.ndarray:
    """Unit rows, float64 (n, d), of unit sketches less an offset (d,).

    The offset is the mean over clients where the fingerprint is centred. Each half is centred by its own mean:
    a common mean would carry noise from one half into the other and spoil c_kk.
    """
    return unit_rows(unit_rows(np.asarray(sketches, dtype=np.float64)) - offset)


def cross_similarity(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosines across halves, (n, n) symmetrised: `c_kl = (cos(first_k, second_l) + cos(first_l, second_k)) / 2`.

    The diagonal is the reliability of each client, not 1.
    """
    cosines = unit_rows(first) @ unit_rows(second).T
    return np.asarray((cosines + cosines.T) / 2)


def reliability(cross: np.ndarray) -> np.ndarray:
    """c_kk, (n,): the agreement of each client's own halves."""
    return np.diag(cross).copy()


def own_reliability(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The same from both halves (n, d); of very many clients without their pairs."""
    if len(first) <= MOST_EXACT:
        return reliability(cross_similarity(first, second))
    return np.asarray(np.einsum("kd,kd->k", unit_rows(first), unit_rows(second)))


def corrected_similarity(cross: np.ndarray, *, floor: float = 0.0) -> np.ndarray:
    """Noise-corrected similarity rho (n, n) in [-1, 1] with ones on the diagonal.

    Reliabilities below `floor` are raised to it. Where one is not positive rho is undefined, and 0 stands for it:
    no evidence that the two are alike. Noise can push rho past 1, hence the clipping.
    """
    reliabilities = np.maximum(reliability(cross), floor)
    scale = np.sqrt(np.outer(np.maximum(reliabilities, 0.0), np.maximum(reliabilities, 0.0)))
    rho = np.divide(cross, scale, out=np.zeros_like(cross), where=scale > 0)
    np.fill_diagonal(rho, 1.0)
    return np.asarray(np.clip(rho, -1.0, 1.0))
