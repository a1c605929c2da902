"""Audit of kriging: the halves as reported, and each client's row computed again from dense changes in float64.

The program is solved one weight at a time, each set to where the objective is least, until none moves. The server
solves it otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rule_weights import robust_of
from atlas_fl.audit.run_files import AuditPlan, Models, Run, is_aggregated
from atlas_fl.audit.server_state import Flat, change_since_start, shares_matrix
from atlas_fl.params import HEAD, LORA_B, PRIVATE

HALVES = ("first", "second")
RIDGE = 1e-9
"""Ridge on top of the noise."""
SHORTEST = 1e-6
"""Share of the longest below which a length is none."""
SWEEPS, STILL = 100_000, 1e-14
"""Rounds over all weights, and how little of the largest they may move in the last one."""


class Predictions:
    """The rows of a round, from the halves in the server state, and before those from the trained models."""

    def __init__(self, run: Run, plan: AuditPlan, trained: Models, state: Flat) -> None:
        self._run, self._plan, self._trained, self._state = run, plan, trained, state
        whole = {client: _initial_names(state, client) for client in plan.clients}
        # the row of the server state has failed for halves that lack something
        self._reports = {
            client: halves
            for client, halves in read_halves(state).items()
            if all(halves[half].keys() == whole.get(client) for half in HALVES)
        }
        self._rows: dict[tuple[tuple[int, ...], tuple[str, ...]], np.ndarray] = {}
        self._averaged: dict[tuple[tuple[int, ...], tuple[str, ...]], bool] = {}

    def row(
        self, k: int, members: Sequence[int], key: str, average: list[float], in_cluster: list[float]
    ) -> list[float] | None:
        """The weights of client k for this parameter among these members who reported; its own where it is none.

        `average`, that of all members, where they differ by less than their noise, and `in_cluster` where those of its
        cluster do. None where it has not reported.
        """
        names = self._plan.clients
        known = tuple(one for one in members if names[one] in self._reports)
        if names[k] not in self._reports:
            return None
        if k not in known:
            return [float(one == k) for one in range(len(names))]
        keys = self._compared_with(key, [halves[HALVES[0]] for halves in self._reports.values()])
        if self._is_averaged_over_all(key, keys):
            return average
        if self._is_averaged(k, key, keys):
            return in_cluster
        if (known, keys) not in self._rows:
            self._rows[known, keys] = self._predict(known, keys)
        row = [0.0] * len(names)
        for one, weight in zip(known, self._rows[known, keys][known.index(k)], strict=True):
            row[one] = float(weight)
        return self._cap_shares(row, k)

    def cluster_row(self, k: int, averages: Mapping[int, Sequence[float]], key: str) -> list[float] | None:
        """The weights of client k before it has reported, by the cluster that it begins in; None where it has.

        `averages` are the rows of the averages of everyone who took part and may weigh here, by place.
        """
        plan = self._plan
        by_cluster: dict[int, list[int]] = {}
        for one in averages:
            by_cluster.setdefault(int(plan.clusters[one]), []).append(one)
        groups = list(by_cluster.values())
        if plan.clients[k] in self._reports or k not in averages or len(groups) < 2 or max(map(len, groups)) < 2:
            return None
        names = [plan.clients[one] for one in averages]
        keys = self._compared_with(key, [self._trained[name] for name in names])
        change = dict(zip(averages, self._vectors(names, {name: self._trained[name] for name in names}, keys)))
        means = [np.sum([averages[group[0]][one] * change[one] for one in averages], axis=0) for group in groups]
        known, noise = _between_and_inside(groups, means, change)
        spread = [sum(averages[group[0]][one] ** 2 for one in averages) for group in groups]
        examples = np.array([sum(plan.examples[one] for one in group) for group in groups], np.float64)
        c = next(place for place, group in enumerate(groups) if k in group)
        weights = prediction_row(c, _without_negative(known), noise * np.array(spread), examples)
        row = [0.0] * len(plan.clients)
        for d, weight in enumerate(self._cap_shares(weights, c)):
            for one in averages:
                row[one] += weight * averages[groups[d][0]][one]
        return row

    def _cap_shares(self, row: Sequence[float] | np.ndarray, k: int) -> list[float]:
        others = {one: min(float(weight), self._max_share) for one, weight in enumerate(row) if one != k}
        return [others.get(one, 1.0 - sum(others.values())) for one in range(len(row))]

    def _is_averaged_over_all(self, key: str, keys: Sequence[str]) -> bool:
        """Return whether clusters are averaged, and the adapters of all reports differ by less than their noise."""
        known = [one for one, name in enumerate(self._plan.clients) if name in self._reports]
        if robust_of(self._run).within == "all" or key.startswith(HEAD) or len(known) < 2:
            return False
        which = (tuple(known), (*keys, "over all"))
        if which not in self._averaged:
            noise, between = self._noise_and_variance(known, keys)
            self._averaged[which] = noise > 0 and between < noise
        return self._averaged[which]

    def _is_averaged(self, k: int, key: str, keys: Sequence[str]) -> bool:
        """True if clusters are averaged and this client's differs by less than its noise and than clusters do."""
        plan = self._plan
        known = [
            one
            for one, name in enumerate(plan.clients)
            if name in self._reports and (plan.tasks[one] == plan.tasks[k] or not key.startswith(HEAD))
        ]
        members = [one for one in known if plan.clusters[one] == plan.clusters[k]]
        if robust_of(self._run).within == "all" or plan.clusters[k] < 0 or len(members) < 2:
            return False
        which = (tuple(members), tuple(keys))
        if which not in self._averaged:
            noise, inside = self._noise_and_variance(members, keys)
            _, total = self._noise_and_variance(known, keys)
            explains = len(members) == len(known) or max(0.0, inside) < total - max(0.0, inside)
            self._averaged[which] = noise > 0 and inside < noise and explains
        return self._averaged[which]

    def _noise_and_variance(self, members: Sequence[int], keys: Sequence[str]) -> tuple[float, float]:
        first, second = (self._changes(members, half, keys) for half in HALVES)
        noise = sum(float(np.square(one - other).sum()) for one, other in zip(first, second, strict=True)) / 4
        # the mean of what both halves of all pairs say is the squared distance between two clients, without noise
        pairs = [(i, j) for i in range(len(members)) for j in range(i)]
        between = sum(float((first[i] - first[j]) @ (second[i] - second[j])) for i, j in pairs) / len(pairs) / 2
        return noise / len(members), between

    @property
    def _max_share(self) -> float:
        return float(self._run.config.get("robust", {}).get("max_share", 1.0))

    def _compared_with(self, key: str, models: Sequence[Mapping[str, Tensor]]) -> tuple[str, ...]:
        """The parameters that the matrix of this one follows from; in product space a module stands at its A."""
        run, by = self._run, str(self._run.config.get("server", {}).get("gram_by", "all"))
        held = {one for model in models for one in model if one != PRIVATE}
        is_product = run.mixing.space == "product"
        compared = {one for one in held if shares_matrix(run, self._plan, one, key, by=by)}
        return tuple(sorted(one for one in compared if not (is_product and one.endswith(LORA_B))))

    def _predict(self, members: Sequence[int], keys: Sequence[str]) -> np.ndarray:
        first, second = (self._changes(members, half, keys) for half in HALVES)
        n = len(members)
        covariance, noise = np.zeros((n, n)), np.zeros(n)
        for i in range(n):
            noise[i] = float(np.square(first[i] - second[i]).sum()) / 4
            for j in range(n):
                covariance[i, j] = float(first[i] @ second[j] + second[i] @ first[j]) / 2
        known = _without_negative(covariance)
        examples = np.array([self._plan.examples[one] for one in members], np.float64)
        return np.array([prediction_row(k, known, noise, examples) for k in range(n)])

    def _changes(self, members: Sequence[int], half: str, keys: Sequence[str]) -> list[np.ndarray]:
        names = [self._plan.clients[one] for one in members]
        return self._vectors(names, {name: self._reports[name][half] for name in names}, keys)

    def _vectors(self, names: Sequence[str], models: Models, keys: Sequence[str]) -> list[np.ndarray]:
        vectors: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for key in keys:
            holders = [name for name in names if key in models[name]]
            parts = {n: change_since_start(self._run, self._plan, n, key, models, self._state) for n in holders}
            longest = max(map(len, parts.values()), default=0)
            for name in names:
                part = parts.get(name, np.zeros(0))
                vectors[name].append(np.pad(part, (0, longest - len(part))))
        return [np.concatenate(parts) if parts else np.zeros(0) for parts in vectors.values()]


