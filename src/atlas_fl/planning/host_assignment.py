"""Assignment of guests' server halves to host clients, in the plan and in every round (`--topology`).

Training results do not depend on it. The plan matches all clients. A round matches the clients that are present by the
same rule, so that guests of a host that is absent or has dropped get another host in the same round. A simulation
derives a round's matches from the clients that answered; across machines the engine decides them and reports them
(`runtime.coordinator.peer_relay`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from atlas_fl.client.job import Job, Update
from atlas_fl.data.clients import ClientData
from atlas_fl.planning.plan import ClientPlan
from atlas_fl.planning.round_costs import SERVER_DEVICE, cut_traffic_of
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
_UNPAIRED = "unpaired"
"""Predictions for a client before it became a guest or a host."""


@dataclass(frozen=True, kw_only=True)
class HostAssignment:
    """The host of every guest in a round; empty where the server runs all server halves."""

    training: Mapping[str, HostMatch] = field(default_factory=dict)
    evaluation: Mapping[str, HostMatch] = field(default_factory=dict)
    relayed: bool = False
    """True if messages between two clients are relayed by the server."""


def match_round_hosts(
    assembly: Assembly, clients: Sequence[ClientPlan], *, training: Sequence[Update], evaluation: Sequence[Update]
) -> HostAssignment:
    """Match guests and hosts of a round, from the clients whose training and evaluation updates these are."""
    if assembly.config.split.topology == "server":
        return HostAssignment()
    planned = _match_hosts(assembly, clients, present=[client.name for client in clients])
    by_phase = {"training": training, "evaluation": evaluation}
    relayed = any(update.hosted is not None for updates in by_phase.values() for update in updates)
    return HostAssignment(
        **{phase: _match_present_hosts(assembly, clients, planned, answers) for phase, answers in by_phase.items()},
        relayed=relayed,
    )


def _match_present_hosts(
    assembly: Assembly, clients: Sequence[ClientPlan], planned: Mapping[str, HostMatch], updates: Sequence[Update]
) -> dict[str, HostMatch]:
    """Match the clients that answered; matches that the engine reports take precedence."""
    present = {update.client for update in updates}
    matches = _explain_missing_hosts(_match_hosts(assembly, clients, present=present), planned, present)
    engine_matches = {update.client: update.hosted for update in updates if update.hosted is not None}
    return {
        name: engine_matches[name] if name in engine_matches and engine_matches[name].host != match.host else match
        for name, match in matches.items()
    }


@dataclass(frozen=True, kw_only=True)
class EngineWithHosts:
    """An engine that adds to every job what its client needs of a host, or can offer as one."""

    engine: Engine
    requirements: Mapping[str, GuestRequirement | HostCapacity]

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order (`runtime.engine.Engine`)."""
        return self.engine.run(action, [replace(job, hosting=self.requirements[job.client]) for job in jobs])


def attach_hosts(assembly: Assembly, clients: Sequence[ClientPlan], engine: Engine) -> Engine:
    """Return the engine for the rounds of this plan; the same one where the server runs all server halves."""
    if assembly.config.split.topology == "server":
        return engine
    guests, hosts = _hosting_requirements(assembly, [_without_hosting(client) for client in clients])
    requirements: list[GuestRequirement | HostCapacity] = [*guests, *hosts]
    return EngineWithHosts(engine=engine, requirements={requirement.name: requirement for requirement in requirements})


def assign_hosts(assembly: Assembly, clients: Sequence[ClientPlan]) -> tuple[ClientPlan, ...]:
    """Assign a host to every cut client, and predict the round of both.

    Predictions are of rounds in which all clients take part.
    """
    if assembly.config.split.topology == "server":
        return tuple(clients)
    clients = [_without_hosting(client) for client in clients]
    guests, _ = _hosting_requirements(assembly, clients)
    pairs = _match_hosts(assembly, clients, present=assembly.names)
    seconds, by_name = round_seconds(guests, pairs), {guest.name: guest for guest in guests}
    guests_by_host: dict[str, list[GuestRequirement]] = {}
    for name, match in pairs.items():
        if match.host is not None:
            guests_by_host.setdefault(match.host, []).append(by_name[name])
    traffic_by_guest = {client.name: _GuestTraffic.of(client) for client in clients if client.cut is not None}
    devices = dict(zip(assembly.names, assembly.devices, strict=True))
    return tuple(
        _as_host(client, devices[client.name], guests_by_host[client.name], traffic_by_guest)
        if client.name in guests_by_host
        else _as_guest(client, pairs[client.name], seconds.get(client.name))
        if client.name in pairs
        else client
        for client in clients
    )


@dataclass(frozen=True, kw_only=True)
class _GuestTraffic:
    """Bytes of a guest's round that go over its host's link."""

    adapter_bytes: int
    """Its trained parameters above the cut: from the server at the start, and back at the end."""
    up_bytes: int
    """Through the cut, from the guest."""
    down_bytes: int

    @staticmethod
    def of(client: ClientPlan) -> "_GuestTraffic":
        crossing = client.split["crossing_bytes"]
        up, down = (
            sum(size for name, size in crossing.items() if name.endswith(direction)) for direction in ("up", "down")
        )
        trained = client.split["server_memory"]["adapters and optimizer"] // TRAINING_COPIES
        return _GuestTraffic(adapter_bytes=trained, up_bytes=up, down_bytes=down)


