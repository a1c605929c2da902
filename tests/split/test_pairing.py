from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.rng import generator
from atlas_fl.split.host_matching import GuestRequirement, HostCapacity, HostingCost, HostMatch, match_hosts


def guest(
    name: str, *, cluster: int = 0, size: int = 10, own: float = 1.0, **costs: tuple[float, float]
) -> GuestRequirement:
    made = {host: HostingCost(compute_seconds=compute, link_seconds=link) for host, (compute, link) in costs.items()}
    return GuestRequirement(name=name, cluster=cluster, bytes=size, device_seconds=own, costs=made)


def random_federation(seed: int) -> tuple[list[GuestRequirement], list[HostCapacity]]:
    draw = generator(seed, "pairing")
    hosts = [
        HostCapacity(name=f"h{k}", cluster=int(draw.integers(-1, 3)), free_bytes=int(draw.integers(0, 60)))
        for k in range(draw.integers(0, 5))
    ]
    guests = []
    for k in range(draw.integers(0, 7)):
        cluster, size, own = int(draw.integers(-1, 3)), int(draw.integers(1, 40)), float(draw.random())
        costs = {host.name: (float(draw.random()), float(draw.random())) for host in hosts}
        guests.append(guest(f"g{k}", cluster=cluster, size=size, own=own, **costs))
    return guests, hosts


def test_four_clients_by_hand() -> None:
    """Two small ones; a laptop in their cluster with room for one of them, and a fast one in another cluster."""
    laptop = HostCapacity(name="laptop", cluster=0, free_bytes=25)
    fast = HostCapacity(name="fast", cluster=1, free_bytes=100)
    small = guest("small", size=10, own=1.0, laptop=(4.0, 2.0), fast=(0.5, 3.0))
    large = guest("large", size=20, own=1.0, laptop=(6.0, 2.0), fast=(1.0, 3.0))
    found = match_hosts([small, large], [laptop, fast])
    assert found == {
        "large": HostMatch(host="laptop", reason="the quickest of 1 with room, in cluster 0"),
        "small": HostMatch(host="fast", reason="the quickest of 1 with room, in other clusters"),
    }
    # no client is a guest of its own device
    assert match_hosts([guest("small", fast=(0.5, 3.0))], [laptop, fast])["small"].host == "fast"
    # the laptop has gone
    assert [own.host for own in match_hosts([small, large], [fast]).values()] == ["fast", "fast"]
    alone = replace(small, cluster=UNDECIDED)
    assert match_hosts([alone], [fast])["small"].host == "fast"
    tiny = HostCapacity(name="laptop", cluster=0, free_bytes=9)
    none = HostMatch(host=None, reason="no client that holds a whole model has room for it")
    assert match_hosts([small], [tiny]) == match_hosts([small], []) == {"small": none}


def test_guests_spread_over_hosts_as_their_waiting_grows() -> None:
    hosts = [HostCapacity(name=name, cluster=0, free_bytes=100) for name in ("a", "b")]
    guests = [guest(f"g{k}", a=(1.0, 0.0), b=(1.5, 0.0)) for k in range(5)]
    counts = [own.host for own in match_hosts(guests, hosts).values()]
    assert (counts.count("a"), counts.count("b")) == (3, 2)


@pytest.mark.parametrize("seed", range(20))
def test_no_host_is_over_its_memory_and_nobody_leaves_a_cluster_with_room(seed: int) -> None:
    guests, hosts = random_federation(seed)
    found, by_name = match_hosts(guests, hosts), {own.name: own for own in guests}
    assert list(found) == sorted(by_name)
    for host in hosts:
        here = [by_name[name] for name, own in found.items() if own.host == host.name]
        near = [own for own in here if own.cluster == host.cluster != UNDECIDED]
        assert sum(own.bytes for own in here) <= host.free_bytes
        for name, own in found.items():
            guest = by_name[name]
            at = next((other.cluster for other in hosts if other.name == own.host), None)
            if own.host is None:
                assert guest.bytes > host.free_bytes - sum(other.bytes for other in here)
            elif guest.cluster == host.cluster != UNDECIDED and at != guest.cluster:
                assert guest.bytes > host.free_bytes - sum(other.bytes for other in near)


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_guests_and_hosts_changes_nothing(seed: int) -> None:
    guests, hosts = random_federation(seed)
    found, draw = match_hosts(guests, hosts), np.random.default_rng(seed)
    for order in list(permutations(hosts))[:6]:
        mixed = [guests[k] for k in draw.permutation(len(guests))]
        assert list(match_hosts(mixed, order).items()) == list(found.items())


@pytest.mark.parametrize("seed", range(8))
def test_a_guest_alone_gets_the_host_of_its_cluster_with_the_shortest_round(seed: int) -> None:
    guests, hosts = random_federation(seed)
    for own in guests:
        (found,) = match_hosts([own], hosts).values()
        room = [host for host in hosts if host.free_bytes >= own.bytes]
        near = [host for host in room if host.cluster == own.cluster != UNDECIDED] or room
        times = {host.name: own.costs[host.name].compute_seconds + own.costs[host.name].link_seconds for host in near}
        assert found.host == (min(times, key=lambda name: times[name]) if times else None)
