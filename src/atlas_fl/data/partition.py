"""Partitions of a task's rows among clients: by label mixes, by sizes, by N_c classes; mixes of test rows.

A partition says two things of every client: how many rows it gets and in which mix of classes. `deal` then hands out
distinct rows that come as near to this as the rows there are allow.

With `N_c` every client gets N_c different classes, every class as many clients as every other (or one more), by a
random bi-regular assignment, and the rows of a class go to its clients. H. B. McMahan et al., Communication-efficient
learning of deep networks from decentralized data, 2017, cut sorted rows into shards instead, by which a client may get
the same class twice.
"""

from bisect import bisect
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from atlas_fl.data.task import Labels
from atlas_fl.errors import ConfigError, DataError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MixesAndSizes: TypeAlias = tuple[Array, Array]
"""(mixes (clients, C), sizes (clients,))."""
Partition: TypeAlias = Callable[[Array, int, int, float, np.random.Generator], MixesAndSizes]
"""(class shares of the task (C,), clients, samples, alpha, rng) -> its clients' mixes and sizes."""

LEAST_SHARE = 0.1
"""No client of the quantity skew gets less than this share of the mean."""


def iid(prior: Array, num_clients: int, samples: int, _alpha: float, _rng: np.random.Generator) -> MixesAndSizes:
    """Every client has the task's own mix of classes and `samples` rows."""
    return np.tile(prior, (num_clients, 1)), np.full(num_clients, samples)


def dirichlet(prior: Array, num_clients: int, samples: int, alpha: float, rng: np.random.Generator) -> MixesAndSizes:
    """Every client has `samples` rows in a mix drawn from Dirichlet(alpha C p), p the task's own mix of C classes.

    With equal classes that is the usual symmetric Dirichlet(alpha); large alpha is iid.
    T.-M. H. Hsu et al., Measuring the effects of non-identical data distribution, 2019.
    """
    mixes = rng.dirichlet(np.maximum(alpha * len(prior) * prior, 1e-9), size=num_clients)
    return mixes, np.full(num_clients, samples)


def quantity(prior: Array, num_clients: int, samples: int, alpha: float, rng: np.random.Generator) -> MixesAndSizes:
    """The task's own mix, and sizes that share `clients * samples` rows by a draw from Dirichlet(alpha)."""
    least = max(2, int(LEAST_SHARE * samples))
    spare = max(0, num_clients * (samples - least))
    shares = rng.dirichlet(np.full(num_clients, alpha)) * spare
    return np.tile(prior, (num_clients, 1)), min(least, samples) + _round_randomly(shares, rng)


def shard(prior: Array, num_clients: int, samples: int, _alpha: float, rng: np.random.Generator) -> MixesAndSizes:
    """Every client has `samples` rows of two shards: rows sorted by class are cut into two equal ones for each client.

    H. B. McMahan et al., Communication-efficient learning of deep networks from decentralized data, 2017.
    """
    ends = np.cumsum(prior) / prior.sum()
    cuts = np.linspace(0, 1, 2 * num_clients + 1)
    # overlap of every shard with the stretch of every class
    stretches = np.minimum(cuts[1:, None], ends) - np.maximum(cuts[:-1, None], ends - prior / prior.sum())
    shards = np.maximum(stretches, 0)[rng.permutation(2 * num_clients)]
    mixes = shards[:num_clients] + shards[num_clients:]
    return mixes / mixes.sum(axis=1, keepdims=True), np.full(num_clients, samples)


def _sized(weights: Callable[[Array], Array], formula: str) -> Partition:
    """The partition in the task's own mix whose sizes are in the proportion of these weights of 1, 2, .. clients."""

    def partition(
        prior: Array, num_clients: int, samples: int, _alpha: float, rng: np.random.Generator
    ) -> MixesAndSizes:
        share = weights(np.arange(1.0, num_clients + 1))
        least = min(2, samples)
        spare = share / share.sum() * num_clients * (samples - least)
        return np.tile(prior, (num_clients, 1)), least + _round_randomly(spare, rng)

    partition.__doc__ = f"The task's own mix; client k has rows in the proportion of {formula}, two at the least."
    return partition


