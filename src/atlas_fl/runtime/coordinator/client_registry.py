"""The clients as the server sees them: metadata, open job, missed deadlines and refused answers."""

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

MAX_REASON_LENGTH = 500
"""Most of a refusal that is noted."""
MAX_REFUSALS = 3
"""Answers of a client that are refused, before it is asked no more until it registers again."""
MAX_MISSED_DEADLINES = 2
"""Deadlines that a connected client lets pass, before it is asked no more until it is back."""
ANSWERS_UNTIL_FORGIVEN = 8
"""Answers that are taken, one after another, before deadlines and refusals are forgotten: one in between would not do,
or whoever is silent in training and scores at once is waited for in every round."""
MAX_PAUSE_ROUNDS = 8
"""Most rounds for which a client is not asked that was given up again and again."""


class SplitBackend(Protocol):
    """Where the upper parts of cut clients are, for one job each."""

    def begin_job(self, number: int, action: str, job: Job) -> tuple[Job, Told]:
        """The job as its client gets it, and what the client is told of its cut; its upper part begins anew."""
        ...

    async def answer_request(self, number: int, head: Mapping[str, Any], tensors: Params) -> tuple[Head, Params] | None:
        """The answer to a client's question about this job; None where the client has to begin it again."""
        ...

    async def finish_job(self, number: int, update: Update, tensors: Params) -> Update | None:
        """The whole update; None where the client has to begin the job again."""
        ...

    def drop_job(self, number: int, client: str) -> None:
        """Forget the upper part of a job that nobody waits for any more."""
        ...


@dataclass(eq=False)
class PendingJob:
    """What one client is asked."""

    number: int
    action: str
    job: Job
    """The whole client's."""
    future: asyncio.Future[Update | str]
    split_backend: "SplitBackend | None" = None
    """Where its upper blocks are, if it is cut."""
    client_job: Job | None = None
    """What a cut client was given of it; None before."""
    num_layers: int | None = None
    """Blocks of the backbone; None for whole models."""


@dataclass(eq=False)
class ClientProxy:
    """One client as the server sees it."""

    name: str
    metadata: Census | None = None
    device: Device | None = None
    part: int | None = None
    connected: bool = False
    given_up: bool = False
    """It let deadlines pass, or sent what was refused, and nobody waits for it until it is back."""
    missed_deadlines: int = 0
    """Deadlines that it let pass while it was here, until they are forgotten."""
    refusals: int = 0
    """Answers that were refused, until they are forgotten."""
    accepted_answers: int = 0
    """Answers that were taken since the last deadline or refusal."""
    pauses: int = 0
    """How often it was given up for either."""
    pause_reason: str = ""
    """For what it was the last time."""
    resume_round: int = 0
    """The round from which it is asked again."""
    removal_reason: str = ""
    """Why it will not come, or not again."""
    refusal_reason: str = ""
    """Why it was refused last."""
    pending_job: PendingJob | None = None
    sender: Sender = field(default_factory=AdapterSender)
    """What is sent to it, which depends on what its process has in memory."""
    hosted_digests: dict[str, str] = field(default_factory=dict)
    """By guest, the digest of the upper part that this client was given of it last as its host."""
    shutdown_message: tuple[Head, Params] | None = None
    shutdown_sent: bool = False
    """It was told that the run is over."""
    model_saved: bool = False
    """It has said that its model lies on its disk, and that is written down."""
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)


def check_registration(
    client: ClientProxy,
    metadata: Census,
    part: Any,
    clients: Iterable[ClientProxy],
    *,
    images: bool,
    is_late: bool,
    accepts_late: bool,
) -> None:
    """Nothing where this client may come, with this data; raises `ProtocolError` else.

    Its examples are such as the run trains on, and the clients of its task have its labels and other parts. Who comes
    to a plan that was made without it may do so where late clients are let in, and with any data.
    """
    if metadata.images is not images:
        kinds = {True: "images", False: "texts"}
        raise ProtocolError(
            f"{client.name} has {kinds[metadata.images]} (task {metadata.task!r}), and this run trains on"
            f" {kinds[images]}; give a --task of {kinds[images]}"
        )
    _check_task_peers(client, metadata, part, clients)
    _check_rejoin(client, metadata, is_late=is_late, accepts_late=accepts_late)


def _check_rejoin(client: ClientProxy, metadata: Census, *, is_late: bool, accepts_late: bool) -> None:
    if is_late:
        if not accepts_late:
            raise ProtocolError(f"this federation was planned without {client.name}; it can join the next one")
        client.removal_reason, client.given_up = "", False  # if it was turned away, that was as another
    elif client.metadata is not None and client.metadata != metadata:
        raise ProtocolError(f"{client.name} came back with other data than it had; join with the same --task")


