"""The seats of a hall: what the server knows of each client, and what it has asked it."""

import asyncio
from dataclasses import dataclass, field

from atlas_fl.clients.base import Job, Update
from atlas_fl.engines.census import Census
from atlas_fl.engines.frames import Head
from atlas_fl.engines.suffixes import Suffixes
from atlas_fl.ranks.devices import Device
from atlas_fl.types import Params


@dataclass(eq=False)
class Work:
    """What one client is asked."""

    number: int
    action: str
    job: Job
    """The whole client's."""
    future: asyncio.Future[Update | str]
    suffixes: Suffixes | None = None
    """Where its upper blocks are, if it is cut."""
    below: Job | None = None
    """What a cut client was given of it; None before."""


@dataclass(eq=False)
class Seat:
    """One client as the server sees it."""

    name: str
    census: Census | None = None
    device: Device | None = None
    part: int | None = None
    here: bool = False
    given_up: bool = False
    """It let a deadline pass and has not been here since; nobody waits for it."""
    lost: str = ""
    """Why it will not come, or not again."""
    work: Work | None = None
    held: dict[str, str] = field(default_factory=dict)
    """Digests of the models that its process has in memory: the last one that it got, and the last one it trained."""
    farewell: tuple[Head, Params] | None = None
    dismissed: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)