PARTITIONS: dict[str, Partition] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "shard": shard,
    "linear": _sized(lambda number: number, "k"),
    "square": _sized(np.square, "k^2"),
    "exponential": _sized(lambda number: np.exp(number - number[-1]), "e^k"),
}

NATURAL, PATHOLOGICAL = "natural", "pathological"
"""Partitions that draw no mixes and sizes: the data name their clients (`data.own_clients`), or every client has rows
of as many classes as `--nc` says (`deal_classes`)."""


def deal(
    classes: Labels, mixes: Array, sizes: Array, *, rng: np.random.Generator, two_classes: bool = False
) -> list[Labels]:
    """For every client the positions of its rows: disjoint, `sizes[k]` of them, in about the mix `mixes[k]`.

    Where a class has run out, the client gets more of its others. With `two_classes` every client gets rows of two
    classes at the least, and a `DataError` says where that is impossible.
    """
    assert sizes.sum() <= len(classes), "the caller checks that the rows suffice"
    supply = np.bincount(classes, minlength=mixes.shape[1])
    counts = _first_pairs(mixes, supply) if two_classes else np.zeros(mixes.shape, dtype=np.int64)
    left = supply - counts.sum(axis=0)
    # In a random order, since the last ones get what the others leave.
    for client in rng.permutation(len(sizes)):
        targets = np.maximum(mixes[client] * sizes[client] - counts[client], 0)
        need = int(sizes[client] - counts[client].sum())
        more = np.zeros_like(left)
        while (missing := need - int(more.sum())) > 0:
            room = left - more
            open_weights = np.where(room > 0, targets, 0.0)
            if open_weights.sum() < 1e-9:  # the client's own classes have run out
                open_weights = room.astype(np.float64)
            more += np.minimum(_round_randomly(missing * open_weights / open_weights.sum(), rng), room)
        counts[client] += more
        left -= more
    return _draw_rows(classes, counts, rng)


def actual_mixes(classes: Labels, dealt: list[Labels], mixes: Array) -> Array:
    """The mixes that the dealt rows have, for clients whose rows differ from their mix by more than rounding does."""
    counts = np.stack([np.bincount(classes[rows], minlength=mixes.shape[1]) for rows in dealt])
    sizes = counts.sum(axis=1, keepdims=True)
    differs = (np.abs(counts - mixes * sizes) > 1).any(axis=1, keepdims=True)
    return np.where(differs, counts / sizes, mixes)


