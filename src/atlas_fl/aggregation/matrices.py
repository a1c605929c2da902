"""Mixing matrices: averages, Laplacian step, bounded weights; every server rule is `w <- M w`, M row-stochastic.

FedAvg: McMahan et al., 2017. Laplacian step: MIRA (Elbakary et al., 2024).
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.lib.mixins import NDArrayOperatorsMixin
from scipy.sparse import csr_array, eye_array, vstack

from atlas_fl.frozen import Frozen

Square: TypeAlias = Float64[np.ndarray, "n n"]
"""(n, n): rows of a mixing matrix, a graph, inner products."""
Vector: TypeAlias = Float64[np.ndarray, " n"]
Groups: TypeAlias = Int64[np.ndarray, " n"]
"""The number of each client's group, or cluster."""
Chosen: TypeAlias = Bool[np.ndarray, " n"]
HalfGram: TypeAlias = Float64[np.ndarray, "n2 n2"]
"""Inner products of the first halves of n clients, then their second ones, with each other."""
MOST_DENSE = 1000
"""Clients up to which a mixing matrix is an array; above it, it is `Rows`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(NDArrayOperatorsMixin):
    """A mixing matrix (n, n) by its distinct rows; NumPy reads it, and computes with it, as the array."""

    distinct: csr_array
    """The rows, (r, n), with sorted columns."""
    of: Groups
    """The row of each client."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[np.arange(len(self.of))], dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*(np.asarray(x) if isinstance(x, Rows) else x for x in inputs), **kwargs)

    def __getitem__(self, clients: Any) -> np.ndarray:
        """The rows of these clients, an array."""
        return np.asarray(self.distinct[self.of[clients]].toarray())


def identity(n: int) -> "Square | Rows":
    """The mixing matrix with which everyone keeps its model."""
    return np.eye(n) if n <= MOST_DENSE else Rows(distinct=csr_array(eye_array(n)), of=np.arange(n))


def choose_rows(chosen: Chosen, first: "Square | Rows", second: "Square | Rows") -> "Square | Rows":
    """The rows of the first matrix for the chosen clients, those of the second for others."""
    if not (isinstance(first, Rows) and isinstance(second, Rows)):
        return np.where(chosen[:, None], first, second)
    distinct = csr_array(vstack([first.distinct, second.distinct]))
    return Rows(distinct=distinct, of=np.where(chosen, first.of, second.of + first.distinct.shape[0]))


class Federation(Frozen, eq=False):
    """Clients as a rule knows them; every array follows the order of `clients`."""

    clients: tuple[str, ...]
    """Names, in the fixed order of the run."""
    weights: Vector
    """Training examples of each client."""
    clusters: Groups
    """Cluster of each client; -1 is undecided and mixes with nobody inside clusters."""
    adjacency: Square | csr_array
    """Edge weights: symmetric, not negative, zero on the diagonal; sparse where there are very many clients."""
    head_groups: tuple[str, ...]
    """Task of each client: heads mix only inside one."""
    importance: Float64[np.ndarray, "n layers"] | None = None
    """Measured importance of every layer, needed when eta is weighted by layer."""
    layer_of: Mapping[str, int] = field(default_factory=dict)
    """Layer of every adapted module, needed when eta is weighted by layer."""


def group_ids(labels: Sequence[Hashable]) -> Groups:
    """A number for each client: equal exactly where the labels are."""
    number: dict[Hashable, int] = {}
    return np.array([number.setdefault(label, len(number)) for label in labels], np.int64)


def cluster_labels(clusters: Groups) -> list[tuple[str, int]]:
    """A label for each client under which every undecided client (-1) is a group of its own."""
    return [("undecided", k) if cluster < 0 else ("cluster", int(cluster)) for k, cluster in enumerate(clusters)]


