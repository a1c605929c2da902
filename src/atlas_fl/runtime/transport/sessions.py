"""Client sessions: every request is carried out exactly once; one-time tokens; rate-limited log of refusals.

One message path serves control and tensors: a client asks, the server answers. `exchange(head, tensors) ->
(head, tensors)` is the whole of it, over mutual TLS (`runtime.transport.client`, `runtime.transport.server`); the
bytes are those of `runtime.transport.frames`.

A client's requests are numbered within its session. The answer to the newest is kept, and worked out by a task that
outlives the stream, so a request that is sent again after a lost connection is answered from it.

A certificate says who a client is; a one-time token says that it was told to come. Where another system starts the
clients (a Flower federation, say), both reach a client in one message. The first session that brings the token has it:
the same session may come again, and whoever else holds a copy of the message is refused.

The first refusal of a name is logged at once, further ones are counted and logged once a minute.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from atlas_fl.errors import ProtocolError, one_line
from atlas_fl.params import Params
from atlas_fl.runtime.transport.frames import FRAME_LIMIT, Frame, Head, Message, decode_frame, make_frame

MINUTE = 60.0
MOST_NAMES = 1000
"""Names that are told apart; who comes after them counts as one."""
OTHERS = "others"
SHOWN_SIGNS = 63
"""Most characters of a name in a log: as long as one may be."""


@dataclass(eq=False)
class _Minute:
    """The minute of a name since it was logged."""

    since: float
    told: int = 0
    more: int = 0
    """Refusals that were counted instead."""
    reason: str = ""
    """The newest of these."""


@dataclass(kw_only=True, eq=False)
class RefusalLog:
    """Passes refusals on to `tell`, as many of each name as `most` a minute; the rest are counted."""

    tell: Callable[[str, str], None]
    clock: Callable[[], float]
    _minutes: dict[str, _Minute] = field(default_factory=dict)

    def add(self, name: str, reason: str, *, most: int = 1) -> None:
        """Log that this one was refused for this reason, or count it."""
        name = one_line(name, limit=SHOWN_SIGNS)
        if name not in self._minutes and len(self._minutes) >= MOST_NAMES:
            name = OTHERS
        minute = self._minutes.setdefault(name, _Minute(self.clock()))
        if minute.told < most:
            minute.told += 1
            self.tell(name, reason)
        else:
            minute.more += 1
            minute.reason = reason

    def look(self) -> None:
        """Log how many more there were, of names that were logged a minute ago; to be called regularly."""
        now = self.clock()
        for name, minute in list(self._minutes.items()):
            if now - minute.since < MINUTE:
                continue
            del self._minutes[name]
            if minute.more:
                self._minutes[name] = _Minute(now, told=1)
                times = "once more" if minute.more == 1 else f"{minute.more} times more"
                self.tell(name, f"{minute.reason} ({times} within a minute)")


@dataclass(kw_only=True, eq=False)
class Penalties:
    """Names that are refused at the door for a while: from `first_seconds`, twice as long each time, to `most_seconds`.

    Whoever has done nothing for `most_seconds` after that begins anew.
    """

    clock: Callable[[], float]
    first_seconds: float
    most_seconds: float
    _penalties: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(when it ends, for how long it was) of each name."""

    def add(self, name: str) -> None:
        """Refuse this name from now on, for longer than the last time."""
        now = self.clock()
        until, seconds = self._penalties.get(name, (0.0, 0.0))
        again = 2 * seconds if now <= until + self.most_seconds else 0.0
        seconds = min(max(self.first_seconds, again), self.most_seconds)
        self._penalties[name] = now + seconds, seconds

    def check(self, name: str) -> None:
        """Raise `ProtocolError` while this name is refused."""
        until, seconds = self._penalties.get(name, (0.0, 0.0))
        if (left := until - self.clock()) > 0:
            raise ProtocolError(
                f"client {one_line(name, limit=SHOWN_SIGNS)!r} sent a message that was too long and is refused for"
                f" {seconds:g} seconds, {left:.0f} of them from now; install the same atlas-fl on both ends"
            )


PROTOCOL = 4
"""Version of the meaning of requests and answers; ends of different versions refuse each other."""

NO_TENSORS: Params = {}
MOST_TOLD = 10
"""Refusals, and comings and goings, of a listed client that are told in a minute; of anybody else it is one."""

