"""Topology: who computes the upper parts of cut models, in the plan and in every round (`--topology`).

Nothing that is trained depends on it. The plan pairs all clients; a round pairs those who are there by the same rule,
so that the guests of a host that takes no part, or has dropped, find another one in the same round. In a simulation the
pairs of a round are worked out from who answered; across machines the engine pairs and says whom
(`runtime.coordinator.peer_relay`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from atlas_fl.client.job import Job, Update
from atlas_fl.data.clients import ClientData
from atlas_fl.planning.plan import ClientPlan
from atlas_fl.planning.round_costs import SERVER, crossings_of
from atlas_fl.ranks.cost_model import TRAINING_COPIES, crossing_seconds, link_between
from atlas_fl.ranks.devices import Device
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import cut_of
from atlas_fl.split.host_matching import (
    GuestRequirement,
    HostCapacity,
    HostingCost,
    HostMatch,
    match_hosts,
    round_seconds,
)

GUESTS = "guests"
"""The part of a host's memory that its guests take."""
_APART = "unpaired"
"""What was predicted of a client before it became a guest or a host."""


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """Who hosts whom in a round, by guest; empty where the server hosts everyone."""

    training: Mapping[str, HostMatch] = field(default_factory=dict)
    evaluation: Mapping[str, HostMatch] = field(default_factory=dict)
    relayed: bool = False
    """What goes between two clients goes over the server."""


def hosting_of(
    assembly: Assembly, clients: Sequence[ClientPlan], *, training: Sequence[Update], evaluation: Sequence[Update]
) -> Hosting:
    """The pairs of a round, where these are the answers when clients were to train and to evaluate."""
    if assembly.config.split.topology == "server":
        return Hosting()
    planned = _pairs(assembly, clients, present=[client.name for client in clients])
    both = {"training": training, "evaluation": evaluation}
    relayed = any(update.hosted is not None for updates in both.values() for update in updates)
    return Hosting(**{work: _held(assembly, clients, planned, own) for work, own in both.items()}, relayed=relayed)


def _held(
    assembly: Assembly, clients: Sequence[ClientPlan], planned: Mapping[str, HostMatch], updates: Sequence[Update]
) -> dict[str, HostMatch]:
    """The pairs of those who answered; where an engine has paired them itself, as it did."""
    present = {update.client for update in updates}
    found = _told(_pairs(assembly, clients, present=present), planned, present)
    done = {update.client: update.hosted for update in updates if update.hosted is not None}
    return {name: done[name] if name in done and done[name].host != own.host else own for name, own in found.items()}


@dataclass(frozen=True, kw_only=True)
class Seated:
    """An engine that is told with every job what its client needs of a host, or has left as one."""

    engine: Engine
    seats: Mapping[str, GuestRequirement | HostCapacity]

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order (`runtime.engine.Engine`)."""
        return self.engine.run(action, [replace(job, seat=self.seats[job.client]) for job in jobs])


def seated(assembly: Assembly, clients: Sequence[ClientPlan], engine: Engine) -> Engine:
    """The engine for the rounds of this plan; the same one where the server hosts everyone."""
    if assembly.config.split.topology == "server":
        return engine
    guests, hosts = _seats(assembly, [_unpaired(client) for client in clients])
    seats: list[GuestRequirement | HostCapacity] = [*guests, *hosts]
    return Seated(engine=engine, seats={own.name: own for own in seats})


def with_hosts(assembly: Assembly, clients: Sequence[ClientPlan]) -> tuple[ClientPlan, ...]:
    """The clients' plans with a host for every cut one, and what that means for both of them in a round.

    Predictions are of rounds in which all take part.
    """
    if assembly.config.split.topology == "server":
        return tuple(clients)
    clients = [_unpaired(client) for client in clients]
    guests, _ = _seats(assembly, clients)
    pairs = _pairs(assembly, clients, present=assembly.names)
    seconds, by_name = round_seconds(guests, pairs), {guest.name: guest for guest in guests}
    hosted: dict[str, list[GuestRequirement]] = {}
    for name, own in pairs.items():
        if own.host is not None:
            hosted.setdefault(own.host, []).append(by_name[name])
    sizes = {client.name: _Sizes.of(client) for client in clients if client.cut is not None}
    devices = dict(zip(assembly.names, assembly.devices, strict=True))
    return tuple(
        _as_host(client, devices[client.name], hosted[client.name], sizes)
        if client.name in hosted
        else _as_guest(client, pairs[client.name], seconds.get(client.name))
        if client.name in pairs
        else client
        for client in clients
    )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes of a guest's round that go over its host's link."""

    carried: int
    """Its trained numbers above the cut: from the server at the start, and back at the end."""
    up: int
    """Through the cut, from the guest."""
    down: int

    @staticmethod
    def of(client: ClientPlan) -> "_Sizes":
        crossing = client.split["crossing_bytes"]
        up, down = (sum(size for name, size in crossing.items() if name.endswith(way)) for way in ("up", "down"))
        trained = client.split["server_memory"]["adapters and optimizer"] // TRAINING_COPIES
        return _Sizes(carried=trained, up=up, down=down)


