"""The worker-pool engine: packs of clients in worker processes or actors, and the loop of a worker.

Packs are formed by `client.batching`, as in one process, and do not depend on the workers, so neither do the results.
A pack is sent as one frame for each job and returns as one frame for each update.
"""

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from atlas_fl.client.batching import packs
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.registry import ACTIONS
from atlas_fl.errors import AtlasError, ProtocolError
from atlas_fl.runtime.local import collect_updates
from atlas_fl.runtime.protocol.model_sync import NewSender, Receiver, Sender
from atlas_fl.runtime.transport.frames import Head, Message, decode_frame, encode_frame

MAX_FRAME_BYTES = 2**40
"""Maximum size of a frame: both ends are ours, and a model may be larger than a message over a network."""


InitWorker: TypeAlias = Callable[[Head, Any], tuple[Site, Receiver]]
"""(head of the init message, shared memory) -> the site and the receiver with which a worker runs jobs."""


class Worker(Protocol):
    """Runs packs: a process or an actor."""

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """The answer to these frames, which are consumed; blocks until it is there.

        Raises `ProtocolError` where the worker has ended.
        """


@dataclass(kw_only=True, eq=False)
class PoolEngine:
    """An `Engine` that sends each pack to the next free worker."""

    site: Site
    workers: Sequence[Worker]
    threads: Executor
    """One thread for each worker."""
    on_progress: Callable[[str, int, int], None]
    """Callback with (action, jobs done, jobs) after each pack."""
    new_sender: NewSender = Sender
    _free: "queue.SimpleQueue[tuple[Worker, Sender]]" = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for worker in self.workers:
            self._free.put((worker, self.new_sender()))

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order; raises `ProtocolError` where a worker has ended."""
        pack_by_future = {self.threads.submit(self._run_pack, action, pack): pack for pack in packs(jobs, self.site)}
        # popped, because a future keeps its result
        results = ((pack_by_future.pop(future), future.result()) for future in as_completed(list(pack_by_future)))
        try:
            return collect_updates(action, jobs, results, self.on_progress)
        finally:
            for future in pack_by_future:
                future.cancel()  # without effect on packs that are running

    def _run_pack(self, action: str, pack: Sequence[Job]) -> list[Update]:
        worker, sender = self._free.get()
        try:
            frames = []
            for number, job in enumerate(pack):
                head, tensors = sender.job(action, job, number=number)
                frames.append(encode_frame({**head, "client": job.client}, tensors, limit=MAX_FRAME_BYTES))
            updates = list[Update]()
            for head, tensors in _decode_frames(worker.ask(frames)):
                raise_failure(head)
                updates.append(sender.update(action, head, tensors, job=pack[len(updates)]))
            assert len(updates) == len(pack), "a worker answers every job"
            return updates
        except AtlasError:
            sender.forget()  # as a worker does after an error
            raise
        finally:
            self._free.put((worker, sender))


def init_workers(workers: Sequence[Worker], heads: Sequence[Head], threads: Executor) -> None:
    """Initialise every worker from its head and wait; raises the error of a worker that failed."""
    frames = [encode_frame(head, {}) for head in heads]
    for answer in threads.map(lambda worker, frame: worker.ask([frame]), workers, frames):
        raise_failure(decode_frame(answer[0])[0])


def _decode_frames(frames: list[bytes]) -> Iterator[Message]:
    """Decode the frames one after another; each is freed before the next, since it may hold a whole model."""
    frames.reverse()
    while frames:
        yield decode_frame(frames.pop(), limit=MAX_FRAME_BYTES)


def raise_failure(head: Head) -> None:
    """Raise a worker's error where this head reports one."""
    if head.get("kind") == "failed":
        kinds = {kind.__name__: kind for kind in AtlasError.__subclasses__()}
        raise kinds.get(str(head["error"]), ProtocolError)(str(head["reason"]))


class WorkerLoop:
    """The worker's end: the first frame initialises it, all others are packs."""

    def __init__(self, init_worker: InitWorker, memory: Callable[[], Any]) -> None:
        self._init_worker, self._memory = init_worker, memory
        self._context: tuple[Site, Receiver] | None = None

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """An update for every job, or the error that was raised. The frames are consumed."""
        try:
            if self._context is None:
                ((head, _),) = _decode_frames(frames)
                self._context = self._init_worker(head, self._memory())
                return [encode_frame({"kind": "ready"}, {})]
            site, receiver = self._context
            action = ""
            jobs = list[Job]()
            for head, tensors in _decode_frames(frames):
                action, job, _ = receiver.job(head, tensors, client=str(head["client"]))
                jobs.append(job)
            updates = ACTIONS[action](jobs, site)
            answers = []
            for number, (update, job) in enumerate(zip(updates, jobs, strict=True)):
                head, tensors = receiver.update(action, update, job, number=number)
                answers.append(encode_frame(head, tensors, limit=MAX_FRAME_BYTES))
            return answers
        except AtlasError as error:
            if self._context is not None:
                self._context[1].forget()
            return [encode_frame({"kind": "failed", "error": type(error).__name__, "reason": str(error)}, {})]
