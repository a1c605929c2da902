"""The server's end of the stream: mutual TLS by grpc.aio, generic handlers, frames as they are."""

import asyncio
import contextlib
import socket
from collections import Counter
from typing import Any

import grpc

from atlas_fl.errors import ConfigError, ProtocolError, one_line
from atlas_fl.frozen import Frozen
from atlas_fl.runtime.transport import connections, event_loop, frames
from atlas_fl.runtime.transport.certificates import Certs, common_name, digest_of
from atlas_fl.runtime.transport.sessions import HereAlreadyError, Penalties, Session, Sessions

SERVICE, METHOD = "atlas.Stream", "Exchange"
PING_SECONDS, ANSWER_SECONDS = 10.0, 60.0
"""A peer that has said nothing for so long is asked whether it is there, and has so long to answer: over a slow link
the answer waits behind a piece of a message."""
LOOK_AGAIN_SECONDS = 0.05
"""Seconds between two looks of a stream that waits for room."""
STOP_SECONDS = 2.0
"""Longest time in which a server that stops tells its clients so."""


class Limits(Frozen):
    """Bounds of a server's memory and time that the other ends may take."""

    hello_bytes: int = 64 * 2**10
    """Most bytes of the first frame of a stream."""
    handshake_seconds: float = 10.0
    """Longest time of the handshake of TLS."""
    look_seconds: float = 1.0
    """Between two looks at every stream. Time is counted in looks, so that none is held against clients in which the
    server itself stood still."""
    hello_looks: int = 10
    """Until all of the first frame is here."""
    skip_looks: int = 2
    """Looks for the first piece of who is refused, which nobody reads."""
    piece_looks: int = 120
    """Looks for each piece of a frame, of at most 1 MiB, either way."""
    streams: int = 4
    """Streams of one client: its own, one that hangs, and those that try to take its place."""
    unfinished_bytes: int = 16 * frames.FRAME_LIMIT
    """Bytes of all requests of which more is to come; all but the oldest wait for room, and not for longer than for a
    piece."""
    ping_seconds: float = PING_SECONDS
    answer_seconds: float = ANSWER_SECONDS
    """Times as above, after which a client is gone and another session of its name may come in."""
    penalty_seconds: float = 1.0
    """Time for which a name is refused whose frame was too long: twice as long each time, to `most_penalty_seconds`."""
    most_penalty_seconds: float = 600.0
    sweep_seconds: float = 0.25
    """Between two looks at connections without a stream of a listed client."""
    idle_seconds: float = 60.0
    """Time for which a connection may have no stream."""


LIMITS = Limits()


