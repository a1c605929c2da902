"""Clients' models after a round computed a second time, in dense float64, from the formula of the rule.

Product space by full singular value decompositions; factors row by row of the rank; what clients have in common.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from atlas_fl.audit.dense import TOLERANCE, decompose, is_best, is_mixed, numbers, update
from atlas_fl.audit.run_files import AuditPlan, Models
from atlas_fl.audit.step import Formula, Step, Value, weights
from atlas_fl.params import HEAD, LORA_A, LORA_B, is_last_layer

NEAR_TIE = 1e-3
"""Below this gap between the last singular value kept and the first dropped, share of the largest, the directions
at the cut are not determined by float32 factors, and any optimal choice is right."""


def common_faults(
    plan: AuditPlan, trained: Models, after: Models, *, excluded: Collection[str]
) -> Iterator[tuple[str, str]]:
    """(task, fault) of tasks with one adapter: the first tensor of which it has another than a task before it.

    Who kept its own model at the end has it with the adapter of when it was trained.
    """
    for k, client in enumerate(plan.clients):
        faults = [
            f"{client} {what} another {key} than {other}"
            for models, what in ((trained, "trained"), (after, "starts with"))
            for other in plan.clients[:k]
            if client in models and other in models and not {client, other} & set(excluded)
            for key, tensor in adapters_of(models[client]).items()
            if not tensor.equal(models[other][key])
        ]
        yield client, faults[0] if faults else ""


def with_common_adapter(before: Models, trained: Models) -> Models:
    """Models before the server's step, with the adapter that tasks have trained together for those who took no part."""
    common = adapters_of(next(iter(trained.values()), {}))
    return {client: {**params, **common} for client, params in before.items()}