Answer: TypeAlias = Callable[[str, Mapping[str, Any], Params], Awaitable[Message]]
"""(client, head, tensors) -> (head, tensors); a `ProtocolError` goes back to the client as a refusal."""
Admit: TypeAlias = Callable[[str, Mapping[str, Any]], Head]
"""(client, its hello) -> the server's welcome; raises `ProtocolError` to refuse."""


class HereAlreadyError(ProtocolError):
    """A living session has this name."""

    def __init__(self, session: "Session") -> None:
        super().__init__(
            f"client {session.name!r} is here already; end the other one, or join with another certificate"
        )
        self.session = session


class Exchange(Protocol):
    """A client's end of the path."""

    def exchange(self, head: Head, tensors: Params = NO_TENSORS) -> Message:
        """The server's answer; blocks until it is there. Raises `ProtocolError` where there will be none."""


@dataclass(eq=False)
class Session:
    """One client process, from its first stream to its last."""

    name: str
    id: str
    sequence: int | None = None
    """Number of the newest request; None before the first."""
    task: asyncio.Task[Frame] | None = None
    """Computes the answer to it, and keeps it."""
    streams: int = 0
    """Streams so far; the newest one counts."""
    here: bool = False
    certificate: str | None = None
    """SHA-256 of the certificate that it has shown; None where it needs none."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it is not here."""
    end: Callable[[str], None] = field(init=False, repr=False)
    """Ends the newest one now and for good, with a reason; set by whoever has let it enter."""


@dataclass(kw_only=True, eq=False)
class Sessions:
    """The server's side of the path, without a network: the clients that are here, and the newest answer of each."""

    answer: Answer
    admit: Admit
    listed: Callable[[], Mapping[str, str | None]]
    """The clients that may join now, with the SHA-256 of the certificate of each; None for any that was signed."""
    on_presence: Callable[[str, bool], None]
    """Callback with (client, whether it is here) for every change of that."""
    on_refused: Callable[[str, str], None] = lambda _name, _reason: None
    """Callback with (client, reason) of a refused connection or request."""
    on_unlisted: Callable[[str], None] = lambda _name: None
    """Callback with a client that was taken off the list while it had a session here."""
    limit: int = FRAME_LIMIT
    """Most bytes of a request, which the welcome says; an answer may have `FRAME_LIMIT` at least."""
    clock: Callable[[], float] = time.monotonic
    by_name: dict[str, Session] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._refusals = RefusalLog(tell=self.on_refused, clock=self.clock)

    def check_listed(self, name: str, certificate: str | None = None) -> None:
        """Raise `ProtocolError` unless a client of this name may join with this certificate.

        A refused client learns nothing of any other.
        """
        listed = self.listed()
        if name not in listed:
            shown = one_line(name, limit=SHOWN_SIGNS)
            raise ProtocolError(f"client {shown!r} is not listed here; ask who runs the server")
        if listed[name] not in (None, certificate):
            raise ProtocolError(
                f"client {name!r} is listed with another certificate: this one was replaced or revoked; ask who runs"
                " the server for the new one"
            )

    def refuse(self, name: str, reason: str) -> None:
        """Log this refusal, or count it where there were many."""
        self._refusals.add(name, reason, most=MOST_TOLD if name in self.listed() else 1)

    def look(self) -> None:
        """End the sessions of clients that may not be here any more, and log refusals; to be called regularly."""
        for session in list(self.by_name.values()):
            try:
                self.check_listed(session.name, session.certificate)
            except ProtocolError as error:
                reason = str(error)
                del self.by_name[session.name]
                self.refuse(session.name, reason)
                if session.here:
                    session.end(reason)
                elif session.task is not None:
                    session.task.cancel()  # nobody will ask again
                if session.name not in self.listed():
                    self.on_unlisted(session.name)
        self._refusals.look()

    def enter(
        self, name: str, payload: bytes | bytearray, *, certificate: str | None = None
    ) -> tuple[Session, int, Frame]:
        """(session, number of this stream, welcome) of a client whose stream begins with this frame.

        Raises `HereAlreadyError` for a name that another living session has, and `ProtocolError` as `check_listed` and
        `admit` do.
        """
        hello, _ = decode_frame(payload)
        self.check_listed(name, certificate)
        if hello.get("protocol") != PROTOCOL:
            raise ProtocolError(
                f"client {name!r} speaks protocol {hello.get('protocol')!r:.20}, the server {PROTOCOL}; install the"
                " same atlas-fl on both ends"
            )
        session_id = str(hello.get("session"))
        session = self.by_name.get(name)
        if session is not None and session.id != session_id and session.here:
            raise HereAlreadyError(session)
        welcome = self.admit(name, hello)
        if session is None or session.id != session_id:
            if session is not None and session.task is not None:
                session.task.cancel()  # whoever asked has ended, and nobody will ask again
            session = self.by_name[name] = Session(name=name, id=session_id)
        session.streams += 1
        session.certificate = certificate
        if not session.here:
            session.here = True
            session.left.clear()
            self.on_presence(name, True)
        return session, session.streams, make_frame({"welcome": welcome, "limit": self.limit}, {})

    def leave(self, session: Session, stream: int) -> None:
        """Record that the stream of this number has ended; the client is gone unless a newer one has begun."""
        if session.streams == stream and session.here:
            session.here = False
            session.left.set()
            self.on_presence(session.name, False)
        if self.by_name.get(session.name) is not session and session.task is not None:
            session.task.cancel()  # it was ended, or another has its place: nobody will ask again

    async def handle(self, session: Session, payload: bytes | bytearray) -> Frame:
        """The answer to a request of this session, worked out once however often it is sent."""
        head, tensors = decode_frame(payload, limit=self.limit)
        del payload
        number, body = head.get("sequence"), head.get("body")
        if type(number) is not int or not isinstance(body, dict):
            raise ProtocolError("a request has no number or no body; install the same atlas-fl on both ends")
        # A server that was started again knows no number, and takes the client's.
        if session.sequence is None or number == session.sequence + 1:
            if session.task is not None and not session.task.done():
                # Else those of streams that have ended would all wait on, with what they hold.
                raise ProtocolError(
                    f"request {number} came before request {session.sequence} was answered; allowed: request"
                    f" {session.sequence} again"
                )
            session.sequence = number
            session.task = asyncio.create_task(self._work(session.name, number, body, tensors))
        elif number != session.sequence or session.task is None:
            raise ProtocolError(f"request {number} follows request {session.sequence}; allowed: it again, or the next")
        del tensors
        # Shielded: a stream that is cut cancels whoever waits here, and the work must go on.
        return await asyncio.shield(session.task)

    async def _work(self, name: str, number: int, body: Mapping[str, Any], tensors: Params) -> Frame:
        try:
            answering = self.answer(name, body, tensors)
            del tensors
            head, answer_tensors = await answering
            return make_frame({"sequence": number, "body": head}, answer_tensors, limit=max(FRAME_LIMIT, self.limit))
        except ProtocolError as error:
            self.refuse(name, error.logged)
            return make_frame({"sequence": number, "refused": str(error)}, {})


