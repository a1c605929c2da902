"""Equal tuning before a comparison (`atlas compare --trials`): as many settings of every method, on development seeds.

Every method is tried at the same learning rates, around the one given, as many as there are trials; knobs of a
method's own are drawn at random beside them (Bergstra and Bengio, Random search for hyper-parameter optimization, JMLR
2012), the defaults first. The best by mean validation score over the development seeds is what the comparison then runs
on its own seeds; test scores choose nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from atlas_fl.config import Config, settings, value_of, with_values
from atlas_fl.errors import ConfigError, short_repr
from atlas_fl.experiment.summary import LOWEST
from atlas_fl.experiment.sweep import Point, grid
from atlas_fl.frozen import Frozen
from atlas_fl.rng import generator
from atlas_fl.storage.jsonl import read_json, read_sealed, write_sealed
from atlas_fl.storage.run_folder import RunFolder

DEVELOPMENT_SEEDS = (9001, 9002)
"""Seeds that no comparison reports."""

SettingValue: TypeAlias = float | str

KNOBS: dict[str, dict[str, Sequence[SettingValue]]] = {}
"""By method, the values of its knobs, the default first (`methods.knobs.Tried`)."""
for _setting in settings().values():
    for _strategy, _values in _setting.tried.items():
        KNOBS.setdefault(_strategy, {})[_setting.name] = _values


class TuningTrial(Frozen):
    """Settings of a method that were tried."""

    settings: Mapping[str, SettingValue]
    """Values by setting."""
    validation: float
    """Mean validation score over clients and development seeds."""

    def __str__(self) -> str:
        """`lr 0.01, second_weight 0.1`."""
        return ", ".join(f"{name} {value_words(value)}" for name, value in self.settings.items())


class TunedMethod(Frozen):
    """Tried settings of a method."""

    strategy: str
    trials: tuple[TuningTrial, ...]
    seeds: tuple[int, ...] = DEVELOPMENT_SEEDS
    """Seeds of the trials."""

    @property
    def best(self) -> TuningTrial:
        """The trial with the best validation score; of equal ones the first, which is nearer to the defaults."""
        return max(self.trials, key=lambda trial: trial.validation)

    @property
    def tried(self) -> str:
        """`8 settings tried on seeds 9001, 9002, lr 0.005..0.02`."""
        number = f"{len(self.trials)} setting{'s' * (len(self.trials) > 1)}"
        return f"{number} tried on seeds {', '.join(map(str, self.seeds))}, lr {self._ends('lr')}"

    @property
    def chosen(self) -> str:
        """`lr 0.01, eta 1 of 0..1`: the best settings, of all but the rate with what was tried."""
        words = [f"{name} {value_words(value)} of {self._ends(name)}" for name, value in self.best.settings.items()]
        return ", ".join([words[0].partition(" of ")[0], *words[1:]])

    def __str__(self) -> str:
        """`8 settings tried on seeds 9001, 9002, lr 0.005..0.02; chosen lr 0.01, eta 1 of 0..1 (validation 0.812)`."""
        return f"{self.tried}; chosen {self.chosen} (validation {self.best.validation:.3f})"

    def _ends(self, name: str) -> str:
        """`0.005..0.02`, or the choices that were tried."""
        values = [trial.settings[name] for trial in self.trials]
        numbers = [value for value in values if not isinstance(value, str)]
        ends = [min(numbers), max(numbers)] if numbers else values
        return (".." if numbers else " or ").join(dict.fromkeys(map(value_words, ends)))


RunPoints = Callable[[Sequence[Point]], Sequence[Path]]
"""Runs every point, and gives the folders of the finished runs."""


def candidates(strategy: str, number: int, *, lr: float) -> tuple[dict[str, SettingValue], ...]:
    """The settings that are tried of a strategy, `number` of them, the defaults first.

    Learning rates are lr, 2 lr, lr/2, 4 lr, lr/4 and so on, for every strategy the same.

    >>> candidates("fedavg", 3, lr=0.001)
    ({'lr': 0.001}, {'lr': 0.002}, {'lr': 0.0005})
    """
    rng, knobs = generator(0, "tuning", strategy), KNOBS.get(strategy, {})
    return tuple(
        {
            "lr": lr * _factor(trial),
            **{name: values[int(rng.integers(len(values))) if trial else 0] for name, values in knobs.items()},
        }
        for trial in range(number)
    )


def _factor(index: int) -> float:
    """1, 2, 1/2, 4, 1/4, ..."""
    power = (index + 1) // 2
    return float(2.0**power if index % 2 else 2.0**-power)


def tune_methods(
    base: Config,
    strategies: Sequence[str],
    *,
    number: int,
    lr: float,
    run_points: RunPoints,
    score: Literal["final", "best"] = "final",
) -> tuple[TunedMethod, ...]:
    """Try `number` settings of every strategy on the development seeds.

    Raises:
        ConfigError: a setting contradicts the base, or a strategy's models give no numbers with any that is tried.
        CheckpointError: a run failed; those before it stay and are not repeated.
    """
    tried = [(strategy, values) for strategy in strategies for values in candidates(strategy, number, lr=lr)]
    points = [
        point
        for strategy, values in tried
        for point in grid(with_values(base, values), over={"strategy": (strategy,)}, seeds=DEVELOPMENT_SEEDS)
    ]
    scores = [_validation(folder, score) for folder in run_points(points)]
    trials: dict[str, list[TuningTrial]] = {}
    for (strategy, values), mean in zip(tried, np.reshape(scores, (len(tried), -1)).mean(axis=1).tolist(), strict=True):
        trials.setdefault(strategy, []).append(TuningTrial(settings=values, validation=mean))
    if diverged := [name for name, own in trials.items() if all(trial.validation == LOWEST for trial in own)]:
        raise ConfigError(
            f"no settings of {', '.join(diverged)} that were tried gave outputs that are numbers at all clients; lower"
            " --lr, or tune more of them with --trials"
        )
    return tuple(TunedMethod(strategy=strategy, trials=tuple(own)) for strategy, own in trials.items())


def value_words(value: SettingValue) -> str:
    """A number in as few digits as it takes, a choice by its name.

    >>> value_words(0.5), value_words("head_then_rest")
    ('0.5', 'head_then_rest')
    """
    return value if isinstance(value, str) else f"{value:g}"


def has_settings(config: Config, trial: TuningTrial) -> bool:
    """Return true for a config with the settings of the trial."""
    return all(name in settings() and value_of(config, name) == value for name, value in trial.settings.items())


def write_tuning(folder: RunFolder, tuned: TunedMethod) -> None:
    """Write beside a run how its settings were chosen; a record of more trials that chose the same stays."""
    earlier = read_tuning(folder)
    if earlier is None or earlier.best.settings != tuned.best.settings or len(earlier.trials) <= len(tuned.trials):
        write_sealed(folder.tuning, asdict(tuned))


def read_tuning(folder: RunFolder) -> TunedMethod | None:
    """The trials that chose the settings of this run; None without a record.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not folder.tuning.is_file():
        return None
    return parse_tuning(read_sealed(folder.tuning, "strategy", "seeds", "trials"))


def parse_tuning(content: Mapping[str, Any]) -> TunedMethod:
    """The method of this JSON.

    Raises:
        KeyError, TypeError, ValueError: it is no record of a tuning.
    """
    trials = tuple(
        TuningTrial(settings=dict(trial["settings"]), validation=float(trial["validation"]))
        for trial in content["trials"]
    )
    for name, value in [item for trial in trials for item in trial.settings.items()]:
        if name not in settings() or not (isinstance(value, int | float) or str(value).isidentifier()):
            raise ValueError(f"no tuning tries {name} {short_repr(value)}")
    if len({frozenset(trial.settings) for trial in trials}) != 1:
        raise ValueError("the trials of a tuning are one and more, of the same settings")
    seeds = tuple(int(seed) for seed in content["seeds"])
    return TunedMethod(strategy=str(content["strategy"]), seeds=seeds, trials=trials)


def _validation(folder: Path, score: str) -> float:
    """The mean validation score; the lowest there is where a client's outputs were no numbers: it has no loss then."""
    scores = read_json(RunFolder(folder).summary)["overall"][score].get("validation", {})
    return float(scores["primary"]) if "loss" in scores else LOWEST
