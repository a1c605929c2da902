"""Runs of several configs, here or at once in worker processes that each make several and keep what these share.

A process is given the runs of one seed after another, because strategies of one seed share data, fingerprints, states
of the frozen blocks and first rounds (`runtime.reuse`, `models.prefix_cache`); one without work takes over runs of the
others. A process that dies takes one run down with it, which the same command resumes.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from atlas_fl.config import Config, parse_config, run_folder, to_toml
from atlas_fl.errors import AtlasError, CheckpointError
from atlas_fl.events import Note, OnEvent, ignore
from atlas_fl.experiment.free_memory import bytes_of_a_run, free_bytes, jobs_that_fit, memory_note
from atlas_fl.experiment.sweep import OnRun, Point, RunState, run_state
from atlas_fl.plugins import check_registered, load_plugins, registered_names

DONE: RunState = "finished"
PROGRAM = "from atlas_fl.experiment.parallel_runs import serve_runs; serve_runs()"


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
        with REUSED_RESULTS.remember() as results:
            for index, (point, state) in enumerate(zip(points, states)):
                on_run(index, point, state)
                if state != "finished":
                    run_config(point.config, on_event=on_event, resume=True)
        computed_seconds, saved_seconds = results.computed_seconds, results.saved_seconds
    else:
        computed_seconds, saved_seconds = run_in_processes(points, states, jobs=jobs, on_run=on_run, on_event=on_event)
    if saved_seconds:
        share = saved_seconds / (computed_seconds + saved_seconds)
        on_event(
            Note(
                f"{computed_seconds:.0f} s of the clients' work computed, {saved_seconds:.0f} s ({share:.0%}) shared"
                " between runs: equal fingerprints, first rounds and scores"
            )
        )
    return tuple(run_folder(point.config).path for point in points)


def run_in_processes(
    points: Sequence[Point], states: Sequence[RunState], *, jobs: int, on_run: OnRun, on_event: OnEvent
) -> tuple[float, float]:
    """Run the unfinished points, as many at once as fit into memory, each process with its share of the cores.

    Returns the seconds of the clients' work that were computed, and those that were saved (`run_all`).

    Raises:
        CheckpointError: a run failed; those that had begun end first, and all that was done stays.
    """
    queue = RunQueue([(index, point.config.run.seed) for index, point in enumerate(points) if states[index] != DONE])
    free = free_bytes()
    each = bytes_of_a_run(points)
    fitting = jobs_that_fit(jobs, free=free, each=each)
    for line in memory_note(jobs, fitting, free=free, each=each) if len(queue) else ():
        on_event(Note(line))
    problems: dict[int, str] = {}

    def work() -> dict[str, Any]:
        answer: dict[str, Any] = {"computed": 0.0, "saved": 0.0}
        with run_process(fitting) as process:
            while not problems and (index := queue.take()) is not None:
                on_run(index, points[index], states[index])
                told = process.make(points[index].config)
                if told["problem"]:
                    problems[index] = told["problem"]
                answer |= told
        return answer

    with ThreadPoolExecutor(max_workers=fitting) as pool:
        futures = [pool.submit(work) for _ in range(min(fitting, len(queue)))]
    answers = [future.result() for future in futures]
    if problems:
        index = min(problems)
        raise CheckpointError(f"{run_folder(points[index].config).path} failed: {problems[index]}")
    return sum(answer["computed"] for answer in answers), sum(answer["saved"] for answer in answers)


class RunQueue:
    """Indices of the runs to make, by seed; a thread is given runs of one seed as long as there are some."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        """`runs` are (index, seed) in their order."""
        self._by_seed: dict[int, list[int]] = {}
        for index, seed in runs:
            self._by_seed.setdefault(seed, []).append(index)
        self._seed_of_thread: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._by_seed.values()))

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


@dataclass(kw_only=True)
class RunProcess:
    """A process that makes runs, one after the other."""

    process: "subprocess.Popen[str]"
    errors: IO[str]
    """Its standard error."""

    def make(self, config: Config) -> dict[str, Any]:
        """Begin or resume this run; its `problem`, empty if none, and the seconds so far."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([to_toml(config), registered_names()]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"problem": self._last_words()}
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else {"problem": self._last_words()}

    def _last_words(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return lines[-1] if lines else f"its process ended with exit code {code}; the same command goes on"


@contextmanager
def run_process(jobs: int) -> Iterator[RunProcess]:
    """A process for one of so many runs at once, which ends with the context."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            try:
                yield RunProcess(process=process, errors=errors)
            finally:
                if process.stdin is not None and not process.stdin.closed:
                    process.stdin.close()


def serve_runs() -> None:
    """Make the runs whose settings come in, a line each, and answer each with a line, until there are no more."""
    from atlas_fl.experiment.run import run_config
    from atlas_fl.runtime.reuse import REUSED_RESULTS

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with REUSED_RESULTS.remember() as results:
        for line in sys.stdin:
            problem = ""
            try:
                text, registered = json.loads(line)
                config = parse_config(text, origin="the settings of a run")
                load_plugins(config.run.plugin)
                check_registered(registered)
                run_config(config, resume=True)
            except AtlasError as error:
                problem = str(error)
            told = {"problem": problem, "computed": results.computed_seconds, "saved": results.saved_seconds}
            answers.write(json.dumps(told) + "\n")
            answers.flush()
