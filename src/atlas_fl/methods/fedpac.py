"""FedPAC: features aligned over clients, and each client's classifier combined from those of its task.

Down go the means of the classes over clients, c_y = sum_k n_k^y mu_k^y / sum_k n_k^y. A client adds to its loss

    lambda / n  sum_i  1/d || h(x_i) - c_{y_i} ||^2                   (`--feature-alignment`)

and sends up, of the model that it began the round with, mu_k^c, the mean of the d features h(x) that enter its
classifier over its n_k^c training examples of class c, and their variance. The server averages all by examples, but

    m_k = argmin over the simplex of  m^T (diag(v) + D_k) m,     D_k[i, j] = sum_c < h_k^c - h_i^c, h_k^c - h_j^c >

    h_k^c = p_k(c) mu_k^c,     v_k = 1/n_k  sum_c ( p_k(c) E || h(x) ||^2 - p_k(c)^2 || mu_k^c ||^2 )

are the weights of client k's classifier, with p_k(c) = n_k^c / n_k. D is a squared bias, v the variance of the
estimate. The classifier is the last layer of the head, as in the authors' models (`fc2` of their CNNs, which reads what
`fc1` gives); a layer of the head below it belongs to the representation and is averaged by examples, inside a task,
because every task has drawn its own. Xu, Tong and Huang, "Personalized federated learning with feature alignment and
classifier collaboration", ICLR 2023, arXiv:2306.11867, and the authors' code (`get_head_agg_weight` in its `tools.py`).
Its cut of weights below .001 is left out.

The program is solved as non-negative least squares: u = argmin over u >= 0 of || R u ||^2 + (1 - sum u)^2, R^T R the
matrix, has the direction of m, because for a fixed direction the best length depends on || R m ||^2 alone.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float64
from scipy.optimize import nnls
from torch import Tensor

from atlas_fl.aggregation.matrices import Rows, Square, Vector
from atlas_fl.aggregation.rules import LAST_LAYER, MixingContext, present_by_group
from atlas_fl.errors import short_repr
from atlas_fl.methods.averages import Averaging
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Report, ReportTensor, RoundStart
from atlas_fl.params import HEAD, ByClient, Params, ServerState, TreesByClient, params_by_client
from atlas_fl.ranges import Range

FEATURES = "class_features"
"""The entry of the server state: what the clients of the last aggregation reported, by client."""

COUNTS, MEANS, VARIANCES = "counts", "means", "variances"
"""Tensors of a report: n_k^c, (classes,) int64; mu_k^c, (classes, width), and E || h(x) - mu_k^c ||^2, (classes,)."""
CENTROIDS, SEEN = "means", "seen"
"""Tensors that are sent: c, (classes, width) float32, and which classes have one, (classes,) bool."""
LARGEST_FEATURE = 1e6
"""Largest feature that the head reads: it has passed a layer norm, and is of the order of one."""

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


def minimize_on_simplex(matrix: Square, shares: Vector) -> Vector:
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


def combination_rows(reports: Sequence[Mapping[str, Tensor]], shares: Vector) -> Square:
    """The weights m_k of every client's head, a row each, from these reports and shares of the examples."""
    estimates = [estimate(report) for report in reports]
    features, variances = np.stack([h for h, _ in estimates]), np.array([v for _, v in estimates])
    rows = []
    for own in features:
        bias = own - features
        rows.append(minimize_on_simplex(bias @ bias.T + np.diag(np.maximum(variances, 0.0)), shares))
    return np.stack(rows)