def channel_options(*, ping: float = PING_SECONDS, answer: float = ANSWER_SECONDS) -> list[tuple[str, int]]:
    """The options that both ends set; gRPC pings the other end, and ends the streams of one that does not answer."""
    return [
        ("grpc.max_receive_message_length", frames.CHUNK),
        ("grpc.max_send_message_length", frames.CHUNK),
        ("grpc.keepalive_time_ms", int(ping * 1000)),
        ("grpc.keepalive_timeout_ms", int(answer * 1000)),
        ("grpc.http2.ping_timeout_ms", int(answer * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", int(ping * 500)),
        ("grpc.http2.max_ping_strikes", 0),
    ]


class Server:
    """Streams of clients into `Sessions`. Its methods run in the loop that it was started in."""

    def __init__(self, sessions: Sessions, certs: Certs, *, host: str, port: int, limits: Limits = LIMITS) -> None:
        self._sessions = sessions
        self._certs = certs
        self._host = host
        self._port = port
        self._limits = limits
        self._unfinished: dict[Visit, int] = {}
        """Bytes of each request of which more is to come, the oldest one first."""
        self._penalties = Penalties(
            clock=sessions.clock, first_seconds=limits.penalty_seconds, most_seconds=limits.most_penalty_seconds
        )
        self._streams = Counter[str]()
        self._visits: set[Visit] = set()
        self._admitted = Counter[connections.Peer]()
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """The port on which it listens from now on; the given one, or a free one for 0.

        Raises `ConfigError` where the port is taken or the address is not this machine's.
        """
        check_free(self._host, self._port)
        event_loop.keep_freed_memory()
        descriptors = connections.raise_descriptor_limit()
        limits = self._limits
        options = [
            *channel_options(ping=limits.ping_seconds, answer=limits.answer_seconds),
            # Without this, Linux lets two servers share a port and deals the clients out between them.
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", limits.streams),
            ("grpc.server_handshake_timeout_ms", int(limits.handshake_seconds * 1000)),
            ("grpc.max_connection_idle_ms", int(limits.idle_seconds * 1000)),
            ("grpc.max_allowed_incoming_connections", connections.most_connections(descriptors)),
        ]
        server = grpc.aio.server(options=options)
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        certs = self._certs
        credentials = grpc.ssl_server_credentials([(certs.key, certs.cert)], certs.ca, require_client_auth=True)
        try:
            port: int = server.add_secure_port(target(self._host, self._port), credentials)
        except RuntimeError:
            raise _port_taken(self._host, self._port, "it cannot be bound") from None
        await server.start()
        self._server = server
        self._port = port
        waiting = connections.Waiting(port=port, most=connections.most_waiting(descriptors), admitted=self._admitted)
        self._tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._sweep(waiting))]
        return port

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._limits.look_seconds)
            for visit in self._visits:
                visit.look()
            self._sessions.look()

    async def _sweep(self, waiting: connections.Waiting) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep_seconds)
            waiting.look()

    async def stop(self, reason: str = "") -> None:
        """End every stream and close the port; with a reason every client is told it, and does not try again."""
        for task in self._tasks:
            task.cancel()
        if reason:
            for visit in self._visits:
                visit.end(reason)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    while self._streams:
                        await asyncio.sleep(LOOK_AGAIN_SECONDS)
        if self._server is not None:
            await self._server.stop(grace=0)

    async def _stream(self, _: Any, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        (pem,) = context.auth_context()["x509_pem_cert"]  # the authority has signed it
        name = common_name(pem)
        certificate = digest_of(pem)
        visit = Visit(context, self._limits, self._unfinished)
        self._streams[name] += 1
        try:
            if self._streams[name] > self._limits.streams:
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"{name} has {self._limits.streams} streams already")
            async with visit.clock:
                self._visits.add(visit)  # and is looked at no longer than its clock can be set
                try:
                    await self._serve_visit(name, certificate, visit)
                finally:
                    self._visits.discard(visit)
        except ProtocolError as error:
            self._sessions.refuse(name, str(error))
            await visit.abort(grpc.StatusCode.PERMISSION_DENIED, one_line(error), port=self._port)
        except TimeoutError:
            if not visit.clock.expired():
                raise
            await visit.abort(visit.code, visit.reason, port=self._port)
        finally:
            self._streams -= Counter([name])  # in place, and without those that have none

    async def _serve_visit(self, name: str, certificate: str, visit: "Visit") -> None:
        """One stream from its hello to its end; raises `ProtocolError` where the client or what it says is refused."""
        try:
            self._sessions.check_listed(name, certificate)
            self._penalties.check(name)
        except ProtocolError:
            # Its hello is on the way: gRPC at the other end loses the reason of a stream that ends before it is sent.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(visit.context.read(), self._limits.skip_looks * self._limits.look_seconds)
            raise
        self._admitted[visit.peer] += 1
        try:
            hello = await visit.frame(limit=self._limits.hello_bytes, looks=self._limits.hello_looks)
            if hello is None:
                return
            session, stream, welcome = await self._enter_session(name, certificate, hello)
            session.end = visit.end
            try:
                await visit.write(welcome)
                await self._serve_requests(session, certificate, visit)
            finally:
                self._sessions.leave(session, stream)
        except frames.FrameTooLongError:
            self._penalties.add(name)
            raise
        finally:
            self._admitted -= Counter([visit.peer])

    async def _serve_requests(self, session: Session, certificate: str, visit: "Visit") -> None:
        while (request := await visit.frame(limit=self._sessions.limit)) is not None:
            self._sessions.check_listed(session.name, certificate)
            answering = self._sessions.handle(session, request)
            del request  # no message is held while its answer is worked out, which may be the next job
            await visit.write(await answering)

    async def _enter_session(self, name: str, certificate: str, hello: bytearray) -> tuple[Session, int, frames.Frame]:
        """Enter as `Sessions.enter` does, once it is known whether a session of this name lives."""
        try:
            return self._sessions.enter(name, hello, certificate=certificate)
        except HereAlreadyError as error:
            longest = self._limits.ping_seconds + self._limits.answer_seconds
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(error.session.left.wait(), 1.1 * longest)
            return self._sessions.enter(name, hello, certificate=certificate)


