"""The seats of a hall: what the server knows of each client, and what it has asked it."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from atlas_fl.clients.base import Job, Update
from atlas_fl.engines.census import Census
from atlas_fl.engines.frames import Head
from atlas_fl.engines.suffixes import Suffixes
from atlas_fl.errors import ProtocolError
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


def check_return(seat: Seat, census: Census, *, comes_late: bool, late: bool) -> None:
    """Nothing where this client may come, with this data; raises `ProtocolError` else.

    Who comes to a plan that was made without it may do so where late clients are let in, and with any data.
    """
    if comes_late:
        if not late:
            raise ProtocolError(f"this federation was planned without {seat.name}; it can join the next one")
        seat.lost, seat.given_up = "", False  # if it was turned away, that was as another
    elif seat.census is not None and seat.census != census:
        raise ProtocolError(f"{seat.name} came back with other data than it had; join with the same --task")


def check_fellows(seat: Seat, census: Census, part: Any, seats: Iterable[Seat]) -> None:
    """Nothing where the clients of this one's task have its labels and other parts; raises `ProtocolError` else."""
    for other in seats:
        if other is seat or other.census is None or other.census.task != census.task:
            continue
        if not census.same_task(other.census):
            raise ProtocolError(
                f"{seat.name} has labels {census.shown} for task {census.task!r}, {other.name} has"
                f" {other.census.shown}; clients of one task share its labels: rename the task or mend the data"
            )
        if part is not None and part == other.part:
            raise ProtocolError(f"part {part} of task {census.task!r} is with {other.name}; give another --part")
