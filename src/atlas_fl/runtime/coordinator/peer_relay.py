"""Server halves of weak clients (guests) run at strong clients (hosts); the server relays messages.

    guest -- request --> server -- request --> host -- answer --> server -- answer --> guest

Sites can seldom be reached from outside, so both ends are streams that the sites have opened (ADR 14). The server knows
where a guest's server half is; its adapters and optimizer are at the host and come back when the job ends. Where a host
disconnects, does not answer or answers nonsense, its guests begin their jobs again with the server, and get hosts again
with the next jobs: results do not depend on who hosts whom.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from atlas_fl.aggregation.update_checks import check_update
from atlas_fl.client.job import Job, Update
from atlas_fl.client.local_training import client_side_indices, trained_names
from atlas_fl.client.split_server import CutMessages, Payloads, merge_updates
from atlas_fl.errors import ProtocolError, one_line
from atlas_fl.params import Params, digest
from atlas_fl.runtime.coordinator.client_registry import ClientProxy
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.protocol.answer_schema import AnsweredRequest, check_answer
from atlas_fl.runtime.protocol.client_metadata import redacted_metadata
from atlas_fl.runtime.protocol.messages import (
    CutInfo,
    job_head,
    model_message,
    read_payloads,
    read_update,
    write_payloads,
)
from atlas_fl.runtime.transport.frames import Head
from atlas_fl.split.channel import NORMS
from atlas_fl.split.codec import ROWS, read_message
from atlas_fl.split.host_matching import GuestRequirement, HostCapacity, HostMatch, match_hosts
from atlas_fl.storage.jsonl import to_json
from atlas_fl.storage.ledger import KINDS, Direction

GUEST_INFO = "about"
"""The message that describes the guest of a server half: JSON beside the head, which has a size limit."""


@dataclass(eq=False)
class HostedTask:
    """The server half of one guest's job at its host."""

    id: str
    side: CutMessages
    host: str
    request: AnsweredRequest
    """The guest's whole job, which the update of both halves answers."""
    num_tokens: int = 0
    """Tokens of the guest's newest message."""
    num_outputs: int = 0
    """Positions of it that the guest's head reads."""
    answer: "asyncio.Future[tuple[Head, Params] | None] | None" = None
    """The host's answer that the guest waits for; None where the host was left."""
    left: bool = False
    """The host is not asked any more."""

    def leave(self) -> None:
        """Ask the host no more; a guest that waits for its answer begins again."""
        self.left = True
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(None)

    def record_shape(self, payloads: Payloads) -> None:
        """Record the size of the guest's message; raises `ProtocolError` where it cannot be read."""
        if (message := payloads.get("0/activation")) is not None:
            tensors = read_message(message)
            positions = tensors.get("places", tensors.get("lengths"))
            self.num_tokens = len(tensors.get(ROWS, ()))
            self.num_outputs = 0 if positions is None else positions.numel()

    def check_answer(self, what: object, payloads: Payloads) -> None:
        """Raise `ProtocolError` where the host's answer does not have the shapes that the guest needs.

        A site stops on an answer that no server would send, and this one is another site's.
        """
        expected = {name: shape for name, shape in self._expected_shapes(what).items() if shape[0]}
        if payloads.keys() != expected.keys():
            raise ProtocolError(f"it answers with {sorted(payloads)}; allowed: {sorted(expected)}")
        for name, shape in expected.items():
            tensor = read_message(payloads[name]).get(NORMS if name.endswith("control") else ROWS)
            if tensor is None or tensor.dtype is not torch.float32 or tuple(tensor.shape) != shape:
                raise ProtocolError(f"its {name} is not {shape} float32")

    def _expected_shapes(self, what: object) -> dict[str, tuple[int, ...]]:
        job = self.side.job
        backbone = self.side.site.backbone
        if what == "features":
            return {"0/activation": (self.num_outputs, backbone.hidden)}
        if what not in ("loss", "gradient"):
            return {}
        names = trained_names(job.params, job.options)
        num_below = len(client_side_indices(backbone, names, job.options, self.side.cut))
        tells_norms = job.options.clip > 0 or self.side.site.fp16
        return {
            "0/gradient": (self.num_tokens if num_below else 0, backbone.hidden),
            "0/control": (len(names) - num_below if tells_norms else 0,),
        }


