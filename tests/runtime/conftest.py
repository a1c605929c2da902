"""A federation's certificates, made once, and a TCP proxy whose links a test cuts."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atlas_fl.runtime.transport.certificates import make_certs

SITES = ("site-1", "site-2", "site-3")


@pytest.fixture(scope="session")
def certs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "fed"
    make_certs(folder, servers=["localhost", "127.0.0.1"], clients=SITES)
    return folder


class Proxy:
    """Passes bytes on to a port, until it is told to cut what goes through it; counts links and bytes each way."""

    def __init__(self, target: int) -> None:
        self.target, self.links = target, 0
        self.up = self.down = 0
        self.passing = threading.Event()
        """While it is cleared, no byte gets through, and nobody is told."""
        self.passing.set()
        self._open: list[socket.socket] = []
        self._counting = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inside, _ = self._listener.accept()
                try:
                    outside = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    inside.close()
                    continue
                self.links += 1
                self._open += [inside, outside]
                for source, sink, way in ((inside, outside, "up"), (outside, inside, "down")):
                    threading.Thread(target=self._pass_on, args=(source, sink, way), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.passing.wait()
                with self._counting:
                    setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
        self._close(source, sink)

    @staticmethod
    def _close(*ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> None:
        """End every connection that is open now."""
        ended, self._open = self._open, []
        self._close(*ended)

    def close(self) -> None:
        self._close(self._listener)
        self.cut()
        self.passing.set()


@pytest.fixture
def proxies() -> Iterator[Callable[[int], Proxy]]:
    """A maker of proxies, which are closed at the end."""
    with contextlib.ExitStack() as made:
        yield lambda target: made.enter_context(contextlib.closing(Proxy(target)))