def _check_task_peers(client: ClientProxy, metadata: Census, part: Any, clients: Iterable[ClientProxy]) -> None:
    for other in clients:
        if other is client or other.metadata is None or other.metadata.task != metadata.task:
            continue
        if not metadata.same_task(other.metadata):
            raise ProtocolError(
                f"{client.name} has labels {metadata.shown} for task {metadata.task!r}, {other.name} has"
                f" {other.metadata.shown}; clients of one task share its labels: rename the task or mend the data"
            )
        if part is not None and part == other.part:
            raise ProtocolError(f"part {part} of task {metadata.task!r} is with {other.name}; give another --part")


def describe_connected(clients: Collection[ClientProxy]) -> str:
    """How many of these are here, in words."""
    return f"{sum(client.connected and client.metadata is not None for client in clients)} of {len(clients)} here"


def registered_clients(
    clients: Sequence[ClientProxy], *, min_clients: int, seconds: float
) -> tuple[tuple[str, ...], str]:
    """Who of these has come, in their order, and in words who has not.

    Raises `ProtocolError` where fewer than `least` have, within the seconds that were waited.
    """
    registered = tuple(client.name for client in clients if client.metadata and not client.removal_reason)
    missing = ", ".join(
        f"{client.name} ({client.removal_reason})" if client.removal_reason else client.name
        for client in clients
        if client.name not in registered
    )
    if len(registered) < min_clients:
        within = "" if any(client.removal_reason for client in clients) else f" within {seconds:g} seconds"
        raise ProtocolError(
            f"{len(registered)} of {len(clients)} clients have come{within}, missing: {missing};"
            f" {min_clients} are needed: start them, raise --wait or lower --min-clients"
        )
    return registered, missing


def refusal_note(client: ClientProxy | None, name: str, reason: str) -> str | None:
    """What is noted of a refusal, with a client's words as a terminal may have them; None where it is no news."""
    if client is not None:
        previous, client.refusal_reason = (client.removal_reason, client.refusal_reason), reason
        if reason in previous:
            return None
    return f"{name} was refused: {printable_reason(reason)}"


def printable_reason(text: str) -> str:
    """What a client says as a terminal may have it."""
    return one_line(text, limit=MAX_REASON_LENGTH)


def record_missed_deadline(client: ClientProxy, *, round: int) -> None:
    """This client let a deadline pass: nobody waits again for who is away, or was silent too often.

    Who is given up again and again is asked again after more and more rounds.
    """
    client.missed_deadlines, client.accepted_answers = client.missed_deadlines + client.connected, 0
    if client.missed_deadlines >= MAX_MISSED_DEADLINES:
        _pause(client, f"it let {client.missed_deadlines} deadlines pass", round=round)
    client.given_up = not client.connected or client.missed_deadlines >= MAX_MISSED_DEADLINES


def record_refusal(client: ClientProxy, *, round: int) -> None:
    """An answer of this client was refused; after too many it is asked no more until it registers again."""
    client.refusals, client.accepted_answers = client.refusals + 1, 0
    if client.refusals >= MAX_REFUSALS:
        _pause(client, f"{client.refusals} of its answers were refused", round=round)


def record_accepted_answer(client: ClientProxy) -> None:
    """An answer of this client was taken."""
    client.accepted_answers += 1
    if client.accepted_answers >= ANSWERS_UNTIL_FORGIVEN:
        client.missed_deadlines = client.refusals = 0


def allow_retry(client: ClientProxy) -> None:
    """This client has registered anew: who was refused too often has one more answer before it is so again."""
    client.refusals = min(client.refusals, MAX_REFUSALS - 1)


def _pause(client: ClientProxy, reason: str, *, round: int) -> None:
    client.pauses, client.pause_reason = client.pauses + 1, reason
    client.resume_round = round + min(MAX_PAUSE_ROUNDS, 2 ** (client.pauses - 1))


def skip_reason(client: ClientProxy, *, round: int) -> str:
    """Why this client has no job in this round; empty where it gets one."""
    if client.refusals >= MAX_REFUSALS:
        return f"{client.refusals} of its answers were refused; it is asked again once it has registered anew"
    if client.given_up and client.connected:
        return f"it let {client.missed_deadlines} deadlines pass and is not asked again until it answers"
    if client.given_up:
        return client.removal_reason or "it has been away since it let a deadline pass"
    if round < client.resume_round:
        return f"{client.pause_reason}; it is asked again from round {client.resume_round} on"
    return ""
