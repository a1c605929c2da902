"""Second formulas of averages: by examples, norms or distances, robust ones, of others, and the Laplacian step.

Robust rules follow their papers one client and one coordinate at a time: Yin et al., 2018 (median, trimmed mean);
Blanchard et al., 2017 (Krum); Pillutla et al., 2022 (geometric median). FedAMP: Huang et al., 2021.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from atlas_fl.audit.dense import arrays, below, bound_weights, is_compared, numbers, padded, update, vector
from atlas_fl.audit.step import Formula, Step
from atlas_fl.errors import CheckpointError
from atlas_fl.params import HEAD, LORA_A, PRIVATE, SHARE

Shares: TypeAlias = Callable[[Step, Sequence[int], str], Sequence[float]]
"""(step, members, parameter) -> the share of each member."""


def by_examples(step: Step, members: Sequence[int], _key: str) -> Sequence[float]:
    """Shares by examples."""
    return step.shares(members)


def alike(_step: Step, members: Sequence[int], _key: str) -> Sequence[float]:
    """Equal shares."""
    return [1 / len(members)] * len(members)


def by_norm(step: Step, members: Sequence[int], key: str) -> Sequence[float]:
    """Shares of adapters by the Frobenius norm of all updates s B A; of heads, and where all are 0, by examples."""
    norms = [step.once(("norm", k), partial(_norm, step, k)) for k in members]
    if key.startswith(HEAD) or not any(norms):
        return step.shares(members)
    return bound_weights(norms, step.run.settings.robust.max_share)


def _norm(step: Step, k: int) -> float:
    params = step.trained[step.plan.clients[k]]
    modules = [key.removesuffix(LORA_A) for key, tensor in params.items() if key.endswith(LORA_A) and tensor.numel()]
    return float(np.sqrt(sum(float(np.square(update(step.plan, params, module)).sum()) for module in modules)))


def by_krum(step: Step, members: Sequence[int], key: str, *, several: bool = False) -> Sequence[float]:
    """The one with the smallest s(k) = the sum over its n - f - 2 nearest others l of || V_k - V_l ||^2.

    With `several` the n - f with the smallest.
    """
    distances, n = square_distances(step, members, key), len(members)
    if n == 1:
        return [1.0]
    num_nearest = min(max(n - step.run.settings.server.byzantine - 2, 1), n - 1)
    scores = [sum(sorted(np.delete(distances[k], k))[:num_nearest]) for k in range(n)]
    byzantine = min(step.run.settings.server.byzantine, (n - 1) // 2)
    last = sorted(scores)[n - byzantine - 1 if several else 0]
    chosen = [score <= last * (1 + 1e-9) for score in scores]
    return [one / sum(chosen) for one in chosen]


def by_geometric_median(step: Step, members: Sequence[int], key: str) -> Sequence[float]:
    """Weiszfeld's weights 1 / max(nu, || z - w_k ||), from the mean on until they settle."""
    points = model_points(step, members, key)
    shares = [1 / len(points)] * len(points)
    for _ in range(1000):
        centre = sum(share * point for share, point in zip(shares, points, strict=True))
        inverse = [1 / max(1e-6, float(np.linalg.norm(centre - point))) for point in points]
        before = shares
        shares = [one / sum(inverse) for one in inverse]
        if max(abs(new - old) for new, old in zip(shares, before, strict=True)) < 1e-12:
            break
    return shares


def square_distances(step: Step, members: Sequence[int], key: str) -> np.ndarray:
    """Squared distances between these members' models, of their heads or of all the rest."""
    points = model_points(step, members, key)
    return np.array([[float(np.square(one - other).sum()) for other in points] for one in points])


def model_points(step: Step, members: Sequence[int], key: str) -> np.ndarray:
    """(members, members): points with the distances of what these share, of their heads or of all the rest.

    The triangular factors of differences to the first member, tensor after tensor: each column keeps its own digits.
    """
    is_head, share = key.startswith(HEAD), step.run.mixing.share
    space = "product" if {"A", "B"} <= set(share) else "factors"  # both are compared by their product

    def reduce() -> np.ndarray:
        factor = np.zeros((0, len(members)))
        for name in step.trained[step.plan.clients[members[0]]]:
            if name.startswith(HEAD) == is_head and is_compared(name, share, space):
                models = (step.trained[step.plan.clients[k]] for k in members)
                columns = padded([vector(step.plan, params, name, space) for params in models])
                block = np.stack([column - columns[0] for column in columns], axis=1)
                factor = np.asarray(np.linalg.qr(np.concatenate([factor, block]), mode="r"))
        return factor.T

    return step.once(("points", tuple(members), is_head), reduce)


