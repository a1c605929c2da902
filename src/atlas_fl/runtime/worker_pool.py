"""Packs of clients in worker processes.

Packs handed out to workers, each of which has a site of its own: what one process computes, by any number of them.

Packs are formed by `client.batching`, as for one process, and never depend on who works, so the results do not
either. A pack goes out as frames, one for each job, and comes back as one for each update.

Worker processes of this machine: fresh interpreters that a pipe and a piece of memory lead to.

They are started as `multiprocessing` spawns its own, but without its pickled arguments and without importing the
caller's main module, so that a script needs no guard. What goes through a pipe is bytes.
"""

import mmap
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

from atlas_fl.client.batching import packs
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.registry import ACTIONS
from atlas_fl.errors import AtlasError, ProtocolError
from atlas_fl.params import Params
from atlas_fl.runtime.local import within_memory
from atlas_fl.runtime.protocol.model_sync import AdapterSender, NewSender, Receiver, Sender
from atlas_fl.runtime.transport.frames import Head, decode_frame, encode_frame

LIMIT = 2**40
"""Most bytes of a frame: both ends are ours, and a model may be larger than what may come over a network."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a worker works with."""

    site: Site
    receiver: Receiver


Settle: TypeAlias = Callable[[Head, Any], Bench]
"""(what a worker is told at its start, the memory that it shares) -> what it makes of these."""


class Worker(Protocol):
    """Somebody who takes a pack."""

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """The answer to these frames, which are used up; blocks until it is there.

        Raises `ProtocolError` where there will be none.
        """
        ...


@dataclass(kw_only=True, eq=False)
class PoolEngine:
    """An `Engine` whose packs go to whoever is free."""

    site: Site
    workers: Sequence[Worker]
    threads: Executor
    """A thread for each worker."""
    on_progress: Callable[[str, int, int], None]
    """Told (action, jobs done, jobs) after each pack."""
    new_sender: NewSender = AdapterSender
    _free: "queue.SimpleQueue[tuple[Worker, Sender]]" = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for worker in self.workers:
            self._free.put((worker, self.new_sender()))

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order; raises `ProtocolError` where a worker has ended."""
        formed = list(packs(jobs, self.site))
        given = {self.threads.submit(self._carried_out, action, pack): place for place, pack in enumerate(formed)}
        found: dict[int, list[Update]] = {}
        try:
            for future in as_completed(given):
                held = [update for updates in found.values() for update in updates]
                # popped, because a future holds what it gave
                found[given.pop(future)] = within_memory(action, future.result(), held)
                self.on_progress(action, sum(map(len, found.values())), len(jobs))
        finally:
            for future in given:
                future.cancel()  # without effect on what has begun
        by_job = {id(job): update for place, pack in enumerate(formed) for job, update in zip(pack, found[place])}
        return [by_job[id(job)] for job in jobs]

    def _carried_out(self, action: str, pack: Sequence[Job]) -> list[Update]:
        worker, sender = self._free.get()
        try:
            return read_answer(action, worker.ask(pack_frames(action, pack, sender)), pack, sender)
        except AtlasError:
            sender.forget()  # as a worker does that meets one
            raise
        finally:
            self._free.put((worker, sender))


def settled(workers: Sequence[Worker], heads: Sequence[Head], threads: Executor) -> None:
    """Nothing, once every worker has made its site of its head; raises what one of them met."""
    frames = [encode_frame(head, {}) for head in heads]
    for answer in threads.map(lambda worker, frame: worker.ask([frame]), workers, frames):
        raise_failure(decode_frame(answer[0])[0])


def pack_frames(action: str, pack: Sequence[Job], sender: Sender) -> list[bytes]:
    """What asks a worker for this pack."""
    found = []
    for number, job in enumerate(pack):
        head, tensors = sender.job(action, job, number=number)
        found.append(encode_frame({**head, "client": job.client}, tensors, limit=LIMIT))
    return found


def read_answer(action: str, frames: list[bytes], pack: Sequence[Job], sender: Sender) -> list[Update]:
    """The updates that a worker's answer to this pack holds; raises what the worker met. The frames are used up."""
    found = list[Update]()
    for head, tensors in _decoded(frames):
        raise_failure(head)
        found.append(sender.update(action, head, tensors, job=pack[len(found)]))
    assert len(found) == len(pack), "a worker answers every job"
    return found


def _decoded(frames: list[bytes]) -> Iterator[tuple[Head, Params]]:
    """What the frames say, one after another; each is gone before the next: it may hold a whole model."""
    frames.reverse()
    while frames:
        yield decode_frame(frames.pop(), limit=LIMIT)


