"""Exactly so many classes a client: a random bi-regular assignment of classes to clients, and the rows to it.

Every client gets N_c different classes, every class as many clients as every other (or one more), and the rows of a
class go to its clients. H. B. McMahan et al., Communication-efficient learning of deep networks from decentralized
data, 2017, cut sorted rows into shards instead, by which a client may get the same class twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from atlas_fl.errors import ConfigError, DataError
from atlas_fl.tasks.spec import Labels

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

SWITCHES = 10
"""Attempted switches a slot, of the chain that makes the assignment random."""


def assign_classes(num_clients: int, num_classes: int, classes_per_client: int, rng: np.random.Generator) -> Array:
    """Which classes every client has: bool (clients, classes), `classes_per_client` in a row, columns even to one.

    Drawn by the switch chain, whose moves keep the sums of rows and columns, from a dealt start; it reaches every
    assignment. A `ConfigError` says what is impossible: more classes than there are, or a class without a client.
    """
    check_classes(num_clients, num_classes, classes_per_client)
    slots = num_clients * classes_per_client
    # classes dealt out in turn: no client gets one twice, since it takes neighbours of a circle that is no shorter
    dealt = np.arange(slots) % num_classes
    held = np.zeros((num_clients, num_classes), dtype=bool)
    held[np.repeat(np.arange(num_clients), classes_per_client), rng.permutation(num_classes)[dealt]] = True
    return _switched(held, rng)


def check_classes(num_clients: int, num_classes: int, classes_per_client: int) -> None:
    """Nothing where so many clients can share these classes; a `ConfigError` says why they cannot.

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


def _switched(held: Array, rng: np.random.Generator) -> Array:
    """The same sums of rows and columns, at random: two clients swap two classes that the other does not have."""
    clients, classes = (places.copy() for places in np.nonzero(held))
    held = held.copy()
    for one, two in rng.integers(len(clients), size=(SWITCHES * len(clients), 2)):
        a, b, x, y = clients[one], clients[two], classes[one], classes[two]
        if a != b and x != y and not held[a, y] and not held[b, x]:
            held[a, x] = held[b, y] = False
            held[a, y] = held[b, x] = True
            classes[one], classes[two] = y, x
    return held


@dataclass(frozen=True, kw_only=True)
class _Bounds:
    """What a plan must keep: rows of a client in a class, of a client, and of a class."""

    cells: tuple[Array, Array]
    clients: tuple[Array, Array]
    classes: tuple[Array, Array]


def plan_rows(held: Array, supply: Array, *, size: int | None) -> Array:
    """How many rows of every class each client gets, int64 (clients, classes): none of a class that is not its own.

    With a `size` every client has exactly so many, spread over its classes as evenly as the supply allows; without one
    every row is dealt out, to clients as equal as the assignment allows and of every class as equally as that leaves
    possible. A `DataError` says for what size the rows suffice.
    """
    clients, degree = held.sum(axis=1), held.sum(axis=0)
    if (supply < degree).any():
        scarce = int(np.argmax(degree - supply))
        raise DataError(
            f"class {scarce} has {supply[scarce]} rows for {degree[scarce]} clients; lower --clients-per-task or --nc"
        )
    if size is None:
        low, high = _evenest(held, supply)
        wanted = np.where(held, supply / np.maximum(degree, 1), 0.0)
        sizes, classes = (np.full(len(held), low), np.full(len(held), high)), (supply, supply)
    else:
        wanted = np.where(held, size / clients[:, None], 0.0)
        sizes, classes = (np.full(len(held), size),) * 2, (degree, supply)

    def bounds(slack: int) -> _Bounds:
        lowest = np.where(held, np.maximum(np.floor(wanted) - slack, 1), 0).astype(np.int64)
        highest = np.where(held, np.minimum(np.ceil(wanted) + slack, supply), 0).astype(np.int64)
        return _Bounds(cells=(lowest, np.maximum(lowest, highest)), clients=sizes, classes=classes)

    most = int(supply.max())
    if _flow(bounds(most)) is None:
        assert size is not None, "what `_evenest` found can be dealt"
        raise DataError(_too_large(held, supply, size))
    found = _flow(bounds(_least(lambda slack: _flow(bounds(slack)) is not None, 0, most)))
    assert found is not None, "the search ends where there is a plan"
    return found