def trimmed_mean(step: Step, stack: np.ndarray) -> np.ndarray:
    """The mean of what is left without the largest and the smallest values."""
    trim = step.run.settings.server.trim
    left_out = min(int(np.ceil(trim * len(stack) - 1e-9)), (len(stack) - 1) // 2)
    ordered = np.sort(stack, axis=0)
    return np.asarray(np.mean(ordered[left_out : len(stack) - left_out], axis=0))


def median(_step: Step, stack: np.ndarray) -> np.ndarray:
    """The median of every value."""
    return np.asarray(np.median(stack, axis=0))


class Own(Formula):
    """Identity: each client keeps its own model."""

    mixes = False


@dataclass(frozen=True, kw_only=True)
class Mean(Formula):
    """An average over those who took part, inside a cluster or of all."""

    within: str = "all"
    """`all`, `clusters`, or `settings` for what these say."""
    shares: Shares = by_examples
    clusters: tuple[int, ...] | None = None
    """Cluster of each client; None for those of the plan."""

    def cohort(self, step: Step, k: int, key: str) -> list[int]:
        """Clients that have one model, or head, with client k, itself included."""
        within = step.run.settings.robust.within if self.within == "settings" else self.within
        clusters = step.plan.clusters if self.clusters is None else self.clusters
        return [one for one in step.mates(k, key) if within == "all" or one == k or 0 <= clusters[k] == clusters[one]]

    def members(self, step: Step, k: int, key: str) -> list[int]:
        """Clients whose values are averaged for client k."""
        return step.there(self.cohort(step, k, key))

    def stepping(self, step: Step, k: int, key: str) -> list[int]:
        """The same of a server step, which a client that is alone does not have."""
        cohort = self.cohort(step, k, key)
        return step.there(cohort) if len(cohort) > 1 else []

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """The shares of the members; its own where there are none."""
        members = self.members(step, k, key)
        if not members:
            return step.own_row(k)
        return step.row(dict(zip(members, self.shares(step, members, key), strict=True)))


MEAN = Mean()
CLUSTER_MEAN = Mean(within="clusters")


class Averaging(Formula):
    """A rule of its own under which those who join begin with the average of all."""

    average = MEAN

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """The average, of rules that step from it."""
        return self.average.row(step, k, key)

    def arrival_row(self, step: Step, k: int, key: str) -> list[float]:
        """The average of the others."""
        return self.average.row(step, k, key)


class MeanWithShares(Mean):
    """FedALT: the average of all, and in the state the share of each client in it."""

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The shares of those who took part; those of before where the average is that of before.

        In sums they are of the clients that have a share, bounded among these or among all that took part: who left is
        in no record.
        """
        there, is_summed = step.there(range(step.num_clients)), step.run.settings.needs_sums
        paths = [f"{SHARE}/{client}/{SHARE}" for client in step.plan.clients]
        told = {k: float(step.told.get(paths[k], 0.0)) for k in there}
        members = [k for k in there if told[k] > 0] if is_summed else there
        is_lost = is_summed and all(
            np.array_equal(step.value(step.before, k, key), step.value(step.trained, k, key))
            for k in there
            for key in step.compared(step.before, [k], lambda key: key.endswith(LORA_A))
        )
        if not members or is_lost:
            return arrays(step.state)
        bounded = [dict(zip(some, step.shares(some), strict=True)) for some in (there, members)]
        candidates = [{k: shares[k] / sum(shares[one] for one in members) for k in members} for shares in bounded]
        nearest = min(candidates, key=lambda shares: sum(abs(share - told[k]) for k, share in shares.items()))
        return {path: np.array(nearest.get(k, 0.0)) for k, path in enumerate(paths)}


class MeanWithVariances(Mean):
    """Shrinkage: the average of all, and in the state how far each client keeps its own deviation."""

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """b_k from the means of what clients have reported, as they were recorded in the round that asked for them."""
        told = {name: float(value) for name, value in below(step.told, "means/").items()}
        if step.state or told.keys() != {"half_length", "agreement", "length", "squares"}:
            return arrays(step.state)
        there, examples = step.there(range(step.num_clients)), np.array(step.plan.examples)
        start, shares = step.before[step.plan.clients[0]], np.array(step.shares(there))
        moved = []
        for key in [key for key in start if not key.startswith(HEAD) and key != PRIVATE]:
            trained = np.stack([numbers(step.trained[step.plan.clients[k]][key]) for k in there])
            moved.append((np.tensordot(shares, trained, 1) - numbers(start[key])).ravel())
        whole, own = float(np.square(np.concatenate(moved)).mean()), told["squares"]
        kept = np.zeros(step.num_clients)
        if told["half_length"] > 0 and own < 1:
            between = told["length"] * told["agreement"] / told["half_length"]
            across = (whole - own * told["length"]) / (1 - own)
            variance = max(0.0, between - across)
            noise = max(0.0, told["length"] - across - variance) * examples.mean() / examples
            kept = variance / np.maximum(variance + noise, 1e-300)
        parts = {f"{SHARE}/{one}/{SHARE}": np.array(part) for one, part in zip(step.plan.clients, kept, strict=True)}
        return {**{f"means/{name}": np.array(value) for name, value in told.items()}, **parts}


class MeanByDistance(Averaging):
    """FedAMP: alpha / (n - 1) e^(-x / sigma) to each other, with x in mean squared distances; the rest to itself."""

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """The attention of client k."""
        members, row = self.average.members(step, k, key), step.own_row(k)
        if not step.present[k] or len(members) < 2:
            return row
        server = step.run.settings.server
        distances, others = square_distances(step, members, key), len(members) - 1
        mean = float(distances.sum()) / (len(members) * others)
        for other, square in zip(members, distances[members.index(k)], strict=True):
            if other != k:
                near = float(np.exp(-square / (mean * server.attention_sigma))) if mean > 0 else 1.0
                row[other] = server.attention_alpha * near / others
                row[k] -= row[other]
        return row


class Laplacian(Formula):
    """W <- (I - eta L) W over the graph of the plan; who took no part keeps its model."""

    steps = True

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """Row k of I - eta L."""
        if not step.present[k]:
            return step.own_row(k)
        is_head = key.startswith(HEAD)
        matrix = step.once(("laplacian", is_head), lambda: self._matrix(step, key))
        return list(np.array(step.own_row(k)) - self._step_size(step, key) * matrix[k])

    def arrival_row(self, step: Step, k: int, key: str) -> list[float]:
        """The weights of its edges over their sum; its own where it meets nobody."""
        edges = {other: self._edge(step, k, other, key) for other in step.there(range(step.num_clients))}
        total = sum(edges.values())
        return step.row({one: edge / total for one, edge in edges.items()}) if total > 0 else step.own_row(k)

    def _edge(self, step: Step, k: int, other: int, key: str) -> float:
        names = step.plan.clients
        is_edge = k != other and step.plan.may_meet(k, other, key)
        if not is_edge or names[k] in step.without_edges or names[other] in step.without_edges:
            return 0.0
        return float(step.plan.adjacency[k, other])

    def _matrix(self, step: Step, key: str) -> np.ndarray:
        n = step.num_clients
        edge = [[self._edge(step, k, other, key) for other in range(n)] for k in range(n)]
        degree = [sum(row) for row in edge]
        pull = np.zeros((n, n))  # how strongly each client is drawn to each other
        for k in range(n):
            for other in range(n):
                if edge[k][other] > 0:
                    pull[k, other] = edge[k][other] / degree[k]
        return np.asarray(np.diag(pull.sum(axis=1)) - pull)

    def _step_size(self, step: Step, key: str) -> float:
        layer = step.plan.layer(key)
        eta = step.run.eta(step.round)
        if step.run.mixing.layer_weighting != "importance" or layer is None:
            return eta
        if step.plan.importance is None:
            raise CheckpointError("the plan holds no importance of the layers, but eta was to follow it")
        means = step.plan.importance.mean(axis=0)
        return float(eta * means[layer] / means.max())


class Recorded(Formula):
    """A plug-in's method: the rows that it recorded, for there is no second formula."""

    is_known = False

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """Row k of the recorded matrix."""
        return list(step.run.mixing_rows(step.round)["head" if key.startswith(HEAD) else "adapters"][k])
