"""The server's side of connected clients: who is there, jobs and answers, late clients, shutdown.

Where a server's clients wait for work: who is here, what each was asked, and what has come back.

A client asks ("register", "next", "result") and is answered when there is something for it to do. A job is its
client's until the answer is in: whoever comes back with the same certificate, be it a new process, gets it again.

Clients that come to a hall whose plan was made without them.

How the clients of a hall are told that it is over, and when their models lie on their disks.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError, short_repr
from atlas_fl.params import Params
from atlas_fl.runtime.coordinator.client_registry import (
    MOST_REFUSALS,
    Seat,
    Upper,
    Work,
    check_entry,
    count_here,
    forgive,
    note_refusal,
    note_silence,
    note_taken,
    present,
    printable,
    refusal,
    why_not_asked,
)
from atlas_fl.runtime.coordinator.peer_relay import Hosts, hosts_of
from atlas_fl.runtime.coordinator.split_server import Suffixes
from atlas_fl.runtime.protocol.answer_schema import Asked, check_answer
from atlas_fl.runtime.protocol.client_metadata import read_census, read_device
from atlas_fl.runtime.protocol.messages import Identity
from atlas_fl.runtime.protocol.model_sync import AdapterSender, NewSender
from atlas_fl.runtime.transport.frames import FRAME_LIMIT, Head
from atlas_fl.runtime.transport.sessions import MOST_TOLD, NO_TENSORS, Refusals

KEPT_SECONDS = 5.0
"""How long a client that has its model waits for a server that has only begun to listen."""
REQUESTS = ("register", "next", "result", "failed", "cut", "hosted", "kept")
"""The kinds of what a client may say."""
WITHOUT_TENSORS = ("register", "next", "kept")
"""Those that wait without a job: what came with them would lie in memory for as long."""


class Hall:
    """All seats. Its methods run in one loop."""

    def __init__(
        self,
        names: Sequence[str],
        identity: Identity,
        *,
        settings: str,
        on_note: Callable[[str], None],
        late: bool = False,
        new_sender: NewSender = AdapterSender,
        images: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_sender, self._images = new_sender, images
        self.seats = {name: Seat(name, sender=new_sender()) for name in names}
        self.planned: set[str] | None = None  # who is in the plan, once there is one
        self._identity, self._settings, self._on_note, self._late = identity, settings, on_note, late
        self._numbers, self._changed = 0, asyncio.Condition()
        self._hosts: Hosts | None = None
        self._presence = Refusals(tell=lambda name, told: on_note(f"{name} {told}"), clock=clock)
        self.on_kept: Callable[[str], None] = lambda _: None
        """Told of a client whose model lies on its disk; raises `ProtocolError` where that cannot be written down."""
        self.most_bytes = FRAME_LIMIT
        """Most bytes of a client's request."""

    def admit(self, name: str, hello: Mapping[str, Any]) -> Head:
        """What the server says to a client that knocks; raises `ProtocolError` where they do not belong together."""
        self._identity.check(name, hello)
        # it may have been listed after the server was started
        self.seats.setdefault(name, Seat(name, sender=self._new_sender()))
        return {**vars(self._identity), "settings": self._settings}

    def on_presence(self, name: str, here: bool) -> None:
        """A stream of this client has begun or ended."""
        seat = self.seats[name]
        seat.here = here
        if here:
            seat.given_up = False
        if self._hosts is not None:
            self._hosts.presence(name, here)
        if seat.census is not None and not seat.dismissed:
            told = f"is {'back' if here else 'gone'} ({count_here(self.seats.values())})"
            self._presence.add(name, told, most=MOST_TOLD)
        self._presence.look()

    def on_refused(self, name: str, reason: str) -> None:
        """A client, or who would be one, was told that it may not come, and why."""
        if line := refusal(self.seats.get(name), name, reason):
            self._on_note(line)

    async def answer(self, name: str, head: Mapping[str, Any], tensors: Params) -> tuple[Head, Params]:
        """The answer to a client's request: its next job, as soon as there is one."""
        seat = self.seats[name]
        if head.get("kind") not in REQUESTS:
            raise ProtocolError(f"{name} says {short_repr(head.get('kind'))}; allowed: {', '.join(REQUESTS)}")
        if tensors and head.get("kind") in WITHOUT_TENSORS:
            raise ProtocolError(
                f"a request {head['kind']!r} of {name} has tensors; only an answer to a job may bring them"
            )
        if head.get("kind") == "register":
            await self._register(seat, head)
        elif head.get("kind") == "kept":
            return await self._kept(seat, head)
        elif seat.census is None:
            return {"kind": "register"}, NO_TENSORS  # the server was started again and knows nobody
        elif head.get("kind") == "cut" and (answer := await self._crossed(seat, head, tensors)) is not None:
            return answer
        elif head.get("kind") == "hosted" and self._hosts is not None:
            self._hosts.answered(name, head, tensors)
        elif head.get("kind") in ("result", "failed"):
            await self._accept(seat, head, tensors)
            if head.get("leaves") is True:
                return {"kind": "left"}, NO_TENSORS
        return await self._next(seat)

    async def _next(self, seat: Seat) -> tuple[Head, Params]:
        """What there is for this client to do, as soon as there is something."""
        seat.given_up = bool(seat.lost)  # it is here and ready
        while True:
            if seat.lost:
                raise ProtocolError(seat.lost)
            if seat.farewell is not None:
                seat.dismissed = True
                return seat.farewell
            if self._hosts is not None and (told := await self._hosts.next(seat)) is not None:
                return told
            if seat.work is not None:
                return self._handed(seat, seat.work)
            seat.woken.clear()
            await seat.woken.wait()

    async def _kept(self, seat: Seat, head: Mapping[str, Any]) -> tuple[Head, Params]:
        """What a client is told whose model lies on its disk: that this is known here, or that another one is its own.

        It may say so before it is registered: it was killed then, and needs nothing any more.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEPT_SECONDS):
                while seat.farewell is None:
                    seat.woken.clear()
                    await seat.woken.wait()
        named = None if seat.farewell is None else seat.farewell[0].get("sha256")
        if named is None or head.get("sha256") != named:
            return {"kind": "another"}, NO_TENSORS
        if not seat.kept:
            self.on_kept(seat.name)
        seat.dismissed = seat.kept = True
        return {"kind": "over"}, NO_TENSORS

    async def _crossed(self, seat: Seat, head: Mapping[str, Any], tensors: Params) -> tuple[Head, Params] | None:
        """The answer to a question of a cut client; None where nobody waits for that job any more."""
        work = seat.work
        if work is None or work.suffixes is None or head.get("number") != work.number:
            return None
        try:
            answer = await work.suffixes.ask(work.number, head, tensors)
        except ProtocolError as error:
            note_refusal(seat, round=work.job.round)
            self._ended(seat, work, f"its question was refused: {printable(str(error))}")
            raise
        return answer if seat.work is work else None

    def _handed(self, seat: Seat, work: Work) -> tuple[Head, Params]:
        job, told = work.job, None
        if job.cut is not None and work.suffixes is not None:
            # Whoever gets it, for the first time or again, begins at its start, and so does the half here.
            job, told = work.suffixes.begin(work.number, work.action, job)
            work.below = job
        return seat.sender.job(work.action, job, number=work.number, told=told)

    async def _register(self, seat: Seat, head: Mapping[str, Any]) -> None:
        self._identity.check(seat.name, head)
        census, device, part = read_census(head), read_device(str(head.get("device"))), head.get("part")
        comes_late = self.planned is not None and seat.name not in self.planned
        check_entry(
            seat, census, part, self.seats.values(), images=self._images, comes_late=comes_late, late=self._late
        )
        is_new, seat.census, seat.device = seat.census is None, census, device
        seat.sender.forget()
        forgive(seat)
        seat.part, seat.lodged = part if type(part) is int else None, {}
        if is_new:
            many, here = census.examples["train"], count_here(self.seats.values())
            self._on_note(f"{seat.name}: {census.task}, {many} training examples, {device.name} ({here})")
            if comes_late:
                self._on_note(f"{seat.name} came after the plan was made and joins before the next round")
        async with self._changed:
            self._changed.notify_all()

    async def _accept(self, seat: Seat, head: Mapping[str, Any], tensors: Params) -> None:
        """Take this answer to the client's job, or refuse it; raises `ProtocolError` where that was too often."""
        work = seat.work
        if work is None or head.get("number") != work.number:
            # It answers what nobody waits for any more, and what it holds is unknown here.
            seat.sender.forget()
            return
        if head["kind"] == "failed":
            self._ended(seat, work, printable(str(head.get("reason"))))
            return
        try:
            if (update := await self._read(seat, work, head, tensors)) is not None:
                note_taken(seat)
                self._ended(seat, work, update)
        except ProtocolError as error:
            seat.sender.forget()
            note_refusal(seat, round=work.job.round)
            self._ended(seat, work, f"its answer was refused: {printable(str(error))}")
            if seat.refusals >= MOST_REFUSALS:
                raise ProtocolError(
                    f"{seat.refusals} answers of {seat.name} were refused, the last of {work.action}: {error}; mend"
                    " it and join again"
                ) from None

    async def _read(self, seat: Seat, work: Work, head: Mapping[str, Any], tensors: Params) -> Update | None:
        """The whole update that this answer is or ends; None where the client has to begin its job again.

        Raises `ProtocolError` where it is none, or not one to this job (`messages.answer_schema`).
        """
        # what crosses a cut is counted here, whatever the site says of it
        job = work.below or work.job
        update: Update | None = replace(seat.sender.update(work.action, head, tensors, job=job), crossed={})
        if work.suffixes is not None and work.below is not None and update is not None:
            update = await work.suffixes.finish(work.number, update, tensors)
        if update is not None:
            assert seat.census is not None, "who has a job has registered"
            asked = Asked(action=work.action, job=work.job, census=seat.census, num_layers=work.num_layers)
            check_answer(asked, update)
        return update

    def _ended(self, seat: Seat, work: Work, found: Update | str) -> None:
        """Nobody waits for this work any more."""
        if work.suffixes is not None:
            work.suffixes.drop(work.number, work.job.client)
        if seat.work is work:
            seat.work = None
        if not work.future.done():
            work.future.set_result(found)

    async def gather(self, wanted: Sequence[str], *, least: int, seconds: float) -> tuple[str, ...]:
        """Who of the wanted has come, in their order: all, or after so many seconds at least `least` of them.

        Raises `ProtocolError` where fewer have come.
        """
        seats = [self.seats[name] for name in wanted]

        def decided() -> bool:
            lost = sum(bool(seat.lost) for seat in seats)
            return len(seats) - lost < least or all(seat.lost or seat.census for seat in seats)

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(decided), seconds)
        come, missing = present(seats, least=least, seconds=seconds)
        if missing:
            self._on_note(f"begins without {missing}")
        self.planned = set(come)
        return come

    async def work(
        self,
        action: str,
        jobs: Sequence[Job],
        *,
        seconds: float,
        on_done: Callable[[int], None],
        suffixes: Suffixes | None = None,
    ) -> list[Update | str]:
        """The update of every job, or why there is none, in their order, after at most so many seconds.

        The upper blocks of jobs with a cut are in `suffixes`.
        """
        self._presence.look()
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in jobs]
        num_layers = None if suffixes is None else len(suffixes.site.backbone.blocks)
        self._hosts = hosts_of(jobs, self.seats, suffixes, seconds=seconds, on_note=self._on_note)
        for job, future in zip(jobs, futures, strict=True):
            self._give(action, job, future, self._hosts or suffixes, num_layers=num_layers)
        waiting, until = {future for future in futures if not future.done()}, loop.time() + seconds
        while waiting and loop.time() < until:
            _, waiting = await asyncio.wait(waiting, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            on_done(len(futures) - len(waiting))
        for job, future in zip(jobs, futures, strict=True):
            seat = self.seats[job.client]
            if not future.done() and seat.work is not None:
                note_silence(seat, round=job.round)
                self._ended(seat, seat.work, f"no answer within {seconds:g} seconds")
        if self._hosts is not None:
            self._hosts.close()
        return [future.result() for future in futures]

    def _give(
        self,
        action: str,
        job: Job,
        future: asyncio.Future[Update | str],
        suffixes: Upper | None,
        *,
        num_layers: int | None,
    ) -> None:
        seat = self.seats[job.client]
        if reason := why_not_asked(seat, round=job.round):
            future.set_result(reason)
            if suffixes is not None:
                suffixes.drop(0, job.client)
            return
        self._numbers += 1
        seat.work = Work(self._numbers, action, job, future, suffixes, num_layers=num_layers)
        seat.woken.set()

    async def lose(self, name: str, reason: str) -> None:
        """Wait for this client no more, and send it away with this reason where it asks."""
        seat = self.seats[name]
        seat.lost, seat.given_up = reason, True
        seat.woken.set()
        if seat.work is not None:
            self._ended(seat, seat.work, reason)
        async with self._changed:
            self._changed.notify_all()


async def newcomers(hall: Hall) -> tuple[Seat, ...]:
    """Who is here and in no plan, in the order in which the names were listed."""
    known = hall.planned or set()
    return tuple(
        seat for name, seat in hall.seats.items() if seat.here and seat.census and not seat.lost and name not in known
    )


async def let_in(hall: Hall, name: str) -> None:
    """This client is in the plan from now on."""
    hall.planned = {*(hall.planned or ()), name}


async def leave_out(hall: Hall, name: str) -> None:
    """The plan is made without this client, which may join later as any other that comes late."""
    hall.planned = (hall.planned or set()) - {name}


async def turn_away(hall: Hall, name: str, reason: str) -> None:
    """Tell a newcomer why it cannot join; it may come again, with other data or another device."""
    await hall.lose(name, f"{name} cannot join: {reason}")
    hall.seats[name].census = None


async def dismiss(
    hall: Hall,
    models: Mapping[str, Params],
    *,
    seconds: float,
    writing_seconds: float = 0.0,
    reason: str | None = None,
    awaited: Collection[str] = (),
) -> None:
    """Tell everyone that it is over, each with its model, or the reason why there is none.

    Waits so long for those who are here to hear it and to go, and for the `awaited` to come and to have their models on
    their disks; for those who are writing them at least `writing_seconds`. `hall.on_kept` is told who has: before it
    says so a client may be killed, and a stream that the server ends could take the last message with it.
    """
    for name, seat in hall.seats.items():
        seat.farewell = _farewell(seat, models.get(name), reason=reason)
        seat.woken.set()
    began = asyncio.get_running_loop().time()
    while not _over(hall.seats, awaited):
        waited = asyncio.get_running_loop().time() - began
        if waited >= seconds and not (waited < writing_seconds and _writing(hall.seats.values())):
            return
        await asyncio.sleep(0.02)


def _over(seats: Mapping[str, Seat], awaited: Collection[str]) -> bool:
    present = (seat for seat in seats.values() if seat.here and not seat.given_up)
    here = any(seat.census is not None or seat.kept for seat in present)
    return not here and all(seats[name].kept or seats[name].lost for name in awaited)


def _writing(seats: Iterable[Seat]) -> bool:
    """Whether somebody has been given its model and has not said that it is written."""
    return any(seat.here and seat.dismissed and not seat.kept and _has_model(seat) for seat in seats)


def _has_model(seat: Seat) -> bool:
    return seat.farewell is not None and seat.farewell[0].get("model") is True


def _farewell(seat: Seat, model: Params | None, *, reason: str | None) -> tuple[Head, Params]:
    """What a client is told at the end: its model, or why there is none."""
    if reason is not None:
        return {"kind": "ended", "reason": reason}, NO_TENSORS
    return ({"kind": "done", "model": False}, NO_TENSORS) if model is None else seat.sender.farewell(model)