@dataclass(frozen=True, eq=False)
class Question:
    """One message to a host; it has one at a time."""

    task: HostedTask
    message: tuple[Head, Params]
    answer: "asyncio.Future[tuple[Head, Params] | None] | None"
    """The guest waits for it; None where it does not."""


HOST_WAIT_FRACTION = 0.25
"""Share of a deadline that a host waits for the next request of its guests before it gets its own job."""
ANSWER_WAIT_FRACTION = 0.4
"""Share of a deadline that a guest waits for its host before it begins again with the server."""


class PeerRelay:
    """Server halves for the jobs of one action: of guests with a host at that host, of others at the `SplitServer`."""

    def __init__(
        self,
        jobs: Sequence[Job],
        clients: Mapping[str, ClientProxy],
        split_server: SplitServer,
        *,
        seconds: float,
        on_note: Callable[[str], None],
    ) -> None:
        self._clients = clients
        self._split_server = split_server
        self._on_note = on_note
        self._seconds = seconds
        self._tasks: dict[int, HostedTask] = {}
        self._task_numbers = itertools.count()
        self._closed = False
        guests = [job.hosting for job in jobs if isinstance(job.hosting, GuestRequirement)]
        hosts = [job.hosting for job in jobs if isinstance(job.hosting, HostCapacity)]
        available = [host for host in hosts if clients[host.name].connected and not clients[host.name].given_up]
        self._matches: dict[str, HostMatch] = match_hosts(guests, available)
        self._queues: dict[str, deque[Question]] = {host.name: deque() for host in hosts}
        self._asked: dict[str, Question] = {}
        """By host, the question that it was sent last."""

    def begin_job(self, number: int, action: str, job: Job) -> tuple[Job, CutInfo]:
        """(the guest's half of the job, its cut info); the server half begins anew at the host."""
        if (before := self._tasks.pop(number, None)) is not None:
            before.leave()
        host = self._matches[job.client].host
        if host is None:
            return self._split_server.begin_job(number, action, job)
        site = self._split_server.site
        side = CutMessages(job, site)
        metadata = self._clients[job.client].metadata
        assert metadata is not None, "who has a job has registered"
        request = AnsweredRequest(action=action, job=job, metadata=metadata, num_layers=len(site.backbone.blocks))
        task = HostedTask(f"{number}.{next(self._task_numbers)}", side, host, request)
        self._tasks[number] = task
        guest_info = to_json({"census": asdict(redacted_metadata(metadata)), "below": list(side.below.params)}).encode()
        private, params = model_message(side.above)
        head = {**job_head(action, job, number=number, cut_info=None), **private, "model": digest(params)}
        tensors = {**params, **write_payloads({GUEST_INFO: guest_info})}
        self._enqueue(task, {**head, "asks": "begin", "client": job.client}, tensors)
        trains = action == "train"
        indices = client_side_indices(site.backbone, job.params, job.options, side.cut) if trains else []
        part = self._split_server.part_digest(side.cut.blocks)
        return side.below, CutInfo(places=tuple(indices), tokens=site.max_tokens, part=part)

    def _enqueue(self, task: HostedTask, head: Head, tensors: Params) -> None:
        self._queues[task.host].append(Question(task, ({**head, "half": task.id}, tensors), task.answer))
        self._clients[task.host].wakeup.set()

    async def answer_request(self, number: int, head: Mapping[str, Any], tensors: Params) -> tuple[Head, Params] | None:
        """The host's answer to a guest's request; None where the guest has to begin again."""
        task = self._tasks.get(number)
        if task is None:
            return await self._split_server.answer_request(number, head, tensors)
        what = head.get("what")
        task.record_shape(read_payloads(tensors))
        reply = await self._host_answer(task, {"asks": "cut", "what": what, "done": head.get("done")}, tensors)
        if reply is None:
            return None
        try:
            answer = self._count_traffic(task, reply[1], "down")
            task.check_answer(what, read_payloads(answer))
        except ProtocolError as error:
            self._leave_host(task, str(error))
            return None
        return {"kind": "cut"}, answer

    async def _host_answer(self, task: HostedTask, head: Head, tensors: Params) -> tuple[Head, Params] | None:
        """Send a request to the host and wait for its answer; None where the guest begins again at the server."""
        if task.left:
            return None
        task.answer = asyncio.get_running_loop().create_future()
        self._enqueue(task, head, self._count_traffic(task, tensors, "up"))
        try:
            return await asyncio.wait_for(task.answer, self._seconds * ANSWER_WAIT_FRACTION)
        except TimeoutError:
            if not task.left:
                self._leave_host(task, "it does not answer")
            return None

    def _leave_host(self, task: HostedTask, reason: str) -> None:
        """Move the guest's job from its host to the server, where it begins again."""
        guest = task.side.job.client
        task.leave()
        self._matches[guest] = HostMatch(host=None, reason=f"{task.host} was left: {one_line(reason)}")
        self._clients[task.host].wakeup.set()
        self._on_note(f"{guest} begins its job again with the server, and not with {task.host}: {one_line(reason)}")

    def _count_traffic(self, task: HostedTask, tensors: Params, direction: Direction) -> Params:
        """The messages through the cut among these tensors; their bytes are counted here, whatever the sites report."""
        payloads = read_payloads(tensors)
        for name, message in payloads.items():
            kind = next((known for known in KINDS if known == name.partition("/")[2]), None)
            if kind is None:
                raise ProtocolError(f"{name!r:.40} came through a cut; install the same atlas-fl on both ends")
            task.side.crossed[kind, direction] += len(message)
        return write_payloads(payloads)

    async def finish_job(self, number: int, update: Update, tensors: Params) -> Update | None:
        """The update of both halves; None where the guest has to begin again."""
        task = self._tasks.get(number)
        if task is None:
            whole = await self._split_server.finish_job(number, update, tensors)
            return replace(whole, hosted=self._matches[update.client])
        reply = await self._host_answer(task, {"asks": "end"}, tensors)
        if reply is None:
            return None
        side = task.side
        try:
            host_update = read_update(*reply, job=replace(side.job, params=side.above))
            if host_update.params is not side.above:
                check_update(side.above, host_update.params)
            whole = merge_updates(side, update, host_update)
            check_answer(task.request, whole)
        except ProtocolError as error:
            self._leave_host(task, str(error))
            return None
        return replace(whole, hosted=self._matches[update.client])

    def drop_job(self, number: int) -> None:
        """Forget the server half of a closed job."""
        self._split_server.drop_job(number)
        if (task := self._tasks.pop(number, None)) is not None:
            self._clients[task.host].wakeup.set()

    async def next_message(self, client: ClientProxy) -> tuple[Head, Params] | None:
        """The next message to this client as a host; None without guests, or where they send nothing for long."""
        queue = self._queues.get(client.name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds * HOST_WAIT_FRACTION
        while queue is not None and not self._closed and not client.removal_reason and client.shutdown_message is None:
            live = [task.id for task in self._tasks.values() if task.host == client.name and not task.left]
            while queue:
                question = queue.popleft()
                if question.task.id in live:
                    self._asked[client.name] = question
                    head, tensors = question.message
                    return {**head, "kind": "host", "live": live}, tensors
            guests = [self._clients[guest] for guest, match in self._matches.items() if match.host == client.name]
            if not any(guest.connected and guest.pending_job is not None for guest in guests):
                return None
            client.wakeup.clear()
            try:
                await asyncio.wait_for(client.wakeup.wait(), deadline - loop.time())
            except TimeoutError:
                return None
        return None

    def handle_answer(self, host: str, head: Mapping[str, Any], tensors: Params) -> None:
        """Hand a host's answer to the guest that waits for it; where the host refuses it, the server takes over."""
        question = self._asked.pop(host, None)
        if question is None or question.task.left:
            return
        if "refused" in head:
            # where the guest is at fault, the server finds out now
            self._leave_host(question.task, str(head["refused"]))
        elif question.answer is not None and not question.answer.done():
            question.answer.set_result((dict(head), tensors))

    def close(self) -> None:
        """Stop sending: the jobs are closed."""
        self._closed = True

    def on_presence(self, name: str, connected: bool) -> None:
        """Record that a client has connected or disconnected; guests of a disconnected host go to the server."""
        if (host := self._matches[name].host if name in self._matches else None) is not None:
            self._clients[host].wakeup.set()  # it need not wait for a guest that has disconnected
        if connected or name not in self._queues:
            return
        self._queues[name].clear()
        self._asked.pop(name, None)
        for task in self._tasks.values():
            if task.host == name and not task.left:
                self._leave_host(task, "it is gone")
        for guest, match in self._matches.items():
            if match.host == name and self._clients[guest].pending_job is not None:
                self._matches[guest] = HostMatch(host=None, reason=f"{name} was left: it is gone")
