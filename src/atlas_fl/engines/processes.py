"""Worker processes of this machine: fresh interpreters that a pipe and a piece of memory lead to.

They are started as `multiprocessing` spawns its own, but without its pickled arguments and without importing the
caller's main module, so that a script needs no guard. What goes through a pipe is bytes.
"""

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
