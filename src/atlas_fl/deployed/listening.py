"""How a server is reached, and the hall in which its clients wait, for as long as it listens."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_fl.config import Config
from atlas_fl.deployed.halls import hall_of
from atlas_fl.engines.hall.hall import Hall
from atlas_fl.engines.stream.frames import Head
from atlas_fl.engines.stream.loops import Desk, LoopThread
from atlas_fl.engines.stream.server import Server, check_free
from atlas_fl.engines.stream.sessions import Admit, Sessions
from atlas_fl.engines.stream.tokens import Tokens
from atlas_fl.errors import ProtocolError
from atlas_fl.events import OnEvent
from atlas_fl.io.certs import Certs, Listed
from atlas_fl.sparse.choose import Mask

NOT_LISTED = "it is not listed any more"
"""Why a client is lost that was taken off the list while the server runs."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """How a server is reached and whom it waits for."""

    certs: Path
    """The folder `server` of `atlas certs make`."""
    host: str = "0.0.0.0"
    port: int = 8470
    """0 takes a free one."""
    min_clients: int = 0
    """Fewest clients that the plan and a round need; 0 for all that are listed."""
    wait_seconds: float = 600.0
    """How long the server waits for all of them before it begins with fewer, or gives up."""
    deadline_seconds: float = 600.0
    """How long a job may take."""
    tokens: Tokens | None = None
    """What clients bring beside their certificate; None where that is enough."""
    late: bool = True
    """Whether clients may join that come after the plan was made."""
    without: tuple[str, ...] = ()
    """Clients of the plan without which the run goes on."""
    beside: Callable[[Hall, Desk], AbstractContextManager[None]] = lambda *_: nullcontext()
    """Entered when the server listens and left when the run ends: whatever else starts and watches its clients."""


def _not_left_out(without: Collection[str], admit: Admit) -> Admit:
    """`admit` for all but the clients without which the run goes on."""

    def admitted(name: str, hello: Mapping[str, Any]) -> Head:
        if name in without:
            raise ProtocolError(f"the run goes on without {name}; who runs the server can let it in again")
        return admit(name, hello)

    return admitted


def _listed_again(hall: Hall, admit: Admit) -> Admit:
    """`admit`, which forgets that a client was taken off the list: who gets here is on it."""

    def admitted(name: str, hello: Mapping[str, Any]) -> Head:
        welcome = admit(name, hello)
        if hall.seats[name].lost == NOT_LISTED:
            hall.seats[name].lost = ""
        return welcome

    return admitted


def _lose(hall: Hall, desk: Desk, name: str) -> None:
    if name in hall.seats:
        desk.threads.submit(hall.lose(name, NOT_LISTED))


@contextmanager
def listening(
    config: Config,
    service: Service,
    certs: Certs,
    *,
    on_event: OnEvent,
    listed: tuple[str, ...],
    late: bool,
    mask: Mask | None = None,
) -> Iterator[tuple[Hall, Desk, str]]:
    """The hall of this config, the desk before it, and the address that it listens on.

    Raises `ConfigError` where the address cannot be listened on.
    """
    check_free(service.host, service.port)  # before the model is loaded, which may take minutes
    with LoopThread() as threads:
        desk = Desk(threads=threads, on_event=on_event)
        hall = hall_of(config, listed, desk, late=late, mask=mask)
        allowed = Listed(service.certs, on_note=desk.note)
        admit = _listed_again(hall, _not_left_out(service.without, hall.admit))
        sessions = Sessions(
            answer=hall.answer,
            admit=admit if service.tokens is None else service.tokens.guard(admit),
            allowed=allowed,
            certificate_of=allowed.certificate,
            on_presence=hall.on_presence,
            on_refused=hall.on_refused,
            on_unlisted=lambda name: _lose(hall, desk, name),
            limit_of=lambda _name: hall.most_bytes,
        )
        server = Server(sessions, certs, host=service.host, port=service.port)
        port = desk.call(server.start())
        try:
            yield hall, desk, f"{service.host}:{port}"
        finally:
            threads.call(server.stop())
