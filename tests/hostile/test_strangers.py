"""Whoever knocks at a server over TLS, it serves those who may join, tells nobody who they are, and stays small."""

import contextlib
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
import torch

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from atlas_fl.runtime.transport import certificates as certificates
from atlas_fl.runtime.transport.certificates import (
    CERT,
    Certs,
    Listed,
    make_certs,
    open_certs,
    renew_certs,
    revoke_certs,
)
from atlas_fl.runtime.transport.client import Link
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.frames import CHUNK, encode_frame
from atlas_fl.runtime.transport.server import METHOD, SERVICE, Limits, Server
from atlas_fl.runtime.transport.sessions import NO_TENSORS, PROTOCOL, Sessions
from tests.runtime.coordinator.test_coordinator import CENSUS, IDENTITY

MEMBERS = ("alpha", "bravo", "charlie", "delta", "echo")
HELLO = {"session": "s", "protocol": PROTOCOL, "version": "1", "config": "c", "model": "m"}
LIMIT = 4 * 2**20
"""Of a request."""
LIMITS = Limits(
    handshake_seconds=0.5,
    look_seconds=0.05,
    hello_looks=10,
    piece_looks=10,
    ping_seconds=0.2,
    answer_seconds=0.2,
    idle_seconds=1.0,
    penalty_seconds=0.001,
)
NOW = datetime.now(UTC)
REACHED = 20.0
"""Longest wait; only a fault waits for so long."""


@dataclass(kw_only=True, eq=False)
class Place:
    """A server with its manager, and the certificates of its federation and of others."""

    folder: Path
    manager: ClientManager
    server: Server
    port: int = 0
    notes: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def certs(self, name: str, *, federation: str = "fed") -> Certs:
        return open_certs(self.folder / federation / name, now=NOW)

    def link(self, name: str, *, certs: Certs | None = None) -> Link:
        return Link(
            f"localhost:{self.port}",
            certs or self.certs(name),
            hello=lambda: {"version": "1", "config": "c", "model": "m"},
            patience=REACHED,
            first_patience=REACHED,
            on_event=lambda _: None,
        )

    def wait_for(self, name: str, here: bool) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.manager.clients[name].connected is here, timeout=REACHED)


@dataclass(kw_only=True)
class Told:
    """What a server has said to who knocked."""

    code: grpc.StatusCode | None = None
    text: str = ""

    def __str__(self) -> str:
        return f"{self.code} {self.text}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("strangers")
    fed = folder / "fed"
    # Names that nobody lists are signed by the same authority.
    make_certs(fed, servers=["localhost"], clients=["stranger", "revoked", "replaced"])
    (folder / "old").mkdir()
    (fed / "replaced").rename(folder / "old" / "replaced")
    make_certs(fed, servers=[], clients=["expired"], days=1, now=NOW - timedelta(hours=30, days=0))
    make_certs(fed, servers=[], clients=["early"], days=1, now=NOW + timedelta(days=2))
    renew_certs(fed, clients=["replaced"])
    (folder / "old" / "revoked").symlink_to(fed / ".revoked" / "revoked-1")
    revoke_certs(fed, clients=["revoked"])
    make_certs(fed, servers=[], clients=MEMBERS)
    make_certs(folder / "other", servers=["localhost"], clients=["alpha"])
    path = fed / "server" / "clients.txt"
    kept = [line for line in path.read_text().splitlines() if line.split()[0] in (*MEMBERS, "replaced")]
    path.write_text("\n".join(kept) + "\n")
    notes = list[str]()
    manager = ClientManager(MEMBERS, IDENTITY, settings="", on_note=notes.append)
    for name in MEMBERS:
        manager.clients[name].shutdown_message = ({"kind": "done", "model": False}, NO_TENSORS)
    changed, listed = threading.Condition(), Listed(fed / "server")

    def on_presence(name: str, here: bool) -> None:
        with changed:
            manager.on_presence(name, here)
            changed.notify_all()

    with LoopThread() as threads:
        sessions = Sessions(
            answer=manager.answer,
            admit=manager.handshake,
            listed=listed.now,
            on_presence=on_presence,
            on_refused=manager.on_refused,
            limit=LIMIT,
        )
        server = Server(sessions, open_certs(fed / "server"), host="127.0.0.1", port=0, limits=LIMITS)
        found = Place(folder=folder, manager=manager, server=server, notes=notes, changed=changed)
        found.port = threads.wait(server.start)
        try:
            yield found
        finally:
            threads.wait(server.stop)


