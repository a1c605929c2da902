"""Every mixing rule written a second time: the weights of a round, from each rule's definition; robust rules too.

Weights follow one row and one edge at a time; robust rules from their papers, one client and one coordinate at a time.
How models follow from the weights is in `audit.recompute`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from atlas_fl.audit.run_files import AuditPlan, Models, Run
from atlas_fl.errors import CheckpointError
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE, is_last_layer


@dataclass(frozen=True, kw_only=True)
class Robust:
    """A run's settings of robust aggregation."""

    within: str = "all"
    trim: float = 0.2
    byzantine: int = 1
    max_share: float = 1.0


def robust_of(run: Run) -> Robust:
    """The robust settings of this run, from its config.toml; `atlas` asks clusters whatever they say."""
    robust_settings: Mapping[str, Any] = {**run.config.get("robust", {}), **run.config.get("server", {})}
    if run.mixing.strategy == "atlas":
        robust_settings = {**robust_settings, "within": "clusters"}
    return Robust(**{name: robust_settings[name] for name in Robust.__dataclass_fields__ if name in robust_settings})


def attention_of(run: Run) -> tuple[float, float]:
    """FedAMP's alpha and sigma, from config.toml."""
    given: Mapping[str, Any] = run.config.get("server", {})
    return float(given.get("attention_alpha", 1.0)), float(given.get("attention_sigma", 1.0))


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
    """Reduction of the clients' values, (clients, ...), to one; None for a rule that is a weighted sum."""
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


def norms_of(models: Models, plan: AuditPlan, clients: Sequence[int]) -> list[float]:
    """The Frobenius norm of all updates s B A of each of these clients, from the dense products."""
    norms = []
    for k in clients:
        params, squares = models[plan.clients[k]], 0.0
        for key in (key for key in params if key.endswith(LORA_A)):
            a, b = (params[name].double().numpy() for name in (key, key.removesuffix(LORA_A) + LORA_B))
            if a.size and b.size:
                squares += float(np.square(plan.scale(len(a)) * (b @ a)).sum())
        norms.append(float(np.sqrt(squares)))
    return norms


def _columns(
    client_params: Sequence[Mapping[str, Any]], plan: AuditPlan, share: Sequence[str], key: str
) -> list[np.ndarray] | None:
    """Compared value at this key for each client; None without one, or where another key has it."""
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


STACKED, RESIDUAL = "mean of products", "mean, and what it lacks of products"
"""The rules with a frozen part (`audit.exact_average`)."""

RULES = {
    **dict.fromkeys(("local", "local_only", "centralized", "multitask", "linear_probe", "local_prior"), "own"),
    **dict.fromkeys(("fedavg", "standard_fl", "fedit", "flexlora", "ffa", "rolora", "fedsa", "fedper"), "mean"),
    **dict.fromkeys(
        ("mr_mtl", "fedrep", "fedbabu", "fedavg_ft", "fedavg_prior", "fedprox", "hsplitlora", "scaffold"), "mean"
    ),
    **dict.fromkeys(("ditto", "apfl", "feddpa"), "mean"),
    **dict.fromkeys(("fedavg_cluster", "fedavg_cluster_ft", "fedavg_cluster_prior", "fedlease"), "cluster mean"),
    **dict.fromkeys(("fedavg_oracle", "atlas_no_laplacian", "mr_mtl_cluster"), "cluster mean"),
    **dict.fromkeys(("atlas_laplacian", "atlas_pad", "atlas_truncate"), "laplacian"),
    **dict.fromkeys(("fedavg_by_norm", "hetlora"), "mean by norm"),
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
    **dict.fromkeys(("fedavg_by_distance", "fedamp"), "mean by distance"),
    **dict.fromkeys(("fedavg_of_others", "fedalt", "fedalt_fixed"), "mean of others"),
    **dict.fromkeys(("fedavg_dynamic", "feddyn"), "feddyn"),
    **dict.fromkeys(("fedavg_stacked", "flora"), STACKED),
    **dict.fromkeys(("fedavg_with_residual", "fedex"), RESIDUAL),
    "cfl": "cfl",
    "ifca": "ifca",
    "fedtreelora": "fedtreelora",
    **dict.fromkeys(("classifier_collaboration", "fedpac"), "mean, heads by features"),
    **dict.fromkeys(("kriging", "atlas"), "kriging"),
}
"""Kind of rule by the name of a strategy."""

ROBUST = ("median", "trimmed mean", "krum", "multi-krum", "geometric median")
"""Rules under which every client counts alike."""

HEADS_BY_FEATURES = "mean, heads by features"
"""The rule whose last layers of heads follow class features (`audit.class_features`), and all else the examples."""

KRIGING = "kriging"
"""The rule whose rows follow from split halves (`audit.kriging`)."""

