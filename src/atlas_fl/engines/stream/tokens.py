"""One-time tokens: a certificate says who one is, a token that one was told to come, once.

Where another system starts the clients (a Flower federation, say), certificate and token reach a client in one message.
The first session that brings the token has it: the same session may come again after a cut, and whoever else holds a
copy of that message, at once or later, is refused.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atlas_fl.engines.stream.frames import Head
from atlas_fl.engines.stream.sessions import Admit
from atlas_fl.errors import ProtocolError


@dataclass(eq=False)
class _Issued:
    token: str
    session: str | None = None
    """Who brought it."""


@dataclass(eq=False)
class Tokens:
    """The token of every client, and the session that has used it."""

    _issued: dict[str, _Issued] = field(default_factory=dict)

    def issue(self, name: str) -> str:
        """A new token for this client; what it was given before is worth nothing from now on."""
        self._issued[name] = _Issued(secrets.token_urlsafe(32))
        return self._issued[name].token

    def redeem(self, name: str, hello: Mapping[str, Any]) -> None:
        """Nothing where the session that says this brings the client's token, first or again.

        Raises `ProtocolError` for no token, another's, one that was replaced, and one that another session has used.
        """
        issued, token, session = self._issued.get(name), str(hello.get("token")), str(hello.get("session"))
        if issued is None or not secrets.compare_digest(issued.token.encode(), token.encode()):
            raise ProtocolError(
                f"client {name!r} brings {'no token' if 'token' not in hello else 'a token that is not its own now'};"
                " a client of this server is started by what runs the server, with a token of its own"
            )
        if issued.session not in (None, session):
            raise ProtocolError(
                f"the token of client {name!r} was used already, and it lets one session in; if this client has never"
                " been in, somebody else has read its message: start the run again, over TLS"
            )
        issued.session = session

    def guard(self, admit: Admit) -> Admit:
        """`admit` for clients that bring their token."""

        def admitted(name: str, hello: Mapping[str, Any]) -> Head:
            welcome = admit(name, hello)
            self.redeem(name, hello)
            return welcome

        return admitted
