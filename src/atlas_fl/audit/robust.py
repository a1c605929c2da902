"""Robust rules, written again from their papers: dense float64 vectors, one client and one coordinate at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_fl.audit.folder import Plan, Run
from atlas_fl.audit.models import Models
from atlas_fl.tree import HEAD, LORA_A, LORA_B, PRIVATE


@dataclass(frozen=True, kw_only=True)
class Robust:
    """What a run's settings say of robust aggregation; runs older than these had no bound on shares."""

    within: str = "all"
    trim: float = 0.2
    byzantine: int = 1
    max_share: float = 1.0


def robust_of(run: Run) -> Robust:
    """The robust settings of this run, from its config.toml."""
    known: Mapping[str, Any] = run.config.get("robust", {})
    return Robust(**{name: known[name] for name in Robust.__dataclass_fields__ if name in known})


def bounded(weights: Sequence[float], max_share: float) -> list[float]:
    """The weights cut at the height t for which the largest is `max_share` of what is left; of three or more."""
    n = len(weights)
    limit = max(max_share, 1 / max(n, 1))
    if n < 3 or max(weights) <= limit * sum(weights):
        return list(weights)
    low, high = min(weights), max(weights)
    for _ in range(200):
        middle = (low + high) / 2
        inside = middle <= limit * sum(min(weight, middle) for weight in weights) * (1 + 1e-14)
        low, high = (middle, high) if inside else (low, middle)
    return [min(weight, low) for weight in weights]


def reducer(kind: str, robust: Robust) -> Callable[[np.ndarray], np.ndarray] | None:
    """How the values of clients, (clients, ...), become one; None for a rule that is a weighted sum."""
    if kind == "median":
        return lambda stack: np.asarray(np.median(stack, axis=0))
    if kind == "trimmed mean":
        return lambda stack: _trimmed(stack, robust.trim)
    return None


def _trimmed(stack: np.ndarray, share: float) -> np.ndarray:
    left_out = min(int(np.ceil(share * len(stack) - 1e-9)), (len(stack) - 1) // 2)
    ordered = np.sort(stack, axis=0)
    return np.asarray(np.mean(ordered[left_out : len(stack) - left_out], axis=0))


def model_weights(kind: str, points: np.ndarray, robust: Robust) -> list[float]:
    """The weight of each of these models, given as points with their distances, under a rule that goes by these."""
    if len(points) == 1:
        return [1.0]
    if kind == "geometric median":
        return _geometric_median(points)
    scores = [_krum_score(points, k, robust.byzantine) for k in range(len(points))]
    n, f = len(points), robust.byzantine
    wanted = 1 if kind == "krum" else n - min(f, (n - 1) // 2)
    last = sorted(scores)[wanted - 1]
    chosen = [score <= last * (1 + 1e-9) for score in scores]
    return [one / sum(chosen) for one in chosen]


def _krum_score(points: np.ndarray, k: int, f: int) -> float:
    """s(k) = the sum over its n - f - 2 nearest others l of || V_k - V_l ||^2."""
    others = sorted(float(((points[k] - points[other]) ** 2).sum()) for other in range(len(points)) if other != k)
    return sum(others[: min(max(len(points) - f - 2, 1), len(others))])


def _geometric_median(points: np.ndarray) -> list[float]:
    """Weiszfeld's weights 1 / max(nu, || z - w_k ||), from the mean on until they settle."""
    weights = [1 / len(points)] * len(points)
    for _ in range(1000):
        centre = sum(weight * point for weight, point in zip(weights, points))
        inverse = [1 / max(1e-6, float(np.linalg.norm(centre - point))) for point in points]
        before, weights = weights, [one / sum(inverse) for one in inverse]
        if max(abs(new - old) for new, old in zip(weights, before)) < 1e-12:
            break
    return weights


def points_of(models: Models, plan: Plan, share: Sequence[str], clients: Sequence[int], *, head: bool) -> np.ndarray:
    """(clients, clients): points with the distances of what these share, of their heads or of all the rest.

    The triangular factors of differences to the first client, tensor after tensor: each column keeps its own digits.
    """
    held = [models[plan.clients[k]] for k in clients]
    factor = np.zeros((0, len(held)))
    for key in (key for key in held[0] if key.startswith(HEAD) == head and key != PRIVATE):
        columns = _columns(held, plan, share, key)
        if columns is not None:
            block = np.stack([(column - columns[0]).ravel() for column in columns], axis=1)
            factor = np.asarray(np.linalg.qr(np.concatenate([factor, block]), mode="r"))
    return factor.T


def _columns(held: Sequence[Mapping[str, Any]], plan: Plan, share: Sequence[str], key: str) -> list[np.ndarray] | None:
    """What is compared at this key for each client; None where that is nothing, or told at another key."""
    values = [params[key].double().numpy() for params in held]
    is_a, is_b = key.endswith(LORA_A), key.endswith(LORA_B)
    if not is_a and not is_b:
        shared = "head" in share if key.startswith(HEAD) else "A" in share or "B" in share
        return values if shared else None
    if "A" in share and "B" in share:
        others = [params[key.removesuffix(LORA_A) + LORA_B].double().numpy() for params in held] if is_a else []
        return [plan.scale(len(a)) * (b @ a) for a, b in zip(values, others)] if is_a else None
    if ("A" if is_a else "B") not in share:
        return None
    rows = [value.T if is_b else value for value in values]
    longest = max(len(row) for row in rows)
    return [np.pad(row, ((0, longest - len(row)), (0, 0))) for row in rows]
