"""Requests of a session, one after another."""

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from atlas_fl.errors import ProtocolError
from atlas_fl.params import Params
from atlas_fl.runtime.transport.frames import Head, decode_frame, encode_frame
from atlas_fl.runtime.transport.sessions import PROTOCOL, Sessions


def request(number: int) -> bytes:
    return encode_frame({"sequence": number, "body": {"kind": "next"}}, {"t": torch.zeros(1000)})


def test_requests_that_wait_do_not_pile_up_and_the_first_is_answered() -> None:
    """Each comes over a stream of its own, that of the one before has ended."""

    async def script() -> None:
        asked, ready = list[str](), asyncio.Event()

        async def answer(name: str, _head: Mapping[str, Any], _: Params) -> tuple[Head, Params]:
            asked.append(name)
            await ready.wait()
            return {}, {}

        sessions = Sessions(
            answer=answer, admit=lambda _name, _hello: {}, listed=lambda: {"a": None}, on_presence=lambda *_: None
        )
        hello = encode_frame({"session": "x", "protocol": PROTOCOL}, {})
        told = list[str]()
        for number in range(1, 21):
            session, stream, _ = sessions.enter("a", hello)
            waiting = asyncio.create_task(sessions.handle(session, request(number)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            waiting.cancel()
            try:
                await waiting
            except asyncio.CancelledError:
                assert number == 1
            except ProtocolError as error:
                told.append(str(error))
            sessions.leave(session, stream)
        assert asked == ["a"]
        assert told[0] == "request 2 came before request 1 was answered; allowed: request 1 again"
        assert len(told) == 19
        session, _, _ = sessions.enter("a", hello)
        again = asyncio.create_task(sessions.handle(session, request(1)))
        ready.set()
        assert decode_frame(bytes(await again))[0] == {"sequence": 1, "body": {}}
        assert decode_frame(bytes(await sessions.handle(session, request(2))))[0] == {"sequence": 2, "body": {}}

    asyncio.run(asyncio.wait_for(script(), 60))
