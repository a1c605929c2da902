"""What runs with workers have in common: settings that a pack or a message could get wrong, and who is compared how."""

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.config import Config
from atlas_fl.events import OnEvent
from atlas_fl.experiment.backends import (
    BACKENDS,
    Allocate,
    Backend,
    in_process_backend,
    init_worker,
    pool_engine,
    share_weights,
    worker_init_messages,
)
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.runtime.engine import Engine
from atlas_fl.runtime.worker_pool import WorkerLoop, init_workers
from atlas_fl.setup.assembly import assemble
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state

# Packs of a client or two each, with cuts, noise, dropout, some of the clients, and clusters that are measured anew.
SETTINGS = {
    **{"split": "cpu_2gb=2,trec-0=1", "wire": "int8", "wire_noise": 0.05, "head": "client", "dropout": 0.1},
    **{"participation": 0.75, "rounds": 3, "recluster_every": 2, "pack_tokens": 200, "eta": 0.3},
}


def check_same(left: Path, right: Path) -> None:
    """Both runs have left the same models, metrics and bytes behind, and the audit finds nothing."""
    assert same_tensors(state(left), state(right))
    assert rows(left) == rows(right)
    assert rows(left, "ledger") == rows(right, "ledger")
    files = sorted(path.relative_to(left) for path in left.rglob("*.safetensors") if "checkpoints" not in path.parts)
    assert any(path.parts[0] in ("adapters", "models") for path in files)
    assert all((left / path).read_bytes() == (right / path).read_bytes() for path in files)
    passing_audit(right)


def into(held: list[mmap.mmap]) -> Allocate:
    """Memory of this process alone, which begins at a page as that of processes does."""

    def filled(size: int, fill: Callable[[mmap.mmap], None]) -> mmap.mmap:
        held.append(mmap.mmap(-1, size))
        fill(held[0])
        return held[0]

    return filled


class InTurn:
    """A worker that works while no other does: torch keeps the kernels that attention may use for the whole process."""

    def __init__(self, inner: WorkerLoop, turn: threading.Lock) -> None:
        self.inner, self.turn = inner, turn

    def ask(self, frames: list[bytes]) -> list[bytes]:
        with self.turn:
            return self.inner.ask(frames)


def in_threads(count: int) -> Callable[[Config, OnEvent], AbstractContextManager[tuple[Any, Engine]]]:
    """Workers as they are in processes of their own, with the same bytes to and fro, in threads of this one."""

    @contextmanager
    def backend(config: Config, on_event: OnEvent) -> Iterator[tuple[Any, Engine]]:
        memory = list[mmap.mmap]()
        assembly, places = share_weights(assemble(config), into(memory))
        turn = threading.Lock()
        workers = [InTurn(WorkerLoop(init_worker, lambda: memory[0]), turn) for _ in range(count)]
        with ThreadPoolExecutor(count) as threads:
            heads = worker_init_messages(assembly, places, devices=["cpu"] * count, cpus=torch.get_num_threads())
            init_workers(workers, heads, threads)
            yield assembly, pool_engine(assembly, workers, threads, on_event)

    return backend


def run_in_threads(config: Config, count: int) -> RunResult:
    """The run of this config by so many workers in threads, which leaves all behind that `--workers` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, config.run.engine, in_threads(count))
        return run_config(config)


@dataclass(frozen=True)
class Without:
    """An engine in which some jobs get no answer."""

    engine: Engine
    is_lost: Callable[[str, Job], bool]
    """Of an action and a job."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        asked = [job for job in jobs if not self.is_lost(action, job)]
        return self.engine.run(action, asked) if asked else []


def backend_without(is_lost: Callable[[str, Job], bool]) -> Backend:
    """This process, where these jobs get no answer."""

    @contextmanager
    def backend(config: Config, on_event: OnEvent) -> Iterator[tuple[Any, Engine]]:
        with in_process_backend(config, on_event) as (assembly, engine):
            yield assembly, Without(engine, is_lost)

    return backend


def check_workers(make: Make, **settings: Any) -> Path:
    """The folder of the run with two workers, which has the same files as that of one process."""
    whole = run_config(make(name="alone", **settings)).folder
    found = run_config(make(name="workers", **settings), backend=in_threads(2)).folder
    check_same(whole, found)
    return found
