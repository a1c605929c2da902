"""A client in the same process as its server: the same frames and rules without a network, and no consent."""

import asyncio
from typing import Any

from atlas_fl.params import Params
from atlas_fl.runtime.transport.frames import FRAME_LIMIT, Frame, Head, Message, decode_frame, make_frame
from atlas_fl.runtime.transport.sessions import NO_TENSORS, PROTOCOL, Session, Sessions, read_answer


class InProcess:
    """A client of a server in the same process; `exchange` is called from a thread of its own."""

    def __init__(self, sessions: Sessions, loop: asyncio.AbstractEventLoop, *, name: str, hello: Head) -> None:
        self._sessions, self._loop, self._number = sessions, loop, 0
        payload = bytes(make_frame({"session": name, "protocol": PROTOCOL, **hello}, {}))
        self._session, _, welcome = self._in_loop(self._enter(name, payload))
        said, _ = decode_frame(bytes(welcome))
        self._limit: int = said["limit"]
        self.welcome: dict[str, Any] = said["welcome"]

    async def _enter(self, name: str, payload: bytes | bytearray) -> tuple[Session, int, Frame]:
        session, stream, welcome = self._sessions.enter(name, payload)
        session.end = lambda _: None
        return session, stream, welcome

    def _in_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def exchange(self, head: Head, tensors: Params = NO_TENSORS) -> Message:
        """The server's answer."""
        number = self._number + 1
        request = make_frame({"sequence": number, "body": head}, tensors, limit=self._limit)
        self._number = number
        answer = self._in_loop(self._sessions.handle(self._session, bytes(request)))
        return read_answer(bytes(answer), number=number, limit=max(FRAME_LIMIT, self._limit))


class AcceptAll:
    """The policy that accepts everything."""

    def check_job(self, *_: object) -> None: ...
    def check_private(self, *_: object) -> None: ...
    def check_model(self, *_: object, is_own: bool, own: Params) -> None: ...
    def check_answer(self, *_: object) -> None: ...
    def check_final_model(self, *_: object, own: Params) -> None: ...
