"""`atlas watch`: the pages of runs while they go on, from a small server on this machine.

It reads the folders of the runs and never writes there. Other machines see nothing without the token that it prints;
a page of another site that a browser shows cannot read from it either, since the name of the host is checked.
"""

import hmac
import os
import re
import secrets
import socket
import sys
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from atlas_fl.cli.display import show
from atlas_fl.cli.options import WatchOptions
from atlas_fl.errors import ConfigError, short_repr
from atlas_fl.report.html.live import Places, find_places, list_text, page_text, state_of
from atlas_fl.storage.run_folder import find_run

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HOST = r"(?!.*[^.:]{64})[A-Za-z0-9._:%-]{1,253}"
"""An address, or a name whose parts are as short as names of machines must be."""
COOKIE = "atlas-watch"
CONNECTIONS = 32
"""Connections that may be open at once; if there are more, one that has not asked yet what it may is closed."""
NICE = 10
"""Niceness of the server where the run wants the same cores."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Pages of a server, and who may see them."""

    runs: tuple[Path, ...]
    """The runs that were named; empty for all in `runs_dir`."""
    runs_dir: Path
    token: str | None
    """Token that a request needs; None where only this machine can ask."""

    def places(self) -> Places:
        """The runs by the names of their pages."""
        every = sorted(self.runs_dir.iterdir()) if self.runs_dir.is_dir() else ()
        return find_places(self.runs or every)


def watch(options: WatchOptions) -> int:
    """Serve the pages of the runs that these words name until Ctrl-C; 0."""
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}; allowed: 0 to 65535, 0 takes a free one")
    if not re.fullmatch(HOST, options.host):
        raise ConfigError(f"--host is {short_repr(options.host)}; name an address of this machine, or leave it out")
    named = tuple(find_run(name, runs_dir=options.runs_dir, allow_unplanned=True).path for name in options.runs)
    if not named and not Path(options.runs_dir).is_dir():
        raise ConfigError(f"--runs-dir is {options.runs_dir}, which is no folder; begin a run first, or name one")
    token = None if options.host in LOOPBACK else secrets.token_urlsafe(24)
    watched = Watched(runs=named, runs_dir=Path(options.runs_dir), token=token)
    if named and len(watched.places()) < len(named):
        raise ConfigError("two of these runs have the same name; watch them one at a time, or by --runs-dir")
    with listen(watched, host=options.host, port=options.port) as server:
        os.nice(NICE)
        show([f"watching at {address(server, watched)} until Ctrl-C"])
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            show(["no longer watching; the runs go on"])
    return 0


def listen(watched: Watched, *, host: str, port: int) -> "_Server":
    """A server that shows these runs, not yet serving; raises ConfigError where the address cannot be had."""

    class Handler(_Handler):
        shown = watched

    class Server(_Server):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        return Server((host, port), Handler)
    except OSError as error:
        where = f"--host {host} --port {port}"
        raise ConfigError(
            f"{where} cannot be listened at: {error.strerror}; take another, port 0 is a free one"
        ) from error


def address(server: ThreadingHTTPServer, watched: Watched) -> str:
    """The address to open, with the token where there is one; the machine's name where it listens at all addresses."""
    host, port = str(server.server_address[0]), server.server_address[1]
    host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    words = "" if watched.token is None else f"?token={watched.token}"
    return f"http://{host}:{port}/{words}"


class _Server(ThreadingHTTPServer):
    """So many connections at once and no more; one that breaks off is no news.

    A connection waits until it has asked for what it may see. Where all places are taken, the oldest that waits is
    closed for a new one, of the address that most of those are from: who says nothing keeps nobody out.
    """

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, str] = {}
        """The address of each connection that has not asked for what it may see, the oldest first."""
        self._answered: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or close the connection where too many are being answered."""
        with self._lock:
            is_full = len(self._waiting) + len(self._answered) >= CONNECTIONS
            evicted = self._next_to_close() if is_full and self._waiting else None
            if evicted is not None:
                del self._waiting[evicted]
            is_refused = is_full and evicted is None
            if not is_refused:
                self._waiting[request] = client_address[0]
        if evicted is not None:
            with suppress(OSError):  # it has gone by itself
                evicted.shutdown(socket.SHUT_RDWR)
        if is_refused:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def _next_to_close(self) -> socket.socket:
        most = Counter(self._waiting.values()).most_common(1)[0][0]
        return next(request for request, address in self._waiting.items() if address == most)

    def admit(self, request: socket.socket) -> None:
        """Keep the place of a connection that has asked for what it may see until it has its answer."""
        with self._lock:
            if self._waiting.pop(request, None) is not None:
                self._answered.add(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._waiting.pop(request, None)
                self._answered.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line for what could not be answered; nothing where the other side has gone."""
        del request, client_address
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            show([f"a request could not be answered: {type(error).__name__}: {error}"])


class _Handler(BaseHTTPRequestHandler):
    """Answers GET: the list of runs, a run's page, or with `?state` what changes when it does."""

    shown: Watched
    timeout = 10
    """Seconds that a client may be silent."""

    def do_HEAD(self) -> None:
        """Answer without the page."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer one request."""
        try:
            url = urlsplit(self.path)
            query = parse_qs(url.query, keep_blank_values=True)
            is_allowed = self._is_allowed(query)
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, "This is no address.\n", kind="plain")
            return
        if not is_allowed:
            self._answer(HTTPStatus.FORBIDDEN, "Open the address that `atlas watch` has printed.\n", kind="plain")
            return
        assert isinstance(self.server, _Server)
        self.server.admit(self.connection)

        places, name = self.shown.places(), unquote(url.path.strip("/"))
        if not name and len(self.shown.runs) == 1:
            name = next(iter(places), "gone")
        if name and name not in places:
            self._answer(HTTPStatus.NOT_FOUND, "There is no such run here.\n", kind="plain")
            return
        state = state_of({name: places[name]} if name else places)
        if "state" in query:
            self._answer(HTTPStatus.OK, state, kind="plain")
        else:
            text = page_text(places[name], state) if name else list_text(places, state)
            self._answer(HTTPStatus.OK, text, kind="html")

    @property
    def _cookie(self) -> str:
        """Its name: that of the server at this port, since browsers send cookies to all ports of a machine."""
        return f"{COOKIE}-{self.connection.getsockname()[1]}"

    def _is_allowed(self, query: dict[str, list[str]]) -> bool:
        token = self.shown.token
        if token is None:  # of this machine alone, and by its own name: else a site that the browser shows could read
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in LOOPBACK
        cookies = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        given = [*query.get("token", []), *(value for name, _, value in cookies if name == self._cookie)]
        return any(hmac.compare_digest(one.encode(errors="replace"), token.encode()) for one in given)

    def _answer(self, status: HTTPStatus, text: str, *, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        if self.shown.token is not None and status == HTTPStatus.OK:
            self.send_header("Set-Cookie", f"{self._cookie}={self.shown.token}; HttpOnly; SameSite=Strict; Path=/")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a request is no news."""