SERVER_OPTIMIZERS = {"fedavgm": (1.0, 0.9), "fedadagrad": (0.01, 0.0), "fedyogi": (0.01, 0.9), "fedadam": (0.01, 0.9)}
"""Default learning rate and first beta of each server optimizer."""

BY_UPDATES = ("cfl", "fedtreelora", "ifca")
"""Rules whose clusters follow from updates or losses, and are in the server state."""

EVERYONE = (
    "mean",
    "mean by norm",
    "mean by distance",
    "mean of others",
    "feddyn",
    STACKED,
    RESIDUAL,
    HEADS_BY_FEATURES,
    *BY_UPDATES,
)
"""Rules over all clients; of those by updates, before anything told them apart."""

WITHIN = (*ROBUST, *SERVER_OPTIMIZERS, "pfedgraph", KRIGING)
"""Rules over all clients, or inside clusters, as the settings say; of kriging what is given before it has measured."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Input of a round's weights."""

    kind: str
    """One of the values of `RULES`."""
    laplacian: str
    """`symmetric`, `random_walk` or `metropolis`."""
    eta: float
    """Step of the round."""
    by_layer: bool
    """True if eta is scaled by the importance of the layer."""
    present: tuple[bool, ...]
    """Clients whose update counts."""
    without_edges: tuple[str, ...] = ()
    """Clients that are nobody's neighbour."""
    robust: Robust = field(default_factory=Robust)
    """Bounds on weights, and settings of robust rules."""
    recorded: Mapping[str, np.ndarray] | None = None
    """Recorded matrices of a plug-in's method, `adapters` and `head`."""
    points: Callable[[Sequence[int], bool], np.ndarray] | None = None
    """Points as far apart as the models of these clients, heads or the rest; None where nobody asks."""
    project: Callable[[int, Sequence[int], list[float], str], list[float]] | None = None
    """Row by directions from a client, its members, their shares and a parameter; None where nobody asks."""
    norms: Callable[[Sequence[int]], list[float]] | None = None
    """Norms of these clients' updates; None where nobody asks."""
    combine: Callable[[int, Sequence[int]], list[float]] | None = None
    """Row of a head by class features from a client and its members; None where nobody asks."""
    predict: Callable[[int, Sequence[int], str, list[float], list[float]], list[float] | None] | None = None
    """Row from a client, its members, a parameter and the rows of the members' average and its cluster's: that by split
    halves, or none; None where nobody asks."""
    predict_cluster: Callable[[int, Mapping[int, Sequence[float]], str], list[float] | None] | None = None
    """Row before a client has reported, from the averages' rows of all who may weigh and a parameter, or none."""
    clusters: Callable[[bool, int | None], list[int]] | None = None
    """For heads or a layer: the clusters that followed from updates; None where nobody asks."""
    attention: tuple[float, float] = (1.0, 1.0)
    """FedAMP's alpha and sigma."""


def has_state(kind: str) -> bool:
    """Return whether rows of this kind follow from more than the federation and who took part."""
    return kind in SERVER_OPTIMIZERS or kind in (
        "pfedgraph",
        "mean by distance",
        "feddyn",
        STACKED,
        RESIDUAL,
        HEADS_BY_FEATURES,
        KRIGING,
    )


PLUGGED = "of a plug-in"
"""The kind of a method that a plug-in brings: there is no second formula for it."""


def run_kind(run: Run) -> str:
    """The kind of the run's method; raises CheckpointError where no audit is written for it."""
    is_plugged = run.mixing.strategy not in RULES and bool(run.config.get("run", {}).get("plugin"))
    return PLUGGED if is_plugged else kind_of(run.mixing.strategy)


def kind_of(strategy: str) -> str:
    """Kind of a strategy; raises CheckpointError for one that no audit is written for."""
    if strategy not in RULES:
        raise CheckpointError(f"no audit is written for strategy {strategy!r}; there is one for {', '.join(RULES)}")
    return RULES[strategy]


def _may_meet(plan: AuditPlan, k: int, other: int, *, head: bool) -> bool:
    return not head or plan.tasks[k] == plan.tasks[other]


def _begins_in_cluster(plan: AuditPlan, k: int) -> bool:
    """Return whether most clients share a cluster with another, and this one does."""
    labels = [label for label in plan.clusters if label >= 0]
    shared = [label for label in labels if labels.count(label) > 1]
    return 2 * len(shared) > len(plan.clusters) and plan.clusters[k] in shared


