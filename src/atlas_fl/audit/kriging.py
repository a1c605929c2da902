"""Second formulas of rules by changes since the run began: pFedGraph (Ye et al., 2023) by their cosines, and kriging.

Kriging's rows are computed again from the halves that each client reported, in float64. So are estimates of many means:
Feldman et al., 2012 and 2014 (Multi-Task Averaging, by the inverse); Efron and Morris, 1975 (James-Stein); Marienwald
et al., 2021 (similarity tests, one pair at a time).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np

from atlas_fl.audit.averages import CLUSTER_MEAN, MEAN, Averaging, Mean
from atlas_fl.audit.dense import arrays, below, cosines, is_mixed, numbers, smallest_without_signs
from atlas_fl.audit.run_files import AuditPlan, Flat, Models, Run
from atlas_fl.audit.step import Step, compare_values
from atlas_fl.params import HEAD, unflatten_by_client

FIRST, SECOND = HALVES = ("first", "second")
RIDGE = 1e-9
"""Ridge on top of the noise."""
SHORTEST = 1e-6
"""Share of the longest below which a length is none."""

Halves = dict[str, Models]
"""By half the models that clients reported, by client."""
Predict: TypeAlias = Callable[[Step, Sequence[int], np.ndarray, np.ndarray], np.ndarray]
"""(step, members, first halves, second halves) -> the members' rows; halves are (members, values), as changes."""


class Since(Averaging):
    """A rule that compares changes since the beginning, from models that its state keeps."""

    def initial(self, run: Run, models: Models) -> dict[str, np.ndarray]:
        """Shared tensors of the models that clients begin with."""
        shared = {
            f"initial/{client}/{key}": tensor
            for client, params in models.items()
            for key, tensor in params.items()
            if is_mixed(key, run.mixing.share)
        }
        return arrays(shared)


def first_models(step: Step, models: Models) -> Models:
    """The first models of these clients, as the state keeps them.

    What it lacks counts as zero: the row of the state itself has failed then.
    """
    return step.once(
        ("first", id(models)),
        lambda: {
            client: {key: step.state.get(f"initial/{client}/{key}", tensor * 0) for key, tensor in params.items()}
            for client, params in models.items()
        },
    )


def shares_matrix(step: Step, key: str) -> Callable[[str], bool]:
    """Return for another parameter whether both are heads, or neither is and `--gram-by` gives them one matrix."""
    by_layer = step.run.settings.server.gram_by == "layer"

    def shares(other: str) -> bool:
        if other.startswith(HEAD) or key.startswith(HEAD):
            return other.startswith(HEAD) and key.startswith(HEAD)
        return not by_layer or step.plan.layer(other) == step.plan.layer(key)

    return shares


class ByDirections(Since):
    """The row of each client by a program on the simplex; who took no part keeps its model."""

    average = Mean(within="settings")

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """argmin over the simplex of sum_l m_l d_kl + alpha || m - p ||^2, by bisection on what each entry loses."""
        members = self.average.members(step, k, key)
        if not step.present[k]:
            return step.own_row(k)
        if len(members) < 2:
            return self.average.row(step, k, key)
        server = step.run.settings.server
        shares = (lambda _: True) if server.gram_by == "all" else shares_matrix(step, key)
        keys = tuple(step.compared(step.trained, members, shares))
        first = first_models(step, step.trained)
        known = step.once(
            ("cosines", tuple(members), keys), lambda: cosines(step.products(members, keys, first, step.trained))
        )
        pulls = known[members.index(k)] / (2.0 * server.gram_alpha)
        point = [share + float(pull) for share, pull in zip(step.shares(members), pulls, strict=True)]
        low, high = min(point) - 1.0, max(point)
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(max(one - middle, 0.0) for one in point) > 1.0 else (low, middle)
        kept = [max(one - high, 0.0) for one in point]
        return step.row({one: weight / sum(kept) for one, weight in zip(members, kept, strict=True)})


