"""The worker-pool engine: packs of clients in worker processes, over pipes and shared memory.

Packs are formed by `client.batching`, as in one process, and do not depend on the workers, so neither do the results.
A pack is sent as one frame for each job and returns as one frame for each update.

Worker processes are fresh interpreters, started as `multiprocessing` spawns its own, but without pickled arguments and
without importing the caller's main module, so that a script needs no guard. Only bytes go through the pipes.
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
from atlas_fl.runtime.local import spill_to_disk
from atlas_fl.runtime.protocol.model_sync import AdapterSender, NewSender, Receiver, Sender
from atlas_fl.runtime.transport.frames import Head, decode_frame, encode_frame

MAX_FRAME_BYTES = 2**40
"""Maximum size of a frame: both ends are ours, and a model may be larger than a message over a network."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What a worker needs to run jobs."""

    site: Site
    receiver: Receiver


InitWorker: TypeAlias = Callable[[Head, Any], WorkerContext]
"""(head of the init message, shared memory) -> the worker's context."""


class Worker(Protocol):
    """Runs packs: a process or an actor."""

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """The answer to these frames, which are consumed; blocks until it is there.

        Raises `ProtocolError` where the worker has ended.
        """
        ...


@dataclass(kw_only=True, eq=False)
class PoolEngine:
    """An `Engine` that sends each pack to the next free worker."""

    site: Site
    workers: Sequence[Worker]
    threads: Executor
    """One thread for each worker."""
    on_progress: Callable[[str, int, int], None]
    """Called with (action, jobs done, jobs) after each pack."""
    new_sender: NewSender = AdapterSender
    _free: "queue.SimpleQueue[tuple[Worker, Sender]]" = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for worker in self.workers:
            self._free.put((worker, self.new_sender()))

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order; raises `ProtocolError` where a worker has ended."""
        all_packs = list(packs(jobs, self.site))
        index_by_future = {
            self.threads.submit(self._run_pack, action, pack): index for index, pack in enumerate(all_packs)
        }
        updates_by_pack: dict[int, list[Update]] = {}
        try:
            for future in as_completed(index_by_future):
                earlier = [update for updates in updates_by_pack.values() for update in updates]
                # popped, because a future keeps its result
                updates_by_pack[index_by_future.pop(future)] = spill_to_disk(action, future.result(), earlier)
                self.on_progress(action, sum(map(len, updates_by_pack.values())), len(jobs))
        finally:
            for future in index_by_future:
                future.cancel()  # without effect on packs that are running
        by_job = {
            id(job): update for index, pack in enumerate(all_packs) for job, update in zip(pack, updates_by_pack[index])
        }
        return [by_job[id(job)] for job in jobs]

    def _run_pack(self, action: str, pack: Sequence[Job]) -> list[Update]:
        worker, sender = self._free.get()
        try:
            return decode_updates(action, worker.ask(encode_jobs(action, pack, sender)), pack, sender)
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


def encode_jobs(action: str, pack: Sequence[Job], sender: Sender) -> list[bytes]:
    """The frames that send this pack to a worker."""
    frames = []
    for number, job in enumerate(pack):
        head, tensors = sender.job(action, job, number=number)
        frames.append(encode_frame({**head, "client": job.client}, tensors, limit=MAX_FRAME_BYTES))
    return frames


def decode_updates(action: str, frames: list[bytes], pack: Sequence[Job], sender: Sender) -> list[Update]:
    """The updates in a worker's answer to this pack; raises the worker's error. The frames are consumed."""
    updates = list[Update]()
    for head, tensors in _decode_frames(frames):
        raise_failure(head)
        updates.append(sender.update(action, head, tensors, job=pack[len(updates)]))
    assert len(updates) == len(pack), "a worker answers every job"
    return updates


def _decode_frames(frames: list[bytes]) -> Iterator[tuple[Head, Params]]:
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
        self._context: WorkerContext | None = None

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """An update for every job, or the error that was raised. The frames are consumed."""
        try:
            if self._context is None:
                ((head, _),) = _decode_frames(frames)
                self._context = self._init_worker(head, self._memory())
                return [encode_frame({"kind": "ready"}, {})]
            return self._execute(self._context, frames)
        except AtlasError as error:
            if self._context is not None:
                self._context.receiver.forget()
            return [encode_frame({"kind": "failed", "error": type(error).__name__, "reason": str(error)}, {})]

    def _execute(self, context: WorkerContext, frames: list[bytes]) -> list[bytes]:
        action, jobs = "", list[Job]()
        for head, tensors in _decode_frames(frames):
            action, job, _ = context.receiver.job(head, tensors, client=str(head["client"]))
            jobs.append(job)
        pairs = enumerate(zip(ACTIONS[action](jobs, context.site), jobs, strict=True))
        messages = (context.receiver.update(action, update, job, number=n) for n, (update, job) in pairs)
        return [encode_frame(*message, limit=MAX_FRAME_BYTES) for message in messages]


class SharedMemory:
    """Anonymous memory that processes inherit as a file descriptor; freed when the last of them ends."""

    def __init__(self) -> None:
        # /dev/shm is often small in containers; a memfd is bounded by the memory alone
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("atlas-weights")
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())

    def allocate(self, size: int, fill: Callable[[mmap.mmap], None]) -> mmap.mmap:
        """The memory, resized to `size` bytes and filled."""
        os.ftruncate(self.file, size)
        memory = mmap.mmap(self.file, 0)
        fill(memory)
        return memory

    def close(self) -> None:
        """Close the descriptor; mappings stay."""
        os.close(self.file)


class WorkerProcess:
    """One worker process, at its parent's end."""

    def __init__(self, name: str, program: str, memory: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._link = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), str(memory)],
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                # workers can import what this process can
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.name, self.pid = name, self._process.pid

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """The answer to these frames, which are consumed; raises `ProtocolError` where the process has ended."""
        try:
            send_frames(self._link, frames)
            frames.clear()  # not needed while the worker computes
            return receive_frames(self._link)
        except (EOFError, OSError):
            raise ProtocolError(self._exit_message()) from None

    def _exit_message(self) -> str:
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return (
            f"{self.name} (process {self.pid}) {how}; start the run again: it goes on from its last checkpoint, and"
            " with fewer --workers it takes less memory"
        )

    def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        self._link.close()