def raise_failure(head: Head) -> None:
    """Raise the error of a worker where this head tells one."""
    if head.get("kind") == "failed":
        kinds = {kind.__name__: kind for kind in AtlasError.__subclasses__()}
        raise kinds.get(str(head["error"]), ProtocolError)(str(head["reason"]))


class Resident:
    """A worker's end: the first frame says what it works with, all others are packs for it."""

    def __init__(self, settle: Settle, memory: Callable[[], Any]) -> None:
        self._settle, self._memory = settle, memory
        self._bench: Bench | None = None

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """The answer: an update for every job, or the error that was met. The frames are used up."""
        try:
            if self._bench is None:
                ((head, _),) = _decoded(frames)
                self._bench = self._settle(head, self._memory())
                return [encode_frame({"kind": "ready"}, {})]
            return self._carried_out(self._bench, frames)
        except AtlasError as error:
            if self._bench is not None:
                self._bench.receiver.forget()
            return [encode_frame({"kind": "failed", "error": type(error).__name__, "reason": str(error)}, {})]

    def _carried_out(self, bench: Bench, frames: list[bytes]) -> list[bytes]:
        action, jobs = "", list[Job]()
        for head, tensors in _decoded(frames):
            action, job, _ = bench.receiver.job(head, tensors, client=str(head["client"]))
            jobs.append(job)
        pairs = enumerate(zip(ACTIONS[action](jobs, bench.site), jobs, strict=True))
        messages = (bench.receiver.update(action, update, job, number=n) for n, (update, job) in pairs)
        return [encode_frame(*message, limit=LIMIT) for message in messages]


class SharedMemory:
    """Memory without a name that processes inherit as a file; it is gone with the last of them, however that ends."""

    def __init__(self) -> None:
        # /dev/shm is often small in containers; what has no mount is bounded by the memory alone
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("atlas-weights")
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())

    def filled(self, size: int, fill: Callable[[mmap.mmap], None]) -> mmap.mmap:
        """The memory, from now on of so many bytes, as `fill` leaves it."""
        os.ftruncate(self.file, size)
        memory = mmap.mmap(self.file, 0)
        fill(memory)
        return memory

    def close(self) -> None:
        """Forget it here; what is mapped stays."""
        os.close(self.file)


class Process:
    """One worker process as its parent sees it."""

    def __init__(self, name: str, program: str, memory: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._link = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), str(memory)],
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                # what this process can import, its workers can
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.name, self.pid = name, self._process.pid

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """The answer to these frames, which are used up; raises `ProtocolError` where the process has ended."""
        try:
            send(self._link, frames)
            frames.clear()  # while the worker works nobody needs them
            return receive(self._link)
        except (EOFError, OSError):
            raise ProtocolError(self._last_words()) from None

    def _last_words(self) -> str:
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return (
            f"{self.name} (process {self.pid}) {how}; start the run again: it goes on from its last checkpoint, and"
            " with fewer --workers it takes less memory"
        )

    def end(self) -> None:
        """End it at once, and wait until it has."""
        self._process.kill()
        self._process.wait()
        self._link.close()


@contextmanager
def processes(count: int, *, program: str, memory: int) -> Iterator[list[Process]]:
    """So many workers; none is left afterwards.

    `program` is Python that calls `serve`; its arguments are the descriptors of its pipe and of the memory.
    """
    with ExitStack() as stack:
        started = []
        for number in range(count):
            process = Process(f"worker {number + 1} of {count}", program, memory)
            stack.callback(process.end)
            started.append(process)
        yield started


def serve(link: int, answer: Callable[[list[bytes]], list[bytes]]) -> None:
    """A worker process: answer what comes until the parent closes the pipe, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the pipe
    threading.Thread(target=_end_with_parent, args=(link,), daemon=True).start()
    connection = Connection(link)
    while True:
        try:
            send(connection, answer(receive(connection)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _end_with_parent(link: int) -> None:
    """End this process as soon as nobody is at the other end, in the middle of a pack too."""
    ended = select.poll()
    ended.register(link, 0)  # nothing but the hang-up, which cannot be left out
    ended.poll()
    os._exit(1)


def send(link: "Connection", frames: Sequence[bytes]) -> None:
    """Write frames, their number first."""
    link.send_bytes(len(frames).to_bytes(8, "little"))
    for frame in frames:
        link.send_bytes(frame)


def receive(link: "Connection") -> list[bytes]:
    """Read what `send` wrote; raises `EOFError` where the other end is closed."""
    count = int.from_bytes(link.recv_bytes(8), "little")
    return [link.recv_bytes() for _ in range(count)]
