"""The client's end of the stream: mutual TLS by grpc.aio, and reconnecting with growing pauses until a limit.

gRPC tries a refused certificate again for ever and names no reason. So one TLS handshake with what Python itself brings
goes first (`probe`) and says why a server cannot be reached. Under TLS 1.3 a server refuses a client's certificate
after the client has finished its handshake, so the probe also waits for the server's first byte.
"""

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import grpc

from atlas_fl.errors import ConfigError, ProtocolError, one_line
from atlas_fl.events import OnEvent
from atlas_fl.params import Params
from atlas_fl.runtime.transport import certificates, event_loop, frames, server, sessions

SECONDS = 10.0
"""Longest wait of each step."""
CLOSED = "it closes the connection at once"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`, or of `[::1]:port`; raises `ConfigError` for anything else."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{address!r} is no address of a server; write host:port, such as fed.example.org:8470")
    return host, int(port)


def probe(host: str, port: int, certs: certificates.Certs, context: ssl.SSLContext) -> str | None:
    """None where the server is there and takes this certificate; else why it may be worth trying again.

    Raises `ProtocolError` for what no second try mends: a host that nobody knows, and a certificate that either end
    refuses. A server that closes the connection once the handshake is over refuses the certificate, as gRPC's does
    without another word, or is just ending; so this is looked at twice.
    """
    for _ in range(2):
        if (reason := _handshake(host, port, certs, context)) != CLOSED:
            return reason
    raise ProtocolError(_refusal(host, port, certs, CLOSED))


def _handshake(host: str, port: int, certs: certificates.Certs, context: ssl.SSLContext) -> str | None:
    try:
        with (
            socket.create_connection((host, port), timeout=SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            return None if secure.recv(1) else CLOSED
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message.rstrip(".")
        raise ProtocolError(
            f"the certificate of {host}:{port} is refused here: {why}; the server's must be made for"
            f" {host!r} by the authority of {certs.folder}: join by a name that it has, or make a new folder for all"
            f" with `atlas certs make FOLDER --server {host}`"
        ) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError, TimeoutError) as error:
        return _words(error)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" in reason:
            raise ProtocolError(_refusal(host, port, certs, reason)) from None
        raise ProtocolError(
            f"{host}:{port} does not speak TLS as an ATLAS server does ({reason}); check host and port"
        ) from None
    except socket.gaierror as error:
        raise ProtocolError(f"host {host!r} is unknown ({error.strerror}); check the address of the server") from None
    except OSError as error:
        return _words(error)


def _context(certs: certificates.Certs) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=certs.ca.decode())
    try:
        context.load_cert_chain(certs.folder / certificates.CERT, certs.folder / certificates.KEY)
    except OSError as error:
        raise ConfigError(
            f"{certs.folder} cannot be read ({_words(error)}); give a folder of `atlas certs make`"
        ) from None
    context.set_alpn_protocols(["h2"])
    return context


def _words(error: OSError) -> str:
    return str(error.strerror or error)


def _refusal(host: str, port: int, certs: certificates.Certs, reason: str) -> str:
    return (
        f"the server at {host}:{port} refuses the certificate {certs.folder / certificates.CERT} ({reason}); it must be"
        " made by the server's own authority and not be expired: ask for a new folder of `atlas certs make`"
    )


async def _status(call: Any, error: Exception) -> tuple[grpc.StatusCode | None, str]:
    """(code, details) with which a stream has ended; (None, "") where it has not."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code(), error.details() or ""
    # Who writes to a stream that the server has ended meanwhile is told that it has ended, and not why.
    return (await call.code(), await call.details()) if call.done() else (None, "")


READY_SECONDS = 90.0
"""Longest wait for a welcome: a server first makes sure that the former session of this name is gone."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
WELCOME_LIMIT = frames.HEAD_LIMIT + 2**10
"""Most bytes of a server's welcome, which has no tensors."""


class UnreachableError(ProtocolError):
    """No server has answered for as long as it was tried."""


@dataclass(eq=False)
class Link:
    """One session with a server; used as a context, from one thread."""

    address: str
    certs: certificates.Certs
    _: KW_ONLY
    hello: Callable[[], frames.Head]
    """Says what this end is, whenever a stream begins."""
    patience: float
    """Seconds for which a server that does not answer is tried again."""
    first_patience: float
    """The same for the very first time."""
    on_event: OnEvent
    welcome: dict[str, Any] = field(default_factory=dict)
    """The server's welcome when the newest stream began."""
    sent_bytes: int = 0
    received_bytes: int = 0
    """Bytes of all frames."""
    answer_limit: int = frames.FRAME_LIMIT
    """Most bytes of an answer."""
    _request_limit: int = 0
    """Most bytes of a request, as the server's welcome says."""
    _number: int = 0
    _channel: grpc.aio.Channel | None = None
    _call: Any = None
    _opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self._host, self._port = split_address(self.address)
        # Read once: what is sent again goes under the same certificate, whatever lies in the folder by then.
        self._context = _context(self.certs)
        self._left = self.first_patience
        self._session = secrets.token_hex(16)
        self._bridge = event_loop.LoopThread(on_event=self.on_event)

    def __enter__(self) -> "Link":
        event_loop.keep_freed_memory()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._bridge)
            stack.callback(lambda: self._bridge.wait(self._drop))
            self._bridge.call(self._open_stream)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def exchange(self, head: frames.Head, tensors: Params = sessions.NO_TENSORS) -> frames.Message:
        """The server's answer, through as many streams as it takes.

        Raises `ProtocolError` where the server refuses, or would refuse what is too long, and `UnreachableError` where
        it is not reached within the patience.
        """
        number = self._number + 1
        frame = frames.make_frame({"sequence": number, "body": head}, tensors, limit=self._request_limit)
        self._number = number
        payload = self._bridge.call(self._exchange, frame)
        self.sent_bytes += len(frame)
        self.received_bytes += len(payload)
        return sessions.read_answer(payload, number=number, limit=self.answer_limit)

    async def _exchange(self, frame: frames.Frame) -> bytearray:
        while True:
            call = await self._open_stream()
            try:
                for chunk in frames.split_frame(frame):
                    await call.write(chunk)
                payload = await frames.join_chunks(call.read, limit=self.answer_limit)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
                await self._handle_disconnect(*await _status(call, error))
                continue
            if payload is not None:
                return payload
            await self._handle_disconnect(None)

    async def _handle_disconnect(self, code: grpc.StatusCode | None, details: str = "") -> None:
        if code is grpc.StatusCode.PERMISSION_DENIED:
            raise ProtocolError(one_line(details))
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED):
            raise ProtocolError(f"the server at {self.address} failed ({code.name}: {one_line(details)}); see its log")
        self._bridge.note(f"the connection to {self.address} is lost; trying again")
        await self._drop()

    async def _drop(self) -> None:
        channel = self._channel
        self._call = self._channel = None
        if channel is not None:
            await channel.close()  # which ends its call

    async def _open_stream(self) -> Any:
        """The stream, begun anew where there is none; pauses grow from a tenth of a second to five seconds."""
        if self._call is not None:
            return self._call
        until = time.monotonic() + self._left
        pause = FIRST_PAUSE
        again = self._number > 0
        while True:
            reason = await asyncio.to_thread(probe, self._host, self._port, self.certs, self._context)
            if reason is None:
                reason = await self._begin()
            if reason is None:
                break
            if time.monotonic() + pause > until:
                raise UnreachableError(
                    f"no answer from {self.address} for {self._left:g} seconds ({reason}); check the address, that"
                    " `atlas serve` runs there and that no firewall is between"
                )
            if pause == FIRST_PAUSE:
                meanwhile = ", in which the server may be started again" if again else ""
                self._bridge.note(
                    f"no answer from {self.address} ({reason}); trying for {self._left:g} seconds{meanwhile}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self._left = self.patience
        if again:
            self._bridge.note(f"connected to {self.address} again")
        return self._call

    async def _begin(self) -> str | None:
        """The reason why no stream has begun; None where one has. Raises `ProtocolError` where the server refuses."""
        certs = self.certs
        credentials = grpc.ssl_channel_credentials(certs.ca, certs.key, certs.cert)
        # Its own connection and no proxy of the environment: the probe has just gone this very way.
        options = [*server.channel_options(), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        channel = grpc.aio.secure_channel(server.target(self._host, self._port), credentials, options=options)
        try:
            # Without a timeout this never ends where a certificate is refused.
            await asyncio.wait_for(channel.channel_ready(), READY_SECONDS)
            call = channel.stream_stream(f"/{server.SERVICE}/{server.METHOD}")()
            hello = {"session": self._session, "protocol": sessions.PROTOCOL, **self.hello()}
            await call.write(bytes(frames.make_frame(hello, {})))
            payload = await asyncio.wait_for(frames.join_chunks(call.read, limit=WELCOME_LIMIT), READY_SECONDS)
            if payload is None:
                return "the stream ended at once"
            head, _ = frames.decode_frame(payload)
            welcome = head.get("welcome")
            limit = head.get("limit")
            if not isinstance(welcome, dict) or type(limit) is not int:
                raise ProtocolError("the server's welcome says nothing of itself; install its version of atlas-fl")
            self._channel = channel
            self._call = call
            self.welcome = welcome
            self._request_limit = limit
            return None
        except TimeoutError:
            return f"no stream within {READY_SECONDS:g} seconds"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                raise ProtocolError(one_line(error.details())) from None
            return f"{error.code().name}: {one_line(error.details())}"
        finally:
            if self._channel is not channel:
                await channel.close()
