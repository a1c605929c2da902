"""Assignment of guests' server halves to host clients, in the plan and in every round (`--topology`).

Training results do not depend on it. The plan matches all clients. A round matches the clients that are present by the
same rule, so that guests of a host that is absent or has dropped get another host in the same round. Across machines
no client hosts another (`config/unserved.tsv`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace

from atlas_fl.client.job import Update
from atlas_fl.data.clients import site_of
from atlas_fl.frozen import Frozen
from atlas_fl.planning.plan import ClientPlan
from atlas_fl.planning.round_costs import SERVER_DEVICE, cut_traffic_of
from atlas_fl.ranks.cost_model import crossing_seconds, link_between
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import cut_of
from atlas_fl.split import host_matching


class HostAssignment(Frozen):
    """The host of every guest in a round; empty where the server runs all server halves."""

    training: Mapping[str, host_matching.HostMatch] = field(default_factory=dict)
    evaluation: Mapping[str, host_matching.HostMatch] = field(default_factory=dict)


def match_round_hosts(
    assembly: Assembly, clients: Sequence[ClientPlan], *, training: Sequence[Update], evaluation: Sequence[Update]
) -> HostAssignment:
    """Match guests and hosts of a round, from the clients whose training and evaluation updates these are."""
    if assembly.config.split.topology == "server":
        return HostAssignment()
    return HostAssignment(
        training=_match_hosts(assembly, clients, {update.client for update in training}),
        evaluation=_match_hosts(assembly, clients, {update.client for update in evaluation}),
    )


def assign_hosts(assembly: Assembly, clients: Sequence[ClientPlan]) -> tuple[ClientPlan, ...]:
    """Assign a host to every cut client, as in a round in which all clients take part.

    The predicted costs of both stay those with a server.
    """
    if assembly.config.split.topology == "server":
        return tuple(clients)
    matches = _match_hosts(assembly, clients, {client.name for client in clients})
    hosts = {name: {"host": {"name": match.host, "reason": match.reason}} for name, match in matches.items()}
    return tuple(replace(client, split={**client.split, **hosts.get(client.name, {})}) for client in clients)


def _match_hosts(
    assembly: Assembly, clients: Sequence[ClientPlan], present: Collection[str]
) -> dict[str, host_matching.HostMatch]:
    """Match the clients of these names."""
    planned_devices = list(zip(clients, assembly.devices, strict=True))
    tasks = {planned.name: planned.task for planned in clients}
    host_devices = {planned.name: device for planned, device in planned_devices if planned.cut is None}
    guests: list[host_matching.GuestRequirement] = []
    hosts: list[host_matching.HostCapacity] = []
    for client, (planned, device) in zip(assembly.clients, planned_devices, strict=True):
        if planned.name not in present:
            continue
        cut = cut_of(assembly.config, planned.cut)
        if cut is None:
            free_bytes = planned.memory["total"] - int(planned.predicted["memory_bytes"])
            hosts.append(host_matching.HostCapacity(name=planned.name, cluster=planned.cluster, free_bytes=free_bytes))
            continue
        split = planned.split
        crossings = cut_traffic_of(assembly, client, cut)
        flops = split["server_seconds"] * SERVER_DEVICE.flops_per_second
        # The client's own adapters go to the server as before.
        model_seconds = split["link_seconds"] - crossing_seconds(crossings, device)
        costs = {
            name: host_matching.HostingCost(
                compute_seconds=flops / host.flops_per_second,
                link_seconds=model_seconds + crossing_seconds(crossings, link_between(device, host)),
            )
            for name, host in host_devices.items()
            if site_of(name, tasks[name]) != site_of(planned.name, planned.task)
        }
        guests.append(
            host_matching.GuestRequirement(
                name=planned.name,
                cluster=planned.cluster,
                bytes=sum(size for part, size in split["server_memory"].items() if part != "frozen weights"),
                device_seconds=split["client_seconds"],
                costs=costs,
            )
        )
    return host_matching.match_hosts(guests, hosts)
