"""Clients' models after a round computed a second time, in dense float64, from the weights of `audit.rule_weights`.

Product space by full singular value decompositions; factors row by row of the rank; what clients have in common.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from torch import Tensor

from atlas_fl.audit.rule_weights import connected_clients
from atlas_fl.audit.run_files import AuditPlan, Models
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE


def common_faults(
    plan: AuditPlan, trained: Models, after: Models, *, excluded: Collection[str]
) -> Iterator[tuple[str, str]]:
    """(client, fault) for everyone who has something in common with others: the first tensor of which it has another.

    Who kept its own model at the end has it with what was in common when it was trained.
    """
    for k, client in enumerate(plan.clients):
        faults, is_one = [], False
        for key, owners in _in_common(plan, k, after[client]):
            is_one = True
            for models, what in ((trained, "trained"), (after, "starts with")):
                others = [plan.clients[one] for one in owners if one < k and plan.clients[one] not in excluded]
                mine = models.get(client, {}).get(key) if client not in excluded else None
                faults += [
                    f"{client} {what} another {key} than {other}"
                    for other in others
                    if mine is not None and key in models.get(other, {}) and not _same(mine, models[other][key])
                ]
        if is_one:
            yield client, faults[0] if faults else ""


def with_common_tensors(plan: AuditPlan, before: Models, trained: Models) -> Models:
    """Models before the server's step, with tensors that were trained in common for those who took no part."""
    by_client = {client: dict(params) for client, params in before.items()}
    for k, client in enumerate(plan.clients):
        for key, owners in _in_common(plan, k, before[client]):
            there = [plan.clients[one] for one in owners if plan.clients[one] in trained]
            if client not in trained and there:
                by_client[client][key] = trained[there[0]][key]
    return by_client