class Visit:
    """One stream: whole frames in and out, each piece of them within its time."""

    def __init__(
        self, context: "grpc.aio.ServicerContext[bytes, bytes]", limits: Limits, unfinished: dict["Visit", int]
    ) -> None:
        self.context = context
        self._limits = limits
        self._unfinished = unfinished
        self.peer = connections.peer_of(context.peer())
        self._looks_left: int | None = None
        self.clock = asyncio.timeout(None)
        self.reason = ""
        """The reason why it was ended."""
        self.code = grpc.StatusCode.UNAVAILABLE

    def end(self, reason: str, *, for_good: bool = True) -> None:
        """End it now, whatever it waits for; a client that is ended for good does not try again."""
        if not self.reason:
            self.reason = reason
            self.code = grpc.StatusCode.PERMISSION_DENIED if for_good else grpc.StatusCode.UNAVAILABLE
            self.clock.reschedule(asyncio.get_running_loop().time())

    def look(self) -> None:
        """End it where its step has lasted for too many looks."""
        if self._looks_left is not None:
            self._looks_left -= 1
            if self._looks_left < 0:
                self.end("nothing came, or was taken, for too long", for_good=False)

    async def frame(self, *, limit: int, looks: int | None = None) -> bytearray | None:
        """The next frame, all of it within so many looks if they are given; None where the stream ends before.

        Raises `ProtocolError` as `join_chunks` does.
        """
        self._looks_left = looks
        sizes = self._unfinished
        most = self._limits.unfinished_bytes

        async def read() -> Any:
            if self in sizes and looks is None:
                self._looks_left = self._limits.piece_looks
                # the oldest never waits, or all might wait for each other
                while sum(sizes.values()) > most and next(iter(sizes)) is not self:
                    await asyncio.sleep(LOOK_AGAIN_SECONDS)
            piece = await self.context.read()
            if piece is not grpc.aio.EOF:
                sizes[self] = sizes.get(self, 0) + len(piece)
            return piece

        try:
            return await frames.join_chunks(read, limit=limit)
        finally:
            sizes.pop(self, None)
            self._looks_left = None

    async def abort(self, code: grpc.StatusCode, reason: str, *, port: int) -> None:
        """End it with this status, and its connection to this port without a word where more keeps coming.

        Of a stream that ends while it has unread data, and over which something was written meanwhile, gRPC keeps a
        megabyte for ever. Of one whose connection has ended and that was read to its end it keeps nothing. A client
        that waits to be answered sends nothing.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                piece = await self.context.read()
            if piece is not grpc.aio.EOF:
                connections.end_connection(port, self.peer)
                async with asyncio.timeout(PING_SECONDS):
                    while await self.context.read() is not grpc.aio.EOF:
                        pass
        await self.context.abort(code, reason)

    async def write(self, frame: frames.Frame) -> None:
        """Send a frame, each piece as soon as the other end has room for it."""
        for chunk in frames.split_frame(frame):
            self._looks_left = self._limits.piece_looks
            await self.context.write(chunk)
        self._looks_left = None


def target(host: str, port: int) -> str:
    """The address as gRPC takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int) -> None:
    """Raise `ConfigError` unless this can be listened on: gRPC fails without the system's reason."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise _port_taken(host, port, getattr(error, "strerror", None) or str(error)) from None


def _port_taken(host: str, port: int, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {target(host, port)} ({reason}); choose another --port from 1 to 65535 that no program"
        " uses, and for --host an address of this machine, or 0.0.0.0 for all"
    )
