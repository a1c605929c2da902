"""The client manager: registration, jobs and answers, late clients, shutdown with final models.

A client sends a request ("register", "next", "result", ...) and the answer is its next job, once there is one. A job
stays assigned until its answer is accepted: a client that comes back with the same certificate, also as a new process,
is sent the job again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError, one_line, short_repr
from atlas_fl.methods.method import Wait
from atlas_fl.params import Params
from atlas_fl.ranks.devices import Device
from atlas_fl.runtime.coordinator.client_registry import (
    MAX_REFUSALS,
    CheckClient,
    ClientProxy,
    PendingJob,
    describe_connected,
    disagreeing_clients,
    other_labels,
)
from atlas_fl.runtime.coordinator.secure_sums import SUM
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.protocol.answer_schema import AnsweredRequest, check_answer
from atlas_fl.runtime.protocol.client_metadata import ClientMetadata, TaskLabels, read_device, read_metadata
from atlas_fl.runtime.protocol.messages import Identity, read_packed
from atlas_fl.runtime.protocol.model_sync import NewSender, Sender
from atlas_fl.runtime.transport.frames import FRAME_LIMIT, Head, Message
from atlas_fl.runtime.transport.sessions import MOST_TOLD, NO_TENSORS, RefusalLog

CONFIRM_SECONDS = 5.0
"""Seconds that the confirmation of a saved model waits for a server that has just started and has no models yet."""
REQUEST_KINDS = ("register", "next", "result", "failed", "cut", "kept")
"""Kinds of requests that a client may send."""
KINDS_WITHOUT_TENSORS = ("register", "next", "kept")
"""Requests that wait without a job: tensors sent with them would stay in memory for as long."""


@dataclass(eq=False)
class ClientManager:
    """The connected clients and their open jobs. All methods run in one event loop."""

    names: Sequence[str]
    identity: Identity
    _: KW_ONLY
    settings: str
    on_note: Callable[[str], None]
    accepts_late: bool = False
    new_sender: NewSender = Sender
    images: bool = False
    """The run trains on images."""
    one_head: bool = False
    """One mask holds for the heads of all clients, so that all need as many labels."""
    task_labels: Mapping[str, TaskLabels] = field(default_factory=dict)
    """The labels of the tasks that the server knows by itself."""
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The classes of tasks of its user, which it tells sites."""
    check_client: CheckClient | None = None
    clock: Callable[[], float] = time.monotonic
    planned: set[str] | None = None
    """The clients in the plan, once there is one."""
    known: Mapping[str, ClientMetadata] = field(default_factory=dict)
    """Metadata of the plan's clients from before the server was started again."""
    on_model_saved: Callable[[str], None] = lambda _: None
    """Callback for a client that has saved its model; raises `ProtocolError` where that cannot be recorded."""
    max_request_bytes: int = FRAME_LIMIT
    """Maximum size of a client's request."""
    open_jobs: dict[str, PendingJob] = field(default_factory=dict)
    """By client the training that goes on over rounds, or whose answer no step has taken; the last to arrive last."""
    _job_count: int = 0
    _registration_changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.clients = {name: ClientProxy(name, sender=self.new_sender()) for name in self.names}
        self._presence_log = RefusalLog(tell=lambda name, note: self.on_note(f"{name} {note}"), clock=self.clock)

    def handshake(self, name: str, hello: Mapping[str, Any]) -> Head:
        """The reply to a client that connects; raises `ProtocolError` where version, config or model differ."""
        self.identity.check(name, hello)
        # it may have been listed after the server was started
        self.clients.setdefault(name, ClientProxy(name, sender=self.new_sender()))
        return {**vars(self.identity), "settings": self.settings, "classes": self.classes}

    def on_presence(self, name: str, connected: bool) -> None:
        """Record that this client has connected or disconnected."""
        client = self.clients[name]
        client.connected = connected
        if connected:
            client.has_come = True
            client.given_up = False
        if client.metadata is not None and not client.shutdown_sent:
            note = f"is {'back' if connected else 'gone'} ({describe_connected(self.clients.values())})"
            self._presence_log.add(name, note, most=MOST_TOLD)
        self._presence_log.look()

    def on_refused(self, name: str, reason: str) -> None:
        """Log that a connection or request was refused, and why, unless the same was logged before."""
        client = self.clients.get(name)
        if client is None or reason not in (client.removal_reason, client.refusal_reason):
            self.on_note(f"{name} was refused: {one_line(reason)}")
        if client is not None:
            client.refusal_reason = reason

    async def answer(self, name: str, head: Head, tensors: Params) -> Message:
        """Answer a client's request, with its next job as soon as there is one."""
        client = self.clients[name]
        kind = head.get("kind")
        if kind not in REQUEST_KINDS:
            raise ProtocolError(f"{name} says {short_repr(kind)}; allowed: {', '.join(REQUEST_KINDS)}")
        if tensors and kind in KINDS_WITHOUT_TENSORS:
            raise ProtocolError(f"a request {kind!r} of {name} has tensors; only an answer to a job may bring them")
        if kind == "register":
            await self._register(client, head)
        elif kind == "kept":
            return await self._confirm_saved(client, head)
        elif client.metadata is None:
            return {"kind": "register"}, NO_TENSORS  # the server was started again and knows nobody
        elif kind == "cut":
            answer = await self._answer_cut_request(client, head, tensors)
            if answer is not None:
                return answer
        elif kind in ("result", "failed"):
            await self._accept_answer(client, head, tensors)
            if head.get("leaves") is True:
                return {"kind": "left"}, NO_TENSORS
        del tensors
        return await self._next_message(client)

    async def _next_message(self, client: ClientProxy) -> Message:
        """The next message to this client, as soon as there is one: a job or shutdown."""
        client.given_up = bool(client.removal_reason)  # it is here and ready
        while True:
            if client.removal_reason:
                raise ProtocolError(client.removal_reason)
            if client.rejection is not None:
                raise client.rejection
            if client.shutdown_message is not None:
                client.shutdown_sent = True
                return client.shutdown_message
            if client.pending_job is not None:
                pending = client.pending_job
                job = pending.job
                if pending.action == SUM:
                    head = {"kind": SUM, "number": pending.number, "round": job.round}
                    return {**head, "step": job.options.step, "group": vars(job.options.group)}, job.sent[SUM]
                cut_info = None
                if job.cut is not None and pending.split_server is not None:
                    # A job that is sent, also again, begins at its start, and so does its server half.
                    job, cut_info = pending.split_server.begin_job(pending.number, pending.action, job)
                    pending.client_job = job
                return client.sender.job(pending.action, job, number=pending.number, cut_info=cut_info)
            client.wakeup.clear()
            await client.wakeup.wait()

    async def _confirm_saved(self, client: ClientProxy, head: Head) -> Message:
        """Record that a client has saved its model, or answer that its model is another one.

        A client that was killed after it had saved its model sends this without registering first.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_SECONDS):
                while client.shutdown_message is None:
                    client.wakeup.clear()
                    await client.wakeup.wait()
        sha256 = None if client.shutdown_message is None else client.shutdown_message[0].get("sha256")
        if sha256 is None or head.get("sha256") != sha256:
            return {"kind": "another"}, NO_TENSORS
        if not client.model_saved:
            self.on_model_saved(client.name)
        client.shutdown_sent = client.model_saved = True
        return {"kind": "over"}, NO_TENSORS

    async def _answer_cut_request(self, client: ClientProxy, head: Head, tensors: Params) -> Message | None:
        """The answer to a request of a cut client; None where the job is closed."""
        pending = client.pending_job
        if pending is None or pending.split_server is None or head.get("number") != pending.number:
            return None
        try:
            answer = await pending.split_server.answer_request(pending.number, head, tensors)
        except ProtocolError as error:
            client.record_refusal(round=pending.job.round)
            self._close_job(client, pending, f"its question was refused: {one_line(error)}")
            raise
        return answer if client.pending_job is pending else None

    async def _register(self, client: ClientProxy, head: Head) -> None:
        self.identity.check(client.name, head)
        metadata = read_metadata(head)
        device = read_device(str(head.get("device")))
        await self._check_registration(client, metadata, device)
        is_late = self._is_late(client)
        if is_late:
            client.removal_reason = ""  # a rejected client may register with other data
            client.given_up = False
        is_new = client.metadata is None
        client.metadata = metadata
        client.device = device
        client.rejection = None
        client.refusal_reason = ""
        client.sender.forget()
        client.allow_retry()
        if is_new:
            connected = describe_connected(self.clients.values())
            count = metadata.examples["train"]
            self.on_note(f"{client.name}: {metadata.task}, {count} training examples, {device.name} ({connected})")
            if is_late:
                self.on_note(f"{client.name} came after the plan was made and joins before the next round")
        async with self._registration_changed:
            self._registration_changed.notify_all()

    async def _check_registration(self, client: ClientProxy, metadata: ClientMetadata, device: Device) -> None:
        """Raise `ProtocolError` where this client cannot register with this metadata; nothing of it is kept then.

        The kind of its examples must be the run's, and the labels of its task the agreed ones. A client outside the
        plan may register where late clients may join; one that comes back must have the metadata that it had before.
        """
        if metadata.images is not self.images:
            kinds = {True: "images", False: "texts"}
            raise ProtocolError(
                f"{client.name} has {kinds[metadata.images]} (task {metadata.task!r}), and this run trains on"
                f" {kinds[self.images]}; give a --task of {kinds[self.images]}"
            )
        labels = self.agreed_labels().get(metadata.task, metadata.task_labels)
        if labels != metadata.task_labels:
            raise other_labels(client.name, metadata, labels)
        before = client.metadata or self.known.get(client.name)
        if self._is_late(client):
            if not self.accepts_late:
                raise ProtocolError(f"this federation was planned without {client.name}; it can join the next one")
        elif before is not None and before != metadata:
            raise ProtocolError(f"{client.name} came back with other data than it had; join with the same --task")
        if self.check_client is not None:
            # as much work and memory as planning one client: one at a time, and the loop answers others meanwhile
            async with self._checking:
                await asyncio.to_thread(self.check_client, client.name, metadata, device)

    def _is_late(self, client: ClientProxy) -> bool:
        return self.planned is not None and client.name not in self.planned

    def agreed_labels(self) -> dict[str, TaskLabels]:
        """By task, the labels that hold for whoever comes: the server's own, and those of the clients of the plan."""
        planned = {metadata.task: metadata.task_labels for metadata in self._planned_metadata()}
        return {**planned, **self.task_labels}

    def _planned_metadata(self) -> list[ClientMetadata]:
        """The metadata of the plan's clients; empty before there is a plan."""
        names = self.known if self.planned is None else self.planned
        metadata = [self.clients[name].metadata or self.known.get(name) for name in names if name in self.clients]
        return [known for known in metadata if known is not None]

    def reject_disagreeing(self, clients: Sequence[ClientProxy]) -> bool:
        """Turn away the registered ones of these clients that the others outvote; return whether there are such."""
        registered = {client.name: client.metadata for client in clients if client.metadata is not None}
        head = next((metadata.num_labels for metadata in self._planned_metadata()), None)
        refused = disagreeing_clients(registered, self.agreed_labels(), one_head=self.one_head, head=head)
        for name, error in refused.items():
            client = self.clients[name]
            client.metadata = None
            client.rejection = error
            self.on_refused(name, error.logged)
            client.wakeup.set()
        return bool(refused)

    async def _accept_answer(self, client: ClientProxy, head: Head, tensors: Params) -> None:
        """Accept or refuse this answer to the client's job; raises `ProtocolError` after too many refusals."""
        pending = client.pending_job
        if pending is None or head.get("number") != pending.number:
            # The job is closed, and what the client has in memory is unknown here.
            client.sender.forget()
            return
        if head["kind"] == "failed":
            self._close_job(client, pending, one_line(head.get("reason")))
            return
        try:
            update = await self._read_update(client, pending, head, tensors)
            client.record_accepted_answer()
            self._close_job(client, pending, update)
        except ProtocolError as error:
            client.sender.forget()
            client.record_refusal(round=pending.job.round)
            self._close_job(client, pending, f"its answer was refused: {one_line(error)}")
            if client.refusals >= MAX_REFUSALS:
                raise ProtocolError(
                    f"{client.refusals} answers of {client.name} were refused, the last of {pending.action}: {error};"
                    " mend it and join again"
                ) from None

    async def _read_update(self, client: ClientProxy, pending: PendingJob, head: Head, tensors: Params) -> Update:
        """The complete update, joined with the server half's.

        Raises `ProtocolError` for an answer that does not fit the job (`runtime.protocol.answer_schema`).
        """
        if pending.action == SUM:
            read_packed(tensors)  # raises for what is none
            return Update(client=client.name, params={}, examples=0, metrics={}, reported={SUM: tensors})
        # bytes through a cut are counted here, whatever the site reports
        job, server = pending.client_job or pending.job, pending.split_server
        update = replace(client.sender.update(pending.action, head, tensors, job=job), crossed={})
        if server is not None and pending.client_job is not None:
            update = await server.finish_job(pending.number, update, tensors)
        assert client.metadata is not None, "who has a job has registered"
        num_layers = None if server is None else len(server.site.backbone.blocks)
        expected = AnsweredRequest(
            action=pending.action, job=pending.job, metadata=client.metadata, num_layers=num_layers
        )
        check_answer(expected, update)
        return update

    def _close_job(self, client: ClientProxy, pending: PendingJob, outcome: Update | str) -> None:
        """Close this job with its update, or with the reason why there is none."""
        if pending.split_server is not None:
            pending.split_server.drop_job(pending.number)
        if client.pending_job is pending:
            client.pending_job = None
        if self.open_jobs.get(client.name) is pending:
            self.open_jobs[client.name] = self.open_jobs.pop(client.name)
        if not pending.future.done():
            pending.future.set_result(outcome)

    async def wait_for_clients(self, names: Sequence[str], *, min_clients: int, seconds: float) -> tuple[str, ...]:
        """The clients that have registered, in the order of `names`: all, or after `seconds` at least `min_clients`.

        Raises `ProtocolError` where fewer have registered.
        """
        clients = [self.clients[name] for name in names]

        def is_decided() -> bool:
            removed = sum(bool(client.removal_reason) for client in clients)
            return len(clients) - removed < min_clients or all(
                client.removal_reason or client.metadata for client in clients
            )

        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline), self._registration_changed:
                    await self._registration_changed.wait_for(is_decided)
            if not self.reject_disagreeing(clients):
                break  # who was turned away may register anew while there is time
        registered = tuple(client.name for client in clients if client.metadata and not client.removal_reason)
        here = [name for name in registered if len(registered) >= min_clients or self.clients[name].connected]
        missing = ", ".join(client.describe_missing() for client in clients if client.name not in here)
        if len(registered) < min_clients:
            after = "" if any(client.removal_reason for client in clients) else f" after {seconds:g} seconds"
            raise ProtocolError(
                f"{len(here)} of {len(clients)} clients are here{after}, missing: {missing};"
                f" {min_clients} are needed: start them, raise --wait or lower --min-clients"
            )
        if missing:
            self.on_note(f"begins without {missing}")
        self.planned = set(registered)
        return registered

    async def run_jobs(
        self,
        action: str,
        jobs: Sequence[Job],
        *,
        seconds: float,
        on_done: Callable[[int], None],
        split_server: SplitServer | None = None,
    ) -> list[Update | str]:
        """The update of every job, or the reason why there is none, in their order, after at most `seconds`.

        `split_server` computes the server halves of jobs with a cut.
        """
        self._presence_log.look()
        loop = asyncio.get_running_loop()
        futures = [self._give(action, job, round=job.round, split_server=split_server).future for job in jobs]
        deadline = loop.time() + seconds
        waiting = {future for future in futures if not future.done()}
        while waiting and loop.time() < deadline:
            _, waiting = await asyncio.wait(
                waiting, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            on_done(len(futures) - len(waiting))
        for job, future in zip(jobs, futures, strict=True):
            client = self.clients[job.client]
            if not future.done() and client.pending_job is not None:
                client.record_missed_deadline(round=job.round)
                self._close_job(client, client.pending_job, f"no answer within {seconds:g} seconds")
        return [future.result() for future in futures]

    def _give(self, action: str, job: Job, *, round: int, split_server: SplitServer | None = None) -> PendingJob:
        """Give a client this job in this round; closed at once, with the reason, where it gets none."""
        client, future = self.clients[job.client], asyncio.get_running_loop().create_future()
        self._job_count += 1
        pending = PendingJob(self._job_count, action, job, future, split_server)
        if reason := client.skip_reason(round=round):
            future.set_result(reason)
        else:
            client.pending_job = pending
            client.wakeup.set()
        return pending

    async def run_until(
        self, jobs: Sequence[Job], wait: Wait, *, round: int, seconds: float, on_done: Callable[[int], None]
    ) -> dict[str, Update | str]:
        """By client the updates of an asynchronous step, or the reason why there is none.

        Who is at work goes on with the job that it has, and is in no answer before it is done. After `seconds` the step
        is made with what is there; who is away then, or late where all are waited for, has missed a deadline.
        """
        self._presence_log.look()
        loop = asyncio.get_running_loop()
        for job in jobs:
            if job.client not in self.open_jobs:
                self.open_jobs[job.client] = self._give("train", job, round=round)
        start = loop.time()
        while True:
            done = {name: one.future.result() for name, one in self.open_jobs.items() if one.future.done()}
            arrived = [name for name, answer in done.items() if isinstance(answer, Update)]
            on_done(len(arrived))
            waiting = {one.future for name, one in self.open_jobs.items() if name not in done}
            most = min(wait.seconds, seconds) if len(arrived) >= wait.updates else seconds
            left = start + most - loop.time()
            if left <= 0 or not waiting:
                break
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if len(arrived) < wait.updates:
            done |= self._close_late(round=round, seconds=seconds, everyone=wait.updates >= len(jobs))
        for name in () if wait.seconds else arrived[wait.updates :]:  # the next step begins with them
            del done[name]
        for name in done:
            del self.open_jobs[name]
        return done

    def _close_late(self, *, round: int, seconds: float, everyone: bool) -> dict[str, str]:
        """Close the open jobs of clients that are away, or of everyone: the reason by client."""
        reason = f"no answer within {seconds:g} seconds"
        late = {name: one for name, one in self.open_jobs.items() if not one.future.done()}
        late = {name: one for name, one in late.items() if everyone or not self.clients[name].connected}
        for name, pending in late.items():
            self.clients[name].record_missed_deadline(round=round)
            self._close_job(self.clients[name], pending, reason)
        return dict.fromkeys(late, reason)

    async def remove(self, name: str, reason: str) -> None:
        """Close this client's job and refuse its further requests with this reason."""
        client = self.clients[name]
        client.removal_reason = reason
        client.given_up = True
        client.wakeup.set()
        if client.pending_job is not None:
            self._close_job(client, client.pending_job, reason)
        async with self._registration_changed:
            self._registration_changed.notify_all()


async def late_clients(manager: ClientManager) -> tuple[ClientProxy, ...]:
    """Clients that are connected and not in the plan, in the order in which the names were listed."""
    planned = manager.planned or set()
    waiting = [
        client
        for name, client in manager.clients.items()
        if client.connected and client.metadata and not client.removal_reason and name not in planned
    ]
    manager.reject_disagreeing(waiting)
    return tuple(client for client in waiting if client.metadata)


async def accept_client(manager: ClientManager, name: str) -> None:
    """Add this client to the plan."""
    manager.planned = {*(manager.planned or ()), name}


async def exclude_client(manager: ClientManager, name: str) -> None:
    """Remove this client from the plan; it may join later as any late client."""
    manager.planned = (manager.planned or set()) - {name}


async def reject_client(manager: ClientManager, name: str, reason: str) -> None:
    """Refuse a late client with this reason; it may register again, with other data or another device."""
    await manager.remove(name, f"{name} cannot join: {reason}")
    manager.clients[name].metadata = None


async def shutdown_clients(
    manager: ClientManager,
    models: Mapping[str, Params],
    *,
    seconds: float,
    writing_seconds: float = 0.0,
    reason: str | None = None,
    wait_for: Collection[str] = (),
    may_return: Collection[str] = (),
    return_seconds: float = 0.0,
) -> None:
    """Send every client the end of the run: its final model, or the reason why there is none.

    Waits up to `seconds` until connected clients have disconnected and those of `wait_for` have connected and saved
    their models, those of `may_return` too for the first `return_seconds`, and at least `writing_seconds` while a
    client is saving. `manager.on_model_saved` is called on a
    client's confirmation only: before that it may be killed, or miss the last message of a stream that is closed.
    """
    for name, client in manager.clients.items():
        if reason is not None:
            client.shutdown_message = {"kind": "ended", "reason": reason}, NO_TENSORS
        elif name in models:
            client.shutdown_message = client.sender.final_model_message(models[name])
        else:
            client.shutdown_message = {"kind": "done", "model": False}, NO_TENSORS
        client.wakeup.set()
    start = asyncio.get_running_loop().time()
    elapsed = 0.0
    while not _all_finished(manager.clients, (*wait_for, *(may_return if elapsed < return_seconds else ()))):
        elapsed = asyncio.get_running_loop().time() - start
        if elapsed >= seconds and not (elapsed < writing_seconds and _is_any_saving(manager.clients.values())):
            return
        await asyncio.sleep(0.02)


def _all_finished(clients: Mapping[str, ClientProxy], wait_for: Collection[str]) -> bool:
    reachable = (client for client in clients.values() if client.connected and not client.given_up)
    is_connected = any(client.metadata is not None or client.model_saved for client in reachable)
    return not is_connected and all(clients[name].model_saved or clients[name].removal_reason for name in wait_for)


def _is_any_saving(clients: Iterable[ClientProxy]) -> bool:
    """Return whether a client was sent its model and has not confirmed that it is saved."""
    return any(
        client.connected
        and client.shutdown_sent
        and not client.model_saved
        and client.shutdown_message is not None
        and bool(client.shutdown_message[0].get("model"))
        for client in clients
    )