def frame(head: Mapping[str, Any], tensors: Any = NO_TENSORS) -> bytes:
    return encode_frame(head, tensors)


def request(number: int, **body: Any) -> bytes:
    return frame({"sequence": number, "body": body})


def pieces_of(data: bytes) -> list[bytes]:
    return [data[start : start + CHUNK] for start in range(0, len(data) + 1, CHUNK)]


def knock(
    place: Place,
    certs: Certs | None,
    *pieces: bytes,
    stays: bool = False,
    method: str = f"/{SERVICE}/{METHOD}",
    metadata: Any = (),
) -> Told:
    """What comes back to these pieces; the stream stays open for more where it is said, until the server ends it."""
    told, over = Told(), threading.Event()
    root = (place.folder / "fed" / "ca" / "ca.pem").read_bytes()
    own = {} if certs is None else {"private_key": certs.key, "certificate_chain": certs.cert}

    def send() -> Iterator[bytes]:
        yield from pieces
        if stays:
            over.wait(REACHED)

    credentials = grpc.ssl_channel_credentials(root, **own)
    with grpc.secure_channel(f"localhost:{place.port}", credentials) as channel:
        call = channel.stream_stream(method)(send(), timeout=REACHED, metadata=metadata)
        try:
            for answer in call:
                told.text += answer.decode(errors="replace")
            told.code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            told.code, told.text = error.code(), told.text + str(error.details())  # type: ignore[attr-defined]
        finally:
            over.set()
    return told


def refused(told: Told, words: str) -> str:
    assert words in told.text, told
    assert "welcome" not in told.text
    return str(told)


def shut_out(told: Told) -> str:
    assert told.code is grpc.StatusCode.UNAVAILABLE, told
    assert "welcome" not in told.text
    return str(told)


def cut_off(told: Told, words: str) -> bool:
    """Whether it was ended: with these words, or without any where it still sent."""
    return told.code is grpc.StatusCode.UNAVAILABLE or words in told.text


def odd_certs(place: Place, name: str) -> Certs:
    """A certificate of the authority with a name that `make_certs` would refuse."""
    folder = place.folder / "odd" / str(len(list(place.folder.glob("odd/*"))))
    begin, end = NOW - timedelta(hours=1), NOW + timedelta(days=1)
    certificates._old_authority(place.folder / "fed" / "ca", (begin, end)).issue(folder, name)
    pem = {file: (folder / file).read_bytes() for file in ("ca.pem", CERT, "key.pem")}
    return Certs(name=name, ca=pem["ca.pem"], cert=pem[CERT], key=pem["key.pem"], folder=folder)


Kind: TypeAlias = Callable[["Place"], str]
"""Given the place it does its worst, and returns all that it was told."""


@dataclass(frozen=True, kw_only=True)
class Knock:
    """One stream of these certificates, and the words with which it is refused; without words it is shut out."""

    certs: str = "fed/alpha"
    pieces: tuple[bytes, ...] = (frame(HELLO),)
    words: str = ""
    stays: bool = False
    at: timedelta = timedelta()
    """When the certificates are taken to be valid, from now."""
    welcomed: bool = False
    """It is a member's session, which is ended."""

    def __call__(self, place: Place) -> str:
        certs = open_certs(place.folder / self.certs, now=NOW + self.at) if self.certs else None
        told = knock(place, certs, *self.pieces, stays=self.stays)
        if self.welcomed:
            assert "welcome" in told.text and self.words in told.text, told
            return told.text
        return refused(told, self.words) if self.words else shut_out(told)


