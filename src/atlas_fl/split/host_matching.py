"""Matching of hosts to guests: strong devices compute the upper part of weak ones' models, and the server the rest.

    seconds(guest, host) = guest's own computing + the host's for all of its guests + the link between the two

A host has the whole frozen model already, so a guest costs it activations, adapters and optimizer alone. It computes
its guests' parts as one pack: each waits for all of them.
"""

from collections.abc import Collection, Mapping

from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.frozen import Frozen


class HostingCost(Frozen):
    """Seconds of one guest's round on one host."""

    compute_seconds: float
    """Computing of the upper part at the host's speed."""
    link_seconds: float
    """Traffic that the guest sends and gets, where the host is at the other end of its cut."""


class GuestRequirement(Frozen):
    """A client with a cut."""

    name: str
    cluster: int
    bytes: int
    """Bytes of its upper part on a host."""
    device_seconds: float
    """Computing on its own device."""
    costs: Mapping[str, HostingCost]
    """By the name of every host that is not this client's own device."""


class HostCapacity(Frozen):
    """A client that holds the whole model."""

    name: str
    cluster: int
    free_bytes: int


class HostMatch(Frozen):
    """Host that computes the upper part of a guest's model."""

    host: str | None
    """None: the server."""
    reason: str


def match_hosts(guests: Collection[GuestRequirement], hosts: Collection[HostCapacity]) -> dict[str, HostMatch]:
    """The host of every guest, by the guest's name in the order of names; a function of the two sets alone.

    Guests choose one after another, the largest first, since it finds room least easily: first all of them inside
    their clusters, then those that found none anywhere. Each takes the host with room where its round is the shortest
    with those who are there already, and so a busy host gets fewer: that is the balance. What holds, and why:

    - No host is over its memory: a guest is added only where it fits into what is left.
    - A guest leaves its cluster, or goes to the server, only where nobody in it, or nobody at all, has room: what is
      left only shrinks, and it was asked of all of them before.
    - The order of guests and hosts changes nothing: both are taken by values and then names, which are unique.

    It is not the best of all assignments, which is a knapsack problem; alone, a guest gets the best host.
    """
    free = {host.name: host.free_bytes for host in hosts}
    load = dict.fromkeys(free, 0.0)
    matched: dict[str, HostMatch] = {}
    for inside in (True, False):
        for guest in sorted(guests, key=lambda guest: (-guest.bytes, guest.name)):
            room = [
                host
                for host in hosts
                if host.name in guest.costs
                and free[host.name] >= guest.bytes
                and (not inside or guest.cluster == host.cluster != UNDECIDED)
            ]
            if guest.name in matched or not room:
                continue
            seconds = {
                name: guest.device_seconds + load[name] + cost.compute_seconds + cost.link_seconds
                for name, cost in guest.costs.items()
                if name in load
            }
            best = min(room, key=lambda host: (seconds[host.name], -free[host.name], host.name))
            free[best.name] -= guest.bytes
            load[best.name] += guest.costs[best.name].compute_seconds
            where = f"cluster {guest.cluster}" if inside else "other clusters"
            matched[guest.name] = HostMatch(host=best.name, reason=f"the quickest of {len(room)} with room, in {where}")
    server = HostMatch(host=None, reason="no client that holds a whole model has room for it")
    return {name: matched.get(name, server) for name in sorted(guest.name for guest in guests)}
