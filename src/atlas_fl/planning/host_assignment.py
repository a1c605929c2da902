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
    return HostAssignment(
        training=_match_present_hosts(assembly, clients, planned, training),
        evaluation=_match_present_hosts(assembly, clients, planned, evaluation),
        relayed=any(update.hosted is not None for update in (*training, *evaluation)),
    )


def _match_present_hosts(
    assembly: Assembly, clients: Sequence[ClientPlan], planned: Mapping[str, HostMatch], updates: Sequence[Update]
) -> dict[str, HostMatch]:
    """Match the clients that answered; matches that the engine reports take precedence.

    Where the host that was planned is absent, the reason says so.
    """
    engine_matches = {update.client: update.hosted for update in updates}
    matches = {}
    for name, match in _match_hosts(assembly, clients, present=engine_matches.keys()).items():
        engine_match = engine_matches[name]
        planned_host = planned[name].host
        if engine_match is not None and engine_match.host != match.host:
            match = engine_match
        elif planned_host is not None and planned_host not in engine_matches:
            match = replace(match, reason=f"{planned_host} takes no part; {match.reason}")
        matches[name] = match
    return matches


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
    guests, hosts = _hosting_requirements(assembly, clients)
    requirements: list[GuestRequirement | HostCapacity] = [*guests, *hosts]
    return EngineWithHosts(engine=engine, requirements={requirement.name: requirement for requirement in requirements})


def assign_hosts(assembly: Assembly, clients: Sequence[ClientPlan]) -> tuple[ClientPlan, ...]:
    """Assign a host to every cut client, and predict the round of both.

    Predictions are of rounds in which all clients take part.
    """
    if assembly.config.split.topology == "server":
        return tuple(clients)
    clients = [_without_hosting(client) for client in clients]
    guests, hosts = _hosting_requirements(assembly, clients)
    pairs = match_hosts(guests, hosts)
    seconds = round_seconds(guests, pairs)
    requirements = {guest.name: guest for guest in guests}
    plans = {client.name: client for client in clients}
    assigned = []
    for client, device in zip(clients, assembly.devices, strict=True):
        names = [name for name, match in pairs.items() if match.host == client.name]
        if names:
            assigned.append(_as_host(client, device, [requirements[name] for name in names], plans))
        elif client.name in pairs:
            assigned.append(_as_guest(client, pairs[client.name], seconds.get(client.name)))
        else:
            assigned.append(client)
    return tuple(assigned)


def _match_hosts(
    assembly: Assembly, clients: Sequence[ClientPlan], *, present: Collection[str]
) -> dict[str, HostMatch]:
    guests, hosts = _hosting_requirements(assembly, clients)
    return match_hosts(
        [requirement for requirement in guests if requirement.name in present],
        [requirement for requirement in hosts if requirement.name in present],
    )


def _hosting_requirements(
    assembly: Assembly, clients: Sequence[ClientPlan]
) -> tuple[list[GuestRequirement], list[HostCapacity]]:
    planned_devices = list(zip(map(_without_hosting, clients), assembly.devices, strict=True))
    host_devices = {planned.name: device for planned, device in planned_devices if planned.cut is None}
    guests: list[GuestRequirement] = []
    hosts: list[HostCapacity] = []
    for client, (planned, device) in zip(assembly.clients, planned_devices, strict=True):
        cut = cut_of(assembly.config, planned.cut)
        if cut is None:
            free_bytes = planned.memory["total"] - int(planned.predicted["memory_bytes"])
            hosts.append(HostCapacity(name=planned.name, cluster=planned.cluster, free_bytes=free_bytes))
            continue
        split = planned.split
        crossings = cut_traffic_of(assembly, client, cut)
        flops = split["server_seconds"] * SERVER_DEVICE.flops_per_second
        # The client's own adapters go to the server as before.
        model_seconds = split["link_seconds"] - crossing_seconds(crossings, device)
        costs = {
            name: HostingCost(
                compute_seconds=flops / host.flops_per_second,
                link_seconds=model_seconds + crossing_seconds(crossings, link_between(device, host)),
            )
            for name, host in host_devices.items()
        }
        memory_bytes = sum(size for part, size in split["server_memory"].items() if part != "frozen weights")
        guests.append(
            GuestRequirement(
                name=planned.name,
                cluster=planned.cluster,
                bytes=memory_bytes,
                device_seconds=split["client_seconds"],
                costs=costs,
            )
        )
    return guests, hosts


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
    plans: Mapping[str, ClientPlan],
) -> ClientPlan:
    """Guests' server halves run first, then the host's own round; traffic over their cuts overlaps with computing.

    A guest's trained parameters above its cut come from the server at the start, and go back at the end.
    """
    guest_bytes = sum(guest.bytes for guest in guests)
    splits = [plans[guest.name].split for guest in guests]
    adapter_bytes = sum(split["server_memory"]["adapters and optimizer"] // TRAINING_COPIES for split in splits)
    crossings = [crossing for split in splits for crossing in split["crossing_bytes"].items()]
    from_guests = sum(size for name, size in crossings if name.endswith("up"))
    to_guests = sum(size for name, size in crossings if name.endswith("down"))
    transfer_seconds = adapter_bytes / device.up_bytes_per_second + adapter_bytes / device.down_bytes_per_second
    compute_seconds = sum(guest.costs[client.name].compute_seconds for guest in guests)
    before = client.predicted
    predicted = {
        "up_bytes": before["up_bytes"] + adapter_bytes + to_guests,
        "down_bytes": before["down_bytes"] + adapter_bytes + from_guests,
        "memory_bytes": before["memory_bytes"] + guest_bytes,
        "seconds": before["seconds"] + compute_seconds + transfer_seconds,
    }
    return replace(
        client,
        split={**client.split, **_unpaired_entry(client), GUESTS: [guest.name for guest in guests]},
        predicted=predicted,
        memory={**client.memory, GUESTS: guest_bytes},
    )