def with_head(text: bytes) -> tuple[bytes, ...]:
    """A frame whose head is this text."""
    return (struct.pack("<4sHHQQ", b"ATLS", 1, 0, len(text), 0) + text,)


NOT_LISTED = "client 'stranger' is not listed here"
KINDS: dict[str, Kind] = {
    "no_certificate": Knock(certs=""),
    "other_authority": Knock(certs="other/alpha"),
    "expired": Knock(certs="fed/expired", pieces=(b"",), at=timedelta(hours=-20)),
    "not_yet_valid": Knock(certs="fed/early", pieces=(b"",), at=timedelta(days=2)),
    "the_servers_own": Knock(certs="fed/server"),
    "not_listed": Knock(certs="fed/stranger", words=NOT_LISTED),
    "not_listed_and_silent": Knock(certs="fed/stranger", pieces=(), stays=True, words=NOT_LISTED),
    "revoked": Knock(certs="old/revoked", words="is not listed here"),
    "no_hello": Knock(pieces=(), stays=True),
    "empty_pieces_and_no_hello": Knock(pieces=(b"",) * 1000, stays=True),
    "garbage": Knock(pieces=(bytes(range(256)) * 2,), words="is this an ATLAS end?"),
    "deep_json": Knock(pieces=with_head(b"[" * 50_000), words="is no strict JSON"),
    "a_number_of_digits_without_end": Knock(
        pieces=with_head(b'{"session": ' + b"9" * 60_000 + b"}"), words="strict JSON"
    ),
    "another_protocol": Knock(pieces=(frame({**HELLO, "protocol": 99}),), words="speaks protocol 99"),
    "another_version_of_frames": Knock(
        pieces=(frame(HELLO)[:4] + b"\x09" + frame(HELLO)[5:],), words="a frame of version 9"
    ),
    **{
        f"a_huge_head {head}, {body}": Knock(
            pieces=(struct.pack("<4sHHQQ", b"ATLS", 1, 0, head, body) + bytes(2000),), words="says that it holds"
        )
        for head, body in ((10 * 2**30, 0), (0, 10 * 2**30), (2**63, 2**63), (2**18 + 1, 0))
    },
    "a_wrong_number": Knock(
        pieces=(frame(HELLO), request(1, kind="next"), request(7, kind="next")),
        words="request 7 follows request 1",
        welcomed=True,
    ),
    "a_request_before_its_hello": Knock(pieces=(request(1, **CENSUS),), words="speaks protocol None"),
}
"""By name; those of more than one stream are added below."""


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function  # type: ignore[attr-defined]
    return function


@kind
def plain_text(place: Place) -> str:
    with grpc.insecure_channel(f"localhost:{place.port}") as channel:
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter([frame(HELLO)]), timeout=REACHED)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    return str(caught.value)


@kind
def replaced(place: Place) -> str:
    told = knock(place, place.certs("replaced", federation="old"), frame(HELLO))
    refused(told, "is listed with another certificate: this one was replaced or revoked")
    assert "welcome" in knock(place, place.certs("replaced"), frame(HELLO)).text
    return str(told)


@kind
def taken_off_while_it_waits(place: Place) -> str:
    """Its request is being worked on, as that of a site that waits for work; and the next stream is refused too."""
    client = place.manager.clients["delta"]
    farewell, client.shutdown_message = client.shutdown_message, None
    caught = list[str]()
    with place.link("delta") as link:

        def wait() -> None:
            try:
                link.exchange(CENSUS)
            except ProtocolError as error:
                caught.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        place.wait_for("delta", True)
        own = place.certs("delta")
        revoke_certs(place.folder / "fed", clients=["delta"])
        waiting.join(REACHED)
        assert not waiting.is_alive()
    place.wait_for("delta", False)
    assert caught == ["client 'delta' is not listed here; ask who runs the server"]
    told = refused(knock(place, own, frame(HELLO)), "is not listed here")
    make_certs(place.folder / "fed", servers=[], clients=["delta"])
    client.shutdown_message = farewell
    return told


