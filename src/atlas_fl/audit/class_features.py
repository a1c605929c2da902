"""Second formula of FedPAC (Xu et al., 2023): class features as reported, and the weights of heads by them.

D_k is added up client by client and class by class, and its program on the simplex is solved one weight at a time.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from atlas_fl.audit.averages import Averaging
from atlas_fl.audit.dense import arrays, below, smallest_without_signs
from atlas_fl.audit.run_files import AuditPlan
from atlas_fl.audit.step import Step
from atlas_fl.frozen import Frozen
from atlas_fl.params import is_last_layer, unflatten_by_client

ENTRY = "class_features"
NAMES = ("counts", "means", "variances")
RIDGE = 1e-9
"""Share of the mean diagonal by which equally good weights are drawn to the shares of the examples."""


class Report(Frozen, eq=False):
    """Report of a client about its training examples."""

    counts: np.ndarray
    means: np.ndarray
    variances: np.ndarray

    def weighted_means(self) -> np.ndarray:
        """h^c of every class: its frequency p(c) times its mean."""
        return np.asarray((self.counts / self.counts.sum())[:, None] * self.means)

    def variance(self) -> float:
        """v: of every class its second moment, less the square of what is counted."""
        moments = self.variances + np.square(self.means).sum(axis=1)
        total = self.counts / self.counts.sum() * moments - np.square(self.weighted_means()).sum(axis=1)
        return max(float(total.sum() / self.counts.sum()), 0.0)


def read_reports(state: Mapping[str, Tensor]) -> dict[str, Report]:
    """Reports by client, from a server state by path; without those whose three tensors are not there."""
    parts = unflatten_by_client(below(state, f"{ENTRY}/"))
    return {client: Report(**arrays(tensors)) for client, tensors in parts.items() if tensors.keys() == set(NAMES)}


class HeadsByFeatures(Averaging):
    """Last layers of heads by class features, and all else by the examples."""

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """The weights of client k; who took no part, or is alone with a head, keeps its own."""
        if not is_last_layer(key):
            return self.average.row(step, k, key)
        members = self.average.members(step, k, key)
        names = [step.plan.clients[one] for one in members]
        reports = step.once("reports", lambda: read_reports(step.told))
        shapes = {reports[name].means.shape if name in reports else () for name in names}
        # without reports the row of the server state has failed, and of heads of several shapes none fits
        if not step.present[k] or len(members) < 2 or len(shapes) > 1 or () in shapes:
            return step.own_row(k)
        row = head_row(reports, names, step.plan.clients[k], [step.plan.examples[one] for one in members])
        return step.row(dict(zip(members, row, strict=True)))

    def state_fault(self, step: Step) -> tuple[str, float | None] | None:
        """Fault where a client that took part has not reported, or counted other examples than the plan."""
        if step.is_undone:
            return None
        accepted = [step.plan.clients[k] for k in step.there(range(step.num_clients))]
        if wrong := sorted({f"{ENTRY}/{client}/{name}" for client in accepted for name in NAMES} ^ step.told.keys()):
            took_part = ", ".join(sorted(accepted))
            return f"the server state lacks {wrong[0]}, or is not to have it; {took_part} took part", None
        for client, report in read_reports(step.told).items():
            arrays = (report.counts, report.means, report.variances)
            has_shapes = report.means.ndim == 2 and len({len(array) for array in arrays}) == 1
            if not has_shapes or not all(np.isfinite(array).all() for array in arrays) or (report.variances < 0).any():
                return f"the class features of {client} are no numbers of its classes, or a variance is below 0", None
            examples, counted = step.plan.examples[step.plan.clients.index(client)], report.counts.sum()
            if examples != counted:
                return f"{client} counted {counted:g} examples in its classes, the plan says {examples:g}", None
        return "", None


def class_means(plan: AuditPlan, k: int, state: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The class means of client k's task and whether anyone has seen the class; empty before anyone has reported."""
    reports = read_reports(state)
    mates = [report for name, report in reports.items() if plan.tasks[plan.clients.index(name)] == plan.tasks[k]]
    if not mates:
        return {}
    totals = sum(report.counts for report in mates)
    sums = sum(report.counts[:, None] * report.means for report in mates)
    return {"means": sums / np.maximum(totals, 1.0)[:, None], "seen": np.asarray(totals > 0)}


def head_row(reports: Mapping[str, Report], names: Sequence[str], own: str, shares: Sequence[float]) -> list[float]:
    """The weight of the head of each of these clients in the next head of `own`, one of them."""
    matrix = np.diag([reports[name].variance() for name in names])
    for here, *others in zip(*(reports[name].weighted_means() for name in (own, *names)), strict=True):
        differences = here - np.stack(others)
        matrix += differences @ differences.T
    mean = float(np.mean(np.diag(matrix)))
    if mean == 0:
        return [share / sum(shares) for share in shares]
    return smallest_on_simplex(matrix / mean + np.diag([RIDGE * sum(shares) / share for share in shares]))


def smallest_on_simplex(matrix: np.ndarray) -> list[float]:
    """The m >= 0 with sum 1 of the smallest m^T matrix m.

    These are the shares of the u >= 0 of the smallest u^T matrix u - 2 sum(u).
    """
    u = smallest_without_signs(matrix, np.ones(len(matrix)))
    return [float(one) for one in u / u.sum()]
