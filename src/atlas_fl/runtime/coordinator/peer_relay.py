"""Server halves that run at other clients, relayed by the server.

What server and host say to each other about guests, and what the server remembers of it.

The upper parts of guests at the clients that host them: the server hands on what both tell each other.

    guest -- question --> server -- question --> host -- answer --> server -- answer --> guest

Sites seldom can be reached from outside, so both ends are the streams that the sites have opened (ADR 14). What the
server holds of a guest's job is where it is; adapters and optimizer of the upper part are at the host, and come back
with its end. A host that goes takes them along: its guests find other hosts by the same rule, or the server, and begin
their jobs again there, so that no bit of the outcome depends on who hosts whom.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import torch

from atlas_fl.aggregation.strategies import check_update
from atlas_fl.client.job import Job, Update
from atlas_fl.client.local_training import trained_below
from atlas_fl.client.split_server import Payloads, Side, joined
from atlas_fl.errors import ProtocolError
from atlas_fl.params import PRIVATE, Params
from atlas_fl.runtime.coordinator.client_registry import Seat, printable
from atlas_fl.runtime.coordinator.split_server import GATHER_SECONDS, Suffixes
from atlas_fl.runtime.protocol.answer_schema import Asked, check_answer
from atlas_fl.runtime.protocol.client_metadata import veiled
from atlas_fl.runtime.protocol.messages import Told, job_message, read_payloads, read_update, write_payloads
from atlas_fl.runtime.transport.frames import FRAME_LIMIT, Head
from atlas_fl.runtime.transport.sessions import Message
from atlas_fl.split.channel import NORMS
from atlas_fl.split.codec import ROWS, read_message
from atlas_fl.split.host_matching import GuestRequirement, HostCapacity, HostMatch, match_hosts
from atlas_fl.storage.jsonl import to_json
from atlas_fl.storage.ledger import KINDS, Direction

ABOUT = "about"
"""The tensor that says whose upper part it is: JSON as bytes, since a head has its limit."""


@dataclass(eq=False)
class Lodging:
    """The upper part of one guest's job at its host."""

    id: str
    side: Side
    host: str
    action: str
    rows: int = 0
    """Tokens of the guest's newest message."""
    reads: int = 0
    """How many of them its head reads."""
    answer: "asyncio.Future[Message | None] | None" = None
    """What the guest waits for; None comes where its host has gone."""
    moved: bool = False
    ended: bool = False
    """The host has given it back, and holds nothing of it any more."""
    refused: str = ""
    """Why the host did not take it."""

    def take_note(self, payloads: Payloads) -> None:
        """How many rows the guest's message has; raises `ProtocolError` where it cannot be read."""
        if (message := payloads.get("0/activation")) is not None:
            opened = read_message(message)
            beside = opened.get("places", opened.get("lengths"))
            self.rows = len(opened.get(ROWS, ()))
            self.reads = 0 if beside is None else beside.numel()

    def check_answer(self, what: object, payloads: Payloads) -> None:
        """Nothing where this can be its host's answer to the guest, who goes on from it; else raises `ProtocolError`.

        A site ends for what no server would send, and this is another site's.
        """
        expected = {name: shape for name, shape in self._shapes(what).items() if shape[0]}
        if payloads.keys() != expected.keys():
            raise ProtocolError(f"it answers with {sorted(payloads)}; allowed: {sorted(expected)}")
        for name, shape in expected.items():
            found = read_message(payloads[name]).get(NORMS if name.endswith("control") else ROWS)
            if found is None or found.dtype is not torch.float32 or tuple(found.shape) != shape:
                raise ProtocolError(f"its {name} is not {shape} float32")

    def _shapes(self, what: object) -> dict[str, tuple[int, ...]]:
        job, backbone = self.side.job, self.side.site.backbone
        if what == "features":
            return {"0/activation": (self.reads, backbone.hidden)}
        if what not in ("loss", "gradient"):
            return {}
        names = [name for name in job.params if name != PRIVATE and not name.endswith(job.options.frozen)]
        below = len(trained_below(backbone, names, job.options, self.side.cut))
        clipped = job.options.clip > 0
        return {
            "0/gradient": (self.rows if below else 0, backbone.hidden),
            "0/control": (len(names) - below if clipped else 0,),
        }


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