@kind
def taken_off_between_requests(place: Place) -> str:
    """A site that trains asks nothing for long: what it asks next is refused."""
    shutil.copytree(place.folder / "fed" / "echo", place.folder / "site" / "echo")  # as it lies at its site
    own = place.certs("echo", federation="site")
    with place.link("echo", certs=own) as link:
        link.exchange({"kind": "next"})
        revoke_certs(place.folder / "fed", clients=["echo"])
        place.wait_for("echo", False)
        with pytest.raises(ProtocolError, match=r"^client 'echo' is not listed here; ask who runs the server$"):
            link.exchange({"kind": "next"})
    told = refused(knock(place, own, frame(HELLO)), "is not listed here")
    make_certs(place.folder / "fed", servers=[], clients=["echo"])
    return told


@kind
def another_name_in_its_hello(place: Place) -> str:
    told = knock(place, place.certs("stranger"), frame({**HELLO, "name": "alpha", "client": "alpha"}))
    member = knock(place, place.certs("bravo"), frame({**HELLO, "name": "alpha"}), request(1, kind="next"))
    assert "welcome" in member.text
    assert not place.manager.clients["alpha"].connected
    return refused(told, "client 'stranger' is not listed here")


@kind
def another_ones_session(place: Place) -> str:
    """The number of a member's session makes nobody that member, nor ends its session."""
    with place.link("alpha") as link:
        link.exchange({"kind": "next"})
        stolen = link._session
        told = knock(place, place.certs("stranger"), frame({**HELLO, "session": stolen}))
        assert "welcome" in knock(place, place.certs("bravo"), frame({**HELLO, "session": stolen})).text
        link.exchange({"kind": "next"})
    return refused(told, "is not listed here")


@kind
def a_second_living_session(place: Place) -> str:
    with place.link("alpha") as link:
        link.exchange({"kind": "next"})
        told = knock(place, place.certs("alpha"), frame({**HELLO, "session": "second"}))
        link.exchange({"kind": "next"})
    return refused(told, "client 'alpha' is here already")


@kind
def endless_first_frame(place: Place) -> str:
    """Four streams of 200 MB each, of who is not listed and of who is: neither is kept."""
    before, most, over = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.01):
            most = max(most, sum(place.server._unfinished.values()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    piece, told = bytes(CHUNK), list[Told]()

    def pour(name: str) -> None:
        told.append(knock(place, place.certs(name), *[piece] * 200))

    pouring = [threading.Thread(target=pour, args=(name,)) for name in ("stranger", "alpha", "stranger", "bravo")]
    for thread in pouring:
        thread.start()
    for thread in pouring:
        thread.join()
    over.set()
    watcher.join()
    assert len(told) == 4
    assert most <= len(pouring) * (LIMITS.hello_bytes + CHUNK)
    assert resident() - before < 100 * 2**20, "the pieces that are sent are one and the same"
    for one in told:
        assert "welcome" not in one.text
    return " ".join(str(one) for one in told)


def resident() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * 4096


@kind
def http_1(place: Place) -> str:
    told = ""
    context = ssl.create_default_context(cafile=place.folder / "fed" / "ca" / "ca.pem")
    context.load_cert_chain(place.folder / "fed" / "stranger" / CERT, place.folder / "fed" / "stranger" / "key.pem")
    for secure in (False, True):
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError))
            end = stack.enter_context(socket.create_connection(("localhost", place.port), REACHED))
            if secure:
                end = stack.enter_context(context.wrap_socket(end, server_hostname="localhost"))
            end.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            told += end.recv(1 << 16).decode(errors="replace")
    return told


@kind
def two_hundred_idle_connections(place: Place) -> str:
    ends = [socket.create_connection(("localhost", place.port), REACHED) for _ in range(200)]
    honest(place)
    for end in ends:  # a handshake that does not come is not waited for
        end.settimeout(REACHED)
        with contextlib.suppress(ConnectionError):
            assert end.recv(1) == b""
        end.close()
    return ""


