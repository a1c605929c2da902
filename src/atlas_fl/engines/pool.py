"""Packs handed out to workers, each of which has a site of its own: what one process computes, by any number of them.

Packs are formed by `clients.packs`, as for one process, and never depend on who works, so the results do not either. A
pack goes out as frames, one for each job, and comes back as one for each update.
"""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from atlas_fl.clients import ACTIONS
from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.packs import packs
from atlas_fl.engines.frames import Head, decode_frame, encode_frame
from atlas_fl.engines.wire import job_message, read_job, read_update, update_message
from atlas_fl.errors import AtlasError, ProtocolError

LIMIT = 2**40
"""Most bytes of a frame: both ends are ours, and a model may be larger than what may come over a network."""

Settle: TypeAlias = Callable[[Head, Any], Site]
"""(what a worker is told at its start, the memory that it shares) -> the site that it makes of these."""


class Worker(Protocol):
    """Somebody who takes a pack."""

    def ask(self, frames: Sequence[bytes]) -> list[bytes]:
        """The answer to these frames; blocks until it is there. Raises `ProtocolError` where there will be none."""
        ...


@dataclass(kw_only=True, eq=False)
class PoolEngine:
    """An `Engine` whose packs go to whoever is free."""

    site: Site
    """What the packs are formed by; nothing is computed on it."""
    workers: Sequence[Worker]
    threads: Executor
    """A thread for each worker."""
    on_progress: Callable[[str, int, int], None]
    """Told (action, jobs done, jobs) after each pack."""
    _free: "queue.SimpleQueue[Worker]" = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for worker in self.workers:
            self._free.put(worker)

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order; raises `ProtocolError` where a worker has ended."""
        formed = list(packs(jobs, self.site))
        given = {self.threads.submit(self._carried_out, action, pack): place for place, pack in enumerate(formed)}
        found: dict[int, list[Update]] = {}
        try:
            for future in as_completed(given):
                found[given[future]] = future.result()
                self.on_progress(action, sum(map(len, found.values())), len(jobs))
        finally:
            for future in given:
                future.cancel()  # without effect on what has begun
        by_job = {id(job): update for place, pack in enumerate(formed) for job, update in zip(pack, found[place])}
        return [by_job[id(job)] for job in jobs]

    def _carried_out(self, action: str, pack: Sequence[Job]) -> list[Update]:
        worker = self._free.get()
        try:
            return read_answer(worker.ask(pack_frames(action, pack)), pack)
        finally:
            self._free.put(worker)


def settled(workers: Sequence[Worker], heads: Sequence[Head], threads: Executor) -> None:
    """Nothing, once every worker has made its site of its head; raises what one of them met."""
    frames = [encode_frame(head, {}) for head in heads]
    for answer in threads.map(lambda worker, frame: worker.ask([frame]), workers, frames):
        raise_failure(decode_frame(answer[0])[0])


def pack_frames(action: str, pack: Sequence[Job]) -> list[bytes]:
    """What asks a worker for this pack."""
    found = []
    for number, job in enumerate(pack):
        head, params = job_message(action, job, number=number, held={})
        found.append(encode_frame({**head, "client": job.client}, params, limit=LIMIT))
    return found


def read_answer(frames: Sequence[bytes], pack: Sequence[Job]) -> list[Update]:
    """The updates that a worker's answer to this pack holds; raises what the worker met."""
    messages = [decode_frame(frame, limit=LIMIT) for frame in frames]
    raise_failure(messages[0][0])
    return [read_update(head, tensors, job=job) for (head, tensors), job in zip(messages, pack, strict=True)]


def raise_failure(head: Head) -> None:
    """Raise the error of a worker where this head tells one."""
    if head.get("kind") == "failed":
        kinds = {kind.__name__: kind for kind in AtlasError.__subclasses__()}
        raise kinds.get(str(head["error"]), ProtocolError)(str(head["reason"]))


class Resident:
    """A worker's end: the first frame says what the site is, all others are packs for it."""

    def __init__(self, settle: Settle, memory: Callable[[], Any]) -> None:
        self._settle, self._memory = settle, memory
        self._site: Site | None = None

    def ask(self, frames: Sequence[bytes]) -> list[bytes]:
        """The answer: an update for every job, or the error that was met."""
        messages = [decode_frame(frame, limit=LIMIT) for frame in frames]
        try:
            if self._site is None:
                self._site = self._settle(messages[0][0], self._memory())
                return [encode_frame({"kind": "ready"}, {})]
            given = [read_job(head, params, client=str(head["client"])) for head, params in messages]
            jobs = [job for _, job, _ in given]
            updates = ACTIONS[given[0][0]](jobs, self._site)
        except AtlasError as error:
            return [encode_frame({"kind": "failed", "error": type(error).__name__, "reason": str(error)}, {})]
        pairs = enumerate(zip(updates, jobs, strict=True))
        return [encode_frame(*update_message(update, job, number=n), limit=LIMIT) for n, (update, job) in pairs]