def read_answer(payload: bytes | bytearray, *, number: int, limit: int = FRAME_LIMIT) -> Message:
    """(head, tensors) of the answer to the request of this number; raises `ProtocolError` where it was refused."""
    head, tensors = decode_frame(payload, limit=limit)
    if "refused" in head:
        raise ProtocolError(one_line(head["refused"]))
    if head.get("sequence") != number or not isinstance(head.get("body"), dict):
        raise ProtocolError(f"an answer to request {head.get('sequence')!r:.20} came for request {number}")
    return head["body"], tensors


@dataclass(eq=False)
class Tokens:
    """The token of every client, and the session that has used it."""

    _issued: dict[str, str] = field(default_factory=dict)
    _sessions: dict[str, str] = field(default_factory=dict)
    """By token, the session that brought it."""

    def issue(self, name: str) -> str:
        """A new token for this client; the one that it was given before is worth nothing from now on."""
        self._issued[name] = secrets.token_urlsafe(32)
        return self._issued[name]

    def redeem(self, name: str, hello: Mapping[str, Any]) -> None:
        """Raise `ProtocolError` unless the session with this hello brings the client's token, first or again.

        Refused are no token, another's, one that was replaced, and one that another session has used.
        """
        issued = self._issued.get(name)
        session = str(hello.get("session"))
        if issued is None or not secrets.compare_digest(issued.encode(), str(hello.get("token")).encode()):
            raise ProtocolError(
                f"client {name!r} brings {'no token' if 'token' not in hello else 'a token that is not its own now'};"
                " a client of this server is started by what runs the server, with a token of its own"
            )
        if self._sessions.setdefault(issued, session) != session:
            raise ProtocolError(
                f"the token of client {name!r} was used already, and it lets one session in; if this client has never"
                " been in, somebody else has read its message: start the run again, over TLS"
            )