@contextmanager
def worker_processes(count: int, *, program: str, memory: int) -> Iterator[list[WorkerProcess]]:
    """This many worker processes; all are killed at the end.

    `program` is Python that calls `run_worker_loop`; its arguments are the descriptors of its pipe and of the memory.
    """
    with ExitStack() as stack:
        started = []
        for number in range(count):
            process = WorkerProcess(f"worker {number + 1} of {count}", program, memory)
            stack.callback(process.kill)
            started.append(process)
        yield started


def run_worker_loop(link: int, answer: Callable[[list[bytes]], list[bytes]]) -> None:
    """Answer frames in a worker process until its parent closes the pipe, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the pipe
    threading.Thread(target=_exit_with_parent, args=(link,), daemon=True).start()
    connection = Connection(link)
    while True:
        try:
            send_frames(connection, answer(receive_frames(connection)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _exit_with_parent(link: int) -> None:
    """End this process as soon as its parent has ended, also in the middle of a pack."""
    hang_up = select.poll()
    hang_up.register(link, 0)  # hang-ups only, which poll always reports
    hang_up.poll()
    os._exit(1)


def send_frames(link: "Connection", frames: Sequence[bytes]) -> None:
    """Write the number of frames, then the frames."""
    link.send_bytes(len(frames).to_bytes(8, "little"))
    for frame in frames:
        link.send_bytes(frame)


def receive_frames(link: "Connection") -> list[bytes]:
    """Read what `send_frames` wrote; raises `EOFError` where the other end is closed."""
    count = int.from_bytes(link.recv_bytes(8), "little")
    return [link.recv_bytes() for _ in range(count)]
