"""A token lets one session in, as often as its stream is cut, and nobody else."""

import asyncio

import pytest

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.transport.frames import encode_frame
from atlas_fl.runtime.transport.sessions import PROTOCOL, Sessions, Tokens


def test_a_token_lets_its_first_session_in_again_and_no_other() -> None:
    tokens = Tokens()
    token = tokens.issue("site-1")
    for _ in range(3):
        tokens.redeem("site-1", {"token": token, "session": "first"})
    with pytest.raises(ProtocolError, match=r"the token of client 'site-1' was used already, and it lets one session"):
        tokens.redeem("site-1", {"token": token, "session": "second"})


def test_a_token_is_of_one_client_and_of_one_invitation() -> None:
    tokens = Tokens()
    first, other = tokens.issue("site-1"), tokens.issue("site-2")
    assert len({first, other}) == 2
    with pytest.raises(ProtocolError, match="client 'site-1' brings a token that is not its own now"):
        tokens.redeem("site-1", {"token": other, "session": "first"})
    tokens.redeem("site-1", {"token": first, "session": "first"})
    newer = tokens.issue("site-1")
    with pytest.raises(ProtocolError, match="not its own now"):
        tokens.redeem("site-1", {"token": first, "session": "first"})
    tokens.redeem("site-1", {"token": newer, "session": "second"})


@pytest.mark.parametrize("hello", [{"session": "s"}, {"session": "s", "token": ""}, {"session": "s", "token": "é"}])
@pytest.mark.parametrize("name", ["site-1", "stranger"])
def test_without_its_token_nobody_enters(hello: dict[str, str], name: str) -> None:
    tokens = Tokens()
    tokens.issue("site-1")
    with pytest.raises(ProtocolError, match=f"client '{name}' brings (no token|a token that is not its own now);"):
        tokens.redeem(name, hello)


def test_a_server_with_tokens_refuses_a_copy_of_the_message_after_the_first_has_left() -> None:
    tokens, asked = Tokens(), []

    async def answer(*_: object) -> tuple[dict[str, object], dict[str, object]]:
        return {}, {}

    def admit(name: str, said: dict[str, str]) -> dict[str, str]:
        asked.append(name)
        tokens.redeem(name, said)
        return {"config": "c"}

    def hello(session: str, token: str) -> bytes:
        return encode_frame({"session": session, "protocol": PROTOCOL, "token": token}, {})

    async def script() -> None:
        sessions = Sessions(answer=answer, admit=admit, listed=lambda: {"site-1": None}, on_presence=lambda *_: None)
        token = tokens.issue("site-1")
        session, stream, _ = sessions.enter("site-1", hello("first", token))
        sessions.leave(session, stream)
        with pytest.raises(ProtocolError, match="was used already"):
            sessions.enter("site-1", hello("copy", token))
        again, stream, _ = sessions.enter("site-1", hello("first", token))
        assert (again, stream) == (session, 2)

    asyncio.run(script())
    assert asked == ["site-1"] * 3
