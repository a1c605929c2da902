"""FedPAC's classifier collaboration: each client's classifier from those of its task, by class means of features.

    m_k = argmin over the simplex of  m^T (diag(v) + D_k) m,     D_k[i, j] = sum_c < h_k^c - h_i^c, h_k^c - h_j^c >

    h_k^c = p_k(c) mu_k^c,     v_k = 1/n_k  sum_c ( p_k(c) E || h(x) ||^2 - p_k(c)^2 || mu_k^c ||^2 )

with mu_k^c the mean of the features that enter the classifier over client k's n_k^c training examples of class c
(`client.class_features`), p_k(c) = n_k^c / n_k. D is a squared bias, v the variance of the estimate. All else is
averaged by examples over all clients. The classifier is the last layer of the head, as in the authors' models
(`fc2` of their CNNs, which reads what `fc1` gives); a layer of the head below it belongs to the representation and is
averaged by examples, inside a task, because every task has drawn its own. To the means of all reports of a task its
clients' features are pulled in the next round (`client.feature_alignment`). Xu, Tong and Huang, "Personalized federated
learning with feature alignment and classifier collaboration", ICLR 2023, arXiv:2306.11867, and the authors' code
(`get_head_agg_weight` in its `tools.py`). Its cut of weights below .001 is left out.

The program is solved as non-negative least squares: u = argmin over u >= 0 of || R u ||^2 + (1 - sum u)^2, R^T R the
matrix, has the direction of m, because for a fixed direction the best length depends on || R m ||^2 alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float64
from scipy.optimize import nnls
from torch import Tensor

from atlas_fl.aggregation.matrices import average
from atlas_fl.aggregation.strategies import LAST_LAYER, MixingContext, Strategy, StrategyOptions, mixing_strategy
from atlas_fl.errors import ConfigError
from atlas_fl.params import ByClient, Params, ServerState

FEATURES = "class_features"
"""The entry of the server state: what the clients of the last aggregation reported, by client."""

RIDGE = 1e-9
"""Among weights that are equally good, those nearest to the shares of the examples, by this share of the matrix."""


def estimate(report: Mapping[str, Tensor]) -> tuple[Float64[np.ndarray, " size"], float]:
    """(h_k of all classes in one row, (classes * width,), and v_k) of what a client reported."""
    counts, means, variances = (report[name].double().numpy() for name in ("counts", "means", "variances"))
    total = counts.sum()
    p = counts / total
    squares = np.square(means).sum(axis=1)
    variance = float((p * (variances + squares) - p**2 * squares).sum() / total)
    return (p[:, None] * means).ravel(), variance


def minimize_on_simplex(
    matrix: Float64[np.ndarray, "n n"], shares: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """argmin of m^T matrix m over m >= 0 with sum 1; of a matrix of zeros the shares, which are above 0.

    Negative eigenvalues, which only rounding can make, count as zero.
    """
    scale = float(np.trace(matrix)) / len(matrix)
    if scale <= 0:
        return shares / shares.sum()
    values, vectors = np.linalg.eigh(matrix / scale + RIDGE * np.diag(shares.sum() / shares))
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    u, _ = nnls(np.vstack([root, np.ones(len(matrix))]), np.append(np.zeros(len(matrix)), 1.0), maxiter=100 * len(root))
    return np.asarray(u / u.sum())


def combination_rows(
    reports: Sequence[Mapping[str, Tensor]], shares: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, "n n"]:
    """The weights m_k of every client's head, a row each, from these reports and shares of the examples."""
    estimates = [estimate(report) for report in reports]
    features, variances = np.stack([h for h, _ in estimates]), np.array([v for _, v in estimates])
    rows = []
    for own in features:
        bias = own - features
        rows.append(minimize_on_simplex(bias @ bias.T + np.diag(np.maximum(variances, 0.0)), shares))
    return np.stack(rows)


def classifier_collaboration(options: StrategyOptions) -> Strategy:
    """One average over all clients; last layers of heads inside a task by how near classes' features are (FedPAC).

    Who took no part keeps its head. Where nobody has reported features yet, heads are averaged by examples.
    """
    if "head" not in options.share:
        raise ConfigError(f"--share {' '.join(options.share)} leaves out heads, which this strategy combines; add head")

    def share(step: MixingContext) -> np.ndarray:
        return np.asarray(average(step.federation.weights, step.groups, step.present, max_share=options.max_share))

    def rule(step: MixingContext) -> np.ndarray:
        reports = {} if step.models is None else reports_of(step.models.server_state)
        if step.parameters.kind != LAST_LAYER or not reports:
            return share(step)
        matrix, names = np.eye(len(step.present)), step.federation.clients
        for label in set(step.groups.tolist()):
            inside = np.flatnonzero((step.groups == label) & step.present).tolist()
            if len(inside) > 1:
                shares = np.asarray(step.federation.weights, np.float64)[inside]
                matrix[np.ix_(inside, inside)] = combination_rows([reports[names[k]] for k in inside], shares)
        return matrix

    strategy = mixing_strategy("classifier_collaboration", rule, options, arrival=share, granularity=LAST_LAYER)
    return replace(strategy, report="class_features", record_reports=_record)


def reports_of(state: ServerState) -> dict[str, dict[str, Tensor]]:
    """What each client of the last aggregation reported; empty before the first."""
    reports = state.get(FEATURES, {})
    assert not isinstance(reports, Tensor), "reports are by client"
    return {
        client: {name: tensor for name, tensor in report.items() if isinstance(tensor, Tensor)}
        for client, report in reports.items()
        if not isinstance(report, Tensor)
    }


def class_centroids(server_state: ServerState, tasks: Mapping[str, str]) -> dict[str, Params]:
    """By task, the means of its classes over the clients that reported, each by its examples of the class.

    `means` (classes, width) float32 with zeros for a class without examples, and `seen` (classes,) bool says which have
    some. Empty before the first report. `tasks` are those of the clients, by name.
    """
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for client, report in sorted(reports_of(server_state).items()):
        counts, task = report["counts"].double(), tasks[client]
        total, of_class = sums.get(task, (torch.zeros(()), torch.zeros(())))
        sums[task] = total + counts[:, None] * report["means"].double(), of_class + counts
    return {
        task: {"means": (total / counts.clamp(min=1)[:, None]).float(), "seen": counts > 0}
        for task, (total, counts) in sums.items()
    }


def _record(server_state: ServerState, features: ByClient) -> ServerState:
    return {**server_state, FEATURES: dict(features)}
