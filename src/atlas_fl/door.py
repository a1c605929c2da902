"""The door of a run that has begun: who waits to join it, and what they are told."""

from collections.abc import Callable
from dataclasses import dataclass

from atlas_fl.clients.base import ClientTokens
from atlas_fl.errors import AtlasError
from atlas_fl.ranks.devices import Device
from atlas_fl.tasks.clients import ClientData


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """A client that the plan knows nothing of."""

    client: ClientData
    device: Device
    tokens: ClientTokens | None = None
    """None of clients that train whole models, which take their data as they are."""


def _nobody(_round: int) -> tuple[Newcomer, ...]:
    return ()


def _anyone(_name: str) -> None:
    return None


def _stop(_name: str, error: AtlasError) -> None:
    raise error


@dataclass(frozen=True, kw_only=True)
class Door:
    """How a run learns who came late; in a simulation its config says so, and what cannot be ends it."""

    waiting: Callable[[int], tuple[Newcomer, ...]] = _nobody
    """(round) -> who would take part from this round on."""
    let_in: Callable[[str], None] = _anyone
    """Told of everyone who is in the plan from now on."""
    turn_away: Callable[[str, AtlasError], None] = _stop
    """Told (client, reason) of everyone who cannot be in it."""
    leave_out: Callable[[str, AtlasError], None] = _stop
    """Told (client, reason) of everyone without whose answers the plan is made; it may join later."""


CLOSED = Door()