class ClassifierCollaboration(Averaging):
    """One average over all clients; last layers of heads inside a task by how near classes' features are (FedPAC).

    Who took no part keeps its head. Where nobody has reported features yet, heads are averaged by examples.
    """

    feature_alignment: Annotated[float, Range(least=0), Tried("fedpac", values=(1.0, 0.1, 0.3, 3.0))] = 0.0
    """FedPAC: weight of the pull of features to the means of their class over clients; 0 for none."""

    name = "classifier_collaboration"
    extra_passes = "passes over the training examples: one more"
    needs_classes = True
    head_is_last_layer = True
    report = "class_features"
    report_words = "with each update class frequencies, means and variances of its features by class"
    granularity = LAST_LAYER

    def send(self, round: RoundStart) -> TreesByClient:
        """The class means of their tasks, of the last aggregation; nothing in round one and in personal rounds."""
        if not self.feature_alignment or round.is_personal:
            return {}
        # by task, each client by its examples of the class; zeros for a class without examples, and `seen` tells them
        sums: dict[str, tuple[Tensor, Tensor]] = {}
        for client, report in sorted(params_by_client(round.server_state, FEATURES).items()):
            counts, task = report["counts"].double(), round.tasks[client]
            total, of_class = sums.get(task, (torch.zeros(()), torch.zeros(())))
            sums[task] = total + counts[:, None] * report["means"].double(), of_class + counts
        centroids = {
            task: {"means": (total / counts.clamp(min=1)[:, None]).float(), "seen": counts > 0}
            for task, (total, counts) in sums.items()
        }
        return {"centroids": {name: centroids.get(round.tasks[name], {}) for name in round.clients}}

    @classmethod
    def measure(cls, report: Report) -> Mapping[str, Params]:
        """Class features by the model that a client begins the round with."""
        return {client: summarize(*report.features(client)) for client in report.clients}

    @classmethod
    def report_tensors(cls, model: Params, *, classes: int) -> Mapping[str, ReportTensor]:
        """Counts, means and variances by class."""
        width = feature_width(model)
        return {
            COUNTS: ReportTensor(shape=(classes,), dtype=torch.int64),
            MEANS: ReportTensor(shape=(classes, width), least=-LARGEST_FEATURE, most=LARGEST_FEATURE),
            VARIANCES: ReportTensor(shape=(classes,), least=0, most=width * LARGEST_FEATURE**2),
        }

    @classmethod
    def report_fault(cls, report: Params, *, counts: Sequence[int]) -> str:
        """The examples of each class are the registered ones; an empty class has zeros."""
        reported = report[COUNTS].tolist()
        if reported != list(counts):
            return f"{COUNTS} are {short_repr(reported)}; allowed: the {short_repr(list(counts))} that were registered"
        for name in (MEANS, VARIANCES):
            if bool(report[name][report[COUNTS] == 0].any()):
                return f"{name} of a class without examples are not 0; install the server's version"
        return ""

    @classmethod
    def examples_behind(cls, labels: np.ndarray, *, most: int | None) -> Mapping[str, int]:
        """The examples of the smallest class."""
        del most
        return {"the mean features of a class": int(np.unique(labels, return_counts=True)[1].min())}

    def sent_tensors(self, model: Params, *, classes: int, round: int) -> Mapping[str, Mapping[str, ReportTensor]]:
        """Class means, from round two to the last aggregation."""
        if not self.feature_alignment or not 2 <= round <= self.options.last_aggregation:
            return {}
        means = ReportTensor(shape=(classes, feature_width(model)), least=-LARGEST_FEATURE, most=LARGEST_FEATURE)
        return {"centroids": {CENTROIDS: means, SEEN: ReportTensor(shape=(classes,), dtype=torch.bool)}}

    def record_reports(self, server_state: ServerState, reports: ByClient) -> ServerState:
        """The features of this aggregation in the place of those of the last one."""
        return {**server_state, FEATURES: dict(reports)}

    def rule(self, step: MixingContext) -> np.ndarray | Rows:
        """The shares of the examples; of last layers of heads the weights m_k."""
        reports = params_by_client(step.server_state, FEATURES)
        if not step.parameters.is_last_layer or not reports:
            return self.arrival(step)
        matrix, names = np.eye(len(step.present)), step.federation.clients
        for inside in present_by_group(step.groups, step.present):
            if len(inside) > 1:
                shares = np.asarray(step.federation.weights, np.float64)[inside]
                matrix[np.ix_(inside, inside)] = combination_rows([reports[names[k]] for k in inside], shares)
        return matrix


def feature_width(params: Params) -> int:
    """Width of what the head of this model reads: every layer of a head reads so many numbers."""
    return next(tensor.shape[1] for key, tensor in params.items() if key.startswith(HEAD) and tensor.ndim == 2)


def summarize(features: Tensor, labels: np.ndarray, num_labels: int) -> Params:
    """Report of these features, (examples, width), with their classes, (examples,) int64."""
    classes = torch.from_numpy(np.asarray(labels, np.int64))
    counts = torch.bincount(classes, minlength=num_labels)
    divisor = counts.clamp(min=1)[:, None].double()
    features = features.double()
    means = torch.zeros(num_labels, features.shape[1], dtype=torch.float64).index_add_(0, classes, features) / divisor
    squares = (features - means[classes]).square().sum(dim=1)
    variances = torch.zeros(num_labels, dtype=torch.float64).index_add_(0, classes, squares) / divisor[:, 0]
    return {COUNTS: counts, MEANS: means.float(), VARIANCES: variances.float()}


def alignment_loss(features: Tensor, labels: Tensor, centroids: Params) -> Tensor:
    """The term with a lambda of 1, float32, of (examples, width) features; 0 for examples of classes without a mean."""
    targets, is_seen = centroids[CENTROIDS].to(features.device), centroids[SEEN].to(features.device)
    distances = (features.float() - targets[labels]).square().mean(dim=1)
    return torch.where(is_seen[labels], distances, torch.zeros_like(distances)).mean()
