"""Clients' models after a round computed a second time, in dense float64, from the formula of the rule.

Product space by full singular value decompositions; factors row by row of the rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse.csgraph import connected_components

from atlas_fl.audit.dense import TOLERANCE, Parts, decompose, is_compared, is_mixed, rank_error, value
from atlas_fl.audit.run_files import Models
from atlas_fl.audit.step import Formula, Step, Value, weights
from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, LORA_A, LORA_B, is_last_layer


class Comparison(Frozen):
    """One tensor, or one module's update, compared with the recomputation."""

    error: float
    """Distance from what it should be, over the size of what went in."""
    shift: float
    """Distance of the recomputation from the trained value, in the same measure."""
    still: bool
    """True if every one of its bits is what was trained."""


def farthest(comparisons: Sequence[tuple[str, Comparison]], still: str) -> tuple[str, float]:
    """(the fault of the tensor or module that is farthest from the recomputation, its error); `still` of what moved."""
    name, worst = max(comparisons, key=lambda one: one[1].error)
    if worst.error == float("inf"):
        return f"{name} {still}", worst.error
    far = f"{name} is {worst.error:.2g} away from the recomputation (allowed: {TOLERANCE:g})"
    return far if not worst.error <= TOLERANCE else "", worst.error


@dataclass(kw_only=True, eq=False)
class Recomputed:
    """Recomputes one server step, module by module; the decompositions of one module are kept while it is looked at."""

    step: Step
    formula: Formula
    after: Models
    """Models with which clients started the next round."""
    joins: bool = False
    """True of what clients begin with that join."""
    _known: dict[bytes, tuple[np.ndarray, float, Parts]] = field(default_factory=dict)
    """Update of one module, size of what went in, and decomposition, by the row of its weights."""

    def weights(self, key: str) -> np.ndarray:
        """The (n, n) weights for a parameter's name: those of one layer, one kind and one end share a matrix."""
        end = key[-1] if key.endswith((LORA_A, LORA_B)) else ""
        group = ("weights", key.startswith(HEAD), self.step.plan.layer(key), end, is_last_layer(key))
        return self.step.once(group, lambda: weights(self.formula, self.step, key, joins=self.joins))

    def comparisons(self) -> list[list[tuple[str, Comparison]]]:
        """For each client every tensor or module with its comparison; key by key, so that little is kept."""
        models = [self.step.trained[client] for client in self.step.plan.clients]
        results: list[list[tuple[str, Comparison]]] = [[] for _ in models]
        for key in dict.fromkeys(key for params in models for key in params):
            self._known.clear()
            for k in (k for k, params in enumerate(models) if key in params):
                results[k] += self._compare(k, key)
        return results

    def _is_still(self, k: int, key: str) -> bool:
        """Return whether client k starts with the very bits that it held."""
        name = self.step.plan.clients[k]
        return self.step.trained[name][key].equal(self.after[name][key])

    def _compare(self, k: int, key: str) -> list[tuple[str, Comparison]]:
        """The comparison of one tensor of client k, or at its A that of a module in product space; nothing at its B."""
        mixing, still = self.step.run.mixing, self._is_still(k, key)
        if not (self.formula.mixes and is_mixed(key, mixing.share)) or self._stays(k, key):
            return [(key, Comparison(error=0.0 if still else float("inf"), shift=0.0, still=still))]
        if not is_compared(key, mixing.share, mixing.space):
            return []
        name, models = self.step.plan.clients[k], (self.step.trained, self.after)
        was, got = (value(self.step.plan, params[name], key, mixing.space) for params in models)
        is_module = mixing.space == "product" and key.endswith(LORA_A)
        if is_module:
            rank = len(self.step.trained[name][key])
            still = still and self._is_still(k, key.removesuffix(LORA_A) + LORA_B)
            row = self.weights(key)[k].tobytes()
            if row not in self._known:
                mixed, size = self._expected(k, key, was)
                self._known[row] = (mixed, size, decompose(mixed))
            mixed, size, parts = self._known[row]
            error, expected = rank_error(mixed, got, rank, size=size or 1.0, parts=parts)
        else:
            expected, size = self._expected(k, key, was)
            error = float(np.linalg.norm(got - expected)) / (size or 1.0)
        shift = float(np.linalg.norm(expected - was)) / (size or 1.0)
        return [(key.removesuffix(LORA_A) if is_module else key, Comparison(error=error, shift=shift, still=still))]

    def _stays(self, k: int, key: str) -> bool:
        """Return whether the rule leaves this tensor of client k as it is."""
        if self.formula.value is not None and not self.joins:
            return self.formula.value(self.step, k, key) is None
        row = self.weights(key)[k]
        return bool(row[k] == 1.0 and np.count_nonzero(row) == 1)

    def _expected(self, k: int, key: str, was: np.ndarray) -> Value:
        """Value that client k is to have here, before it is cut to its rank, and the size of what went in."""
        step, row = self.step, self.weights(key)[k]
        stepped = None if self.formula.value is None or self.joins else self.formula.value(step, k, key)
        if stepped is not None:
            return stepped
        names, space = step.plan.clients, step.run.mixing.space
        parts = {k: value(step.plan, step.trained[names[k]], key, space) for k in np.flatnonzero(row).tolist()}
        if space == "factors" and key.endswith((LORA_A, LORA_B)):
            size = float(sum(abs(row[other]) * np.linalg.norm(part) for other, part in parts.items()))
            return self._factor(k, key, was, parts), size
        return self._combine(row[list(parts)], list(parts.values()))

    def _combine(self, row: np.ndarray, parts: Sequence[np.ndarray]) -> Value:
        """The weighted sum, or what the rule makes of these, and the size of what went in.

        Where one far value does not move the result, the size is that of most.
        """
        norms = [float(np.linalg.norm(part)) for part in parts]
        if self.formula.reduction is not None:
            return self.formula.reduction(self.step, np.stack(parts)), float(np.median(norms))
        mixed = np.asarray(sum(weight * part for weight, part in zip(row, parts, strict=True)))
        return mixed, float(sum(abs(weight) * norm for weight, norm in zip(row, norms, strict=True)))

    def _factor(self, k: int, key: str, was: np.ndarray, others: Mapping[int, np.ndarray]) -> np.ndarray:
        """A factor row by row of the rank: s B for B, because s B A is the update."""
        if all(other == k for other in others):
            return was
        plan, is_b, truncates = self.step.plan, key.endswith(LORA_B), self.step.run.mixing.align == "truncate"
        mine = was.T if is_b else was
        rows = {other: one.T if is_b else one for other, one in others.items()}
        matrix = self.weights(key)
        count = self._leading(k, key, matrix) if truncates else min(len(mine), max(map(len, rows.values())))
        expected = np.zeros_like(mine) if is_b and not truncates else mine.copy()
        parts = []
        for one in rows.values():
            scale = plan.scale(len(one)) / plan.scale(len(mine)) if is_b else 1.0
            parts.append(scale * np.pad(one[:count], ((0, max(0, count - len(one))), (0, 0))))
        expected[:count], _ = self._combine(matrix[k, list(rows)], parts)
        return expected.T if is_b else expected

    def _leading(self, k: int, key: str, matrix: np.ndarray) -> int:
        """The smallest rank of all whose model reaches client k or is reached by it, directly or through others."""
        _, labels = connected_components(matrix != 0, directed=False)
        factors = [
            self.step.trained[client]
            for client, label in zip(self.step.plan.clients, labels, strict=True)
            if label == labels[k]
        ]
        return min(one[key].shape[1 if key.endswith(LORA_B) else 0] for one in factors if key in one)
