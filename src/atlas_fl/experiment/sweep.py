"""Runs of several configs: a grid of settings and seeds; finished runs are not repeated, unfinished ones are resumed.

`atlas sweep`, `compare`, its tuning and `search` run points of `grid` by `run_all`, here or at once in worker processes
that each make several and keep what these share. A process is given the runs of one seed after another, because
strategies of one seed share data, fingerprints, states of the frozen blocks and first rounds (`runtime.reuse`,
`models.prefix_cache`); one without work takes over runs of the others. A process that dies takes one run down with it,
which the same command resumes.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import product
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

from atlas_fl.config import Config, config_hash, parse_config, pin_mask_file, run_folder, to_toml, validate, with_values
from atlas_fl.config.methods import check_typed_settings, without_method_settings
from atlas_fl.config.presets import turn_dial
from atlas_fl.config.settings import find_setting, settings
from atlas_fl.config.values import LARGEST, Mark
from atlas_fl.errors import AtlasError, CheckpointError, ConfigError, ProtocolError, short_repr
from atlas_fl.events import OnEvent, ignore
from atlas_fl.experiment.recorder import check_same_settings
from atlas_fl.frozen import Frozen
from atlas_fl.plugins import check_registered, load_plugins, registered_names
from atlas_fl.runtime.processes import WorkerProcess, run_worker_loop, worker_processes

SEEDS = (42, 123, 456, 789, 1024)
"""The seeds that results are published with, in the order in which they are used."""

MOST_SEEDS = 1000
"""Most seeds of one comparison; a larger number is a seed, given as a count by mistake."""

PROGRAM = """
import os, sys
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "{threads}"
from atlas_fl.storage.extras import silence_libraries
silence_libraries()
from atlas_fl.experiment.sweep import serve_runs
serve_runs(int(sys.argv[1]))
"""

LAMBDA_SWEEP = "eta=0,0.01,0.1,0.5,1"
"""The steps of the Laplacian that `--lambda-sweep` tries."""

RunState = Literal["finished", "unfinished", "new"]

STEPS = "local_steps"
"""The swept setting along which rounds are scaled."""


class Point(Frozen):
    """One run of a grid."""

    config: Config
    changes: Mapping[str, str]
    """The swept settings of this run, as text, in the order of the sweep; the seed is not among them."""


OnRun: TypeAlias = Callable[[int, Point, RunState], None]


def same_steps(base: Config, over: Mapping[str, Sequence[str]]) -> dict[str, dict[str, int]]:
    """Rounds, and rounds between two evaluations, by swept number of local steps: rounds x J is one number.

    It is that of the base, rounded to the nearest number that every swept value divides, halves up. Empty where local
    steps are not swept, or the rounds are swept too.

    Raises:
        ConfigError: a value is no number of steps.
    """
    if STEPS not in over or "rounds" in over:
        return {}
    values = {text: with_values(base, {STEPS: text}).images.local_steps or 0 for text in over[STEPS]}
    if wrong := [text for text, steps in values.items() if steps < 1]:
        raise ConfigError(f"--over sweeps {STEPS} to {wrong[0]}; allowed: at least 1; give numbers of steps")
    training, unit = base.training, lcm(*values.values())
    base_steps = training.rounds * (base.images.local_steps or next(iter(values.values())))
    steps = max(1, (2 * base_steps + unit) // (2 * unit)) * unit
    rounds = {text: steps // local_steps for text, local_steps in values.items()}
    return {
        text: {"rounds": number, "eval_every": max(1, round(training.eval_every * number / training.rounds))}
        for text, number in rounds.items()
    }


def seeds(count: int) -> tuple[int, ...]:
    """The first seeds to use: the published ones, then 2001, 2002 and so on.

    Raises:
        ConfigError: `count` is below 1 or above 1,000.
    """
    if not 1 <= count <= MOST_SEEDS:
        raise ConfigError(
            f"--seeds is {count}; allowed: 1 to {MOST_SEEDS}, how many; two numbers and more are the seeds themselves"
        )
    return (SEEDS + tuple(2001 + extra for extra in range(count - len(SEEDS))))[:count]


def chosen_seeds(numbers: Sequence[int]) -> tuple[int, ...]:
    """The seeds that `--seeds` gives: one number counts them (`seeds`), several are the seeds themselves.

    >>> chosen_seeds([2]), chosen_seeds([7, 8])
    ((42, 123), (7, 8))

    Raises:
        ConfigError: there is no number, or one stands there twice.
    """
    if len(numbers) == 1:
        return seeds(numbers[0])
    if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= seed <= LARGEST for seed in numbers):
        raise ConfigError(
            f"--seeds is {short_repr(list(numbers))}; allowed: how many, or two seeds and more, each once, from 0 to"
            f" {LARGEST:.0e}; name other ones"
        )
    return tuple(numbers)


def parse_over(texts: Sequence[str], *, presets: bool = False) -> dict[str, tuple[str, ...]]:
    """The values of every swept setting from texts such as `eta=0,0.1,0.5`; the parts of a list are joined by `+`.

    With `presets` the preset may be one of them, for callers that make the settings of each.

    Raises:
        ConfigError: a text has another form, or names an unknown setting, the seed, or one setting twice.
    """
    over: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        setting, parts = find_setting(name), tuple(part.strip() for part in values.split(","))
        if not all(parts):
            raise ConfigError(
                f"--over is {text!r}; allowed: a setting and its values; write {setting.name}=VALUE,VALUE"
            )
        if Mark.SESSION in setting.marks or (setting.name == "preset" and not presets):
            raise ConfigError(
                f"--over sweeps {setting.name}, which changes no number of a run; sweep a setting that does"
            )
        if setting.name == "seed":
            raise ConfigError(f"--over is {text!r}; seeds are not swept; a sweep has --seeds NUMBER, a search --seed")
        if setting.name in over:
            raise ConfigError(f"--over sweeps {setting.name} twice; give a setting once")
        over[setting.name] = tuple(dict.fromkeys(parts))
    return over


def grid(
    base: Config,
    *,
    over: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    rounds: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> tuple[Point, ...]:
    """A point for every combination of values and every seed, seeds innermost; all of them are valid.

    `rounds` are those of some local steps (`same_steps`).

    Raises:
        AtlasError: a value is not allowed, or the base has a `max_rounds`, with which no run would be finished.
    """
    if base.run.max_rounds is not None:
        raise ConfigError(f"--max-rounds is {base.run.max_rounds}; here every run goes to its end; leave it out")
    if "strategy" in over:
        base = without_method_settings(base)
    points = []
    for values in product(*over.values()):
        changes = dict(zip(over, values))
        changed = with_values(base, {**changes, **rounds.get(changes.get(STEPS, ""), {})})
        check_typed_settings(changed, {settings()[name].flag for name in changes})
        if "dial" in changes:
            changed = turn_dial(changed, changed.run.dial or 0)
        for seed in seeds:
            config = replace(changed, run=replace(changed.run, seed=seed, alone="none"))
            config = pin_mask_file(validate(config))
            if base.run.name is not None:  # equal names would share a folder
                name = f"{base.run.name}-s{seed}-{config_hash(config)[:8]}"
                config = replace(config, run=replace(config.run, name=name))
            points.append(Point(config=config, changes=changes))
    _check_distinct(points)
    return tuple(points)


def _check_distinct(points: Sequence[Point]) -> None:
    """Raise ConfigError where two points are one run, because a value is written in two ways."""
    seen: dict[str, Point] = {}
    for point in points:
        other = seen.setdefault(config_hash(point.config), point)
        if other is not point:
            name = next(name for name, value in point.changes.items() if other.changes[name] != value)
            values = f"{other.changes[name]} and {point.changes[name]}"
            raise ConfigError(f"--over {name} has {values}, which are the same; give each value once")


def run_state(config: Config) -> RunState:
    """The state of the run of this config; raises `CheckpointError` where its folder holds another run."""
    folder = run_folder(config)
    if not folder.is_run():
        return "new"
    check_same_settings(config, folder)
    return "finished" if folder.summary.is_file() else "unfinished"


def comparison_name(points: Sequence[Point], *, preset: str) -> str:
    """The file name of a comparison of these runs: preset, swept settings, and a hash of the runs."""
    digest = sha256("".join(sorted({config_hash(point.config) for point in points})).encode()).hexdigest()[:8]
    return "-".join(["comparison", preset, *points[0].changes, digest]) + ".csv"


def run_all(
    points: Sequence[Point], *, jobs: int | None = None, on_run: OnRun = lambda *_: None, on_event: OnEvent = ignore
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
        # what runs share is at hand while runs of one seed and rate follow each other
        in_order = sorted(zip(points, states), key=lambda run: (run[0].config.run.seed, run[0].config.training.lr or 0))
        with REUSED_RESULTS.remember():
            for index, (point, state) in enumerate(in_order):
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
    queue = RunQueue({index: point.config.run.seed for index, point in points.items()})
    problems: dict[int, str] = {}

    def work(process: WorkerProcess) -> None:
        seed = None
        while not problems and (index := queue.take(seed)) is not None:
            seed = points[index].config.run.seed
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
    """Indices of the runs to make, with their seeds."""

    def __init__(self, seeds: Mapping[int, int]) -> None:
        self._waiting = dict(seeds)
        self._begun: set[int] = set()
        self._lock = threading.Lock()

    def take(self, seed: int | None) -> int | None:
        """The next run of this seed, else of one that nobody has begun, else of any; None where none is left."""
        with self._lock:
            ranks = {index: (own != seed, own in self._begun) for index, own in self._waiting.items()}
            index = min(ranks, key=lambda index: ranks[index], default=None)
            if index is not None:
                self._begun.add(self._waiting.pop(index))
            return index


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
