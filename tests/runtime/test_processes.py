"""Worker processes without any model: they answer, they end with their parent, and their memory is the same."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import atlas_fl
from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.processes import SharedMemory, worker_processes

ECHO = "import sys; from atlas_fl.runtime.processes import run_worker_loop; run_worker_loop(int(sys.argv[1]), list)"
WRITER = """
import mmap, sys
from atlas_fl.runtime.processes import run_worker_loop
link, memory = map(int, sys.argv[1:])
def answer(frames):
    mmap.mmap(memory, 0)[:5] = frames[0]
    return []
run_worker_loop(link, answer)
"""
BUSY = """
import sys
from atlas_fl.runtime.processes import run_worker_loop
def answer(frames):
    print("busy", flush=True)
    while True:
        sum(range(1000))
run_worker_loop(int(sys.argv[1]), answer)
"""
PARENT = f"""
from contextlib import closing
from atlas_fl.runtime.processes import SharedMemory, worker_processes
with closing(SharedMemory()) as memory, worker_processes(1, program={BUSY!r}, files=(memory.file,)) as (worker,):
    print(worker.pid, flush=True)
    worker.ask([b"work"])
"""


@contextmanager
def workers_of(program: str, count: int = 1) -> Iterator[Any]:
    with closing(SharedMemory()) as memory, worker_processes(count, program=program, files=(memory.file,)) as workers:
        yield workers


def test_frames_of_any_size_come_back_as_they_went() -> None:
    frames = [b"", b"a", os.urandom(3 * 2**20)]
    with workers_of(ECHO, 2) as workers:
        for worker in workers:
            assert worker.ask(list(frames)) == frames, "what is asked is used up"
            assert worker.ask([]) == []


def test_what_one_writes_to_the_memory_all_see() -> None:
    with closing(SharedMemory()) as memory:
        seen = memory.allocate(4096, lambda _: None)
        with worker_processes(1, program=WRITER, files=(memory.file,)) as (worker,):
            worker.ask([b"hello"])
        assert seen[:5] == b"hello"


def test_ctrl_c_is_left_to_the_parent() -> None:
    with workers_of(ECHO) as (worker,):
        worker.ask([b"it listens by now"])
        os.kill(worker.pid, signal.SIGINT)
        assert worker.ask([b"still here"]) == [b"still here"]


def test_a_worker_that_is_killed_is_told_in_a_line() -> None:
    with workers_of(ECHO, 2) as workers:
        os.kill(workers[1].pid, signal.SIGKILL)
        with pytest.raises(ProtocolError, match=r"worker 2 of 2 \(process \d+\) was ended by SIGKILL; start the run"):
            workers[1].ask([b"anything"])
        assert workers[0].ask([b"the other"]) == [b"the other"]


def test_a_worker_that_fails_is_told_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    message = r"worker 1 of 1 .* ended with exit code 1"
    with workers_of("raise RuntimeError('a fault of ours')") as (worker,), pytest.raises(ProtocolError, match=message):
        worker.ask([b"anything"])
    assert "a fault of ours" in capfd.readouterr().err


def test_a_worker_ends_with_its_parent_in_the_middle_of_its_work() -> None:
    source = str(Path(atlas_fl.__file__).parents[1])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    assert parent.stdout is not None
    with parent, parent.stdout as lines:
        worker = os.pidfd_open(int(lines.readline()))
        assert lines.readline() == "busy\n"
        parent.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([worker], [], [], 60)
        if not ended:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        os.close(worker)
    assert ended, "the worker is an orphan"
