"""Whose connection is ended, and how many there may be."""

import socket
from ipaddress import ip_address

import pytest

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.transport import connections
from atlas_fl.runtime.transport.connections import Peer, Waiting, descriptors_note, peer_of, surplus


def test_room_by_hand() -> None:
    for files, room in ((1024, (512, 128)), (2**20, (4096, 1024))):
        assert (connections.most_connections(files), connections.most_waiting(files)) == room


def test_what_is_too_much_is_the_oldest_of_the_address_with_the_most() -> None:
    since: dict[Peer, int] = {("a", port): port for port in range(6)} | {("b", 1): 0, ("c", 1): 0}
    assert surplus(since, most=8) == set()
    assert surplus(since, most=5) == {("a", 0), ("a", 1), ("a", 2)}
    assert ("a", 5) not in surplus(since, most=3), "the newest of whoever has many may be a site's"
    assert len(surplus(since, most=0)) == 8


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:127.0.0.1:80", ("127.0.0.1", 80)),
        ("ipv6:%5B::1%5D:80", ("::1", 80)),
        ("ipv6:[::ffff:10.0.0.1]:80", ("10.0.0.1", 80)),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", ("fe80::1", 80)),
    ],
)
def test_the_other_end_as_grpc_writes_it(text: str, peer: Peer) -> None:
    assert peer_of(text) == peer
    assert str(ip_address(peer[0])) == peer[0]


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ProtocolError, match="and no address"):
        peer_of("unix:/tmp/x")


def test_connections_that_wait_for_long_are_ended_and_admitted_ones_and_new_ones_are_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        admitted = set[Peer]()
        waiting = Waiting(port=port, most=3, admitted=admitted)
        ends = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        accepted = [listener.accept()[0] for _ in ends]
        admitted.add(ends[0].getsockname())
        assert waiting.look() == 0, "three wait"
        ends += [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        accepted += [listener.accept()[0] for _ in range(2)]
        assert waiting.look() == 2
        for end in ends:
            end.settimeout(0.2)
        assert sum(_is_ended(end) for end in ends[1:4]) == 2
        assert not any(_is_ended(end) for end in (ends[0], *ends[4:]))
        for end in (*ends, *accepted):
            end.close()


def _is_ended(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except TimeoutError:
        return False


def test_a_limit_that_is_too_small_for_the_sites_is_told_with_the_one_that_is_not(monkeypatch) -> None:
    monkeypatch.setattr(connections, "raise_descriptor_limit", lambda: 1024)
    assert descriptors_note(128) == ""
    note = descriptors_note(129)
    assert note.startswith("this process may open 1024 files, which is room for 128 sites, and 129 are listed")
    wanted = int(note.partition("ulimit -n ")[2].rstrip("`"))
    monkeypatch.setattr(connections, "raise_descriptor_limit", lambda: wanted)
    assert descriptors_note(129) == ""
