"""What server and host say to each other about guests, and what the server remembers of it."""

import asyncio
from dataclasses import dataclass, field

from atlas_fl.clients.cut.side import Side
from atlas_fl.engines.stream.frames import Head
from atlas_fl.engines.stream.sessions import Message
from atlas_fl.types import Params

ABOUT = "about"
"""The tensor that says whose upper part it is: JSON as bytes, since a head has its limit."""


@dataclass(eq=False)
class Lodging:
    """The upper part of one guest's job at its host."""

    id: str
    side: Side
    host: str
    answer: "asyncio.Future[Message | None] | None" = None
    """What the guest waits for; None comes where its host has gone."""
    moved: bool = False
    ended: bool = False
    """The host has given it back, and holds nothing of it any more."""
    refused: str = ""
    """Why the host did not take it."""


@dataclass(eq=False)
class Inbox:
    """What one host is to be told."""

    items: list[tuple[Head, Params]] = field(default_factory=list)
    stale: bool = False
    """It may hold parts that nobody asks for any more."""


def numbered(tensors: Params, place: int) -> Params:
    """The tensors of the item at this place of a message between server and host."""
    start = f"{place}:"
    return {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
