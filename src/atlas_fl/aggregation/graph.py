"""The graph of clients: fingerprints become edge weights.

`a_kl = exp(-alpha ||f_k - f_l||^2)`, cut into blocks by cluster, symmetric, zero on the diagonal.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool
from scipy.sparse import csr_array

from atlas_fl.aggregation.matrices import Chosen, Groups, Square, Vector
from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen


class GraphOptions(Frozen):
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


class Graph(Frozen, eq=False):
    """Edge weights and what a user should know about them."""

    adjacency: Square | csr_array
    """Symmetric, not negative, zero on the diagonal; sparse where there are very many clients."""
    warnings: tuple[str, ...]
    """One line for each client that was joined across tasks or left without neighbours."""


def similarity_distances(similarity: Square) -> Square:
    """2 - 2 rho: the squared distance of unit vectors with cosine rho; a noise-corrected rho above 1 counts as 1."""
    rho = np.asarray(similarity, np.float64)
    distances = np.maximum(2.0 - (rho + rho.T), 0.0)
    np.fill_diagonal(distances, 0.0)
    return distances


def affinity(distances: Square, *, alpha: float | None = None, used: Chosen | None = None) -> Square:
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


def edge_weights(graph: str, close: Square, performance: Vector | None) -> Square:
    """The weights of the edges, directed with `adaptive`: a client listens more to the neighbours that do well."""
    if graph == "uniform":
        return 1.0 - np.eye(len(close))
    if graph == "similarity":
        return close
    assert performance is not None, "clients are scored for --graph adaptive"
    scores = np.maximum(np.asarray(performance, np.float64), 0.0)
    best = scores.max(initial=0.0)
    return np.asarray(close * (scores / best if best > 0 else np.ones_like(scores))[None, :])


def symmetrize(weights: Square, how: str) -> Square:
    """A symmetric matrix from a directed one: the average, maximum or minimum of the two directions."""
    if how == "average":
        return (weights + weights.T) / 2
    return np.maximum(weights, weights.T) if how == "max" else np.minimum(weights, weights.T)


def blocks(clusters: Groups) -> Bool[np.ndarray, "n n"]:
    """Which edges stay when the graph is cut: two different clients of one cluster; -1 (undecided) has no edges."""
    labels = np.asarray(clusters)
    return (labels[:, None] == labels[None, :]) & (labels[:, None] >= 0) & ~np.eye(len(labels), dtype=bool)


def nearest(distances: Square, allowed: Bool[np.ndarray, "n n"], count: int) -> Bool[np.ndarray, "n n"]:
    """Row k marks the `count` allowed clients nearest to k (fewer if fewer are allowed); ties go to the first."""
    order = np.argsort(np.where(allowed, distances, np.inf), axis=1, kind="stable")[:, :count]
    chosen = np.zeros_like(allowed)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen & allowed


def join_singletons(
    distances: Square, clusters: Groups, *, count: int, tasks: Sequence[str], clients: Sequence[str]
) -> tuple[Bool[np.ndarray, "n n"], tuple[str, ...]]:
    """The edges that join each client alone in its cluster to its `count` nearest, and a line for each join that had
    to leave the client's task. Undecided clients are neither joined nor joined to.
    """
    n, decided, task_names = len(clusters), np.asarray(clusters) >= 0, np.asarray(tasks)
    joined, lines = np.zeros((n, n), bool), []
    for k in range(n):
        if count == 0 or not decided[k] or np.sum(clusters == clusters[k]) > 1:
            continue
        others = decided & (np.arange(n) != k)
        mates = others & (task_names == task_names[k])
        pool = mates if mates.any() else others
        chosen = nearest(distances, np.broadcast_to(pool, (n, n)), count)[k]
        joined[k] |= chosen
        if chosen.any() and not mates.any():
            nearby = ", ".join(clients[other] for other in np.flatnonzero(chosen).tolist())
            lines.append(
                f"{clients[k]} is alone in its cluster and no other decided client has its task: joined to {nearby}"
            )
    return joined | joined.T, tuple(lines)


def make_graph(
    distances: Square,
    clusters: Groups,
    options: GraphOptions,
    *,
    clients: Sequence[str],
    tasks: Sequence[str],
    performance: Vector | None = None,
    previous: Square | None = None,
) -> Graph:
    """The graph of these squared distances: weigh, cut, keep the nearest, symmetrise, join singletons, blend.

    Undecided clients (cluster -1) get no edges, cut or not: their distances are noise. Raises ConfigError for
    distances that are not finite.
    """
    labels = np.asarray(clusters, np.int64)
    decided = labels >= 0
    directed = edge_weights(options.graph, affinity(distances, alpha=options.alpha, used=decided), performance)
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