def _in_common(plan: AuditPlan, k: int, params: dict[str, Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key in params:
        layer = plan.layer_of.get(key.removesuffix(LORA_A).removesuffix(LORA_B))
        owners = () if layer is None else plan.owners(k, layer)
        if len(owners) > 1:
            yield key, owners


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


TOLERANCE = 1e-4
"""Largest relative error: float32 factors of a float64 truth."""
NEAR_TIE = 1e-3
"""Below this gap between the last singular value kept and the first dropped, share of the largest, the directions
at the cut are not determined by float32 factors, and any optimal choice is right."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One tensor, or one module's update, compared with the recomputation."""

    error: float
    """Distance from what it should be, over the size of what went in."""
    shift: float
    """Distance of the recomputation from the trained value, in the same measure."""
    still: bool
    """True if every one of its bits is what was trained."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """The models around one server step, and its weights."""

    plan: AuditPlan
    """The plan in force."""
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
    server: Callable[[int, str], tuple[np.ndarray, float] | None] | None = None
    """Result of a rule that steps from the average at client k's tensor, in product space at an A of its module,
    and the size of what went in; None where it gets nothing."""


def _dense(round: Round, client: str, module: str, models: Models) -> np.ndarray:
    a = models[client][module + LORA_A].double().numpy()
    b = models[client][module + LORA_B].double().numpy()
    return np.asarray(round.plan.scale(a.shape[0]) * (b @ a))


def decompose(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The full singular value decomposition (U, S, V^T).

    LAPACK's divide and conquer fails now and then on a sound matrix of low rank, such as every update is; the slower
    QR iteration then gives the same decomposition.
    """
    try:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
    except np.linalg.LinAlgError:
        left, values, right = scipy.linalg.svd(matrix, full_matrices=False, lapack_driver="gesvd")
    return left, values, right


def _measure(expected: np.ndarray, got: np.ndarray, was: np.ndarray, *, size: float, still: bool) -> Comparison:
    unit = size if size > 0 else 1.0
    error, shift = float(np.linalg.norm(got - expected)) / unit, float(np.linalg.norm(expected - was)) / unit
    return Comparison(error=error, shift=shift, still=still)


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


class Recomputed:
    """Recomputes one round, module by module; the decompositions of one module are kept while it is looked at."""

    def __init__(self, round: Round) -> None:
        self.round = round
        self._module = ""
        self._cut: dict[bytes, tuple[np.ndarray, float, np.ndarray, np.ndarray, np.ndarray]] = {}

    def compare(self, k: int, key: str) -> list[tuple[str, Comparison]]:
        """The comparison of one tensor of client k, or at its A that of a module; nothing at its B."""
        round = self.round
        if not is_mixed(key, round.share) or self._stays(k, key):
            still = self.is_still(k, key)
            return [(key, Comparison(error=0.0 if still else float("inf"), shift=0.0, still=still))]
        if round.space == "factors" or not key.endswith((LORA_A, LORA_B)):
            return [(key, self.tensor(k, key))]
        module = key.removesuffix(LORA_A)
        return [(module, self.module(k, module))] if key.endswith(LORA_A) else []

    def _stays(self, k: int, key: str) -> bool:
        """Return whether the rule leaves this tensor of client k as it is."""
        if self.round.server is not None:
            return self.round.server(k, key) is None
        row = self.round.weights(key)[k]
        return bool(row[k] == 1.0 and np.count_nonzero(row) == 1)

    def module(self, k: int, module: str) -> Comparison:
        """The update of a module in product space."""
        round, names = self.round, self.round.plan.clients
        row = round.weights(module + LORA_A)[k]
        rank = round.before[names[k]][module + LORA_A].shape[0]
        mixed, size, left, values, right = self._mix_product(module, row, k=k)
        expected = (left[:, :rank] * values[:rank]) @ right[:rank]
        got, was = _dense(round, names[k], module, round.after), _dense(round, names[k], module, round.before)
        still = all(self.is_still(k, module + end) for end in (LORA_A, LORA_B))
        comparison = _measure(expected, got, was, size=size, still=still)
        tied = rank < len(values) and values[rank - 1] - values[rank] < NEAR_TIE * values[0]
        if comparison.error > TOLERANCE and tied and is_best(mixed, got, rank, size=size):
            return Comparison(error=0.0, shift=comparison.shift, still=still)
        return comparison

    def _mix_product(
        self, module: str, row: np.ndarray, *, k: int
    ) -> tuple[np.ndarray, float, np.ndarray, np.ndarray, np.ndarray]:
        """The weighted sum of the updates, the size of what went in, and its singular value decomposition."""
        if self._module != module:
            self._module, self._cut = module, {}
        if row.tobytes() not in self._cut:
            mixed, size = self._update(module, row, k=k)
            left, values, right = decompose(mixed)
            self._cut[row.tobytes()] = (mixed, size, left, values, right)
        return self._cut[row.tobytes()]

    def _update(self, module: str, row: np.ndarray, *, k: int) -> tuple[np.ndarray, float]:
        """The dense update that those with this row get, and the size of what went in."""
        if self.round.server is not None and (model := self.round.server(k, module + LORA_A)) is not None:
            return model
        names = self.round.plan.clients
        sources = np.flatnonzero(row).tolist()
        parts = [_dense(self.round, names[other], module, self.round.before) for other in sources]
        return self._combine(row[sources], parts)

    def tensor(self, k: int, key: str) -> Comparison:
        """A tensor that mixes by itself: a head, a bias, or a factor in factor space."""
        round, names = self.round, self.round.plan.clients
        matrix = round.weights(key)
        client_value = round.before[names[k]][key].double().numpy()
        got = round.after[names[k]][key].double().numpy()
        sources = np.flatnonzero(matrix[k]).tolist()
        others = {other: round.before[names[other]][key].double().numpy() for other in sources}
        if self.round.server is not None and (model := self.round.server(k, key)) is not None:
            expected, size = model
        elif key.endswith((LORA_A, LORA_B)):
            expected = self._factor(k, key, client_value, others)
            size = float(sum(abs(matrix[k, other]) * np.linalg.norm(one) for other, one in others.items()))
        else:
            expected, size = self._combine(matrix[k][sources], list(others.values()))
        return _measure(expected, got, client_value, size=size, still=self.is_still(k, key))

    def _combine(self, weights: np.ndarray, parts: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
        """The weighted sum, or what the rule makes of these, and the size of what went in.

        Where one far value does not move the result, the size is that of most.
        """
        norms = [float(np.linalg.norm(part)) for part in parts]
        if self.round.reduce is not None:
            return self.round.reduce(np.stack(parts)), float(np.median(norms))
        mixed = np.asarray(sum(weight * part for weight, part in zip(weights, parts, strict=True)))
        return mixed, float(sum(abs(weight) * norm for weight, norm in zip(weights, norms, strict=True)))

    def is_still(self, k: int, key: str) -> bool:
        """Return whether client k starts with the very bits that it held."""
        name = self.round.plan.clients[k]
        before, after = self.round.before[name][key], self.round.after[name][key]
        return before.shape == after.shape and bool((before == after).all())

    def _factor(self, k: int, key: str, client_value: np.ndarray, others: Mapping[int, np.ndarray]) -> np.ndarray:
        """A factor row by row of the rank: s B for B, because s B A is the update."""
        matrix, plan = self.round.weights(key), self.round.plan
        is_b = key.endswith(LORA_B)
        mine = client_value.T if is_b else client_value
        expected = np.zeros_like(mine) if is_b else mine.copy()
        rows = {other: one.T if is_b else one for other, one in others.items()}
        if all(other == k for other in rows):
            return client_value
        leading = len(mine)
        if self.round.align == "truncate":
            reached = [self.round.before[plan.clients[one]] for one in connected_clients(matrix, k)]
            leading = min(one[key].shape[1 if is_b else 0] for one in reached if key in one)
            expected = mine.copy()
        for row in range(leading):
            nothing = np.zeros(mine.shape[1])
            given = [one[row] if row < len(one) else nothing for one in rows.values()]
            if any(row < len(one) for one in rows.values()):
                own_scale = plan.scale(len(mine)) if is_b else 1.0
                scales = [plan.scale(len(one)) / own_scale if is_b else 1.0 for one in rows.values()]
                weights = np.array([matrix[k, other] for other in rows])
                expected[row], _ = self._combine(weights, [s * one for s, one in zip(scales, given, strict=True)])
        return expected.T if is_b else expected


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
