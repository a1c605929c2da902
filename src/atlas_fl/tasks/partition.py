"""How the rows of a task fall to its clients.

A partition says two things of every client: how many rows it gets and in which mix of classes. `deal` then hands out
distinct rows that come as near to this as the rows there are allow.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from atlas_fl.errors import DataError
from atlas_fl.tasks.spec import Labels

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Partition: TypeAlias = Callable[[Array, int, int, float, np.random.Generator], tuple[Array, Array]]
"""(class shares of the task (C,), clients, samples, alpha, rng) -> (mixes (clients, C), sizes (clients,))."""

LEAST_SHARE = 0.1
"""No client of the quantity skew gets less than this share of the mean."""


def iid(prior: Array, num_clients: int, samples: int, alpha: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Every client has the task's own mix of classes and `samples` rows."""
    del alpha, rng
    return np.tile(prior, (num_clients, 1)), np.full(num_clients, samples)


def dirichlet(
    prior: Array, num_clients: int, samples: int, alpha: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Every client has `samples` rows in a mix drawn from Dirichlet(alpha C p), p the task's own mix of C classes.

    With equal classes that is the usual symmetric Dirichlet(alpha); large alpha is iid.
    T.-M. H. Hsu et al., Measuring the effects of non-identical data distribution, 2019.
    """
    mixes = rng.dirichlet(np.maximum(alpha * len(prior) * prior, 1e-9), size=num_clients)
    return mixes, np.full(num_clients, samples)


def quantity(
    prior: Array, num_clients: int, samples: int, alpha: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """The task's own mix, and sizes that share `clients * samples` rows by a draw from Dirichlet(alpha)."""
    least = max(2, int(LEAST_SHARE * samples))
    spare = max(0, num_clients * (samples - least))
    shares = rng.dirichlet(np.full(num_clients, alpha)) * spare
    return np.tile(prior, (num_clients, 1)), min(least, samples) + _rounded(shares, rng)


PARTITIONS: dict[str, Partition] = {"iid": iid, "dirichlet": dirichlet, "quantity": quantity}


def deal(
    classes: Labels, mixes: Array, sizes: Array, *, rng: np.random.Generator, two_classes: bool = False
) -> list[Labels]:
    """For every client the positions of its rows: disjoint, `sizes[k]` of them, in about the mix `mixes[k]`.

    Where a class has run out, the client gets more of its others. With `two_classes` every client gets rows of two
    classes at the least, and a `DataError` says for how many clients that is possible.
    """
    assert sizes.sum() <= len(classes), "the caller checks that the rows suffice"
    supply = np.bincount(classes, minlength=mixes.shape[1])
    counts = _first_pairs(mixes, supply) if two_classes else np.zeros(mixes.shape, dtype=np.int64)
    left = supply - counts.sum(axis=0)
    # In a random order, since the last ones get what the others leave.
    for client in rng.permutation(len(sizes)):
        wanted = np.maximum(mixes[client] * sizes[client] - counts[client], 0)
        more = _filled(wanted, int(sizes[client] - counts[client].sum()), left, rng)
        counts[client] += more
        left -= more
    return _drawn(classes, counts, rng)


def realised(classes: Labels, dealt: list[Labels], mixes: Array) -> Array:
    """The mixes that the dealt rows have, for clients whose rows differ from their mix by more than rounding does."""
    counts = np.stack([np.bincount(classes[rows], minlength=mixes.shape[1]) for rows in dealt])
    sizes = counts.sum(axis=1, keepdims=True)
    differs = (np.abs(counts - mixes * sizes) > 1).any(axis=1, keepdims=True)
    return np.where(differs, counts / sizes, mixes)


def most_clients_of_two(supply: Array) -> int:
    """The most clients that can all have rows of two classes when class c has `supply[c]` rows."""
    # n clients need 2n rows, of each class one a client: possible iff sum_c min(supply_c, n) >= 2n.
    return max(n for n in range(int(supply.sum()) // 2 + 1) if np.minimum(supply, n).sum() >= 2 * n)


def _first_pairs(mixes: Array, supply: Array) -> Array:
    """One row of each of two classes for every client, the likeliest two where the others still get theirs."""
    num_clients, left = len(mixes), supply.copy()
    if np.minimum(left, num_clients).sum() < 2 * num_clients:
        raise DataError(
            f"rows of two classes are there for {most_clients_of_two(supply)} clients and not for {num_clients} (rows "
            f"per class: {', '.join(map(str, supply))}); lower --clients-per-task or add rows of the rare classes"
        )
    counts = np.zeros(mixes.shape, dtype=np.int64)
    for client, mix in enumerate(mixes):
        waiting = num_clients - client - 1
        pair = np.argsort(np.where(left > 0, -mix, 1.0), kind="stable")[:2]
        after = left.copy()
        after[pair] -= 1
        if after.min() < 0 or np.minimum(after, waiting).sum() < 2 * waiting:
            pair = np.argsort(-left, kind="stable")[:2]
        counts[client, pair] += 1
        left[pair] -= 1
    return counts


def _filled(weights: Array, need: int, supply: Array, rng: np.random.Generator) -> Array:
    """`need` rows over the classes in the proportion of the weights, none above its supply, (C,) int64."""
    given = np.zeros_like(supply)
    while (missing := need - int(given.sum())) > 0:
        room = supply - given
        open_weights = np.where(room > 0, weights, 0.0)
        if open_weights.sum() < 1e-9:  # the client's own classes have run out
            open_weights = room.astype(np.float64)
        given += np.minimum(_rounded(missing * open_weights / open_weights.sum(), rng), room)
    return given


def _rounded(values: Array, rng: np.random.Generator) -> Array:
    """Whole numbers with the same sum, each the floor or the ceiling of its value and right on average, int64."""
    total = np.round(values.sum())
    ends = np.minimum(np.cumsum(values), total)
    ends[-1] = total
    return np.diff(np.floor(np.concatenate([[0.0], ends]) + rng.random())).astype(np.int64)


def _drawn(classes: Labels, counts: Array, rng: np.random.Generator) -> list[Labels]:
    parts: list[list[Labels]] = [[] for _ in counts]
    for value in range(counts.shape[1]):
        members = rng.permutation(np.flatnonzero(classes == value))
        ends = np.cumsum(counts[:, value])
        for part, end, count in zip(parts, ends, counts[:, value]):
            part.append(members[end - count : end])
    return [rng.permutation(np.concatenate(part)) for part in parts]
