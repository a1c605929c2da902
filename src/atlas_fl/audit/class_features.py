"""Audit of FedPAC: class features as reported, the weights of heads and the class means sent down, computed again.

D_k is added up client by client and class by class, and its program on the simplex is solved by an active set: weights
of zero are given up and taken back until no weight would lower the objective. The server solves it otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.run_files import AuditPlan, AuditRecord, Models, Run, read_models, round_folder

ENTRY = "class_features"
NAMES = ("counts", "means", "variances")
RIDGE = 1e-9
"""Share of the mean diagonal by which equally good weights are drawn to the shares of the examples."""

TOLERANCE = 1e-5
"""Tolerance of a value over the largest of its class."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """Report of a client about its training examples."""

    counts: np.ndarray
    means: np.ndarray
    variances: np.ndarray

    def frequency(self, label: int) -> float:
        """p(c)."""
        return float(self.counts[label] / self.counts.sum())

    def weighted_mean(self, label: int) -> np.ndarray:
        """h^c."""
        return np.asarray(self.frequency(label) * self.means[label])

    def variance(self) -> float:
        """v: of every class its second moment, less the square of what is counted."""
        total = 0.0
        for label in range(len(self.counts)):
            moment = float(self.variances[label]) + float(self.means[label] @ self.means[label])
            weighted = self.weighted_mean(label)
            total += self.frequency(label) * moment - float(weighted @ weighted)
        return max(total / float(self.counts.sum()), 0.0)


def read_reports(state: Mapping[str, Tensor]) -> dict[str, Report]:
    """Reports by client, from a server state by path; without those whose three tensors are not there."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    for path, tensor in state.items():
        entry, _, rest = path.partition("/")
        client, _, name = rest.partition("/")
        if entry == ENTRY:
            parts.setdefault(client, {})[name] = tensor.double().numpy()
    return {client: Report(**arrays) for client, arrays in parts.items() if _is_report(arrays)}


def _is_report(arrays: Mapping[str, np.ndarray]) -> bool:
    if set(arrays) != set(NAMES) or [arrays[name].ndim for name in NAMES] != [1, 2, 1]:
        return False
    return len({len(array) for array in arrays.values()}) == 1 and bool(arrays["counts"].sum() > 0)


def report_fault(plan: AuditPlan, record: AuditRecord, state: Mapping[str, Tensor]) -> str:
    """Fault of the class features of a round; empty where there is none."""
    reports = read_reports(state)
    if set(reports) != record.accepted_clients:
        return f"there are class features of {sorted(reports)}, and {sorted(record.accepted_clients)} took part"
    for client, report in reports.items():
        arrays = (report.counts, report.means, report.variances)
        if not all(np.isfinite(array).all() for array in arrays) or (report.variances < 0).any():
            return f"the class features of {client} are no numbers, or a variance is below 0"
        if (examples := plan.examples[plan.clients.index(client)]) != report.counts.sum():
            return f"{client} counted {report.counts.sum():g} examples in its classes, the plan says {examples:g}"
    return ""


def check_centroids(
    run: Run, round: int, plan: AuditPlan, record: AuditRecord, state: Mapping[str, Tensor]
) -> Iterator[AuditRow]:
    """A row for each client that trained: the class means that its features were pulled to; `state` is of before."""
    if not run.config.get("server", {}).get("feature_alignment"):
        return
    is_personal = round > int(run.config["training"]["rounds"]) - run.mixing.personal_rounds
    reports = {} if is_personal else read_reports(state)
    is_there = (round_folder(run, round) / "centroids.safetensors").is_file()
    sent: Models = read_models(run, round, "centroids") if is_there else {}
    for client in record.participants:
        task = plan.tasks[plan.clients.index(client)]
        mates = [report for name, report in reports.items() if plan.tasks[plan.clients.index(name)] == task]
        fault = _centroid_fault(mates, sent.get(client, {}))
        yield AuditRow(run=run.path.name, round=round, client=client, check="aligned", ok=not fault, detail=fault)


def _centroid_fault(mates: Sequence[Report], sent: Mapping[str, Tensor]) -> str:
    if set(sent) != ({"means", "seen"} if mates else set()):
        return f"it was sent {sorted(sent) or 'no class means'}, and {len(mates)} clients of its task had reported some"
    labels = range(len(mates[0].counts) if mates else 0)
    if mates and not len(sent["seen"]) == len(sent["means"]) == len(labels):
        return f"it was sent means of {len(sent['means'])} classes, and its task has {len(labels)}"
    for label in labels:
        total = sum(float(report.counts[label]) for report in mates)
        if bool(sent["seen"][label]) != (total > 0):
            return f"class {label} has {total:g} examples, and it was told otherwise"
        if not total:
            continue
        want = sum(float(report.counts[label]) / total * report.means[label] for report in mates)
        got = sent["means"][label].double().numpy()
        error = float(np.abs(got - want).max(initial=0.0)) if got.shape == np.shape(want) else float("inf")
        if not error <= TOLERANCE * float(np.abs(want).max(initial=0.0)):
            return f"the mean of class {label} is {error:.2g} away from the recomputation"
    return ""


def head_row(reports: Mapping[str, Report], names: Sequence[str], own: str, shares: Sequence[float]) -> list[float]:
    """The weight of the head of each of these clients in the next head of `own`, one of them."""
    matrix = np.zeros((len(names), len(names)))
    for label in range(len(reports[own].counts)):
        here = reports[own].weighted_mean(label)
        differences = [here - reports[name].weighted_mean(label) for name in names]
        for i, left in enumerate(differences):
            for j, right in enumerate(differences):
                matrix[i, j] += float(left @ right)
    for i, name in enumerate(names):
        matrix[i, i] += reports[name].variance()
    mean = float(np.mean(np.diag(matrix)))
    if mean == 0:
        return [share / sum(shares) for share in shares]
    return smallest_on_simplex(matrix / mean + np.diag([RIDGE * sum(shares) / share for share in shares]))


def smallest_on_simplex(matrix: np.ndarray) -> list[float]:
    """The m >= 0 with sum 1 of the smallest m^T matrix m, for a positive definite matrix, by an active set."""
    n = len(matrix)
    m = np.zeros(n)
    m[int(np.argmin(np.diag(matrix)))] = 1.0
    for _ in range(50 * n):
        pull = matrix @ m  # half of the gradient: at the best point no entry is below m^T matrix m
        value, candidate = float(m @ pull), int(np.argmin(pull))
        if pull[candidate] >= value * (1 - 1e-12) or m[candidate] > 0:
            break
        support = [*np.flatnonzero(m > 0).tolist(), candidate]
        while True:
            inner = np.linalg.solve(matrix[np.ix_(support, support)], np.ones(len(support)))
            target = np.zeros(n)
            target[support] = inner / inner.sum()
            if (target[support] > 0).all():
                m = target
                break
            falling = [i for i in support if target[i] <= 0]
            reach = min(m[i] / (m[i] - target[i]) for i in falling)
            m = m + reach * (target - m)
            left = min(falling, key=lambda i: m[i])
            m[left] = 0.0
            support.remove(left)
    return [float(one) for one in m / m.sum()]
