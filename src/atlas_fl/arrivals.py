"""Who is there when: an assembly without those who come later, and with those who have come."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from atlas_fl.assemble import Assembly
from atlas_fl.clients.base import ClientTokens
from atlas_fl.config import arrivals
from atlas_fl.door import Door, Newcomer
from atlas_fl.errors import ConfigError, unknown


def put_off(assembly: Any) -> Any:
    """The assembly that a run begins with: whom `--arrive` names waits at its door until their rounds.

    Raises `ConfigError` for a client that there is not, and where nobody is left to begin.
    """
    rounds = arrivals(assembly.config.data.arrive)
    if not rounds:
        return assembly
    for name in rounds:
        if name not in assembly.names:
            raise unknown("client", name, assembly.names)
    if len(rounds) == len(assembly.clients):
        raise ConfigError("--arrive names every client, and somebody must be there to begin; leave one out")
    later = [
        Newcomer(client=client, tokens=_tokens_of(assembly, client.name), device=device)
        for client, device in zip(assembly.clients, assembly.devices, strict=True)
        if client.name in rounds
    ]
    here = [k for k, name in enumerate(assembly.names) if name not in rounds]
    return replace(
        assembly,
        clients=tuple(assembly.clients[k] for k in here),
        devices=tuple(assembly.devices[k] for k in here),
        door=Door(waiting=lambda number: tuple(one for one in later if rounds[one.client.name] <= number)),
    )


def _tokens_of(assembly: Any, name: str) -> ClientTokens | None:
    return assembly.site.data[name] if isinstance(assembly, Assembly) else None


def with_newcomer(assembly: Any, newcomer: Newcomer) -> Any:
    """The assembly with this client after all others."""
    own = newcomer.client if newcomer.tokens is None else newcomer.tokens
    return replace(
        assembly,
        clients=(*assembly.clients, newcomer.client),
        devices=(*assembly.devices, newcomer.device),
        site=replace(assembly.site, data={**assembly.site.data, newcomer.client.name: own}),
    )


def without_clients(assembly: Any, names: Collection[str]) -> Any:
    """The assembly without these clients."""
    left = [k for k, name in enumerate(assembly.names) if name not in names]
    clients, devices = (tuple(own[k] for k in left) for own in (assembly.clients, assembly.devices))
    return replace(assembly, clients=clients, devices=devices)


def with_planned(assembly: Any, names: Sequence[str], *, round: int) -> Any:
    """The assembly of a run that goes on before this round: with those who had joined it, in the order of its plan."""
    waiting = {one.client.name: one for one in assembly.door.waiting(round)}
    for name in names:
        if name in waiting and name not in assembly.names:
            assembly = with_newcomer(assembly, waiting[name])
    return assembly