def by_kriging(step: Step, members: Sequence[int], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Predictions by covariances and noise, with no weight of another above the bound."""
    known = _without_negative((first @ second.T + second @ first.T) / 2)
    noise = np.square(first - second).sum(axis=1) / 4
    examples = np.array([step.plan.examples[one] for one in members])
    rows = [prediction_row(k, known, noise, examples) for k in range(len(members))]
    return np.array([_cap_shares(step, row, k) for k, row in enumerate(rows)])


@dataclass(frozen=True, kw_only=True)
class FromHalves(Since):
    """Rows by what split halves say, and before there are any, with clusters, from the clusters' models."""

    within: str = "settings"
    """`clusters`, `all`, or `settings` for what these say."""
    predict: Predict = by_kriging
    """The rows of those who are measured and are not averaged."""

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """The prediction, or the average where clients or clusters differ by less than their noise."""
        reports = step.once("reports", lambda: read_halves(step.told))
        if step.plan.clients[k] not in reports[FIRST]:
            return self._cluster_row(step, k, key) or self.arrival_row(step, k, key)
        members = [one for one in MEAN.members(step, k, key) if step.plan.clients[one] in reports[FIRST]]
        if k not in members:
            return step.own_row(k)
        reported = [one for one in range(step.num_clients) if step.plan.clients[one] in reports[FIRST]]
        keys = tuple(step.compared(reports[FIRST], reported, shares_matrix(step, key)))
        if self._is_averaged(step, reports, keys, key):
            return MEAN.row(step, k, key)
        if self._is_averaged(step, reports, keys, key, k=k):
            return CLUSTER_MEAN.row(step, k, key)
        halves = (_vectors(step, members, reports[half], keys) for half in HALVES)
        rows = step.once(("predicted", tuple(members), keys), lambda: self.predict(step, members, *halves))
        return step.row(dict(zip(members, rows[members.index(k)], strict=True)))

    def arrival_row(self, step: Step, k: int, key: str) -> list[float]:
        """The average of a client that nothing is known of: that of its cluster, where it has one."""
        is_in_cluster = self._is_clustered(step) and _begins_in_cluster(step.plan, k)
        return (CLUSTER_MEAN if is_in_cluster else MEAN).row(step, k, key)

    def state_fault(self, step: Step) -> tuple[str, float | None] | None:
        """Fault where a client that was to report has not done so of all tensors, or anything else has changed."""
        if step.is_undone:
            return None
        expected, recorded = arrays(step.state), arrays(step.told)
        for client in (step.plan.clients[k] for k in step.there(range(step.num_clients)) if self._is_measured(step)):
            for path, tensor in (
                (f"{half}/{key}", one) for half in HALVES for key, one in step.trained[client].items()
            ):
                reported = recorded.get(f"halves/{client}/{path}", np.zeros(0))
                fits = reported.shape == tuple(tensor.shape)
                expected.setdefault(f"halves/{client}/{path}", reported if fits else numbers(tensor))
        return compare_values(expected, recorded, "the server state", tolerance=(0.0, 0.0))

    def _is_measured(self, step: Step) -> bool:
        settings = step.run.settings
        first, aggregated = settings.server.measure_round, settings.training.rounds - settings.mixing.personal_rounds
        return step.round >= (first if first <= max(1, aggregated) else -(-aggregated // 3))

    def _is_clustered(self, step: Step) -> bool:
        return "clusters" in (self.within, step.run.settings.robust.within) and self.within != "all"

    def _is_averaged(
        self, step: Step, reports: Halves, keys: tuple[str, ...], key: str, *, k: int | None = None
    ) -> bool:
        """True if clusters are averaged and what was reported differs by less than its noise.

        For client k what its cluster reported, and by less than clusters differ; else the adapters of all.
        """
        plan = step.plan
        is_apart = key.startswith(HEAD) if k is None else plan.clusters[k] < 0
        if is_apart or not self._is_clustered(step):
            return False
        places = range(step.num_clients) if k is None else step.mates(k, key)
        known = [one for one in places if plan.clients[one] in reports[FIRST]]
        members = known if k is None else [one for one in known if plan.clusters[one] == plan.clusters[k]]
        if len(members) < 2:
            return False

        def measure(clients: Sequence[int]) -> tuple[float, float]:
            return step.once(("noise", tuple(clients), keys), lambda: _noise_and_variance(step, reports, clients, keys))

        (noise, inside), (_, total) = measure(members), measure(known)
        explains = len(members) == len(known) or max(0.0, inside) < total - max(0.0, inside)
        return 0 < noise > inside and explains

    def _cluster_row(self, step: Step, k: int, key: str) -> list[float] | None:
        """The weights of client k before it has reported, by the cluster that it begins in; None without clusters."""
        plan = step.plan
        members = [one for one in MEAN.members(step, k, key) if _begins_in_cluster(plan, one)]
        by_cluster: dict[int, list[int]] = {}
        for one in members:
            by_cluster.setdefault(plan.clusters[one], []).append(one)
        groups = list(by_cluster.values())
        if not self._is_clustered(step) or k not in members or len(groups) < 2 or max(map(len, groups)) < 2:
            return None
        averages = [CLUSTER_MEAN.row(step, group[0], key) for group in groups]
        keys = step.compared(step.trained, members, shares_matrix(step, key))
        change = dict(zip(members, _vectors(step, members, step.trained, keys), strict=True))
        means = [np.sum([row[one] * change[one] for one in members], axis=0) for row in averages]
        known, noise = _between_and_inside(groups, means, change)
        spread = np.array([sum(row[one] ** 2 for one in members) for row in averages])
        examples = np.array([sum(plan.examples[one] for one in group) for group in groups], np.float64)
        c = next(place for place, group in enumerate(groups) if k in group)
        weights = _cap_shares(step, prediction_row(c, _without_negative(known), noise * spread, examples), c)
        return step.row({one: sum(w * row[one] for w, row in zip(weights, averages, strict=True)) for one in members})


def _begins_in_cluster(plan: AuditPlan, k: int) -> bool:
    """Return whether most clients share a cluster with another, and this one does."""
    labels = [label for label in plan.clusters if label >= 0]
    shared = [label for label in labels if labels.count(label) > 1]
    return 2 * len(shared) > len(plan.clusters) and plan.clusters[k] in shared


def _cap_shares(step: Step, row: Sequence[float] | np.ndarray, k: int) -> list[float]:
    """The row with no weight of another above the bound; what is left is its own."""
    most: float = step.run.settings.server.max_other_share
    others = {one: min(float(weight), most) for one, weight in enumerate(row) if one != k}
    return [others.get(one, 1.0 - sum(others.values())) for one in range(len(row))]


def read_halves(state: Flat) -> Halves:
    """Both halves of every client that has reported, from a server state by path."""
    by_client = unflatten_by_client(below(state, "halves/"))
    return {half: {client: below(own, f"{half}/") for client, own in by_client.items()} for half in HALVES}


def _vectors(step: Step, members: Sequence[int], models: Models, keys: Sequence[str]) -> np.ndarray:
    """(members, values): the change of each member's model since the beginning, over these parameters."""
    first = first_models(step, models)
    empty = np.zeros((len(members), 0))
    return np.concatenate([empty, *(np.stack(step.changes(members, key, first, models)) for key in keys)], axis=1)


def _noise_and_variance(
    step: Step, reports: Halves, members: Sequence[int], keys: Sequence[str]
) -> tuple[float, float]:
    first, second = (_vectors(step, members, reports[half], keys) for half in HALVES)
    # the mean of what both halves of all pairs say is the squared distance between two clients, without noise
    pairs = combinations(range(len(members)), 2)
    between = np.mean([(first[i] - first[j]) @ (second[i] - second[j]) for i, j in pairs]) / 2
    return float(np.square(first - second).sum() / 4 / len(members)), float(between)


def _between_and_inside(
    groups: Sequence[Sequence[int]], means: Sequence[np.ndarray], change: Mapping[int, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Covariance of clusters with each other and with themselves, and the noise of one member of each."""
    known = np.array([[float(one @ other) for other in means] for one in means])
    noise = np.full(len(groups), np.nan)
    for c, group in enumerate(groups):
        if len(group) > 1:  # half the squared distance of two members is the noise of one
            noise[c] = np.mean([np.square(change[i] - change[j]).sum() / 2 for i, j in combinations(group, 2)])
    noise = np.where(np.isnan(noise), np.nanmean(noise), noise)
    for c, group in enumerate(groups):
        known[c, c] = max(0.0, float(np.mean([float(change[i] @ change[i]) for i in group])) - noise[c])
    return known, noise


def _without_negative(covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.maximum(values, 0.0)) @ vectors.T)


def prediction_row(k: int, known: np.ndarray, noise: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """The weights of client k: lengths apart, and with the reliability of those who are after the same."""
    lengths = np.sqrt(np.maximum(np.diag(known), 0.0))
    some = lengths > SHORTEST * lengths.max()
    if not some[k]:
        return np.asarray(examples / examples.sum())
    places = np.flatnonzero(some)
    cosine = np.zeros_like(known)
    for i in places:
        cosine[i, places] = known[i, places] / (lengths[i] * lengths[places])
    squares, weights = lengths[some] ** 2, cosine[k, some] ** 2
    reliable = squares / (squares + noise[some] * examples[some] / examples.mean())
    agreed = weights @ reliable / weights.sum()
    program = cosine + np.diag((1 / agreed - 1) * examples.mean() / examples + RIDGE)
    row = smallest_without_signs(program, cosine[k])
    return row / row.sum() if row.sum() > 0 else np.asarray(examples / examples.sum())


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
