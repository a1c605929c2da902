"""The server's end of the stream: mutual TLS by grpc.aio, generic handlers, frames as they are."""

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable

import grpc

from atlas_fl.engines.stream.chunks import CHUNK, chunks, joined
from atlas_fl.engines.stream.frames import encode_frame
from atlas_fl.engines.stream.heap import keep_freed_memory
from atlas_fl.engines.stream.sessions import Sessions
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.io.certs import Certs

SERVICE, METHOD = "atlas.Stream", "Exchange"
PING_SECONDS = 10
"""A peer that has said nothing for so long is asked whether it is there."""
SILENCE_SECONDS = 10
"""How long it may take to say so."""


def channel_options() -> list[tuple[str, int]]:
    """What both ends set."""
    return [
        ("grpc.max_receive_message_length", CHUNK),
        ("grpc.max_send_message_length", CHUNK),
        ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", SILENCE_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_SECONDS * 500),
        ("grpc.http2.max_ping_strikes", 0),
    ]


class Server:
    """Streams of clients into `Sessions`. Its methods run in the loop that it was started in."""

    def __init__(self, sessions: Sessions, certs: Certs, *, host: str, port: int) -> None:
        self._sessions, self._certs, self._host, self._port = sessions, certs, host, port
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """The port on which it listens from now on; the given one, or a free one for 0.

        Raises `ConfigError` where the port is taken or the address is not this machine's.
        """
        check_free(self._host, self._port)
        keep_freed_memory()
        # Without this, Linux lets two servers share a port and deals the clients out between them.
        options = [*channel_options(), ("grpc.so_reuseport", 0)]
        server = grpc.aio.server(options=options)
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        certs = self._certs
        credentials = grpc.ssl_server_credentials([(certs.key, certs.cert)], certs.ca, require_client_auth=True)
        try:
            port: int = server.add_secure_port(_target(self._host, self._port), credentials)
        except RuntimeError:
            raise _taken(self._host, self._port, "it cannot be bound") from None
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        """End every stream and close the port."""
        if self._server is not None:
            await self._server.stop(grace=0)

    async def _stream(
        self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> AsyncIterator[bytes]:
        name = context.auth_context().get("x509_common_name", [b""])[0].decode(errors="replace")

        def read() -> Awaitable[bytes]:
            return anext(requests, grpc.aio.EOF)

        try:
            first = await joined(read)
            if first is None:
                return
            session, stream, welcome = self._sessions.enter(name, first)
        except ProtocolError as error:
            self._sessions.on_refused(name, str(error))
            yield encode_frame({"refused": str(error)}, {})
            return
        try:
            yield welcome
            while (request := await joined(read)) is not None:
                for chunk in chunks(await self._sessions.handle(session, request)):
                    yield chunk
        except ProtocolError as error:
            self._sessions.on_refused(name, str(error))
            yield encode_frame({"refused": str(error)}, {})
        finally:
            self._sessions.leave(session, stream)


def _target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int) -> None:
    """Nothing where this can be listened on; else raises `ConfigError`: gRPC fails without the system's reason."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise _taken(host, port, getattr(error, "strerror", None) or str(error)) from None


def _taken(host: str, port: int, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {_target(host, port)} ({reason}); choose another --port from 1 to 65535 that no program"
        " uses, and for --host an address of this machine, or 0.0.0.0 for all"
    )
