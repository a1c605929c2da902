"""How far apart the models are, before and after the server's step.

Everything is computed from Gram matrices of the updates s B A (`<s_k B_k A_k, s_l B_l A_l>` needs only the small
products of the factors), so a rotation of the factors changes nothing and no dense matrix is formed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from jaxtyping import Float64

from atlas_fl.params import LORA_A, LORA_B, ByClient, lora_modules


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """What one server step did to the adapters; all norms are Frobenius norms over all modules."""

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
        """Whether every figure is a number: the squares of updates that are far too large are not."""
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
