"""Dense float64 values of a model's parameters, and the little linear algebra that all formulas share.

In product space the update s B A of a module is one value, which stands at its A; all else are the tensors themselves.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import scipy.linalg
import torch
from scipy.optimize import lsq_linear
from torch import Tensor

from atlas_fl.audit.run_files import AuditPlan
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE, Params

T = TypeVar("T")
TOLERANCE = 1e-4
"""Largest relative error: float32 factors of a float64 truth."""


def is_mixed(key: str, share: Sequence[str]) -> bool:
    """Return whether a parameter leaves the client; what is neither adapter nor head goes with the adapters."""
    if key.startswith(HEAD):
        return "head" in share
    if key == PRIVATE:
        return False
    for end, word in ((LORA_A, "A"), (LORA_B, "B")):
        if key.endswith(end):
            return word in share
    return "A" in share or "B" in share


def is_compared(key: str, share: Sequence[str], space: str) -> bool:
    """Return whether there is a value at this parameter that leaves the client."""
    return is_mixed(key, share) and not (space == "product" and key.endswith(LORA_B))


def numbers(tensor: Tensor) -> np.ndarray:
    """The values of a tensor, float64."""
    return np.asarray(tensor.double().numpy())


def arrays(state: Params) -> dict[str, np.ndarray]:
    """The values of several tensors, float64."""
    return {path: numbers(tensor) for path, tensor in state.items()}


def below(state: Mapping[str, T], start: str) -> dict[str, T]:
    """The entries of a state whose paths begin so, by the rest of their paths."""
    return {path.removeprefix(start): entry for path, entry in state.items() if path.startswith(start)}


def same_tensors(one: Params, other: Params) -> bool:
    """Return whether both hold the same names with the very same values."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def update(plan: AuditPlan, params: Params, module: str) -> np.ndarray:
    """The update s B A of a module; zero at rank 0."""
    a, b = (numbers(params[module + end]) for end in (LORA_A, LORA_B))
    return np.asarray(plan.scale(len(a)) * (b @ a)) if len(a) else np.zeros((b.shape[0], a.shape[1]))


def value(plan: AuditPlan, params: Params, key: str, space: str) -> np.ndarray:
    """The value that stands at this parameter."""
    if space == "product" and key.endswith(LORA_A):
        return update(plan, params, key.removesuffix(LORA_A))
    return numbers(params[key])


def vector(plan: AuditPlan, params: Params, key: str, space: str) -> np.ndarray:
    """The value as a vector, row by row of the rank, so that a larger rank only makes it longer; empty without one."""
    if key not in params:
        return np.zeros(0)
    dense = value(plan, params, key, space)
    return np.asarray((dense.T if key.endswith(LORA_B) else dense).ravel())


def padded(vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The vectors at the length of the longest."""
    longest = max(map(len, vectors), default=0)
    return [np.pad(one, (0, longest - len(one))) for one in vectors]


def cosines(products: np.ndarray) -> np.ndarray:
    """Cosines of vectors by their inner products; 0 with a vector of zeros, 1 with itself."""
    sizes = np.sqrt(np.outer(np.diag(products), np.diag(products)))
    result = np.divide(products, sizes, out=np.zeros_like(products), where=sizes > 0)
    np.fill_diagonal(result, 1.0)
    return np.asarray(result)


Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A full singular value decomposition: U, S, V^T."""


def decompose(matrix: np.ndarray) -> Parts:
    """The full singular value decomposition.

    LAPACK's divide and conquer fails now and then on a sound matrix of low rank, such as every update is; the slower
    QR iteration then gives the same decomposition.
    """
    try:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
    except np.linalg.LinAlgError:
        left, values, right = scipy.linalg.svd(matrix, full_matrices=False, lapack_driver="gesvd")
    return left, values, right


def is_best(mixed: np.ndarray, got: np.ndarray, rank: int, *, size: float) -> bool:
    """True if `got` is some best approximation of that rank: what is left meets neither its rows nor its columns and
    holds no direction larger than the smallest that was kept.
    """
    left, values, right = decompose(got)
    rest, limit = mixed - got, TOLERANCE * size
    num_kept = int((values[:rank] > limit).sum())
    crossing = max(np.linalg.norm(left[:, :num_kept].T @ rest), np.linalg.norm(rest @ right[:num_kept].T))
    smallest = float(values[rank - 1]) if rank <= len(values) else 0.0
    return bool(crossing <= limit and np.linalg.norm(rest, 2) <= smallest + limit)


def rank_error(
    wanted: np.ndarray, got: np.ndarray, rank: int, *, size: float, parts: Parts | None = None
) -> tuple[float, np.ndarray]:
    """(distance from the best approximation of that rank, over `size`; the approximation).

    The distance is 0 where it is another one that is as good: where singular values tie at the cut, float32 factors do
    not determine the directions. `parts` are the decomposition, where it is known.
    """
    left, values, right = decompose(wanted) if parts is None else parts
    best = (left[:, :rank] * values[:rank]) @ right[:rank]
    error = float(np.linalg.norm(best - got)) / size
    return 0.0 if error > TOLERANCE and is_best(wanted, got, rank, size=size) else error, best


def bound_weights(weights: Sequence[float], max_share: float) -> list[float]:
    """Shares of these weights, cut at the height for which the largest is `max_share` of them; of three or more."""
    n = len(weights)
    limit = max(max_share, 1 / max(n, 1))
    if n >= 3 and max(weights) > limit * sum(weights):
        low, high = min(weights), max(weights)
        for _ in range(200):
            middle = (low + high) / 2
            inside = middle <= limit * sum(min(weight, middle) for weight in weights) * (1 + 1e-14)
            low, high = (middle, high) if inside else (low, middle)
        weights = [min(weight, low) for weight in weights]
    total = sum(weights)
    return [weight / total for weight in weights]


def smallest_without_signs(program: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The m >= 0 with the smallest m^T program m - 2 m^T target, for a positive definite program.

    By least squares with bounded variables; the server uses another algorithm.
    """
    root = np.linalg.cholesky(program)
    return np.asarray(lsq_linear(root.T, np.linalg.solve(root, target), bounds=(0.0, np.inf), method="bvls").x)
