"""The graph of clients: fingerprints become edge weights; how far apart the models on it are (Dirichlet energy).

`a_kl = exp(-alpha ||f_k - f_l||^2)`, cut into blocks by cluster, symmetric, zero on the diagonal.

Distances between models are computed from Gram matrices of the updates s B A (`<s_k B_k A_k, s_l B_l A_l>` needs only
the small products of the factors), so a rotation of the factors changes nothing and no dense matrix is formed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from atlas_fl.errors import ConfigError
from atlas_fl.params import LORA_A, LORA_B, ByClient, lora_modules


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options of edge weights; the defaults are those of the command line."""

    graph: str = "similarity"
    """`similarity` (RBF), `uniform` (every edge 1), or `adaptive` (RBF times the neighbour's validation score)."""
    alpha: float | None = None
    """Sharpness of the RBF; one over the median squared distance by default."""
    symmetrize: str = "average"
    """`average`, `max` or `min` of an edge's two directions."""
    neighbours: int = 0
    """Nearest neighbours that a client keeps; 0 keeps all."""
    singleton_neighbours: int = 1
    """Nearest clients that a client alone in its cluster is joined to."""
    ema: float = 0.0
    """Share of the previous graph, in [0, 1)."""
    block_diagonal: bool = True
    """Cut the edges between clusters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """Edge weights and what a user should know about them."""

    adjacency: Float64[np.ndarray, "n n"]
    """Symmetric, not negative, zero on the diagonal."""
    warnings: tuple[str, ...]
    """One line for each client that was joined across tasks or left without neighbours."""


def similarity_distances(similarity: Float64[np.ndarray, "n n"]) -> Float64[np.ndarray, "n n"]:
    """2 - 2 rho: the squared distance of unit vectors with cosine rho; a noise-corrected rho above 1 counts as 1."""
    rho = np.asarray(similarity, np.float64)
    distances = np.maximum(2.0 - (rho + rho.T), 0.0)
    np.fill_diagonal(distances, 0.0)
    return distances


def affinity(
    distances: Float64[np.ndarray, "n n"], *, alpha: float | None = None, used: Bool[np.ndarray, " n"] | None = None
) -> Float64[np.ndarray, "n n"]:
    """exp(-alpha d^2) with a zero diagonal; `alpha=None` is one over the median of the pairs of `used` clients.

    With unit, centred sketches squared distances are near 2n/(n-1), so that alpha = 1 is nearly uniform.
    """
    n = len(distances)
    used = np.ones(n, bool) if used is None else used
    pairs = distances[used][:, used][np.triu_indices(int(used.sum()), 1)]
    if not np.isfinite(pairs).all():
        raise ConfigError("a distance between two clients is not finite; the fingerprints hold NaN or infinity")
    if alpha is None:
        positive = pairs[pairs > 0]
        alpha = 1.0 / float(np.median(positive)) if len(positive) else 1.0
    both = used[:, None] & used[None, :] & ~np.eye(n, dtype=bool)
    return np.where(both, np.exp(-alpha * np.where(both, distances, 0.0)), 0.0)


def _similarity(close: np.ndarray, _performance: np.ndarray | None) -> np.ndarray:
    return close


def _uniform(close: np.ndarray, _performance: np.ndarray | None) -> np.ndarray:
    return 1.0 - np.eye(len(close))


def _adaptive(close: np.ndarray, performance: np.ndarray | None) -> np.ndarray:
    """Directed: a client listens more to the neighbours that do well."""
    assert performance is not None, "clients are scored for --graph adaptive"
    scores = np.maximum(np.asarray(performance, np.float64), 0.0)
    best = scores.max(initial=0.0)
    return close * (scores / best if best > 0 else np.ones_like(scores))[None, :]


GRAPHS: dict[str, Callable[[np.ndarray, np.ndarray | None], np.ndarray]] = {
    "similarity": _similarity,
    "uniform": _uniform,
    "adaptive": _adaptive,
}

SYMMETRIZERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "average": lambda one, other: (one + other) / 2,
    "max": np.maximum,
    "min": np.minimum,
}


def symmetrize(weights: Float64[np.ndarray, "n n"], how: str) -> Float64[np.ndarray, "n n"]:
    """A symmetric matrix from a directed one: the average, maximum or minimum of the two directions."""
    return SYMMETRIZERS[how](weights, weights.T)


def blocks(clusters: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, "n n"]:
    """Which edges stay when the graph is cut: two different clients of one cluster; -1 (undecided) has no edges."""
    labels = np.asarray(clusters)
    return (labels[:, None] == labels[None, :]) & (labels[:, None] >= 0) & ~np.eye(len(labels), dtype=bool)


def nearest(
    distances: Float64[np.ndarray, "n n"], allowed: Bool[np.ndarray, "n n"], count: int
) -> Bool[np.ndarray, "n n"]:
    """Row k marks the `count` allowed clients nearest to k (fewer if fewer are allowed); ties go to the first."""
    order = np.argsort(np.where(allowed, distances, np.inf), axis=1, kind="stable")[:, :count]
    chosen = np.zeros_like(allowed)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen & allowed


def join_singletons(
    distances: Float64[np.ndarray, "n n"],
    clusters: Int64[np.ndarray, " n"],
    *,
    count: int,
    tasks: Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
) -> tuple[Bool[np.ndarray, "n n"], tuple[str, ...]]:
    """The edges that join each client alone in its cluster to its `count` nearest, and a line for each join that had
    to leave the client's task. Undecided clients are neither joined nor joined to.
    """
    n = len(clusters)
    names = [str(k) for k in range(n)] if clients is None else list(clients)
    decided = np.asarray(clusters) >= 0
    joined, lines = np.zeros((n, n), bool), []
    for k in (k for k in range(n) if decided[k] and count > 0 and np.sum(clusters == clusters[k]) == 1):
        others = decided & (np.arange(n) != k)
        mates = others & np.array([tasks is None or task == tasks[k] for task in (tasks or names)], bool)
        pool = mates if mates.any() else others
        chosen = nearest(distances, np.broadcast_to(pool, (n, n)), count)[k]
        joined[k] |= chosen
        if chosen.any() and not mates.any():
            nearby = ", ".join(names[other] for other in np.flatnonzero(chosen))
            lines.append(
                f"{names[k]} is alone in its cluster and no other decided client has its task: joined to {nearby}"
            )
    return joined | joined.T, tuple(lines)


def make_graph(
    distances: Float64[np.ndarray, "n n"],
    clusters: Int64[np.ndarray, " n"],
    options: GraphOptions,
    *,
    clients: Sequence[str],
    tasks: Sequence[str] | None = None,
    performance: Float64[np.ndarray, " n"] | None = None,
    previous: Float64[np.ndarray, "n n"] | None = None,
) -> Graph:
    """The graph of these squared distances: weigh, cut, keep the nearest, symmetrise, join singletons, blend.

    Undecided clients (cluster -1) get no edges, cut or not: their distances are noise. Raises ConfigError for
    distances that are not finite.
    """
    labels = np.asarray(clusters, np.int64)
    decided = labels >= 0
    directed = GRAPHS[options.graph](affinity(distances, alpha=options.alpha, used=decided), performance)
    allowed = blocks(labels if options.block_diagonal else np.where(decided, 0, -1))
    edges = nearest(distances, allowed, options.neighbours) if options.neighbours else allowed
    adjacency = symmetrize(np.where(edges, directed, 0.0), options.symmetrize)
    warnings: tuple[str, ...] = ()
    if options.block_diagonal:
        count = options.singleton_neighbours
        joined, warnings = join_singletons(distances, labels, count=count, tasks=tasks, clients=clients)
        adjacency = np.where(joined, symmetrize(directed, options.symmetrize), adjacency)
        allowed = allowed | joined
    if previous is not None:
        adjacency = np.where(allowed, (1 - options.ema) * adjacency + options.ema * previous, 0.0)
    lonely = [f"{name} has no neighbour on the graph" for name, degree in zip(clients, adjacency.sum(1)) if not degree]
    return Graph(adjacency=adjacency, warnings=(*warnings, *lonely))


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """Effect of one server step on the adapters; all norms are Frobenius norms over all modules."""

    energy_before: float
    """Dirichlet energy of the models as trained: one half of a_kl ||Delta_k - Delta_l||^2 over the edges."""
    energy_after: float
    """The same of what the clients start the next round with."""
    spread_before: float
    """Root mean square distance of the updates from their mean over their root mean square norm: 0 if all agree."""
    spread_after: float
    """The same after the step."""
    norms: dict[str, float]
    """||Delta_k|| as trained."""
    moves: dict[str, float]
    """||Delta_k after - Delta_k before||: what the server changed for each client."""

    def is_finite(self) -> bool:
        """Return whether every figure is a number: the squares of updates that are far too large are not."""
        single = (self.energy_before, self.energy_after, self.spread_before, self.spread_after)
        return all(map(isfinite, (*single, *self.norms.values(), *self.moves.values())))


def update_gram(
    by_client: ByClient, clients: Sequence[str], scale: Callable[[int], float]
) -> Float64[np.ndarray, "n n"]:
    """<Delta_k, Delta_l> of every pair, summed over the adapted modules; a client without a module has zero there."""
    n = len(clients)
    total = np.zeros((n, n))
    # Sorted, because the last bits follow the order, and a model that comes from a checkpoint has another one.
    for module in sorted({module for client in clients for module in lora_modules(by_client[client])}):
        holders = [k for k, client in enumerate(clients) if module + LORA_A in by_client[client]]
        a = [by_client[clients[k]][module + LORA_A].double() for k in holders]
        b = [by_client[clients[k]][module + LORA_B].double() * scale(len(rows)) for k, rows in zip(holders, a)]
        stack_a, stack_b = torch.cat(a), torch.cat(b, 1)
        inner = ((stack_a @ stack_a.T) * (stack_b.T @ stack_b)).cpu().numpy()
        owner = np.zeros((len(inner), n))
        owner[np.arange(len(inner)), np.repeat(holders, [len(rows) for rows in a])] = 1.0
        total += owner.T @ inner @ owner
    return total


def gram_distances(gram: Float64[np.ndarray, "n n"]) -> Float64[np.ndarray, "n n"]:
    """||Delta_k - Delta_l||^2 of every pair; rounding below 1e-13 of the norms counts as zero."""
    squares = np.diag(gram)
    sums = squares[:, None] + squares[None, :]
    distances = sums - gram - gram.T
    return np.where(distances > 1e-13 * sums, distances, 0.0)


def dirichlet_energy(gram: Float64[np.ndarray, "n n"], adjacency: Float64[np.ndarray, "n n"]) -> float:
    """`1/4 sum_kl a_kl ||Delta_k - Delta_l||^2`, that is one half per edge: its gradient is the Laplacian step."""
    return float((adjacency * gram_distances(gram)).sum()) / 4


def spread(gram: Float64[np.ndarray, "n n"]) -> float:
    """Root mean square distance from the plain mean, over the root mean square norm: 0 (all equal) to 1 (mean zero)."""
    size = float(np.trace(gram)) / len(gram)
    return float(np.sqrt(gram_distances(gram).mean() / 2 / size)) if size > 0 else 0.0


def diversity(
    before: ByClient,
    after: ByClient,
    *,
    clients: Sequence[str],
    adjacency: Float64[np.ndarray, "n n"],
    scale: Callable[[int], float],
) -> Diversity:
    """Energy, spread, norms and moves of one server step; `before` are the models as trained, `after` as delivered."""
    n = len(clients)
    both = {f"before/{client}": before[client] for client in clients} | {
        f"after/{client}": after[client] for client in clients
    }
    gram = update_gram(both, list(both), scale)
    first, second = gram[:n, :n], gram[n:, n:]
    moved = np.sqrt(np.diag(gram_distances(gram)[:n, n:]))
    return Diversity(
        energy_before=dirichlet_energy(first, adjacency),
        energy_after=dirichlet_energy(second, adjacency),
        spread_before=spread(first),
        spread_after=spread(second),
        norms={client: float(value) for client, value in zip(clients, np.sqrt(np.diag(first)))},
        moves={client: float(value) for client, value in zip(clients, moved)},
    )