def adapters_of(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that tasks with one adapter have in common: all but the head."""
    return {key: tensor for key, tensor in params.items() if not key.startswith(HEAD)}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One tensor, or one module's update, compared with the recomputation."""

    error: float
    """Distance from what it should be, over the size of what went in."""
    shift: float
    """Distance of the recomputation from the trained value, in the same measure."""
    still: bool
    """True if every one of its bits is what was trained."""


def _measure(expected: np.ndarray, got: np.ndarray, was: np.ndarray, *, size: float, still: bool) -> Comparison:
    unit = size if size > 0 else 1.0
    error, shift = float(np.linalg.norm(got - expected)) / unit, float(np.linalg.norm(expected - was)) / unit
    return Comparison(error=error, shift=shift, still=still)


@dataclass(kw_only=True, eq=False)
class Recomputed:
    """Recomputes one server step, module by module; the decompositions of one module are kept while it is looked at."""

    plan: AuditPlan
    before: Models
    """Models of all clients before mixing."""
    after: Models
    """Models with which clients started the next round."""
    weights: Callable[[str], np.ndarray]
    """The (n, n) weights for a parameter's name."""
    space: str
    """`product` or `factors`."""
    share: Sequence[str]
    """Shared parts."""
    align: str
    """Alignment of factors of different ranks."""
    reduce: Callable[[np.ndarray], np.ndarray] | None = None
    """Reduction of the values of a row, for a rule that is no weighted sum."""
    server: Callable[[int, str], Value | None] | None = None
    """Result of a rule that steps from the average at client k's tensor, in product space at an A of its module,
    and the size of what went in; None where it gets nothing."""
    _module: str = ""
    _cut: dict[bytes, tuple[np.ndarray, float, np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def worst(self, k: int) -> tuple[str, Comparison]:
        """The tensor or module of client k that is farthest from the recomputation."""
        found = [one for key in self.before[self.plan.clients[k]] for one in self.compare(k, key)]
        return max(found, key=lambda one: one[1].error)

    def compare(self, k: int, key: str) -> list[tuple[str, Comparison]]:
        """The comparison of one tensor of client k, or at its A that of a module; nothing at its B."""
        if not is_mixed(key, self.share) or self._stays(k, key):
            still = self.is_still(k, key)
            return [(key, Comparison(error=0.0 if still else float("inf"), shift=0.0, still=still))]
        if self.space == "factors" or not key.endswith((LORA_A, LORA_B)):
            return [(key, self.tensor(k, key))]
        module = key.removesuffix(LORA_A)
        return [(module, self.module(k, module))] if key.endswith(LORA_A) else []

    def is_still(self, k: int, key: str) -> bool:
        """Return whether client k starts with the very bits that it held."""
        name = self.plan.clients[k]
        return self.before[name][key].equal(self.after[name][key])

    def _stays(self, k: int, key: str) -> bool:
        """Return whether the rule leaves this tensor of client k as it is."""
        if self.server is not None:
            return self.server(k, key) is None
        row = self.weights(key)[k]
        return bool(row[k] == 1.0 and np.count_nonzero(row) == 1)

    def module(self, k: int, module: str) -> Comparison:
        """The update of a module in product space."""
        name = self.plan.clients[k]
        rank = self.before[name][module + LORA_A].shape[0]
        mixed, size, left, values, right = self._mix_product(module, k=k)
        expected = (left[:, :rank] * values[:rank]) @ right[:rank]
        was, got = (update(self.plan, models[name], module) for models in (self.before, self.after))
        still = all(self.is_still(k, module + end) for end in (LORA_A, LORA_B))
        comparison = _measure(expected, got, was, size=size, still=still)
        tied = rank < len(values) and values[rank - 1] - values[rank] < NEAR_TIE * values[0]
        if comparison.error > TOLERANCE and tied and is_best(mixed, got, rank, size=size):
            return Comparison(error=0.0, shift=comparison.shift, still=still)
        return comparison

    def _mix_product(self, module: str, *, k: int) -> tuple[np.ndarray, float, np.ndarray, np.ndarray, np.ndarray]:
        """The update of client k, the size of what went in, and its singular value decomposition."""
        if self._module != module:
            self._module = module
            self._cut = {}
        row = self.weights(module + LORA_A)[k]
        if row.tobytes() not in self._cut:
            model = None if self.server is None else self.server(k, module + LORA_A)
            sources = np.flatnonzero(row).tolist()
            if model is None:
                parts = [update(self.plan, self.before[self.plan.clients[one]], module) for one in sources]
                model = self._combine(row[sources], parts)
            self._cut[row.tobytes()] = (*model, *decompose(model[0]))
        return self._cut[row.tobytes()]

    def tensor(self, k: int, key: str) -> Comparison:
        """A tensor that mixes by itself: a head, a bias, or a factor in factor space."""
        names, row = self.plan.clients, self.weights(key)[k]
        was, got = (numbers(models[names[k]][key]) for models in (self.before, self.after))
        others = {other: numbers(self.before[names[other]][key]) for other in np.flatnonzero(row).tolist()}
        model = None if self.server is None else self.server(k, key)
        if model is not None:
            expected, size = model
        elif key.endswith((LORA_A, LORA_B)):
            expected = self._factor(k, key, was, others)
            size = float(sum(abs(row[other]) * np.linalg.norm(one) for other, one in others.items()))
        else:
            expected, size = self._combine(row[list(others)], list(others.values()))
        return _measure(expected, got, was, size=size, still=self.is_still(k, key))

    def _combine(self, row: np.ndarray, parts: Sequence[np.ndarray]) -> Value:
        """The weighted sum, or what the rule makes of these, and the size of what went in.

        Where one far value does not move the result, the size is that of most.
        """
        norms = [float(np.linalg.norm(part)) for part in parts]
        if self.reduce is not None:
            return self.reduce(np.stack(parts)), float(np.median(norms))
        mixed = np.asarray(sum(weight * part for weight, part in zip(row, parts, strict=True)))
        return mixed, float(sum(abs(weight) * norm for weight, norm in zip(row, norms, strict=True)))

    def _factor(self, k: int, key: str, was: np.ndarray, others: Mapping[int, np.ndarray]) -> np.ndarray:
        """A factor row by row of the rank: s B for B, because s B A is the update."""
        if all(other == k for other in others):
            return was
        is_b = key.endswith(LORA_B)
        mine = was.T if is_b else was
        rows = {other: one.T if is_b else one for other, one in others.items()}
        expected = np.zeros_like(mine) if is_b and self.align != "truncate" else mine.copy()
        matrix = self.weights(key)
        for place in range(self._leading(k, key, matrix) if self.align == "truncate" else len(mine)):
            if any(place < len(one) for one in rows.values()):
                given = [one[place] if place < len(one) else np.zeros(mine.shape[1]) for one in rows.values()]
                scales = [
                    self.plan.scale(len(one)) / self.plan.scale(len(mine)) if is_b else 1.0 for one in rows.values()
                ]
                parts = [scale * one for scale, one in zip(scales, given, strict=True)]
                expected[place], _ = self._combine(matrix[k, list(rows)], parts)
        return expected.T if is_b else expected

    def _leading(self, k: int, key: str, matrix: np.ndarray) -> int:
        """The smallest rank of all whose model reaches client k or is reached by it, directly or through others."""
        reached, border = {k}, [k]
        while border:
            here = border.pop()
            near = [one for one in range(len(matrix)) if matrix[here, one] != 0 or matrix[one, here] != 0]
            border += [one for one in near if one not in reached]
            reached.update(near)
        held = [self.before[self.plan.clients[one]] for one in reached]
        return min(one[key].shape[1 if key.endswith(LORA_B) else 0] for one in held if key in one)


def recompute(formula: Formula, step: Step, after: Models, *, joins: bool = False) -> Recomputed:
    """The models after this step, by a formula; `after` are those to compare. With `joins` of clients that join."""
    mixing = step.run.mixing

    def matrix(key: str) -> np.ndarray:
        # parameters of one layer, one kind and one end share a matrix
        end = key[-1] if key.endswith((LORA_A, LORA_B)) else ""
        group = (key.startswith(HEAD), step.plan.layer(key), end, is_last_layer(key))
        if group not in step.matrices:
            step.matrices[group] = weights(formula, step, key, joins=joins)
        return step.matrices[group]

    return Recomputed(
        plan=step.plan,
        before=step.trained,
        after=after,
        weights=matrix,
        space=mixing.space,
        share=mixing.share if formula.mixes else (),
        align=mixing.align,
        reduce=formula.reduce(step),
        server=partial(formula.value, step) if formula.has_value and not joins else None,
    )
