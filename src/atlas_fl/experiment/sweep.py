"""Runs of several configs: a grid of settings and seeds; finished runs are not repeated, unfinished ones are resumed.

`atlas sweep`, `compare`, its tuning and `search` run points of `grid` by `parallel_runs.run_all`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

from atlas_fl.config import (
    Config,
    config_hash,
    differences,
    load_config,
    pin_mask_file,
    run_folder,
    validate,
    with_values,
)
from atlas_fl.config.methods import check_swept_setting, without_method_settings
from atlas_fl.config.presets import turn_dial
from atlas_fl.config.settings import find_setting
from atlas_fl.config.values import LARGEST, Mark
from atlas_fl.errors import CheckpointError, ConfigError, short_repr
from atlas_fl.storage.run_folder import PLANNED_RUNS

SEEDS = (42, 123, 456, 789, 1024)
"""The seeds that results are published with, in the order in which they are used."""

MOST_SEEDS = 1000
"""Most seeds of one comparison; a larger number is a seed, given as a count by mistake."""

LAMBDA_SWEEP = "eta=0,0.01,0.1,0.5,1"
"""The steps of the Laplacian that `--lambda-sweep` tries."""

RunState = Literal["finished", "unfinished", "new"]

STEPS = "local_steps"
"""The swept setting along which rounds are scaled."""
MAX_STRETCH = 1.5
"""Factor by which runs of a sweep over local steps may become longer, so that all take equally many steps."""


@dataclass(frozen=True, kw_only=True)
class Point:
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
        ConfigError: a value is no number of steps, or that number is far from the base's.
    """
    if STEPS not in over or "rounds" in over:
        return {}
    values = {text: with_values(base, {STEPS: text}).images.local_steps or 0 for text in over[STEPS]}
    if wrong := [text for text, steps in values.items() if steps < 1]:
        raise ConfigError(f"--over sweeps {STEPS} to {wrong[0]}; allowed: at least 1; give numbers of steps")
    training, unit = base.training, lcm(*values.values())
    base_steps = training.rounds * (base.images.local_steps or next(iter(values.values())))
    steps = max(1, (2 * base_steps + unit) // (2 * unit)) * unit
    if steps > MAX_STRETCH * base_steps:
        raise ConfigError(
            f"--over sweeps {STEPS} to {', '.join(values)}, which divide multiples of {unit} steps alone, and the"
            f" settings have {training.rounds} rounds, {base_steps} steps; give --rounds"
            f" {-(-training.rounds * unit // base_steps)} or more, other values, or --over rounds={training.rounds}"
        )
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
    if not numbers:
        raise ConfigError("--seeds is empty; give how many, or two seeds and more")
    if len(numbers) == 1:
        return seeds(numbers[0])
    if twice := [seed for seed in numbers if numbers.count(seed) > 1]:
        raise ConfigError(f"--seeds has {twice[0]} twice; name each seed once")
    if wrong := [seed for seed in numbers if not 0 <= seed <= LARGEST]:
        raise ConfigError(f"--seeds has {short_repr(wrong[0])}; allowed: 0 to {LARGEST:.0e}; leave it out")
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


def with_eta(config: Config) -> Config:
    """The config with the Laplacian in the place of `atlas`, which has no eta to be swept."""
    return with_values(config, {"strategy": "atlas_laplacian"}) if config.mixing.strategy == "atlas" else config


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
        for name in changes:
            check_swept_setting(changed, name)
        if "dial" in changes:
            changed = turn_dial(changed, changed.run.dial or 0)
        for seed in seeds:
            config = replace(changed, run=replace(changed.run, seed=seed))
            points.append(Point(config=_with_run_name(pin_mask_file(validate(config)), base.run.name), changes=changes))
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
    """The state of the run of this config.

    Raises:
        CheckpointError: its folder holds the run of another config.
    """
    folder = run_folder(config)
    if not folder.is_run():
        return "new"
    if changed := differences(load_config(folder.config, within=folder.path), config):
        name, (there, here) = next(iter(changed.items()))
        raise CheckpointError(
            f"{folder.path} is a run with {name} = {there}, not {here}; give another --name or --runs-dir, or remove it"
        )
    return "finished" if folder.summary.is_file() else "unfinished"


def comparison_name(points: Sequence[Point], *, preset: str) -> str:
    """The file name of a comparison of these runs: preset, swept settings, and a hash of the runs."""
    runs = sorted({config_hash(point.config) for point in points})
    digest = sha256("".join(runs).encode()).hexdigest()[:8]
    return "-".join(["comparison", preset, *points[0].changes, digest]) + ".csv"


def write_planned_runs(points: Sequence[Point], table: Path) -> Path:
    """Write the names of a comparison's runs beside its table before they begin, for `atlas watch`."""
    from atlas_fl.storage.jsonl import write_json

    path = table.with_name(table.name.removesuffix(".csv") + PLANNED_RUNS)
    write_json(path, {"runs": [run_folder(point.config).path.name for point in points]})
    return path


def _with_run_name(config: Config, name: str | None) -> Config:
    """The config with a run name of its own where the user named the sweep: equal names would share a folder."""
    run_name = None if name is None else f"{name}-s{config.run.seed}-{config_hash(config)[:8]}"
    return replace(config, run=replace(config.run, name=run_name))
