"""A server in a process of its own, with few descriptors: many connections, and many frames that are too long."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch

from atlas_fl.runtime.transport.certificates import make_certs, open_certs
from atlas_fl.runtime.transport.client import Link
from atlas_fl.runtime.transport.connections import raise_descriptor_limit
from atlas_fl.runtime.transport.frames import make_frame, split_frame
from atlas_fl.runtime.transport.server import METHOD, SERVICE, channel_options
from atlas_fl.runtime.transport.sessions import PROTOCOL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems have neither /proc nor 127.0.0.2"),
]
LIMIT = 4 * 2**20
"""Of a request."""
_SERVE = f"""
import resource, sys
from pathlib import Path
from atlas_fl.runtime.transport.certificates import open_certs
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.server import Limits, Server
from atlas_fl.runtime.transport.sessions import Sessions

async def echo(name, head, tensors):
    return head, tensors

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
with LoopThread() as threads:
    sessions = Sessions(
        answer=echo,
        admit=lambda name, hello: {{}},
        listed=lambda: dict.fromkeys(("site-1", "site-2")),
        on_presence=lambda name, here: None,
        limit={LIMIT},
    )
    limits = Limits(penalty_seconds=1e-4, most_penalty_seconds=1e-4)
    server = Server(sessions, open_certs(Path(sys.argv[1])), host="127.0.0.1", port=0, limits=limits)
    print(threads.wait(server.start), flush=True)
    sys.stdin.read()
    threads.wait(server.stop)
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A server's process, its port and the certificates of its sites."""

    folder: Path
    pid: int
    port: int

    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096 / 2**20

    def link(self, name: str) -> Link:
        certs = open_certs(self.folder / name)
        return Link(
            f"localhost:{self.port}", certs, hello=dict, patience=30, first_patience=30, on_event=lambda _: None
        )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "certs"
    make_certs(folder, servers=["localhost"], clients=["site-1", "site-2"])
    words = [sys.executable, "-c", _SERVE, str(folder / "server")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield Place(folder=folder, pid=server.pid, port=int(server.stdout.readline()))
        server.stdin.close()


@pytest.mark.parametrize(("connections", "addresses", "first"), [(1500, 1, b""), (1500, 50, b"\x16")])
def test_a_listed_site_comes_in_within_seconds_while_idle_connections_of_strangers_are_kept_open(
    place: Place, connections: int, addresses: int, first: bytes
) -> None:
    if raise_descriptor_limit() < 2 * connections:
        pytest.skip("this process may not open as many connections")
    with ExitStack() as stack:
        here = stack.enter_context(place.link("site-1"))
        here.exchange({})
        for index in range(connections):
            end = stack.enter_context(socket.socket())
            end.bind((f"127.0.0.{1 + index % addresses}", 0))
            end.connect(("127.0.0.1", place.port))
            with suppress(OSError):  # it is refused already
                end.send(first)
        began = time.monotonic()
        with place.link("site-2") as other:
            other.exchange({})
        here.exchange({})
        assert time.monotonic() - began < 6, "a handshake of a stranger has ten seconds"


def test_memory_of_a_server_stays_where_a_site_sends_frames_that_are_too_long_and_comes_again(place: Place) -> None:
    certs = open_certs(place.folder / "site-1")
    credentials = grpc.ssl_channel_credentials(certs.ca, certs.key, certs.cert)
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    hello = bytes(make_frame({"session": "s", "protocol": PROTOCOL}, {}))
    pieces = list(split_frame(make_frame({}, {"x": torch.zeros(5 * LIMIT // 4)})))

    async def send() -> None:
        async with grpc.aio.secure_channel(f"localhost:{place.port}", credentials, options=options) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                for piece in (hello, *pieces):
                    await call.write(piece)

    async def send_often(times: int) -> None:
        for _ in range(times):
            await send()

    asyncio.run(send_often(100))
    before = place.resident_mb()
    asyncio.run(send_often(150))
    assert place.resident_mb() - before < 60, "each kept 1.2 MB"
    with place.link("site-2") as other:
        other.exchange({})
