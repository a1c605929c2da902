"""The clients as the server sees them: metadata, open job, missed deadlines and refused answers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError, one_line
from atlas_fl.ranks.devices import Device
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.protocol.client_metadata import ClientMetadata, TaskLabels
from atlas_fl.runtime.protocol.model_sync import Sender
from atlas_fl.runtime.transport.frames import Message

MAX_REFUSALS = 3
"""Refused answers after which a client gets no jobs until it registers again."""
MAX_MISSED_DEADLINES = 2
"""Missed deadlines after which a connected client gets no jobs until it sends a request."""
ANSWERS_UNTIL_FORGIVEN = 8
"""Consecutive accepted answers that reset missed deadlines and refusals: after a single one, a client that never
trains but answers every evaluation would be waited for in every round."""
MAX_PAUSE_ROUNDS = 8
"""Longest pause of a client that failed again and again."""


@dataclass(eq=False)
class PendingJob:
    """A job that a client has not answered yet."""

    number: int
    action: str
    job: Job
    """The job of both halves."""
    future: asyncio.Future[Update | str]
    split_server: SplitServer | None = None
    """Computes the server half, if the client is cut."""
    client_job: Job | None = None
    """The half that a cut client was sent; None before."""


@dataclass(eq=False)
class ClientProxy:
    """One client as the server sees it."""

    name: str
    metadata: ClientMetadata | None = None
    device: Device | None = None
    connected: bool = False
    has_come: bool = False
    """It has connected at least once."""
    rejection: ProtocolError | None = None
    """The reason why it was turned away before the plan was made; it may register again, with other data."""
    given_up: bool = False
    """It missed deadlines or was removed, and gets no jobs until it sends a request."""
    missed_deadlines: int = 0
    """Deadlines missed while it was connected, since the last reset."""
    refusals: int = 0
    """Refused answers since the last reset."""
    accepted_answers: int = 0
    """Accepted answers since the last missed deadline or refusal."""
    pauses: int = 0
    """Number of pauses so far."""
    pause_reason: str = ""
    """Reason of the last pause."""
    resume_round: int = 0
    """The first round in which it gets jobs again."""
    removal_reason: str = ""
    """Reason of its removal; empty where it was not removed."""
    refusal_reason: str = ""
    """Reason of the last refusal of a request or connection."""
    pending_job: PendingJob | None = None
    sender: Sender = field(default_factory=Sender)
    """Encodes its jobs, given what its process has in memory."""
    shutdown_message: Message | None = None
    shutdown_sent: bool = False
    """It was sent its shutdown message."""
    model_saved: bool = False
    """It has confirmed that its model is saved, and that is recorded."""
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)

    def record_missed_deadline(self, *, round: int) -> None:
        """Record a missed deadline; after too many, or where the client is disconnected, it is given up.

        The pause after being given up doubles each time.
        """
        self.missed_deadlines += self.connected
        self.accepted_answers = 0
        if self.missed_deadlines >= MAX_MISSED_DEADLINES:
            self._pause(f"it let {self.missed_deadlines} deadlines pass", round=round)
        self.given_up = not self.connected or self.missed_deadlines >= MAX_MISSED_DEADLINES

    def record_refusal(self, *, round: int) -> None:
        """Record a refused answer; after too many the client gets no jobs until it registers again."""
        self.refusals += 1
        self.accepted_answers = 0
        if self.refusals >= MAX_REFUSALS:
            self._pause(f"{self.refusals} of its answers were refused", round=round)

    def record_accepted_answer(self) -> None:
        """Record an accepted answer; enough in a row reset missed deadlines and refusals."""
        self.accepted_answers += 1
        if self.accepted_answers >= ANSWERS_UNTIL_FORGIVEN:
            self.missed_deadlines = self.refusals = 0

    def allow_retry(self) -> None:
        """Allow a client that has registered anew one more answer, where too many were refused."""
        self.refusals = min(self.refusals, MAX_REFUSALS - 1)

    def _pause(self, reason: str, *, round: int) -> None:
        self.pauses += 1
        self.pause_reason = reason
        self.resume_round = round + min(MAX_PAUSE_ROUNDS, 2 ** (self.pauses - 1))

    def skip_reason(self, *, round: int) -> str:
        """The reason why this client has no job in this round; empty where it gets one."""
        if self.refusals >= MAX_REFUSALS:
            return f"{self.refusals} of its answers were refused; it is asked again once it has registered anew"
        if self.given_up and self.connected:
            return f"it let {self.missed_deadlines} deadlines pass and is not asked again until it answers"
        if self.given_up:
            return self.removal_reason or "it has been away since it let a deadline pass"
        if round < self.resume_round:
            return f"{self.pause_reason}; it is asked again from round {self.resume_round} on"
        return ""

    def describe_missing(self) -> str:
        """The name of a client that has not registered, with the reason where it is known."""
        if self.removal_reason:
            return f"{self.name} ({self.removal_reason})"
        if self.refusal_reason:
            return f"{self.name} (refused: {one_line(self.refusal_reason)})"
        if self.has_come:
            after = "is gone" if self.metadata is not None else "did not register; its own last line says why"
            return f"{self.name} (it was here and {after})"
        return self.name


CheckClient: TypeAlias = Callable[[str, ClientMetadata, Device], None]
"""(client, metadata, device): raises `ProtocolError` where such a client cannot take part, whoever the others are."""


def other_labels(name: str, metadata: ClientMetadata, labels: TaskLabels) -> ProtocolError:
    """The refusal of a client whose task has other labels in this run, which the server's log alone names."""
    own = f"{name} has labels {metadata.task_labels} for task {metadata.task!r}"
    remedy = "clients of one task share its labels: rename the task or mend the data"
    return ProtocolError(
        f"{own}, and in this run they are others; {remedy}",
        logged=f"{own}, and in this run they are {labels}; {remedy}",
    )


def disagreeing_clients(
    registered: Mapping[str, ClientMetadata], task_labels: Mapping[str, TaskLabels], *, one_head: bool, head: int | None
) -> dict[str, ProtocolError]:
    """By client, the reason why it cannot take part beside the other registered ones.

    The labels of a task are those in `task_labels`, or those of most of its clients; of equally many, of the client
    that is listed first. So no order of arrival decides, and no single client. With `one_head`, because one mask holds
    for the heads of all tasks, the same is done for the number of labels, which is `head` once there is a plan.
    """
    votes: dict[str, Counter[TaskLabels]] = {}
    for metadata in registered.values():
        votes.setdefault(metadata.task, Counter())[metadata.task_labels] += 1
    agreed = {**{task: counts.most_common(1)[0][0] for task, counts in votes.items()}, **task_labels}
    refused = {
        name: other_labels(name, metadata, agreed[metadata.task])
        for name, metadata in registered.items()
        if metadata.task_labels != agreed[metadata.task]
    }
    sizes = {name: metadata.num_labels for name, metadata in registered.items() if name not in refused}
    if one_head and sizes:
        size = head or Counter(sizes.values()).most_common(1)[0][0]
        refused |= {
            name: ProtocolError(
                f"{name} has {own} classes, and one mask holds for the heads of all clients of this run, which have"
                " another number; bring a task of as many"
            )
            for name, own in sizes.items()
            if own != size
        }
    return refused


def describe_connected(clients: Collection[ClientProxy]) -> str:
    """The number of these clients that are connected, in words."""
    return f"{sum(client.connected and client.metadata is not None for client in clients)} of {len(clients)} here"
