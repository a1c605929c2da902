"""Room for those with certificates: descriptors of the server, and which connections of strangers are ended.

gRPC accepts whoever connects, up to a number, and waits ten seconds for each handshake: so many idle connections keep
every site out. A connection over which a listed client has a stream is admitted and is let alone. Of the others so many
may wait as there are descriptors for a quarter of (`most_waiting`). Beyond that the oldest of the address that has the
most are ended: a handshake takes a fraction of a second, so what waits longest is idle.
"""

import contextlib
import os
import resource
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

from atlas_fl.errors import ProtocolError

MOST_DESCRIPTORS = 2**16
"""Most that a server asks for."""
MOST_CONNECTIONS = 4096
CONNECTIONS_PER_SITE = 3
"""A stream, its successor, and the handshake with which a site looks whether the server is there."""

Peer: TypeAlias = tuple[str, int]
"""(address, port) of the other end."""


def raise_descriptor_limit() -> int:
    """The number of files that this process may open, from now on as many as the system lets it ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower bound than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def most_connections(descriptors: int) -> int:
    """Most connections at a time: files of the run must find room among those of connections."""
    return min(MOST_CONNECTIONS, descriptors // 2)


def most_waiting(descriptors: int) -> int:
    """Most connections at a time over which no listed client has a stream."""
    return most_connections(descriptors) // 4


def descriptors_note(sites: int) -> str:
    """A line where this process may open too few files for so many sites; empty where there is room."""
    descriptors = raise_descriptor_limit()
    room = most_connections(descriptors) - most_waiting(descriptors)
    if CONNECTIONS_PER_SITE * sites <= room:
        return ""
    needed = 8 * CONNECTIONS_PER_SITE * sites
    return (
        f"this process may open {descriptors} files, which is room for {room // CONNECTIONS_PER_SITE} sites, and"
        f" {sites} are listed; raise the limit before the next start, as with `ulimit -n {needed}`"
    )


def peer_of(text: str) -> Peer:
    """The other end as gRPC writes it, `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`."""
    _, _, rest = unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if not port.isdecimal():
        raise ProtocolError(f"the other end of a stream is {text!r:.80}, and no address")
    return _address(host.strip("[]")), int(port)


def _address(host: str) -> str:
    """One text for an address, however it was written."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _descriptors() -> list[str]:
    """The numbers of this process's open files; none where the system does not tell them."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return [path.name for path in Path(folder).iterdir()]
    return []


def _connections(port: int, descriptors: list[str]) -> Iterator[tuple[Peer, socket.socket]]:
    """(other end, socket) of those of these descriptors that are connections to this port.

    Each socket is a duplicate and closed afterwards: gRPC may close its own, and its number is reused.
    """
    for descriptor in descriptors:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError))  # it is closed meanwhile, or no connection
            duplicate = os.dup(int(descriptor))
            try:
                end = stack.enter_context(socket.socket(fileno=duplicate))
            except OSError:
                os.close(duplicate)
                continue
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.getsockname()[1] == port:
                host, number, *_ = end.getpeername()
                yield (_address(host), number), end


def end_connection(port: int, peer: Peer) -> None:
    """End the connection of this other end to this port, if there is one."""
    for other, end in _connections(port, _descriptors()):
        if other == peer:
            _end(end)


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        end.shutdown(socket.SHUT_RDWR)


@dataclass(kw_only=True, eq=False)
class Waiting:
    """The connections to a port that no listed client has a stream over, the oldest first."""

    port: int
    most: int
    admitted: Collection[Peer]
    """The connections over which one has a stream."""
    _since: dict[Peer, int] = field(default_factory=dict)
    """The look at which each was first seen."""
    _looks: int = 0

    def look(self) -> int:
        """End what is too much; how many that were."""
        descriptors = _descriptors()
        if len(descriptors) <= self.most:
            self._since.clear()
            return 0
        self._looks += 1
        seen = {peer for peer, _ in _connections(self.port, descriptors)}.difference(self.admitted)
        self._since = {peer: self._since.get(peer, self._looks) for peer in seen}
        ended = surplus(self._since, most=self.most)
        for peer, end in _connections(self.port, descriptors if ended else []):
            if peer in ended:
                _end(end)
        return len(ended)


def surplus(since: dict[Peer, int], *, most: int) -> set[Peer]:
    """The connections that are to end, so that `most` are left: the oldest of the address with the most."""
    by_address: dict[str, list[Peer]] = {}
    for peer in sorted(since, key=lambda peer: -since[peer]):
        by_address.setdefault(peer[0], []).append(peer)
    return {max(by_address.values(), key=len).pop() for _ in range(len(since) - most)}
