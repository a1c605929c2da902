"""Every mixing rule written a second time, in dense float64: weights, robust rules, clients' models after a round.

Mixing weights follow from each rule's definition, one row and one edge at a time; robust rules from their papers, one
client and one coordinate at a time; product space from full singular value decompositions.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.linalg
from torch import Tensor

from atlas_fl.audit.run_files import AuditPlan, Models, Run
from atlas_fl.errors import CheckpointError
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
    """What everyone holds before the server's step: what was trained in common is so for those who took no part."""
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


@dataclass(frozen=True, kw_only=True)
class Robust:
    """What a run's settings say of robust aggregation; runs older than these had no bound on shares."""

    within: str = "all"
    trim: float = 0.2
    byzantine: int = 1
    max_share: float = 1.0


def robust_of(run: Run) -> Robust:
    """The robust settings of this run, from its config.toml."""
    robust_settings: Mapping[str, Any] = run.config.get("robust", {})
    return Robust(**{name: robust_settings[name] for name in Robust.__dataclass_fields__ if name in robust_settings})


def bound_weights(weights: Sequence[float], max_share: float) -> list[float]:
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
        return lambda stack: _trimmed_mean(stack, robust.trim)
    return None


def _trimmed_mean(stack: np.ndarray, share: float) -> np.ndarray:
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
    num_selected = 1 if kind == "krum" else n - min(f, (n - 1) // 2)
    last = sorted(scores)[num_selected - 1]
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


def points_of(
    models: Models, plan: AuditPlan, share: Sequence[str], clients: Sequence[int], *, head: bool
) -> np.ndarray:
    """(clients, clients): points with the distances of what these share, of their heads or of all the rest.

    The triangular factors of differences to the first client, tensor after tensor: each column keeps its own digits.
    """
    client_params = [models[plan.clients[k]] for k in clients]
    factor = np.zeros((0, len(client_params)))
    for key in (key for key in client_params[0] if key.startswith(HEAD) == head and key != PRIVATE):
        columns = _columns(client_params, plan, share, key)
        if columns is not None:
            block = np.stack([(column - columns[0]).ravel() for column in columns], axis=1)
            factor = np.asarray(np.linalg.qr(np.concatenate([factor, block]), mode="r"))
    return factor.T


def _columns(
    client_params: Sequence[Mapping[str, Any]], plan: AuditPlan, share: Sequence[str], key: str
) -> list[np.ndarray] | None:
    """What is compared at this key for each client; None where that is nothing, or told at another key."""
    values = [params[key].double().numpy() for params in client_params]
    is_a, is_b = key.endswith(LORA_A), key.endswith(LORA_B)
    if not is_a and not is_b:
        shared = "head" in share if key.startswith(HEAD) else "A" in share or "B" in share
        return values if shared else None
    if "A" in share and "B" in share:
        others = (
            [params[key.removesuffix(LORA_A) + LORA_B].double().numpy() for params in client_params] if is_a else []
        )
        return [plan.scale(len(a)) * (b @ a) for a, b in zip(values, others)] if is_a else None
    if ("A" if is_a else "B") not in share:
        return None
    rows = [value.T if is_b else value for value in values]
    longest = max(len(row) for row in rows)
    return [np.pad(row, ((0, longest - len(row)), (0, 0))) for row in rows]


RULES = {
    **dict.fromkeys(("local", "local_only"), "own"),
    **dict.fromkeys(("fedavg", "standard_fl", "fedit", "flexlora", "ffa", "rolora", "fedsa", "fedper"), "mean"),
    **dict.fromkeys(("fedrep", "fedbabu", "fedavg_ft", "fedavg_prior", "fedprox"), "mean"),
    **dict.fromkeys(("fedavg_cluster", "fedavg_cluster_ft", "fedavg_cluster_prior"), "cluster mean"),
    **dict.fromkeys(("fedavg_oracle", "atlas_no_laplacian"), "cluster mean"),
    **dict.fromkeys(("atlas", "atlas_pad", "atlas_truncate"), "laplacian"),
    "median": "median",
    "trimmed_mean": "trimmed mean",
    "krum": "krum",
    "multi_krum": "multi-krum",
    "geometric_median": "geometric median",
    "fedavgm": "fedavgm",
    "fedadagrad": "fedadagrad",
    "fedyogi": "fedyogi",
    "fedadam": "fedadam",
    "pfedgraph": "pfedgraph",
}
"""What each strategy's name, and each older name for it, means."""

ROBUST = ("median", "trimmed mean", "krum", "multi-krum", "geometric median")
"""Rules under which every client counts alike."""

SERVER_OPTIMIZERS = {"fedavgm": (1.0, 0.9), "fedadagrad": (0.01, 0.0), "fedyogi": (0.01, 0.9), "fedadam": (0.01, 0.9)}
"""Default learning rate and first beta of each server optimizer."""

WITHIN = (*ROBUST, *SERVER_OPTIMIZERS, "pfedgraph")
"""Rules over all clients, or inside clusters, as the settings say."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a round's weights follow from."""

    kind: str
    """One of the values of `RULES`."""
    laplacian: str
    """`symmetric`, `random_walk` or `metropolis`."""
    eta: float
    """Step of the round."""
    by_layer: bool
    """Whether eta is scaled by the importance of the layer."""
    present: tuple[bool, ...]
    """Whose update counts."""
    without_edges: tuple[str, ...] = ()
    """Who is nobody's neighbour."""
    robust: Robust = field(default_factory=Robust)
    """What bounds weights, and what robust rules are made from."""
    points: Callable[[Sequence[int], bool], np.ndarray] | None = None
    """Of these clients, and of their heads or the rest: points as far apart as the models; None where nobody asks."""
    project: Callable[[int, Sequence[int], list[float], str], list[float]] | None = None
    """Of a client, its members, their shares and a parameter: its row by directions; None where nobody asks."""


def has_state(kind: str) -> bool:
    """Whether a rule of this kind remembers more than the models."""
    return kind in SERVER_OPTIMIZERS or kind == "pfedgraph"


def kind_of(strategy: str) -> str:
    """What a strategy does; raises CheckpointError for one that no audit is written for."""
    if strategy not in RULES:
        raise CheckpointError(f"no audit is written for strategy {strategy!r}; there is one for {', '.join(RULES)}")
    return RULES[strategy]


def _may_meet(plan: AuditPlan, k: int, other: int, *, head: bool) -> bool:
    return not head or plan.tasks[k] == plan.tasks[other]


def _members(plan: AuditPlan, rule: Rule, k: int, *, head: bool) -> list[int]:
    """Whose updates are aggregated into the model of client k."""
    everyone = rule.kind == "mean" or (rule.kind in WITHIN and rule.robust.within == "all")
    members = []
    for other in range(len(plan.clients)):
        together = everyone or (plan.clusters[k] >= 0 and plan.clusters[k] == plan.clusters[other]) or other == k
        if together and rule.present[other] and _may_meet(plan, k, other, head=head):
            members.append(other)
    return members


def _mean_row(plan: AuditPlan, rule: Rule, k: int, *, head: bool) -> list[float]:
    """The weights of an average, by examples; of robust rules by distances, or all alike where nobody knows these."""
    members = _members(plan, rule, k, head=head)
    row = [float(other == k and not members) for other in range(len(plan.clients))]
    if rule.kind not in ROBUST:
        weights = bound_weights([plan.examples[other] for other in members], rule.robust.max_share)
    elif rule.points is None or reducer(rule.kind, rule.robust) is not None:
        weights = [1.0] * len(members)
    else:
        weights = model_weights(rule.kind, rule.points(members, head), rule.robust) if members else []
    for other, weight in zip(members, weights, strict=True):
        row[other] = weight / sum(weights)
    return row


def _projected_row(plan: AuditPlan, rule: Rule, k: int, *, head: bool, key: str) -> list[float]:
    """The row of a rule that goes by the directions of changes; who took no part keeps its model."""
    if not rule.present[k]:
        return [float(other == k) for other in range(len(plan.clients))]
    row, members = _mean_row(plan, rule, k, head=head), _members(plan, rule, k, head=head)
    return row if rule.project is None or len(members) < 2 else rule.project(k, members, row, key)


def _edge(plan: AuditPlan, rule: Rule, k: int, other: int, *, head: bool) -> float:
    if plan.clients[k] in rule.without_edges or plan.clients[other] in rule.without_edges:
        return 0.0
    if k == other or not _may_meet(plan, k, other, head=head):
        return 0.0
    return float(plan.adjacency[k, other])


def _laplacian(plan: AuditPlan, rule: Rule, *, head: bool) -> np.ndarray:
    n = len(plan.clients)
    edge = [[_edge(plan, rule, k, other, head=head) for other in range(n)] for k in range(n)]
    degree = [sum(row) for row in edge]
    pull = np.zeros((n, n))  # how strongly each client is drawn to each other
    for k in range(n):
        for other in range(n):
            if edge[k][other] > 0:
                divisor = {"symmetric": 1.0, "random_walk": degree[k], "metropolis": max(degree[k], degree[other])}
                pull[k, other] = edge[k][other] / divisor[rule.laplacian]
    matrix = np.diag(pull.sum(axis=1)) - pull
    largest = np.linalg.norm(matrix, 2) if rule.laplacian == "symmetric" else 1.0
    return matrix / largest if largest > 0 else matrix


def _step_size(plan: AuditPlan, rule: Rule, layer: int | None) -> float:
    if not rule.by_layer or layer is None:
        return rule.eta
    if plan.importance is None:
        raise CheckpointError("the plan holds no importance of the layers, but eta was to follow it")
    mean = [float(np.mean(plan.importance[:, one])) for one in range(plan.importance.shape[1])]
    return rule.eta * mean[layer] / max(mean)


def weights(plan: AuditPlan, rule: Rule, *, head: bool, layer: int | None = None, key: str = "") -> np.ndarray:
    """(n, n): row k holds the weight that each client's model has in the next model of client k, for this parameter."""
    each = _each(plan, rule, head=head, layer=layer, key=key)
    if head or layer is None or rule.kind == "own":
        return each
    return np.array([_common_row(plan, rule, k, each, layer) for k in range(len(plan.clients))])


def _common_row(plan: AuditPlan, rule: Rule, k: int, each: np.ndarray, layer: int) -> np.ndarray:
    """The row of what client k has in common with others: the mean of their rows, by examples, over the present."""
    owners = plan.owners(k, layer)
    if len(owners) < 2:
        return np.asarray(each[k])
    if reducer(rule.kind, rule.robust) is not None:
        return np.asarray(each[k])
    counted = [one for one in owners if rule.present[one]] or owners
    examples = bound_weights([plan.examples[one] for one in counted], rule.robust.max_share)
    row = np.zeros(len(each))
    for one, weight in zip(counted, examples, strict=True):
        row += weight / sum(examples) * each[one]
    owners_sum = sum(row[one] for one in owners)
    row[list(owners)] = 0.0
    if not row.any():
        return np.asarray(np.eye(len(each))[k])
    row[k] = owners_sum  # whoever of them it falls on, they hold the same
    return row


def _each(plan: AuditPlan, rule: Rule, *, head: bool, layer: int | None, key: str) -> np.ndarray:
    """The same where nothing is anyone's in common."""
    n = len(plan.clients)
    if rule.kind == "own":
        return np.eye(n)
    if rule.kind == "pfedgraph":
        return np.array([_projected_row(plan, rule, k, head=head, key=key) for k in range(n)])
    if rule.kind != "laplacian":
        return np.array([_mean_row(plan, rule, k, head=head) for k in range(n)])
    step = _step_size(plan, rule, layer)
    matrix = _laplacian(plan, rule, head=head)
    rows = [[float(k == other) - step * matrix[k, other] for other in range(n)] for k in range(n)]
    return np.array([rows[k] if rule.present[k] else np.eye(n)[k] for k in range(n)])


def arrival_weights(plan: AuditPlan, rule: Rule, *, head: bool) -> np.ndarray:
    """(n, n): row k of who is not present, a newcomer, holds the weights of the models that it begins with.

    Those of an average over the others, or the weights of its edges over their sum; its own where it meets nobody.
    """
    n = len(plan.clients)
    matrix = np.eye(n)
    for k in (k for k in range(n) if not rule.present[k] and rule.kind != "own"):
        if rule.kind != "laplacian":
            matrix[k] = _mean_row(plan, rule, k, head=head)
            continue
        row = [_edge(plan, rule, k, other, head=head) * rule.present[other] for other in range(n)]
        if sum(row) > 0:
            matrix[k] = [weight / sum(row) for weight in row]
    return matrix


def connected_clients(matrix: np.ndarray, k: int) -> Sequence[int]:
    """Everyone whose model reaches client k or is reached by it, through any number of others."""
    reached, border = {k}, [k]
    while border:
        here = border.pop()
        near = [one for one in range(len(matrix)) if matrix[here, one] != 0 or matrix[one, here] != 0]
        border += [one for one in near if one not in reached]
        reached.update(near)
    return sorted(reached)


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
    """How far the recomputation moved it from what was trained, in the same measure."""
    still: bool
    """Whether every one of its bits is what was trained."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """The models around one server step, and its weights."""

    plan: AuditPlan
    """The plan in force."""
    before: Models
    """What everyone held when the server mixed."""
    after: Models
    """What everyone started the next round with."""
    weights: Callable[[str], np.ndarray]
    """The (n, n) weights for a parameter's name."""
    space: str
    """`product` or `factors`."""
    share: Sequence[str]
    """What was shared."""
    align: str
    """How factors of different ranks met."""
    reduce: Callable[[np.ndarray], np.ndarray] | None = None
    """Of a rule that is no weighted sum, how the values of those in a row become one."""
    server: Callable[[int, str], tuple[np.ndarray, float] | None] | None = None
    """Of a rule that steps from the average: what client k gets at this tensor, in product space at an A of its module,
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
    """Whether `got` is some best approximation of that rank: what is left meets neither its rows nor its columns and
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
        """Whether the rule leaves this tensor of client k as it is."""
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
        """Whether client k starts with the very bits that it held."""
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
    """Whether a parameter leaves the client; what is neither adapter nor head goes with the adapters."""
    if key.startswith(HEAD):
        return "head" in share
    if key == PRIVATE:
        return False
    for end, word in ((LORA_A, "A"), (LORA_B, "B")):
        if key.endswith(end):
            return word in share
    return "A" in share or "B" in share
