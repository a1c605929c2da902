"""The seats of a hall: what the server knows of each client, and what it has asked it."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError, one_line
from atlas_fl.params import Params
from atlas_fl.ranks.devices import Device
from atlas_fl.runtime.protocol.client_metadata import Census
from atlas_fl.runtime.protocol.messages import Told
from atlas_fl.runtime.protocol.model_sync import AdapterSender, Sender
from atlas_fl.runtime.transport.frames import Head

SHOWN_SIGNS = 500
"""Most of a refusal that is noted."""
MOST_REFUSALS = 3
"""Answers of a client that are refused, before it is asked no more until it registers again."""
MOST_SILENCES = 2
"""Deadlines that a connected client lets pass, before it is asked no more until it is back."""
MOST_TAKEN = 8
"""Answers that are taken, one after another, before deadlines and refusals are forgotten: one in between would not do,
or whoever is silent in training and scores at once is waited for in every round."""
LONGEST_PAUSE = 8
"""Most rounds for which a client is not asked that was given up again and again."""


class Upper(Protocol):
    """Where the upper parts of cut clients are, for one job each."""

    def begin(self, number: int, action: str, job: Job) -> tuple[Job, Told]:
        """The job as its client gets it, and what the client is told of its cut; its upper part begins anew."""
        ...

    async def ask(self, number: int, head: Mapping[str, Any], tensors: Params) -> tuple[Head, Params] | None:
        """The answer to a client's question about this job; None where the client has to begin it again."""
        ...

    async def finish(self, number: int, update: Update, tensors: Params) -> Update | None:
        """The whole update; None where the client has to begin the job again."""
        ...

    def drop(self, number: int, client: str) -> None:
        """Forget the upper part of a job that nobody waits for any more."""
        ...


@dataclass(eq=False)
class Work:
    """What one client is asked."""

    number: int
    action: str
    job: Job
    """The whole client's."""
    future: asyncio.Future[Update | str]
    suffixes: "Upper | None" = None
    """Where its upper blocks are, if it is cut."""
    below: Job | None = None
    """What a cut client was given of it; None before."""
    num_layers: int | None = None
    """Blocks of the backbone; None for whole models."""


@dataclass(eq=False)
class Seat:
    """One client as the server sees it."""

    name: str
    census: Census | None = None
    device: Device | None = None
    part: int | None = None
    here: bool = False
    given_up: bool = False
    """It let deadlines pass, or sent what was refused, and nobody waits for it until it is back."""
    silences: int = 0
    """Deadlines that it let pass while it was here, until they are forgotten."""
    refusals: int = 0
    """Answers that were refused, until they are forgotten."""
    taken: int = 0
    """Answers that were taken since the last deadline or refusal."""
    pauses: int = 0
    """How often it was given up for either."""
    paused: str = ""
    """For what it was the last time."""
    asked_from: int = 0
    """The round from which it is asked again."""
    lost: str = ""
    """Why it will not come, or not again."""
    refused: str = ""
    """Why it was refused last."""
    work: Work | None = None
    sender: Sender = field(default_factory=AdapterSender)
    """What is sent to it, which depends on what its process has in memory."""
    lodged: dict[str, str] = field(default_factory=dict)
    """By guest, the digest of the upper part that this client was given of it last as its host."""
    farewell: tuple[Head, Params] | None = None
    dismissed: bool = False
    """It was told that the run is over."""
    kept: bool = False
    """It has said that its model lies on its disk, and that is written down."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)


def check_entry(
    seat: Seat, census: Census, part: Any, seats: Iterable[Seat], *, images: bool, comes_late: bool, late: bool
) -> None:
    """Nothing where this client may come, with this data; raises `ProtocolError` else.

    Its examples are such as the run trains on, and the clients of its task have its labels and other parts. Who comes
    to a plan that was made without it may do so where late clients are let in, and with any data.
    """
    if census.images is not images:
        kinds = {True: "images", False: "texts"}
        raise ProtocolError(
            f"{seat.name} has {kinds[census.images]} (task {census.task!r}), and this run trains on {kinds[images]};"
            f" give a --task of {kinds[images]}"
        )
    _check_fellows(seat, census, part, seats)
    _check_return(seat, census, comes_late=comes_late, late=late)


def _check_return(seat: Seat, census: Census, *, comes_late: bool, late: bool) -> None:
    if comes_late:
        if not late:
            raise ProtocolError(f"this federation was planned without {seat.name}; it can join the next one")
        seat.lost, seat.given_up = "", False  # if it was turned away, that was as another
    elif seat.census is not None and seat.census != census:
        raise ProtocolError(f"{seat.name} came back with other data than it had; join with the same --task")


def _check_fellows(seat: Seat, census: Census, part: Any, seats: Iterable[Seat]) -> None:
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


def count_here(seats: Collection[Seat]) -> str:
    """How many of these are here, in words."""
    return f"{sum(seat.here and seat.census is not None for seat in seats)} of {len(seats)} here"


def present(seats: Sequence[Seat], *, least: int, seconds: float) -> tuple[tuple[str, ...], str]:
    """Who of these has come, in their order, and in words who has not.

    Raises `ProtocolError` where fewer than `least` have, within the seconds that were waited.
    """
    come = tuple(seat.name for seat in seats if seat.census and not seat.lost)
    missing = ", ".join(f"{s.name} ({s.lost})" if s.lost else s.name for s in seats if s.name not in come)
    if len(come) < least:
        within = "" if any(seat.lost for seat in seats) else f" within {seconds:g} seconds"
        raise ProtocolError(
            f"{len(come)} of {len(seats)} clients have come{within}, missing: {missing};"
            f" {least} are needed: start them, raise --wait or lower --min-clients"
        )
    return come, missing


def refusal(seat: Seat | None, name: str, reason: str) -> str | None:
    """What is noted of a refusal, with a client's words as a terminal may have them; None where it is no news."""
    if seat is not None:
        known, seat.refused = (seat.lost, seat.refused), reason
        if reason in known:
            return None
    return f"{name} was refused: {printable(reason)}"


