"""The weights of every rule, written again from its definition, one row and one edge at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from atlas_fl.audit.folder import Plan
from atlas_fl.audit.robust import Robust, bounded, model_weights, reducer
from atlas_fl.errors import CheckpointError

RULES = {
    "local": "own",
    "local_only": "own",
    "fedavg": "mean",
    "standard_fl": "mean",
    "fedavg_cluster": "cluster mean",
    "atlas_no_laplacian": "cluster mean",
    "atlas": "laplacian",
    "median": "median",
    "trimmed_mean": "trimmed mean",
    "krum": "krum",
    "multi_krum": "multi-krum",
    "geometric_median": "geometric median",
}
"""What each strategy's name, and each older name for it, means."""

ROBUST = ("median", "trimmed mean", "krum", "multi-krum", "geometric median")
"""Rules under which every client counts alike."""


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


def kind_of(strategy: str) -> str:
    """What a strategy does; raises CheckpointError for one that no audit is written for."""
    if strategy not in RULES:
        raise CheckpointError(f"no audit is written for strategy {strategy!r}; there is one for {', '.join(RULES)}")
    return RULES[strategy]


def _may_meet(plan: Plan, k: int, other: int, *, head: bool) -> bool:
    return not head or plan.tasks[k] == plan.tasks[other]


def _members(plan: Plan, rule: Rule, k: int, *, head: bool) -> list[int]:
    """Whose updates are aggregated into the model of client k."""
    everyone = rule.kind == "mean" or (rule.kind in ROBUST and rule.robust.within == "all")
    members = []
    for other in range(len(plan.clients)):
        together = everyone or (plan.clusters[k] >= 0 and plan.clusters[k] == plan.clusters[other]) or other == k
        if together and rule.present[other] and _may_meet(plan, k, other, head=head):
            members.append(other)
    return members


def _mean_row(plan: Plan, rule: Rule, k: int, *, head: bool) -> list[float]:
    """The weights of an average, by examples; of robust rules by distances, or all alike where nobody knows these."""
    members = _members(plan, rule, k, head=head)
    row = [float(other == k and not members) for other in range(len(plan.clients))]
    if rule.kind not in ROBUST:
        weights = bounded([plan.examples[other] for other in members], rule.robust.max_share)
    elif rule.points is None or reducer(rule.kind, rule.robust) is not None:
        weights = [1.0] * len(members)
    else:
        weights = model_weights(rule.kind, rule.points(members, head), rule.robust) if members else []
    for other, weight in zip(members, weights, strict=True):
        row[other] = weight / sum(weights)
    return row


def _edge(plan: Plan, rule: Rule, k: int, other: int, *, head: bool) -> float:
    if plan.clients[k] in rule.without_edges or plan.clients[other] in rule.without_edges:
        return 0.0
    if k == other or not _may_meet(plan, k, other, head=head):
        return 0.0
    return float(plan.adjacency[k, other])


def _laplacian(plan: Plan, rule: Rule, *, head: bool) -> np.ndarray:
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


def _step_size(plan: Plan, rule: Rule, layer: int | None) -> float:
    if not rule.by_layer or layer is None:
        return rule.eta
    if plan.importance is None:
        raise CheckpointError("the plan holds no importance of the layers, but eta was to follow it")
    mean = [float(np.mean(plan.importance[:, one])) for one in range(plan.importance.shape[1])]
    return rule.eta * mean[layer] / max(mean)


def weights(plan: Plan, rule: Rule, *, head: bool, layer: int | None = None) -> np.ndarray:
    """(n, n): row k holds the weight that each client's model has in the next model of client k."""
    each = _each(plan, rule, head=head, layer=layer)
    if head or layer is None or rule.kind == "own":
        return each
    return np.array([_common_row(plan, rule, k, each, layer) for k in range(len(plan.clients))])


def _common_row(plan: Plan, rule: Rule, k: int, each: np.ndarray, layer: int) -> np.ndarray:
    """The row of what client k has in common with others: the mean of their rows, by examples, over the present."""
    owners = plan.owners(k, layer)
    if len(owners) < 2:
        return np.asarray(each[k])
    if reducer(rule.kind, rule.robust) is not None:
        return np.asarray(each[k])
    counted = [one for one in owners if rule.present[one]] or owners
    examples = bounded([plan.examples[one] for one in counted], rule.robust.max_share)
    row = np.zeros(len(each))
    for one, weight in zip(counted, examples, strict=True):
        row += weight / sum(examples) * each[one]
    own = sum(row[one] for one in owners)
    row[list(owners)] = 0.0
    if not row.any():
        return np.asarray(np.eye(len(each))[k])
    row[k] = own  # whoever of them it falls on, they hold the same
    return row


def _each(plan: Plan, rule: Rule, *, head: bool, layer: int | None) -> np.ndarray:
    """The same where nothing is anyone's in common."""
    n = len(plan.clients)
    if rule.kind == "own":
        return np.eye(n)
    if rule.kind != "laplacian":
        return np.array([_mean_row(plan, rule, k, head=head) for k in range(n)])
    step = _step_size(plan, rule, layer)
    matrix = _laplacian(plan, rule, head=head)
    rows = [[float(k == other) - step * matrix[k, other] for other in range(n)] for k in range(n)]
    return np.array([rows[k] if rule.present[k] else np.eye(n)[k] for k in range(n)])


def arrival_weights(plan: Plan, rule: Rule, *, head: bool) -> np.ndarray:
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


def connected(matrix: np.ndarray, k: int) -> Sequence[int]:
    """Everyone whose model reaches client k or is reached by it, through any number of others."""
    found, border = {k}, [k]
    while border:
        here = border.pop()
        near = [one for one in range(len(matrix)) if matrix[here, one] != 0 or matrix[one, here] != 0]
        border += [one for one in near if one not in found]
        found.update(near)
    return sorted(found)