def average(weights: Vector, groups: Groups, present: Chosen, *, max_share: float = 1.0) -> Square | Rows:
    """M of the weighted mean inside each group, over its present clients; everyone in the group gets it.

    `m_kl = p_l / sum of p over the present of the group`, as `bounded_weights` leaves p. A group with nobody present
    keeps its models.
    """
    weighted = np.where(present, np.asarray(weights, np.float64), 0.0)
    for label in set(groups.tolist()) if max_share < 1 else ():
        inside = np.flatnonzero((groups == label) & present)
        weighted[inside] = bounded_weights(weighted[inside], max_share)
    if len(groups) > MOST_DENSE:
        labels, of = np.unique(groups, return_inverse=True)
        sums, there = np.bincount(of, weights=weighted), np.flatnonzero(weighted)
        rows = csr_array((weighted[there] / sums[of[there]], (of[there], there)), shape=(len(labels), len(of)))
        return choose_rows(sums[of] > 0, Rows(distinct=rows, of=of), identity(len(of)))
    return rows_over_sums(np.where(groups[:, None] == groups[None, :], weighted[None, :], 0.0))


def rows_over_sums(weights: np.ndarray) -> np.ndarray:
    """The rows (n, n) of weights at least 0 divided by their sums; those of the identity where a row has only zeros."""
    sums = weights.sum(axis=1, keepdims=True)
    return np.where(sums > 0, weights / np.where(sums > 0, sums, 1.0), np.eye(len(weights)))


def bounded_weights(weights: Vector, max_share: float) -> Vector:
    """The weights with every share of their sum at most `max_share`, or one nth where that is more.

    The very same where none is above it, and of one or two, of whom one always has half. The others keep their ratios.
    """
    n, limit = len(weights), max(max_share, 1 / max(len(weights), 1))
    new, above = np.array(weights, np.float64), np.zeros(len(weights), bool)
    while n > 2 and (over := ~above & (new > limit * new.sum() * (1 + 1e-12))).any():
        above |= over
        if limit * above.sum() >= 1 - 1e-12:
            return np.ones(n)
        new[above] = limit * new[~above].sum() / (1 - limit * above.sum())
    return new


def share_warnings(federation: Federation, max_share: float) -> tuple[str, ...]:
    """Warnings about weights by examples: one client claims more than half of all."""
    total, names = float(np.sum(federation.weights)), federation.clients
    shares = [float(weight) / total for weight in federation.weights]
    bound = "it weighs as much in an average; --max-share 0.5 bounds that"
    if max_share < 1:
        bound = f"an average gives it at most {max_share:g} (--max-share)"
    return tuple(
        f"{name} says that it has {share:.3g} of all training examples; {bound}"
        for name, share in zip(names, shares)
        if share > 0.5 and len(names) > 2
    )


def drop_edges(adjacency: Square, groups: Groups) -> Square:
    """The graph without the edges that join two groups."""
    return np.where(groups[:, None] == groups[None, :], np.asarray(adjacency, np.float64), 0.0)


def without_edges(federation: Federation, clients: Collection[str]) -> Federation:
    """The federation, in which none of these clients has a neighbour; the very same where there are none."""
    if not clients:
        return federation
    linked = np.array([client not in clients for client in federation.clients])
    return replace(federation, adjacency=federation.adjacency * linked[:, None] * linked[None, :])


def laplacian(adjacency: Square) -> Square:
    """The Laplacian I - D^-1 A of a random walk on a symmetric graph; a client without edges has a zero row.

    Rows sum to zero; a step keeps the degree-weighted mean, and no weight is negative for eta <= 1.
    """
    degree = adjacency.sum(axis=1)
    walk = adjacency / np.where(degree > 0, degree, 1.0)[:, None]
    return np.diag((degree > 0).astype(np.float64)) - walk


def laplacian_step(adjacency: Square, *, eta: float, present: Chosen) -> Square:
    """M = I - eta L; absent clients keep their model (identity rows) and still count as neighbours of the others."""
    step = np.eye(len(present)) - eta * laplacian(adjacency)
    return np.where(np.asarray(present, bool)[:, None], step, np.eye(len(present)))


def layer_factors(federation: Federation) -> Float64[np.ndarray, " layers"]:
    """Importance of each layer, averaged over the clients, over that of the most important: factors on eta in [0, 1].

    One factor for all clients, so that the step keeps the mean that its Laplacian promises.
    """
    assert federation.importance is not None, "--layer-weighting importance measures it"
    mean = np.atleast_2d(np.asarray(federation.importance, np.float64)).mean(axis=0)
    return mean / mean.max()