def deal_balanced(classes: Labels, sizes: Array, *, num_classes: int, rng: np.random.Generator) -> list[Labels]:
    """For every client the positions of its rows: disjoint, `sizes[k]` of them, of every class as many as of any other.

    All clients have as many of a class, or one more. Of a class that has too few rows each client has its part, and
    more of the others. The sizes are equal, or the first ones have one more.
    """
    assert sizes.sum() <= len(classes), "the caller checks that the rows suffice"
    totals = _level(np.bincount(classes, minlength=num_classes), int(sizes.sum()))
    counts = np.tile(totals // len(sizes), (len(sizes), 1))
    place = 0
    for value, more in enumerate(totals % len(sizes)):
        # one after the other in a circle, so that nobody is two rows ahead
        counts[(place + np.arange(more)) % len(sizes), value] += 1
        place += int(more)
    assert (counts.sum(axis=1) == sizes).all(), "sizes differ by one at the most"
    return _draw_rows(classes, counts, rng)


def _level(supply: Array, total: int) -> Array:
    """So many rows of every class, `total` together: as equal as the supply allows, (classes,) int64."""
    taken = np.zeros(len(supply), np.int64)
    while (missing := total - int(taken.sum())) > 0:
        there = np.flatnonzero(supply > taken)
        step = min(max(missing // len(there), 1), int((supply - taken)[there].min()))
        taken[there[: missing // step]] += step
    return taken


def _first_pairs(mixes: Array, supply: Array) -> Array:
    """One row of each of two classes for every client, the likeliest two where the others still get theirs."""
    num_clients, left = len(mixes), supply.copy()
    if np.minimum(left, num_clients).sum() < 2 * num_clients:
        raise DataError(
            f"there are no rows of two classes for each of {num_clients} clients (rows per class:"
            f" {', '.join(map(str, supply))}); lower --clients-per-task or add rows of the rare classes"
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


def _round_randomly(values: Array, rng: np.random.Generator) -> Array:
    """Whole numbers with the same sum, each the floor or the ceiling of its value and right on average, int64."""
    total = np.round(values.sum())
    ends = np.minimum(np.cumsum(values), total)
    ends[-1] = total
    return np.diff(np.floor(np.concatenate([[0.0], ends]) + rng.random())).astype(np.int64)


def _draw_rows(classes: Labels, counts: Array, rng: np.random.Generator) -> list[Labels]:
    parts: list[list[Labels]] = [[] for _ in counts]
    for value in range(counts.shape[1]):
        members = rng.permutation(np.flatnonzero(classes == value))
        ends = np.cumsum(counts[:, value])
        for part, end, count in zip(parts, ends, counts[:, value]):
            part.append(members[end - count : end])
    return [rng.permutation(np.concatenate(part)) for part in parts]


SWITCHES = 10
"""Attempted switches a slot, of the chain that makes the assignment random."""


def assign_classes(num_clients: int, num_classes: int, classes_per_client: int, rng: np.random.Generator) -> Array:
    """Classes of every client: bool (clients, classes), `classes_per_client` in a row, columns even to one.

    Drawn by the switch chain, whose moves keep the sums of rows and columns, from a dealt start; it reaches every
    assignment. A `ConfigError` says what is impossible: more classes than there are, or a class without a client.
    """
    check_classes(num_clients, num_classes, classes_per_client)
    slots = num_clients * classes_per_client
    # classes dealt out in turn: no client gets one twice, since it takes neighbours of a circle that is no shorter
    dealt = np.arange(slots) % num_classes
    has_class = np.zeros((num_clients, num_classes), dtype=bool)
    has_class[np.repeat(np.arange(num_clients), classes_per_client), rng.permutation(num_classes)[dealt]] = True
    # the same sums of rows and columns, at random: two clients swap two classes that the other does not have
    clients, classes = np.nonzero(has_class)
    for one, two in rng.integers(len(clients), size=(SWITCHES * len(clients), 2)):
        a, b, x, y = clients[one], clients[two], classes[one], classes[two]
        if a != b and x != y and not has_class[a, y] and not has_class[b, x]:
            has_class[a, x] = has_class[b, y] = False
            has_class[a, y] = has_class[b, x] = True
            classes[one], classes[two] = y, x
    return has_class


def check_classes(num_clients: int, num_classes: int, classes_per_client: int) -> None:
    """Raise `ConfigError`, with the reason, unless this number of clients can share these classes.

    A client would have more classes than there are, or a class no client.
    """
    if not 1 <= classes_per_client <= num_classes:
        raise ConfigError(
            f"--nc is {classes_per_client} classes a client and the task has {num_classes}; give 1 to {num_classes}"
        )
    if num_clients * classes_per_client < num_classes:
        least = -(-num_classes // num_clients)
        raise ConfigError(
            f"{num_clients} clients of {classes_per_client} classes leave some of the {num_classes} classes to nobody;"
            f" give --nc {least} or more, or {-(-num_classes // classes_per_client)} clients"
        )


def plan_rows(has_class: Array, supply: Array, *, size: int | None) -> Array:
    """Number of rows of each class that each client gets, int64 (clients, classes): none of classes not its own.

    With a `size` every client has exactly so many, spread over its classes as evenly as the supply allows; without one
    every row is dealt out, to clients as equal as the assignment allows and of every class as equally as that leaves
    possible. A `DataError` says where the rows do not suffice.
    """
    clients, degree = has_class.sum(axis=1), has_class.sum(axis=0)
    if (supply < degree).any():
        scarce = int(np.argmax(degree - supply))
        raise DataError(
            f"class {scarce} has {supply[scarce]} rows for {degree[scarce]} clients; lower --clients-per-task or --nc"
        )
    targets: Array
    if size is None:
        sizes = _evenest(has_class, supply)
        classes = (supply, supply)
        targets = np.where(has_class, supply / np.maximum(degree, 1), 0.0)
    else:
        sizes = (size, size)
        classes = (degree, supply)
        targets = np.where(has_class, size / clients[:, None], 0.0)

    def plan_within(slack: int) -> Array | None:
        lowest = np.where(has_class, np.maximum(np.floor(targets) - slack, 1), 0).astype(np.int64)
        highest = np.where(has_class, np.minimum(np.ceil(targets) + slack, supply), 0).astype(np.int64)
        return _flow(cells=(lowest, np.maximum(lowest, highest)), clients=sizes, classes=classes)

    slacks = range(int(supply.max()) + 1)
    if plan_within(slacks[-1]) is None:
        raise DataError(
            f"the classes have too few rows for {len(has_class)} clients of {size} with a row or more of each of their"
            f" {clients.max()} classes (rows per class: {', '.join(map(str, supply[:20]))}"
            f"{', ..' if len(supply) > 20 else ''}); give another size"
        )
    plan = plan_within(bisect(slacks, 0, key=lambda slack: plan_within(slack) is not None))
    assert plan is not None, "the search ends where there is a plan"
    return plan


def deal_classes(classes: Labels, has_class: Array, *, size: int | None, rng: np.random.Generator) -> list[Labels]:
    """For every client the positions of its rows: disjoint, of its classes alone, in a random order (`plan_rows`)."""
    counts = plan_rows(has_class, np.bincount(classes, minlength=has_class.shape[1]), size=size)
    return _draw_rows(classes, counts, rng)


def _evenest(has_class: Array, supply: Array) -> tuple[int, int]:
    """The largest smallest size of a client when every row is dealt, and the smallest largest one above it."""
    total = int(supply.sum())
    mean = total // len(has_class)
    cells = has_class.astype(np.int64), np.where(has_class, supply, 0)

    def possible(low: int, high: int) -> bool:
        return _flow(cells=cells, clients=(low, high), classes=(supply, supply)) is not None

    least = int(has_class.sum(axis=1).max())
    sizes = range(-(-total // len(has_class)), total + 1)
    high = sizes[bisect(sizes, 0, hi=len(sizes) - 1, key=lambda size: possible(least, size))]
    less = bisect(range(mean - least), 0, key=lambda less: possible(mean - less, high))
    return mean - less, high


def _flow(*, cells: tuple[Array, Array], clients: tuple[int, int], classes: tuple[Array, Array]) -> Array | None:
    """A plan within these bounds, int64 (clients, classes); None if there is none.

    The least and the most rows of a client in a class, of every client, and of each class. Clients are sources and
    classes are sinks. What each arc must carry at least is sent beforehand, from and to two nodes more, which a maximum
    flow fills if and only if there is a plan.
    """
    low, high = cells
    if any(np.any(lower > upper) for lower, upper in (cells, clients, classes)):
        return None
    num_clients, num_classes = low.shape
    source, sink, give, take = range(num_clients + num_classes, num_clients + num_classes + 4)
    rows, columns = np.nonzero(high)
    client_nodes, class_nodes = np.arange(num_clients), num_clients + np.arange(num_classes)
    arcs = [
        (np.full(num_clients, source), client_nodes, np.full(num_clients, clients[1] - clients[0])),
        (rows, num_clients + columns, (high - low)[rows, columns]),
        (class_nodes, np.full(num_classes, sink), classes[1] - classes[0]),
        (np.array([sink]), np.array([source]), np.array([classes[1].sum()])),
    ]
    # what a node must receive at least, less what it must pass on
    owed = np.zeros(take + 1, dtype=np.int64)
    owed[client_nodes] = clients[0] - low.sum(axis=1)
    owed[class_nodes] = low.sum(axis=0) - classes[0]
    owed[source] = -clients[0] * num_clients
    owed[sink] = classes[0].sum()
    short = np.flatnonzero(owed < 0)
    over = np.flatnonzero(owed > 0)
    arcs += [(np.full(len(over), give), over, owed[over]), (short, np.full(len(short), take), -owed[short])]
    starts, ends, room = (np.concatenate(parts) for parts in zip(*arcs))
    graph = csr_array((room.astype(np.int32), (starts, ends)), shape=(take + 1, take + 1))
    solution = maximum_flow(graph, give, take)
    if solution.flow_value != owed[over].sum():
        return None
    plan: Array = low + np.maximum(solution.flow.toarray()[:num_clients, num_clients : num_clients + num_classes], 0)
    return plan