@kind
def a_hundred_streams(place: Place) -> str:
    """Over as many connections as it likes, a name has so many streams at once and no more."""
    certs, told = place.certs("alpha"), list[Told]()
    streams = [threading.Thread(target=lambda: told.append(knock(place, certs, stays=True))) for _ in range(100)]
    for thread in streams:
        thread.start()
    for thread in streams:
        thread.join()
    assert sum("streams already" in one.text for one in told) > 20
    return " ".join(str(one) for one in told)


@kind
def five_thousand_tiny_frames(place: Place) -> str:
    began = time.process_time()
    told = knock(place, place.certs("alpha"), frame(HELLO), *[frame({})] * 5000)
    assert cut_off(told, "a request has no number or no body"), "the first of them ends it"
    assert time.process_time() - began < 5
    return told.text


@kind
def a_request_that_is_too_large(place: Place) -> str:
    large = frame({"sequence": 1, "body": {}}, {"x": torch.zeros(2 * LIMIT // 4)})
    told = knock(place, place.certs("alpha"), frame(HELLO), *pieces_of(large))
    assert cut_off(told, f"a frame of more than {LIMIT} bytes")
    return told.text


@kind
def a_request_that_stops_in_the_middle(place: Place) -> str:
    first, *_ = pieces_of(frame({"sequence": 1, "body": {}}, {"x": torch.zeros(LIMIT // 8)}))
    told = knock(place, place.certs("alpha"), frame(HELLO), first, stays=True)
    assert "for too long" in told.text
    assert sum(place.server._unfinished.values()) == 0
    return told.text


@kind
def terminal_codes_in_its_name(place: Place) -> str:
    told = knock(place, odd_certs(place, "\x1b[2Jevil\r"), frame(HELLO))
    assert all(note.isprintable() for note in place.notes)
    return refused(told, "?[2Jevil?' is not listed here")


@kind
def a_name_that_nearly_is_a_members(place: Place) -> str:
    for name in ("alpha ", "Alpha", "alpha\x00", "alpha+bravo", ""):
        if name:
            refused(knock(place, odd_certs(place, name), frame(HELLO)), "is not listed here")
    return ""


@kind
def another_method(place: Place) -> str:
    told = knock(place, place.certs("stranger"), frame(HELLO), method="/atlas.Stream/List")
    assert told.code is grpc.StatusCode.UNIMPLEMENTED
    return str(told)


@kind
def endless_metadata(place: Place) -> str:
    return str(knock(place, place.certs("stranger"), frame(HELLO), metadata=[("x", "y" * 2**20)]))


KNOWN = {"a_second_living_session": "alpha", "taken_off_while_it_waits": "delta", "taken_off_between_requests": "echo"}
"""Whose own name is in what it is told."""


def honest(place: Place) -> None:
    """A member comes, registers and hears that the run is over, at once."""
    began = time.monotonic()
    with place.link("charlie") as link:
        assert link.exchange(CENSUS)[0]["kind"] == "done"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", KINDS)
def test_no_stranger_gets_in_or_learns_who_may_and_an_honest_site_comes_in_after_it(kind: str, place: Place) -> None:
    told = KINDS[kind](place)
    member = "not listed" not in told and "replaced or revoked" not in told  # who is one may read its own name
    names = [name for name in MEMBERS if name != KNOWN.get(kind) and not (member and name in ("alpha", "bravo"))]
    assert not [name for name in names if name in told], told
    honest(place)


def test_refusals_of_a_stranger_are_told_once_and_then_counted(place: Place) -> None:
    before = [note for note in place.notes if note.startswith("revoked ")]
    for _ in range(30):
        knock(place, place.certs("revoked", federation="old"), frame(HELLO))
    told = [note for note in place.notes if note.startswith("revoked ")]
    assert told and len(told) - len(before) <= 1