OnNote: TypeAlias = Callable[[str], None]

HOSTING_SHARE = 0.25
"""Of a deadline, how long a host waits for the next question of its guests before it does its own job."""
ANSWER_SHARE = 0.4
"""Of a deadline, how long a guest waits for an answer of its host before it begins again with the server."""


class Hosts:
    """Who hosts whom while the jobs of one action are out; the methods of `Suffixes`, which has who finds no host."""

    def __init__(
        self,
        jobs: Sequence[Job],
        seats: Mapping[str, Seat],
        suffixes: Suffixes,
        *,
        patience: float,
        on_note: OnNote,
        answer_seconds: float | None = None,
    ) -> None:
        self._seats, self._suffixes, self._patience, self._on_note = seats, suffixes, patience, on_note
        self._answer_seconds = answer_seconds
        self._guests = {job.client: job.seat for job in jobs if isinstance(job.seat, GuestRequirement)}
        self._hosts = {job.client: job.seat for job in jobs if isinstance(job.seat, HostCapacity)}
        present = [own for name, own in self._hosts.items() if seats[name].here and not seats[name].given_up]
        self._pairs: dict[str, HostMatch] = match_hosts(self._guests.values(), present)
        self._lodgings: dict[int, Lodging] = {}
        self._inboxes = {name: Inbox() for name in self._hosts}
        self._numbers, self._closed = itertools.count(), False
        for name in self._hosts:
            lodged = seats[name].lodged
            seats[name].lodged = {guest: lodged[guest] for guest in self._of(name) if guest in lodged}

    def _of(self, host: str) -> list[str]:
        return [guest for guest, own in self._pairs.items() if own.host == host]

    def begin(self, number: int, action: str, job: Job) -> tuple[Job, Told]:
        """The job as the guest gets it, and what it is told of its cut; its upper part begins anew at its host."""
        host, suffixes, old = self._pairs[job.client].host, self._suffixes, self._lodgings.pop(number, None)
        if old is not None and not old.moved:
            self._inboxes[old.host].stale = True
        if host is None:
            return suffixes.begin(number, action, job)
        side = Side(job, suffixes.site)
        lodging = Lodging(f"{number}.{next(self._numbers)}", side, host, action)
        self._lodgings[number] = lodging
        seat, lodged = self._seats[job.client], self._seats[host].lodged
        assert seat.census is not None, "who has a job has registered"
        about = to_json({"census": asdict(veiled(seat.census)), "below": list(side.below.params)}).encode()
        above = replace(job, params=side.above)
        held = {key: model for key, model in lodged.items() if key == job.client}
        head, params = job_message(action, above, number=number, held=held)
        lodged[job.client] = head["model"]
        told = {**params, f"/{ABOUT}": torch.frombuffer(bytearray(about), dtype=torch.uint8)}
        self._tell(lodging, {**head, "kind": "begin", "client": job.client}, told)
        names, options = job.params, job.options
        places = trained_below(suffixes.site.backbone, names, options, side.cut) if action == "train" else []
        part = suffixes.part(side.cut.blocks)
        return side.below, Told(places=tuple(places), tokens=suffixes.site.max_tokens, part=part)

    def _tell(self, lodging: Lodging, head: Head, tensors: Params) -> None:
        self._inboxes[lodging.host].items.append(({**head, "half": lodging.id}, tensors))
        self._seats[lodging.host].woken.set()

    async def ask(self, number: int, head: Mapping[str, Any], tensors: Params) -> tuple[Head, Params] | None:
        """The host's answer to a guest's question; None where the guest has to begin again."""
        lodging = self._lodgings.get(number)
        if lodging is None:
            return await self._suffixes.ask(number, head, tensors)
        what = head.get("what")
        lodging.take_note(read_payloads(tensors))
        found = await self._asked(lodging, {"kind": "cut", "what": what, "done": head.get("done")}, tensors)
        if found is None:
            return None
        try:
            answer = self._counted(lodging, found[1], "down")
            lodging.check_answer(what, read_payloads(answer))
        except ProtocolError as error:
            self._leave(lodging, str(error))
            return None
        return {"kind": "cut"}, answer

    async def _asked(self, lodging: Lodging, head: Head, tensors: Params) -> Message | None:
        """The host's answer; None where there is none, and the guest begins again elsewhere."""
        if lodging.moved:
            return None
        lodging.answer = asyncio.get_running_loop().create_future()
        self._tell(lodging, head, self._counted(lodging, tensors, "up"))
        try:
            found = await asyncio.wait_for(lodging.answer, self._answer_seconds)
        except TimeoutError:
            self._leave(lodging, "it does not answer")
            return None
        if found is not None and "refused" in found[0]:
            # the guest's own fault is found by the server, to which it goes now
            self._leave(lodging, lodging.refused or str(found[0]["refused"]))
            return None
        return found

    def _leave(self, lodging: Lodging, reason: str) -> None:
        """Let the guest begin its job again with the server: what its host answers cannot be."""
        guest, host = lodging.side.job.client, lodging.host
        lodging.moved, self._inboxes[host].stale = True, True
        if lodging.answer is not None and not lodging.answer.done():
            lodging.answer.set_result(None)
        self._seats[host].lodged.pop(guest, None)
        self._pairs[guest] = replace(self._pairs[guest], host=None, reason=f"{host} was left")
        self._seats[host].woken.set()
        self._on_note(f"{guest} begins its job again with the server, and not with {host}: {printable(reason)}")

    def _counted(self, lodging: Lodging, tensors: Params, direction: Direction) -> Params:
        """What crosses the cut of these tensors, counted here, whatever the sites say of it."""
        payloads = read_payloads(tensors)
        for name, message in payloads.items():
            kind = next((kind for kind in KINDS if kind == name.partition("/")[2]), None)
            if kind is None:
                raise ProtocolError(f"{name!r:.40} came through a cut; install the same atlas-fl on both ends")
            lodging.side.crossed[kind, direction] += len(message)
        return write_payloads(payloads)

    async def finish(self, number: int, update: Update, tensors: Params) -> Update | None:
        """The whole update, of the guest's own and the host's part; None where the guest has to begin again."""
        lodging = self._lodgings.get(number)
        if lodging is None:
            whole = await self._suffixes.finish(number, update, tensors)
            return None if whole is None else replace(whole, hosted=self._pairs[update.client])
        if (found := await self._asked(lodging, {"kind": "end"}, tensors)) is None:
            return None
        side, seat = lodging.side, self._seats[update.client]
        assert seat.census is not None, "who has a job has registered"
        layers = len(side.site.backbone.blocks)
        asked = Asked(action=lodging.action, job=side.job, census=seat.census, num_layers=layers)
        try:
            own = read_update(*found, job=replace(side.job, params=side.above))
            if own.params is not side.above:
                check_update(side.above, own.params)
            whole = joined(side, update, own)
            check_answer(asked, whole)
        except ProtocolError as error:
            self._leave(lodging, str(error))
            return None
        lodging.ended = True
        return replace(whole, hosted=self._pairs[update.client])

    def drop(self, number: int, client: str) -> None:
        """Forget the upper part of a job that nobody waits for any more."""
        self._suffixes.drop(number, client)
        if (lodging := self._lodgings.pop(number, None)) is not None and not lodging.moved:
            self._inboxes[lodging.host].stale |= not lodging.ended
            self._seats[lodging.host].woken.set()

    async def next(self, seat: Seat) -> tuple[Head, Params] | None:
        """What this client is told as a host; None where it has no guest now, or none has asked for long."""
        inbox, loop = self._inboxes.get(seat.name), asyncio.get_running_loop()
        until = loop.time() + self._patience
        while inbox is not None and not self._closed and not seat.lost and seat.farewell is None:
            if inbox.stale or self._is_complete(seat.name, inbox):
                return self._taken(seat.name, inbox)
            if not inbox.items and not self._is_awaited(seat.name):
                return None
            seat.woken.clear()
            try:
                await asyncio.wait_for(seat.woken.wait(), GATHER_SECONDS if inbox.items else until - loop.time())
            except TimeoutError:
                return self._taken(seat.name, inbox) if inbox.items else None
        return None

    def _is_complete(self, host: str, inbox: Inbox) -> bool:
        """Whether all of its guests have asked; a beginning waits for nobody."""
        open_ = sum(own.host == host and not own.moved for own in self._lodgings.values())
        return any(head["kind"] == "begin" for head, _ in inbox.items) or 0 < open_ <= len(inbox.items)

    def _is_awaited(self, host: str) -> bool:
        """Whether a guest is here that may ask this host."""
        return any(self._seats[guest].here and self._seats[guest].work is not None for guest in self._of(host))

    def _taken(self, host: str, inbox: Inbox) -> tuple[Head, Params]:
        """The oldest items as one message, as many as a frame holds."""
        items, tensors, size = list[Head](), dict[str, torch.Tensor](), 0
        while inbox.items:
            head, own = inbox.items[0]
            size += sum(tensor.nbytes for tensor in own.values())
            if items and size > FRAME_LIMIT // 2:
                break
            inbox.items.pop(0)
            tensors |= {f"{len(items)}:{key}": tensor for key, tensor in own.items()}
            items.append(head)
        inbox.stale = False
        live = [own.id for own in self._lodgings.values() if own.host == host and not own.moved]
        return {"kind": "host", "items": items, "live": live, "guests": self._of(host)}, tensors

    def answered(self, host: str, head: Mapping[str, Any], tensors: Params) -> None:
        """Take a host's answers to the guests that wait for them."""
        items = head.get("items")
        waiting = {own.id: own for own in self._lodgings.values() if own.host == host and not own.moved}
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            for own in waiting.values():
                self._leave(own, "its answer holds no answers")
            raise ProtocolError("a host's answer holds no answers; install the same atlas-fl on both ends")
        for k, item in enumerate(items):
            lodging = waiting.get(str(item.get("half")))
            if lodging is not None and (lodging.answer is None or lodging.answer.done()):
                lodging.refused = str(item.get("refused", ""))
            elif lodging is not None and lodging.answer is not None:
                lodging.answer.set_result((item, dict(numbered(tensors, k))))

    def close(self) -> None:
        """Nobody waits for these jobs any more."""
        self._closed = True
        for name, inbox in self._inboxes.items():
            for head, _ in inbox.items:  # what was never sent is not there next time
                self._seats[name].lodged.pop(head.get("client", ""), None)

    def presence(self, name: str, here: bool) -> None:
        """A client has come or gone; the guests of a host that has gone find another one."""
        if (host := self._pairs[name].host if name in self._pairs else None) is not None:
            self._seats[host].woken.set()  # it need not wait for a guest that is not there
        if here or name not in self._hosts:
            return
        moved = [self._guests[guest] for guest in self._of(name) if self._seats[guest].work is not None]
        for lodging in self._lodgings.values():
            if lodging.host == name and not lodging.moved:
                lodging.moved = True
                if lodging.answer is not None and not lodging.answer.done():
                    lodging.answer.set_result(None)
        # the same process may come back with parts that have found another place by then
        self._inboxes[name].items.clear()
        self._seats[name].lodged.clear()
        self._inboxes[name].stale = True
        for guest, own in match_hosts(moved, self._rooms()).items():
            self._pairs[guest] = replace(own, reason=f"{name} dropped; {own.reason}")
            self._on_note(f"{name} is gone, and {guest} begins its job again with {own.host or 'the server'}")

    def _rooms(self) -> list[HostCapacity]:
        """The hosts that are here, with the memory that their guests leave."""
        taken: Counter[str] = Counter()
        for guest, own in self._pairs.items():
            if own.host is not None and self._seats[guest].work is not None:
                taken[own.host] += self._guests[guest].bytes
        return [
            replace(own, free_bytes=own.free_bytes - taken[name])
            for name, own in self._hosts.items()
            if self._seats[name].here
        ]


def hosts_of(
    jobs: Sequence[Job], seats: Mapping[str, Seat], suffixes: Suffixes | None, *, seconds: float, on_note: OnNote
) -> Hosts | None:
    """The pairs of these jobs, which may take so many seconds; None where clients do not compute for each other."""
    if suffixes is None or all(job.seat is None for job in jobs):
        return None
    return Hosts(
        jobs,
        seats,
        suffixes,
        patience=seconds * HOSTING_SHARE,
        on_note=on_note,
        answer_seconds=seconds * ANSWER_SHARE,
    )
