"""Second formulas of estimates of many means, from the changes of both halves as vectors.

Feldman et al., 2012 and 2014 (Multi-Task Averaging, by the inverse); Efron and Morris, 1975 (James-Stein);
Marienwald et al., 2021 (similarity tests, one pair at a time).
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from atlas_fl.audit.step import Step


def _errors(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Half the difference of both halves, and its squared length."""
    errors = (first - second) / 2
    return errors, np.square(errors).sum(axis=1)


def _unbiased(first: np.ndarray, second: np.ndarray, k: int, other: int) -> float:
    """The squared distance of two clients by products of different halves."""
    return float((first[k] - first[other]) @ (second[k] - second[other]))


def by_multi_task_averaging(step: Step, members: Sequence[int], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """W = (I + gamma / n diag(N) L)^-1."""
    n, server = len(members), step.run.settings.server
    if n < 2:
        return np.eye(n)
    _, noise = _errors(first, second)
    models, pairs = (first + second) / 2, list(combinations(range(n), 2))
    squares = [float(np.square(models[k] - models[other]).sum()) for k, other in pairs]
    if server.mta_similarity == "measured":
        scale = max(0.0, float(np.mean([_unbiased(first, second, *pair) for pair in pairs])))
    else:
        scale = max(squares) if server.mta_similarity == "minimax" else float(np.mean(squares))
    if scale + noise.max() <= 0:
        return np.array([step.shares(members)] * n)
    if scale <= 1e-12 * noise.max():  # an infinite similarity
        precision = 1 / np.maximum(noise, 1e-12 * noise.max())
        return np.array([precision / precision.sum()] * n)
    laplacian = 2 / scale * (n * np.eye(n) - np.ones((n, n)))
    return np.linalg.inv(np.eye(n) + server.mta_gamma / n * noise[:, None] * laplacian)


def by_james_stein(_step: Step, members: Sequence[int], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """s I + (1 - s) / n."""
    n, (errors, noise) = len(members), _errors(first, second)
    if n < 2 or not noise.all():
        return np.eye(n)
    models, pairs = (first + second) / 2, list(combinations(range(n), 2))
    spread = sum(np.square(models - models.mean(axis=0)).sum(axis=1) / noise)
    overlap = sum(float(errors[k] @ errors[other]) ** 2 for k, other in pairs)
    strength = max(0.0, n - 1 - 2 * overlap / sum(noise[k] * noise[other] for k, other in pairs))
    own = max(0.0, 1 - strength / spread) if spread > 0 else 0.0
    return np.array([[(k == other) * own + (1 - own) / n for other in range(n)] for k in range(n)])


def by_similarity_tests(step: Step, members: Sequence[int], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Each client's own share, and equal shares of its neighbours."""
    n, (_, noise), server = len(members), _errors(first, second), step.run.settings.server
    strength, rows = server.stb_c * server.stb_zeta, np.zeros((n, n))
    for k in range(n):
        near = [one for one in range(n) if one == k or _unbiased(first, second, k, one) <= server.stb_zeta * noise[k]]
        others = len(near) - 1
        own = strength * others / ((1 + strength) * others + 1)
        rows[k, near] = (1 - own) / len(near)
        rows[k, k] += own
    return rows
