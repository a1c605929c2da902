"""Worker processes: fresh interpreters with a pipe for bytes and shared memory, which end with their parent.

They are started as `multiprocessing` spawns its own, but without pickled arguments and without importing the caller's
main module, so that a script needs no guard. Nothing of this module needs PyTorch, so a worker imports it at once.
"""

import gc
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

from atlas_fl.errors import ProtocolError


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

    def __init__(self, name: str, program: str, files: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._link = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import gc\ngc.disable()\n{program}", *map(str, (theirs.fileno(), *files))],
                pass_fds=(theirs.fileno(), *files),
                stdin=subprocess.DEVNULL,
                # workers can import what this process can
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.name = name
        self.pid = self._process.pid

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """The answer to these frames, which are consumed; raises `ProtocolError` where the process has ended."""
        try:
            send_frames(self._link, frames)
            frames.clear()  # not needed while the worker computes
            return receive_frames(self._link)
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ProtocolError(
                f"{self.name} (process {self.pid}) {how}; start the run again: it goes on from its last checkpoint, and"
                " with fewer --workers or --jobs it takes less memory"
            ) from None

    def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        self._link.close()


@contextmanager
def worker_processes(count: int, *, program: str, files: Sequence[int] = ()) -> Iterator[list[WorkerProcess]]:
    """This many worker processes; all are killed at the end.

    `program` is Python that calls `run_worker_loop`; its arguments are the descriptors of its pipe and of these files.
    """
    with ExitStack() as stack:
        started = []
        for number in range(count):
            process = WorkerProcess(f"worker {number + 1} of {count}", program, files)
            stack.callback(process.kill)
            started.append(process)
        yield started


def run_worker_loop(link: int, answer: Callable[[list[bytes]], list[bytes]]) -> None:
    """Answer frames in a worker process until its parent closes the pipe, or ends."""
    gc.enable()  # all is imported
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
    return [link.recv_bytes() for _ in range(int.from_bytes(link.recv_bytes(8), "little"))]