def _pairs(assembly: Assembly, clients: Sequence[ClientPlan], *, present: Collection[str]) -> dict[str, HostMatch]:
    guests, hosts = _seats(assembly, [_unpaired(client) for client in clients])
    return match_hosts([own for own in guests if own.name in present], [own for own in hosts if own.name in present])


def _seats(assembly: Assembly, clients: Sequence[ClientPlan]) -> tuple[list[GuestRequirement], list[HostCapacity]]:
    devices = dict(zip(assembly.names, assembly.devices, strict=True))
    whole = {client.name: devices[client.name] for client in clients if client.cut is None}
    hosts = [
        HostCapacity(
            name=own.name, cluster=own.cluster, free_bytes=own.memory["total"] - int(own.predicted["memory_bytes"])
        )
        for own in clients
        if own.name in whole
    ]
    data = {client.name: client for client in assembly.clients}
    guests = [_guest(assembly, data[own.name], own, devices[own.name], whole) for own in clients if own.cut is not None]
    return guests, hosts


def _guest(
    assembly: Assembly, client: ClientData, planned: ClientPlan, device: Device, hosts: Mapping[str, Device]
) -> GuestRequirement:
    cut = cut_of(assembly.config, planned.cut)
    assert cut is not None, "a guest has a cut"
    split, crossings = planned.split, crossings_of(assembly, client, cut)
    flops = split["server_seconds"] * SERVER.flops_per_second
    # The client's own adapters go to the server as before.
    models = split["link_seconds"] - crossing_seconds(crossings, device)
    costs = {
        name: HostingCost(
            compute_seconds=flops / host.flops_per_second,
            link_seconds=models + crossing_seconds(crossings, link_between(device, host)),
        )
        for name, host in hosts.items()
    }
    needs = sum(size for part, size in split["server_memory"].items() if part != "frozen weights")
    return GuestRequirement(
        name=planned.name, cluster=planned.cluster, bytes=needs, device_seconds=split["client_seconds"], costs=costs
    )


def _unpaired(client: ClientPlan) -> ClientPlan:
    """The plan of a client as if the server hosted everyone."""
    if _APART not in client.split:
        return client
    kept = {key: value for key, value in client.split.items() if key not in (_APART, "host", GUESTS)}
    return replace(client, split=kept, **client.split[_APART])


def _apart(client: ClientPlan) -> dict[str, Any]:
    return {_APART: {"predicted": dict(client.predicted), "memory": dict(client.memory)}}


def _as_guest(client: ClientPlan, own: HostMatch, seconds: float | None) -> ClientPlan:
    taken = client.predicted["seconds"] if seconds is None else seconds
    host = {"name": own.host, "reason": own.reason, "seconds": taken}
    return replace(
        client,
        split={**client.split, **_apart(client), "host": host},
        predicted={**client.predicted, "seconds": taken},
    )


def _as_host(
    client: ClientPlan, device: Device, guests: Sequence[GuestRequirement], sizes: Mapping[str, _Sizes]
) -> ClientPlan:
    """Its guests' parts come first, and its own round after them; what crosses their cuts overlaps with computing."""
    taken, own = sum(guest.bytes for guest in guests), [sizes[guest.name] for guest in guests]
    carried = sum(size.carried for size in own)
    moved = carried / device.up_bytes_per_second + carried / device.down_bytes_per_second
    worked = sum(guest.costs[client.name].compute_seconds for guest in guests)
    before = client.predicted
    predicted = {
        "up_bytes": before["up_bytes"] + carried + sum(size.down for size in own),
        "down_bytes": before["down_bytes"] + carried + sum(size.up for size in own),
        "memory_bytes": before["memory_bytes"] + taken,
        "seconds": before["seconds"] + worked + moved,
    }
    return replace(
        client,
        split={**client.split, **_apart(client), GUESTS: [guest.name for guest in guests]},
        predicted=predicted,
        memory={**client.memory, GUESTS: taken},
    )


def _told(
    pairs: Mapping[str, HostMatch], planned: Mapping[str, HostMatch], present: Collection[str]
) -> dict[str, HostMatch]:
    """The pairs, with a word on every planned host that is not there."""

    def told(name: str, own: HostMatch) -> HostMatch:
        host = planned[name].host
        gone = "" if host is None or host in present else f"{host} takes no part; "
        return replace(own, reason=f"{gone}{own.reason}")

    return {name: told(name, own) for name, own in pairs.items()}