def _members(plan: AuditPlan, rule: Rule, k: int, *, head: bool) -> list[int]:
    """Clients whose updates are aggregated into the model of client k."""
    everyone = rule.kind in EVERYONE or (rule.kind in WITHIN and rule.robust.within == "all")
    everyone = everyone or (rule.kind == KRIGING and not _begins_in_cluster(plan, k))
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
    if rule.kind == "mean by norm" and not head and rule.norms is not None and any(norms := rule.norms(members)):
        weights = bound_weights(norms, rule.robust.max_share)
    elif rule.kind not in ROBUST:
        weights = bound_weights([plan.examples[other] for other in members], rule.robust.max_share)
    elif rule.points is None or reducer(rule.kind, rule.robust) is not None:
        weights = [1.0] * len(members)
    else:
        weights = model_weights(rule.kind, rule.points(members, head), rule.robust) if members else []
    for other, weight in zip(members, weights, strict=True):
        row[other] = weight / sum(weights)
    return row


def _row_of_others(plan: AuditPlan, rule: Rule, k: int, *, head: bool) -> list[float]:
    """The weights of everyone's average without client k, which keeps its model where nobody is left."""
    row = _mean_row(plan, rule, k, head=head)
    if not rule.present[k]:
        return row
    others = [0.0 if other == k else weight for other, weight in enumerate(row)]
    return [weight / sum(others) for weight in others] if sum(others) > 0 else [float(o == k) for o in range(len(row))]


def _projected_row(plan: AuditPlan, rule: Rule, k: int, *, head: bool, key: str) -> list[float]:
    """The row of a rule that goes by the directions of changes; who took no part keeps its model."""
    if not rule.present[k]:
        return [float(other == k) for other in range(len(plan.clients))]
    row, members = _mean_row(plan, rule, k, head=head), _members(plan, rule, k, head=head)
    return row if rule.project is None or len(members) < 2 else rule.project(k, members, row, key)


def _attentive_row(plan: AuditPlan, rule: Rule, k: int, *, head: bool) -> list[float]:
    """FedAMP: alpha / (n - 1) e^(-x / sigma) to each other, with x in mean squared distances; the rest to itself."""
    row = [float(other == k) for other in range(len(plan.clients))]
    members = _members(plan, rule, k, head=head)
    if not rule.present[k] or len(members) < 2:
        return row
    points = np.zeros((len(members), 1)) if rule.points is None else rule.points(members, head)
    alpha, sigma = rule.attention
    squares = [[float(((one - other) ** 2).sum()) for other in points] for one in points]
    mean = sum(map(sum, squares)) / (len(members) * (len(members) - 1))
    for other, square in zip(members, squares[members.index(k)], strict=True):
        if other != k:
            near = float(np.exp(-square / (mean * sigma))) if mean > 0 else 1.0
            row[other] = alpha * near / (len(members) - 1)
            row[k] -= row[other]
    return row


def _combined_row(plan: AuditPlan, rule: Rule, k: int) -> list[float]:
    """The row of a head by class features; who took no part, or is alone, keeps its own."""
    members = _members(plan, rule, k, head=True)
    if rule.combine is None:
        return _mean_row(plan, rule, k, head=True)
    if not rule.present[k] or len(members) < 2:
        return [float(other == k) for other in range(len(plan.clients))]
    return rule.combine(k, members)


def _predicted_row(plan: AuditPlan, rule: Rule, k: int, *, head: bool, key: str) -> list[float]:
    """The row of a prediction from split halves, before these of the prediction of clusters, or of the average."""
    over_all = replace(rule, robust=replace(rule.robust, within="all"))
    members = _members(plan, over_all, k, head=head)
    averages = [_mean_row(plan, one, k, head=head) for one in (over_all, replace(rule, kind="cluster mean"))]
    row = None if rule.predict is None else rule.predict(k, members, key, *averages)
    if row is None and rule.predict_cluster is not None and rule.robust.within == "clusters":
        begins = [one for one in members if _begins_in_cluster(plan, one)]
        row = rule.predict_cluster(k, {one: _mean_row(plan, rule, one, head=head) for one in begins}, key)
    return _mean_row(plan, rule, k, head=head) if row is None else row


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
    if rule.recorded is not None:
        return rule.recorded["head" if head else "adapters"]
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
    if rule.kind == HEADS_BY_FEATURES and is_last_layer(key):
        return np.array([_combined_row(plan, rule, k) for k in range(n)])
    if rule.kind == KRIGING:
        return np.array([_predicted_row(plan, rule, k, head=head, key=key) for k in range(n)])
    if rule.kind == "pfedgraph":
        return np.array([_projected_row(plan, rule, k, head=head, key=key) for k in range(n)])
    if rule.kind == "mean of others":
        return np.array([_row_of_others(plan, rule, k, head=head) for k in range(n)])
    if rule.kind == "mean by distance":
        return np.array([_attentive_row(plan, rule, k, head=head) for k in range(n)])
    if rule.kind in BY_UPDATES and rule.clusters is not None:
        plan, rule = replace(plan, clusters=tuple(rule.clusters(head, layer))), replace(rule, kind="cluster mean")
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