def deal_classes(classes: Labels, held: Array, *, size: int | None, rng: np.random.Generator) -> list[Labels]:
    """For every client the positions of its rows: disjoint, of its classes alone, in a random order (`plan_rows`)."""
    counts = plan_rows(held, np.bincount(classes, minlength=held.shape[1]), size=size)
    parts: list[list[Labels]] = [[] for _ in held]
    for value in range(held.shape[1]):
        members = rng.permutation(np.flatnonzero(classes == value))
        for part, rows in zip(parts, np.split(members, np.cumsum(counts[:, value]))):
            part.append(rows)
    return [rng.permutation(np.concatenate(part)) for part in parts]


def _evenest(held: Array, supply: Array) -> tuple[int, int]:
    """The smallest largest size of a client when every row is dealt, and the largest smallest one under it."""
    total = int(supply.sum())
    mean = total // len(held)

    def possible(low: int, high: int) -> bool:
        most = np.where(held, supply, 0)
        sizes = np.full(len(held), low), np.full(len(held), high)
        return _flow(_Bounds(cells=(held.astype(np.int64), most), clients=sizes, classes=(supply, supply))) is not None

    least = int(held.sum(axis=1).max())
    high = _least(lambda size: possible(least, size), -(-total // len(held)), total)
    low = mean - _least(lambda less: possible(mean - less, high), 0, mean - least)
    return low, high


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number of the range for which it holds, where it does for all above; the last one is not tried."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _too_large(held: Array, supply: Array, size: int) -> str:
    least = int(held.sum(axis=1).max())

    def fails(rows: int) -> bool:
        sizes = np.full(len(held), rows)
        most = np.where(held, supply, 0)
        cells = held.astype(np.int64), most
        return _flow(_Bounds(cells=cells, clients=(sizes, sizes), classes=(held.sum(axis=0), supply))) is None

    fits = _least(fails, least, size) - 1
    if fits < least:
        return f"{size} rows a client are fewer than its {least} classes; raise the size to {least}"
    return (
        f"the classes have too few rows for {len(held)} clients of {size} (rows per class:"
        f" {', '.join(map(str, supply[:20]))}{', ..' if len(supply) > 20 else ''}); lower the size to {fits}"
    )


def _flow(bounds: _Bounds) -> Array | None:
    """A plan within the bounds, int64 (clients, classes); None if there is none.

    Clients are sources and classes are sinks. What each arc must carry at least is sent beforehand, from and to two
    nodes more, which a maximum flow fills if and only if there is a plan.
    """
    (low, high), clients, classes = bounds.cells, bounds.clients, bounds.classes
    if any((lower > upper).any() for lower, upper in (bounds.cells, clients, classes)):
        return None
    num_clients, num_classes = low.shape
    source, sink, give, take = range(num_clients + num_classes, num_clients + num_classes + 4)
    rows, columns = np.nonzero(high)
    client_nodes, class_nodes = np.arange(num_clients), num_clients + np.arange(num_classes)
    arcs = [
        (np.full(num_clients, source), client_nodes, clients[1] - clients[0]),
        (rows, num_clients + columns, (high - low)[rows, columns]),
        (class_nodes, np.full(num_classes, sink), classes[1] - classes[0]),
        (np.array([sink]), np.array([source]), np.array([classes[1].sum()])),
    ]
    # what a node must receive at least, less what it must pass on
    owed = np.zeros(take + 1, dtype=np.int64)
    owed[client_nodes] = clients[0] - low.sum(axis=1)
    owed[class_nodes] = low.sum(axis=0) - classes[0]
    owed[source], owed[sink] = -clients[0].sum(), classes[0].sum()
    short, over = np.flatnonzero(owed < 0), np.flatnonzero(owed > 0)
    arcs += [
        (np.full(len(over), give), over, owed[over]),
        (short, np.full(len(short), take), -owed[short]),
    ]
    starts, ends, room = (np.concatenate(parts) for parts in zip(*arcs))
    graph = csr_array((room.astype(np.int32), (starts, ends)), shape=(take + 1, take + 1))
    found = maximum_flow(graph, give, take)
    if found.flow_value != owed[over].sum():
        return None
    plan: Array = low + np.maximum(found.flow.toarray()[:num_clients, num_clients : num_clients + num_classes], 0)
    return plan