def printable(text: str) -> str:
    """What a client says as a terminal may have it."""
    return one_line(text, limit=SHOWN_SIGNS)


def note_silence(seat: Seat, *, round: int) -> None:
    """This client let a deadline pass: nobody waits again for who is away, or was silent too often.

    Who is given up again and again is asked again after more and more rounds.
    """
    seat.silences, seat.taken = seat.silences + seat.here, 0
    if seat.silences >= MOST_SILENCES:
        _pause(seat, f"it let {seat.silences} deadlines pass", round=round)
    seat.given_up = not seat.here or seat.silences >= MOST_SILENCES


def note_refusal(seat: Seat, *, round: int) -> None:
    """An answer of this client was refused; after too many it is asked no more until it registers again."""
    seat.refusals, seat.taken = seat.refusals + 1, 0
    if seat.refusals >= MOST_REFUSALS:
        _pause(seat, f"{seat.refusals} of its answers were refused", round=round)


def note_taken(seat: Seat) -> None:
    """An answer of this client was taken."""
    seat.taken += 1
    if seat.taken >= MOST_TAKEN:
        seat.silences = seat.refusals = 0


def forgive(seat: Seat) -> None:
    """This client has registered anew: who was refused too often has one more answer before it is so again."""
    seat.refusals = min(seat.refusals, MOST_REFUSALS - 1)


def _pause(seat: Seat, reason: str, *, round: int) -> None:
    seat.pauses, seat.paused = seat.pauses + 1, reason
    seat.asked_from = round + min(LONGEST_PAUSE, 2 ** (seat.pauses - 1))


def why_not_asked(seat: Seat, *, round: int) -> str:
    """Why this client has no job in this round; empty where it gets one."""
    if seat.refusals >= MOST_REFUSALS:
        return f"{seat.refusals} of its answers were refused; it is asked again once it has registered anew"
    if seat.given_up and seat.here:
        return f"it let {seat.silences} deadlines pass and is not asked again until it answers"
    if seat.given_up:
        return seat.lost or "it has been away since it let a deadline pass"
    if round < seat.asked_from:
        return f"{seat.paused}; it is asked again from round {seat.asked_from} on"
    return ""