def _between_and_inside(
    groups: Sequence[Sequence[int]], means: Sequence[np.ndarray], change: Mapping[int, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Covariance of clusters with each other and with themselves, and the noise of one member of each."""
    known = np.array([[float(one @ other) for other in means] for one in means])
    noise = np.full(len(groups), np.nan)
    for c, group in enumerate(groups):
        pairs = [(i, j) for i in group for j in group if i < j]
        if pairs:  # half the squared distance of two members is the noise of one
            noise[c] = np.mean([float(np.square(change[i] - change[j]).sum()) / 2 for i, j in pairs])
    noise = np.where(np.isnan(noise), np.nanmean(noise), noise)
    for c, group in enumerate(groups):
        known[c, c] = max(0.0, float(np.mean([float(change[i] @ change[i]) for i in group])) - noise[c])
    return known, noise


def _without_negative(covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.maximum(values, 0.0)) @ vectors.T)


def prediction_row(k: int, known: np.ndarray, noise: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """The weights of client k: lengths apart, and with the reliability of those who are after the same."""
    n, mean = len(examples), float(np.mean(examples))
    lengths = [max(float(known[i, i]), 0.0) ** 0.5 for i in range(n)]
    some = [i for i in range(n) if lengths[i] > SHORTEST * max(lengths)]
    if k not in some:
        return np.asarray(examples / examples.sum())
    cosine = np.zeros((n, n))
    for i in some:
        for j in some:
            cosine[i, j] = known[i, j] / (lengths[i] * lengths[j])
    reliable = {i: lengths[i] ** 2 / (lengths[i] ** 2 + noise[i] * examples[i] / mean) for i in some}
    agreed = sum(cosine[k, i] ** 2 * reliable[i] for i in some) / sum(cosine[k, i] ** 2 for i in some)
    program = cosine + np.diag([(1 / agreed - 1) * mean / count + RIDGE for count in examples])
    row = smallest_without_signs(program, cosine[k])
    return row / row.sum() if row.sum() > 0 else np.asarray(examples / examples.sum())


def _initial_names(state: Flat, client: str) -> set[str]:
    start = f"initial/{client}/"
    return {path.removeprefix(start) for path in state if path.startswith(start)}


def smallest_without_signs(program: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The m >= 0 with the smallest m^T program m - 2 m^T target, for a positive definite program."""
    weights = np.zeros(len(target))
    for _ in range(SWEEPS):
        before = weights.copy()
        for i in range(len(weights)):
            rest = float(program[i] @ weights) - program[i, i] * weights[i]
            weights[i] = max(0.0, (target[i] - rest) / program[i, i])
        if np.abs(weights - before).max() <= STILL * weights.max(initial=0.0):
            break
    return weights


def read_halves(state: Flat) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Both halves of every client that reported, from a server state by path."""
    reports: dict[str, dict[str, dict[str, Tensor]]] = {}
    for path, tensor in state.items():
        entry, _, rest = path.partition("/")
        client, _, rest = rest.partition("/")
        half, _, key = rest.partition("/")
        if entry == "halves" and half in HALVES:
            reports.setdefault(client, {one: {} for one in HALVES})[half][key] = tensor
    return reports


def check_halves(run: Run, round: int, *, trained: Models, before: Flat, after: Flat) -> Iterator[AuditRow]:
    """A row for the server state after a round: who was to report has, in the shapes of its model, and nobody else."""
    first = int(run.config.get("server", {}).get("measure_round", 4))
    aggregated = max(1, run.config["training"]["rounds"] - run.config["mixing"].get("personal_rounds", 0))
    first = first if first <= aggregated else -(-aggregated // 3)
    is_due = round >= first and is_aggregated(run, round)
    known, now = read_halves(before), read_halves(after)
    wanted = known.keys() | (trained.keys() if is_due else set())
    fault = "" if now.keys() == wanted else f"there are halves of {sorted(now)}, and asked were {sorted(wanted)}"
    changed = [path for path, tensor in before.items() if path not in after or not torch.equal(after[path], tensor)]
    fault = fault or (f"{changed[0]} of the server state has changed" if changed else "")
    for client in sorted(now.keys() - known.keys()):
        fault = fault or _report_fault(client, now[client], trained.get(client, {}))
    strange = [path for path in after if path not in before and not path.startswith("halves/")]
    fault = fault or (f"the server state has {strange[0]}, which the rule does not make" if strange else "")
    yield AuditRow(run=run.path.name, round=round, client="", check="server", ok=not fault, detail=fault)


def _report_fault(client: str, halves: Mapping[str, Mapping[str, Tensor]], model: Mapping[str, Tensor]) -> str:
    for half in HALVES:
        if halves[half].keys() != model.keys():
            return f"the {half} half of {client} has {len(halves[half])} tensors, its model {len(model)}"
        for key, tensor in halves[half].items():
            if tensor.shape != model[key].shape or not bool(tensor.isfinite().all()):
                return f"{key} of the {half} half of {client} has shape {tuple(tensor.shape)} or is no number"
    return ""
