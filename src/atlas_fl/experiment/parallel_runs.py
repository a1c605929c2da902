"""Runs of several configs, here or at once in worker processes that each make several and keep what these share.

A process is given the runs of one seed after another, because strategies of one seed share data, fingerprints, states
of the frozen blocks and first rounds (`runtime.reuse`, `models.prefix_cache`); one without work takes over runs of the
others. A process that dies takes one run down with it, which the same command resumes.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atlas_fl.config import parse_config, run_folder, to_toml
from atlas_fl.errors import AtlasError, CheckpointError, ProtocolError
from atlas_fl.events import OnEvent, ignore
from atlas_fl.experiment.sweep import OnRun, Point, run_state
from atlas_fl.plugins import check_registered, load_plugins, registered_names
from atlas_fl.runtime.processes import WorkerProcess, run_worker_loop, worker_processes

PROGRAM = """
import os, sys
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "{threads}"
from atlas_fl.experiment.parallel_runs import serve_runs
serve_runs(int(sys.argv[1]))
"""


def run_all(
    points: Sequence[Point],
    *,
    jobs: int | None = None,
    on_run: OnRun = lambda *_: None,
    on_event: OnEvent = ignore,
) -> tuple[Path, ...]:
    """Run every point: new runs are started, unfinished ones resumed, finished ones left alone; the run folders.

    Runs follow each other in this process, or `jobs` of them run at once, each in a process of its own. `on_run` is
    called with the index, the point and the state of a run beforehand.

    Raises:
        AtlasError: a run cannot go on; those before it stay.
    """
    from atlas_fl.experiment.run import run_config
    from atlas_fl.runtime.reuse import REUSED_RESULTS

    states = [run_state(point.config) for point in points]
    if jobs is None:
        with REUSED_RESULTS.remember():
            for index, (point, state) in enumerate(zip(points, states)):
                on_run(index, point, state)
                if state != "finished":
                    run_config(point.config, on_event=on_event, resume=True)
    else:
        unfinished = {index: point for index, point in enumerate(points) if states[index] != "finished"}
        _run_in_processes(unfinished, jobs, lambda index: on_run(index, points[index], states[index]))
    return tuple(run_folder(point.config).path for point in points)


def _run_in_processes(points: Mapping[int, Point], jobs: int, on_begin: Callable[[int], None]) -> None:
    """Run the points, so many at once, each process with its share of the cores.

    Raises:
        CheckpointError: a run failed; those that had begun end first, and all that was done stays.
    """
    queue = RunQueue([(index, point.config.run.seed) for index, point in points.items()])
    problems: dict[int, str] = {}

    def work(process: WorkerProcess) -> None:
        while not problems and (index := queue.take()) is not None:
            on_begin(index)
            try:
                answer = process.ask([to_toml(points[index].config).encode(), json.dumps(registered_names()).encode()])
            except ProtocolError as error:
                answer = [str(error).encode()]
            if answer:
                problems[index] = answer[0].decode()

    program = PROGRAM.format(threads=max(1, (os.cpu_count() or 1) // jobs))
    # left in this order: whoever waits for a process that was killed goes on
    with ThreadPoolExecutor(jobs) as threads, worker_processes(min(jobs, len(points)), program=program) as processes:
        list(threads.map(work, processes))
    if problems:
        index = min(problems)
        raise CheckpointError(f"{run_folder(points[index].config).path} failed: {problems[index]}")


class RunQueue:
    """Indices of the runs to make, by seed; a thread is given runs of one seed as long as there are some."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        """`runs` are (index, seed) in their order."""
        self._by_seed: dict[int, list[int]] = {}
        for index, seed in runs:
            self._by_seed.setdefault(seed, []).append(index)
        self._seed_of_thread: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """The index of the next run of this thread's seed, of a seed that is nobody's, or of the longest queue."""
        with self._lock:
            waiting = {seed: runs for seed, runs in self._by_seed.items() if runs}
            if not waiting:
                return None
            thread, taken = threading.get_ident(), set(self._seed_of_thread.values())
            seed = self._seed_of_thread.get(thread)
            if seed not in waiting:
                free = [other for other in waiting if other not in taken]
                seed = free[0] if free else max(waiting, key=lambda other: len(waiting[other]))
                self._seed_of_thread[thread] = seed
            return self._by_seed[seed].pop(0)


def serve_runs(link: int) -> None:
    """Make the runs whose settings come in, and answer each with its problem, or with nothing."""
    from atlas_fl.experiment.run import run_config
    from atlas_fl.runtime.reuse import REUSED_RESULTS

    def make_run(frames: list[bytes]) -> list[bytes]:
        settings, registered = frames
        try:
            config = parse_config(settings.decode(), origin="the settings of a run")
            load_plugins(config.run.plugin)
            check_registered(json.loads(registered))
            run_config(config, resume=True)
        except AtlasError as error:
            return [str(error).encode()]
        return []

    with REUSED_RESULTS.remember():
        run_worker_loop(link, make_run)