def _match_hosts(
    assembly: Assembly, clients: Sequence[ClientPlan], *, present: Collection[str]
) -> dict[str, HostMatch]:
    guests, hosts = _hosting_requirements(assembly, [_without_hosting(client) for client in clients])
    return match_hosts(
        [requirement for requirement in guests if requirement.name in present],
        [requirement for requirement in hosts if requirement.name in present],
    )


def _hosting_requirements(
    assembly: Assembly, clients: Sequence[ClientPlan]
) -> tuple[list[GuestRequirement], list[HostCapacity]]:
    devices = dict(zip(assembly.names, assembly.devices, strict=True))
    host_devices = {client.name: devices[client.name] for client in clients if client.cut is None}
    hosts = [
        HostCapacity(
            name=planned.name,
            cluster=planned.cluster,
            free_bytes=planned.memory["total"] - int(planned.predicted["memory_bytes"]),
        )
        for planned in clients
        if planned.name in host_devices
    ]
    data = {client.name: client for client in assembly.clients}
    guests = [
        _guest_requirement(assembly, data[planned.name], planned, devices[planned.name], host_devices)
        for planned in clients
        if planned.cut is not None
    ]
    return guests, hosts


def _guest_requirement(
    assembly: Assembly, client: ClientData, planned: ClientPlan, device: Device, hosts: Mapping[str, Device]
) -> GuestRequirement:
    cut = cut_of(assembly.config, planned.cut)
    assert cut is not None, "a guest has a cut"
    split, crossings = planned.split, cut_traffic_of(assembly, client, cut)
    flops = split["server_seconds"] * SERVER_DEVICE.flops_per_second
    # The client's own adapters go to the server as before.
    models = split["link_seconds"] - crossing_seconds(crossings, device)
    costs = {
        name: HostingCost(
            compute_seconds=flops / host.flops_per_second,
            link_seconds=models + crossing_seconds(crossings, link_between(device, host)),
        )
        for name, host in hosts.items()
    }
    memory_bytes = sum(size for part, size in split["server_memory"].items() if part != "frozen weights")
    return GuestRequirement(
        name=planned.name,
        cluster=planned.cluster,
        bytes=memory_bytes,
        device_seconds=split["client_seconds"],
        costs=costs,
    )


def _without_hosting(client: ClientPlan) -> ClientPlan:
    """The plan of a client as if the server ran all server halves."""
    if _UNPAIRED not in client.split:
        return client
    split = {key: value for key, value in client.split.items() if key not in (_UNPAIRED, "host", GUESTS)}
    return replace(client, split=split, **client.split[_UNPAIRED])


def _unpaired_entry(client: ClientPlan) -> dict[str, Any]:
    return {_UNPAIRED: {"predicted": dict(client.predicted), "memory": dict(client.memory)}}


def _as_guest(client: ClientPlan, match: HostMatch, seconds: float | None) -> ClientPlan:
    total_seconds = client.predicted["seconds"] if seconds is None else seconds
    host = {"name": match.host, "reason": match.reason, "seconds": total_seconds}
    return replace(
        client,
        split={**client.split, **_unpaired_entry(client), "host": host},
        predicted={**client.predicted, "seconds": total_seconds},
    )


def _as_host(
    client: ClientPlan,
    device: Device,
    guests: Sequence[GuestRequirement],
    traffic_by_guest: Mapping[str, _GuestTraffic],
) -> ClientPlan:
    """Guests' server halves run first, then the host's own round; traffic over their cuts overlaps with computing."""
    guest_bytes = sum(guest.bytes for guest in guests)
    guest_traffic = [traffic_by_guest[guest.name] for guest in guests]
    adapter_bytes = sum(traffic.adapter_bytes for traffic in guest_traffic)
    transfer_seconds = adapter_bytes / device.up_bytes_per_second + adapter_bytes / device.down_bytes_per_second
    compute_seconds = sum(guest.costs[client.name].compute_seconds for guest in guests)
    before = client.predicted
    predicted = {
        "up_bytes": before["up_bytes"] + adapter_bytes + sum(traffic.down_bytes for traffic in guest_traffic),
        "down_bytes": before["down_bytes"] + adapter_bytes + sum(traffic.up_bytes for traffic in guest_traffic),
        "memory_bytes": before["memory_bytes"] + guest_bytes,
        "seconds": before["seconds"] + compute_seconds + transfer_seconds,
    }
    return replace(
        client,
        split={**client.split, **_unpaired_entry(client), GUESTS: [guest.name for guest in guests]},
        predicted=predicted,
        memory={**client.memory, GUESTS: guest_bytes},
    )


def _explain_missing_hosts(
    pairs: Mapping[str, HostMatch], planned: Mapping[str, HostMatch], present: Collection[str]
) -> dict[str, HostMatch]:
    """The matches, with a note for every planned host that is absent."""

    def explain(name: str, match: HostMatch) -> HostMatch:
        host = planned[name].host
        absence = "" if host is None or host in present else f"{host} takes no part; "
        return replace(match, reason=f"{absence}{match.reason}")

    return {name: explain(name, match) for name, match in pairs.items()}
