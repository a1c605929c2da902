import asyncio
import contextlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.runtime.transport.certificates import Certs, make_certs, open_certs
from atlas_fl.runtime.transport.client import READY_SECONDS, Link, split_address
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.frames import CHUNK, FRAME_LIMIT, encode_frame
from atlas_fl.runtime.transport.server import LIMITS, Limits, Server, channel_options
from atlas_fl.runtime.transport.sessions import PROTOCOL, Sessions
from tests.runtime.in_process import InProcess


@dataclass
class Echo:
    """A server that sends back what it gets, and holds answers while it is told to."""

    handled: list[tuple[str, Any]] = field(default_factory=list)
    presence: list[tuple[str, bool]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    allowed: list[str] = field(default_factory=lambda: ["site-1", "site-2"])
    hold: Callable[[], bool] = lambda: False
    limit: int = FRAME_LIMIT
    begun: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    async def answer(self, name: str, head: Mapping[str, Any], tensors: Any) -> tuple[Any, Any]:
        if head.get("refuse"):
            raise ProtocolError("no")
        self.begun.set()
        while self.hold():
            await asyncio.sleep(0.01)
        self.handled.append((name, head.get("n")))
        return {**head, "from": name}, tensors

    def admit(self, name: str, hello: Mapping[str, Any]) -> dict[str, Any]:
        if hello.get("config", "c") != "c":
            raise ProtocolError(f"{name} has config {hello['config']}, the server c")
        return {"config": "c"}

    def on_presence(self, name: str, here: bool) -> None:
        with self.changed:
            self.presence.append((name, here))
            self.changed.notify_all()

    def wait_for(self, *presence: tuple[str, bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.presence == list(presence), timeout=60), self.presence

    def sessions(self) -> Sessions:
        return Sessions(
            answer=self.answer,
            admit=self.admit,
            listed=lambda: dict.fromkeys(self.allowed),
            on_presence=self.on_presence,
            on_refused=lambda name, reason: self.refused.append((name, reason.partition(";")[0])),
            limit=self.limit,
        )


@contextlib.contextmanager
def serving(
    echo: Echo, folder: Path, *, port: int = 0, limits: Limits = LIMITS, now: datetime | None = None
) -> Iterator[int]:
    with LoopThread() as threads:
        certs = open_certs(folder / "server", now=now)
        server = Server(echo.sessions(), certs, host="127.0.0.1", port=port, limits=limits)
        try:
            yield threads.wait(server.start)
        finally:
            threads.wait(server.stop)


def link(
    port: int, certs: Certs, notes: list[str] | None = None, *, host: str = "localhost", wait: float = 1, **hello: Any
) -> Link:
    """A client that waits for the server's first answer for so many seconds, and writes its events in `notes`."""

    def note(event: object) -> None:
        if notes is not None:
            notes.append(str(event))

    return Link(
        f"{host}:{port}", certs, hello=lambda: hello, patience=max(60, wait), first_patience=wait, on_event=note
    )


@contextlib.contextmanager
def proxied(
    echo: Echo, certs: Path, proxies: Any, *, limits: Limits = LIMITS, **how: Any
) -> Iterator[tuple[Any, Link]]:
    """A server's proxy, and a client that reaches the server through it."""
    with serving(echo, certs, limits=limits) as port:
        proxy = proxies(port)
        with link(proxy.port, open_certs(certs / "site-1"), **how) as far:
            yield proxy, far


def test_an_exchange_over_mutual_tls_and_in_process_is_the_same(certs_folder: Path) -> None:
    tensors = {"x": torch.randn(300, 300), "y": torch.tensor([1, 2])}
    echo = Echo()
    with serving(echo, certs_folder) as port, link(port, open_certs(certs_folder / "site-1")) as far:
        assert far.welcome == {"config": "c"}
        head, found = far.exchange({"n": 1}, tensors)
        assert far.sent_bytes == len(encode_frame({"sequence": 1, "body": {"n": 1}}, tensors))
    with LoopThread() as threads:
        near = InProcess(Echo().sessions(), threads.loop, name="site-1", hello={})
        assert near.welcome == {"config": "c"}
        head_near, found_near = near.exchange({"n": 1}, tensors)
    assert head == head_near == {"n": 1, "from": "site-1"}
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(found_near[name], tensor)
    echo.wait_for(("site-1", True), ("site-1", False))


def test_messages_of_many_pieces_come_back_as_they_went(certs_folder: Path) -> None:
    with serving(Echo(), certs_folder) as port, link(port, open_certs(certs_folder / "site-1")) as far:
        for n, count in enumerate([3 * CHUNK, 1, CHUNK // 4]):
            tensors = {"x": torch.randn(count)}
            head, found = far.exchange({"n": n}, tensors)
            assert head["n"] == n
            assert torch.equal(found["x"], tensors["x"])


def test_a_message_may_be_longer_than_a_frame_where_both_ends_allow_it(certs_folder, monkeypatch) -> None:
    monkeypatch.setattr("atlas_fl.runtime.transport.sessions.FRAME_LIMIT", CHUNK)
    with serving(Echo(limit=8 * CHUNK), certs_folder) as port, link(port, open_certs(certs_folder / "site-1")) as far:
        far.answer_limit = 8 * CHUNK
        tensors = {"x": torch.randn(CHUNK)}
        assert torch.equal(far.exchange({}, tensors)[1]["x"], tensors["x"])
        far.answer_limit = CHUNK
        with pytest.raises(ProtocolError, match=f"a frame of more than {CHUNK} bytes: it says that it holds"):
            far.exchange({}, tensors)


@pytest.mark.slow
@pytest.mark.product
def test_a_model_of_300_mb_goes_both_ways(certs_folder: Path) -> None:
    model = {f"w{index}": torch.randn(25 * 2**17) for index in range(24)}
    with serving(Echo(limit=2**29), certs_folder) as port, link(port, open_certs(certs_folder / "site-1")) as far:
        far.answer_limit = 2**29
        _, found = far.exchange({}, model)
        assert far.sent_bytes > 300 * 2**20 > FRAME_LIMIT
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def test_what_is_longer_than_the_server_takes_is_not_sent_and_a_line_says_so(certs_folder: Path) -> None:
    echo = Echo(limit=CHUNK)
    with serving(echo, certs_folder) as port, link(port, open_certs(certs_folder / "site-1")) as far:
        with pytest.raises(
            ProtocolError, match=rf"^a message of 1048\d+ bytes, .*allowed: {CHUNK} and .*; take a smaller model, lower"
        ):
            far.exchange({"n": 0}, {"x": torch.zeros(CHUNK // 4)})
        assert far.exchange({"n": 1})[0]["n"] == 1
    assert echo.handled == [("site-1", 1)]
    assert echo.refused == []


def test_who_sends_what_is_too_long_is_refused_at_the_door_for_a_while_and_others_are_not(certs_folder: Path) -> None:
    echo = Echo(limit=CHUNK)
    certs = open_certs(certs_folder / "site-1")
    with serving(echo, certs_folder, limits=Limits(penalty_seconds=60)) as port:
        with link(port, certs) as far:
            far._request_limit = FRAME_LIMIT
            with pytest.raises(ProtocolError, match=r"a frame of more than|is refused for 60 seconds"):
                far.exchange({"n": 0}, {"x": torch.zeros(4 * CHUNK)})
        with pytest.raises(ProtocolError, match=r"^client 'site-1' sent a message that was too long and is refused"):
            link(port, certs).__enter__()
        with link(port, open_certs(certs_folder / "site-2")) as other:
            assert other.exchange({"n": 1})[0]["n"] == 1
    assert echo.handled == [("site-2", 1)]
    assert echo.refused[0][1].startswith(f"a frame of more than {CHUNK} bytes")


def test_a_refusal_is_told_and_the_stream_goes_on(certs_folder: Path) -> None:
    with serving(Echo(), certs_folder) as port, link(port, open_certs(certs_folder / "site-1")) as far:
        with pytest.raises(ProtocolError, match="no"):
            far.exchange({"refuse": True})
        assert far.exchange({"n": 2})[0]["n"] == 2


def test_a_link_that_is_cut_again_and_again_loses_and_repeats_nothing(certs_folder: Path, proxies: Any) -> None:
    echo, notes = Echo(), list[str]()
    with proxied(echo, certs_folder, proxies, notes=notes) as (proxy, far):
        for n in range(12):
            if n % 3 == 1:
                proxy.cut()
            head, found = far.exchange({"n": n}, {"x": torch.full((1000,), float(n))})
            assert (head["n"], float(found["x"][0])) == (n, n)
    assert echo.handled == [("site-1", n) for n in range(12)]
    assert any("lost" in note for note in notes)
    assert any("again" in note for note in notes)


def test_an_answer_that_is_being_worked_on_survives_its_stream(certs_folder: Path, proxies: Any) -> None:
    cut = threading.Event()
    echo = Echo(hold=lambda: not cut.is_set())
    with proxied(echo, certs_folder, proxies) as (proxy, far):

        def cut_it() -> None:
            assert echo.begun.wait(60)
            proxy.cut()
            echo.wait_for(("site-1", True), ("site-1", False), ("site-1", True))
            cut.set()

        cutter = threading.Thread(target=cut_it)
        cutter.start()
        assert far.exchange({"n": 0})[0]["n"] == 0
        cutter.join()
    assert echo.handled == [("site-1", 0)]


def test_a_server_that_is_started_again_gets_the_request_again(certs_folder: Path) -> None:
    first, second, notes = Echo(), Echo(), list[str]()
    with serving(first, certs_folder) as port:
        far = link(port, open_certs(certs_folder / "site-1"), notes=notes).__enter__()
        assert far.exchange({"n": 0})[0]["n"] == 0
    with serving(second, certs_folder, port=port):
        assert far.exchange({"n": 1})[0]["n"] == 1
        far.__exit__()
    assert (first.handled, second.handled) == ([("site-1", 0)], [("site-1", 1)])


def test_who_is_taken_off_the_list_while_it_computes_is_told_why_and_does_not_try_again(certs_folder: Path) -> None:
    echo, notes = Echo(), list[str]()
    with (
        serving(echo, certs_folder, limits=Limits(look_seconds=0.02)) as port,
        link(port, open_certs(certs_folder / "site-1"), notes=notes) as far,
    ):
        assert far.exchange({"n": 0})[0]["n"] == 0
        echo.allowed.remove("site-1")
        assert far._bridge.wait(far._call.code) is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(ProtocolError, match=r"^client 'site-1' is not listed here; ask who runs the server$"):
            far.exchange({"n": 1})
    assert notes == []
    assert echo.handled == [("site-1", 0)]


def test_a_link_goes_on_with_the_certificate_that_it_began_with(certs_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(certs_folder / "site-1", tmp_path / "site-1")
    first, second = Echo(), Echo()
    with serving(first, certs_folder) as port:
        far = link(port, open_certs(tmp_path / "site-1")).__enter__()
        assert far.exchange({"n": 0})[0]["n"] == 0
    shutil.rmtree(tmp_path / "site-1")
    with serving(second, certs_folder, port=port):
        assert far.exchange({"n": 1})[0]["n"] == 1
        far.__exit__()
    assert second.handled == [("site-1", 1)]


QUICK = Limits(ping_seconds=0.2, answer_seconds=0.2, look_seconds=0.05)


def test_two_clients_with_one_name_are_refused_and_one_may_come_back(certs_folder: Path) -> None:
    certs, echo = open_certs(certs_folder / "site-1"), Echo()
    with serving(echo, certs_folder, limits=QUICK) as port:
        with link(port, certs) as far:
            with pytest.raises(ProtocolError, match="client 'site-1' is here already"):
                link(port, certs).__enter__()
            assert far.exchange({"n": 0})[0]["n"] == 0
        echo.wait_for(("site-1", True), ("site-1", False))
        with link(port, certs) as again:
            assert again.exchange({"n": 1})[0]["n"] == 1


@pytest.mark.slow
def test_a_link_that_falls_silent_gives_its_place_to_a_newer_process_and_a_living_one_does_not(certs_folder, proxies):
    certs, echo = open_certs(certs_folder / "site-1"), Echo()
    with serving(echo, certs_folder, limits=QUICK) as port:
        proxy = proxies(port)
        with link(proxy.port, certs) as silent:
            assert silent.exchange({"n": 0})[0]["n"] == 0
            with pytest.raises(ProtocolError, match="client 'site-1' is here already"):
                link(port, certs).__enter__()
            proxy.passing.clear()
            with link(port, certs) as newer:
                assert newer.exchange({"n": 1})[0]["n"] == 1
                proxy.passing.set()
                with pytest.raises(ProtocolError, match="client 'site-1' is here already"):
                    silent.exchange({"n": 2})
                assert newer.exchange({"n": 3})[0]["n"] == 3
    assert echo.handled == [("site-1", 0), ("site-1", 1), ("site-1", 3)]


def test_a_link_that_falls_silent_is_noticed_and_goes_on_when_it_is_back(certs_folder: Path, proxies: Any) -> None:
    echo = Echo()
    with proxied(echo, certs_folder, proxies, limits=QUICK) as (proxy, far):
        assert far.exchange({"n": 0})[0]["n"] == 0
        proxy.passing.clear()
        echo.wait_for(("site-1", True), ("site-1", False))
        proxy.passing.set()
        assert far.exchange({"n": 1})[0]["n"] == 1


def test_a_client_that_falls_silent_while_it_is_answered_is_noticed_too(certs_folder: Path, proxies: Any) -> None:
    over = threading.Event()
    echo = Echo(hold=lambda: not over.is_set())
    with proxied(echo, certs_folder, proxies, limits=QUICK) as (proxy, far):
        asking = threading.Thread(target=far.exchange, args=({"n": 0},))
        asking.start()
        assert echo.begun.wait(60)
        proxy.passing.clear()
        echo.wait_for(("site-1", True), ("site-1", False))
        proxy.passing.set()
        over.set()
        asking.join()
    assert echo.handled == [("site-1", 0)]


def test_a_silent_client_is_noticed_in_the_seventy_seconds_of_the_guide() -> None:
    options = dict(channel_options())
    assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] <= 70_000
    assert 1.1 * (LIMITS.ping_seconds + LIMITS.answer_seconds) < READY_SECONDS, "a newer process waits until then"


def test_who_is_not_listed_or_has_another_config_is_refused_and_the_server_is_told(certs_folder: Path) -> None:
    echo = Echo()
    with serving(echo, certs_folder) as port:
        with pytest.raises(ProtocolError, match=r"^client 'site-3' is not listed here; ask who runs the server$"):
            link(port, open_certs(certs_folder / "site-3")).__enter__()
        with pytest.raises(ProtocolError, match="site-1 has config other, the server c"):
            link(port, open_certs(certs_folder / "site-1"), config="other").__enter__()
        with pytest.raises(ProtocolError, match=r"speaks protocol 0, the server 4; install the same"):
            link(port, open_certs(certs_folder / "site-1"), protocol=0).__enter__()
    assert echo.refused == [
        ("site-3", "client 'site-3' is not listed here"),
        ("site-1", "site-1 has config other, the server c"),
        ("site-1", "client 'site-1' speaks protocol 0, the server 4"),
    ]


def test_a_certificate_for_another_name_is_refused_at_once(tmp_path: Path) -> None:
    make_certs(tmp_path / "fed", servers=["fed.example.org"], clients=["site-1"])
    message = r"is refused here: .*localhost.*`atlas certs make FOLDER --server localhost`"
    with serving(Echo(), tmp_path / "fed") as port, pytest.raises(ProtocolError, match=message):
        link(port, open_certs(tmp_path / "fed" / "site-1")).__enter__()


def test_a_port_in_use_is_told(certs_folder: Path) -> None:
    with (
        serving(Echo(), certs_folder) as port,
        pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*; choose another --port"),
        serving(Echo(), certs_folder, port=port),
    ):
        pass


def test_nobody_there_is_told(certs_folder: Path) -> None:
    certs = open_certs(certs_folder / "site-1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ProtocolError, match=f"no answer from 127.0.0.1:{port} for 1 seconds .*Connection refused"):
        link(port, certs, host="127.0.0.1").__enter__()
    with pytest.raises(ProtocolError, match=r"host 'nowhere\.invalid' is unknown"):
        link(port, certs, host="nowhere.invalid").__enter__()


def test_what_speaks_no_tls_is_told(certs_folder: Path) -> None:
    def speak(listener: socket.socket) -> None:
        end, _ = listener.accept()
        end.recv(100)
        end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        end.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        speaker = threading.Thread(target=speak, args=(listener,))
        speaker.start()
        with pytest.raises(ProtocolError, match="does not speak TLS as an ATLAS server does"):
            link(port, open_certs(certs_folder / "site-1")).__enter__()
        speaker.join()


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:0", "host:65536"])
def test_what_is_no_address_is_told(address: str) -> None:
    assert (split_address("fed.example.org:8470"), split_address("[::1]:1")) == (("fed.example.org", 8470), ("::1", 1))
    with pytest.raises(ConfigError, match="is no address of a server; write host:port"):
        split_address(address)


def test_requests_out_of_order_are_refused() -> None:
    sessions = Echo().sessions()

    async def play() -> None:
        hello = encode_frame({"session": "s", "protocol": PROTOCOL}, {})
        session, _, _ = sessions.enter("site-1", hello)
        frames = [encode_frame({"sequence": n, "body": {"n": n}}, {}) for n in range(5)]
        first = await sessions.handle(session, frames[1])
        assert await sessions.handle(session, frames[1]) == first
        for wrong in (frames[0], frames[3]):
            with pytest.raises(ProtocolError, match="follows request 1; allowed: it again, or the next"):
                await sessions.handle(session, wrong)
        await sessions.handle(session, frames[2])
        with pytest.raises(ProtocolError, match="no number or no body"):
            await sessions.handle(session, encode_frame({"sequence": "3", "body": {}}, {}))

    asyncio.run(play())
