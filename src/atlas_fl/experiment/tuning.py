"""Equal tuning before a comparison (`atlas compare --trials`): as many settings of every method, on development seeds.

Each method is tried with the same number of settings: learning rates around the one given, and where a method has a
knob of its own, both together, the nearest to the defaults first. The best by mean validation score over the
development seeds is what the comparison then runs on its own seeds; test scores choose nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from atlas_fl.config import Config, settings, value_of, with_values
from atlas_fl.config.schema import NONE
from atlas_fl.errors import CheckpointError
from atlas_fl.experiment.sweep import Point, grid
from atlas_fl.storage.jsonl import read_json, read_sealed, write_sealed
from atlas_fl.storage.run_folder import RunFolder

DEVELOPMENT_SEEDS = (9001, 9002)
"""Seeds that no comparison reports."""

SettingValue: TypeAlias = float | str

KNOBS: Mapping[str, tuple[str, tuple[SettingValue, ...]]] = {
    "fedprox": ("proximal_mu", (0.01, 0.1, 0.001, 1.0)),
    **dict.fromkeys(("mr_mtl", "mr_mtl_cluster"), ("proximal_mu", (0.1, 0.01, 1.0, 0.03))),
    **dict.fromkeys(("atlas_laplacian", "atlas_pad", "atlas_truncate"), ("eta", (0.5, 0.25, 0.9, 0.1))),
    **dict.fromkeys(("fedavg_ft", "fedavg_cluster_ft", "fedbabu"), ("personal_rounds", (2, 1, 4))),
    **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), ("server_lr", (0.01, 0.003, 0.03, 0.1))),
    "fedavgm": ("server_lr", (1.0, 0.5, 0.25, 2.0)),
    "pfedgraph": ("gram_alpha", (0.8, 0.4, 1.6, 0.2)),
    "ditto": ("second_weight", (0.5, 0.1, 1.0, 0.03)),
    **dict.fromkeys(("apfl", "feddpa", "fedalt", "fedalt_fixed"), ("second_weight", (0.5, 0.25, 0.75, 0.9))),
    **dict.fromkeys(("fedamp", "feddyn"), ("proximal_mu", (0.1, 0.01, 1.0, 0.03))),
    "ifca": ("ifca_clusters", (3, 2, 4, 5)),
    "fedpac": ("feature_alignment", (1.0, 0.1, 0.3, 3.0)),
    "cfl": ("bipartition_ratio", (0.4, 0.25, 0.6, 0.8)),
    "fedtreelora": ("tree_threshold", (0.1, 0.0, 0.2, 0.3)),
    **dict.fromkeys(("kriging", "atlas"), ("trained_parts", ("all", "head_then_rest"))),
}
"""The knob of a method, and its values, the default first."""


@dataclass(frozen=True, kw_only=True)
class TuningTrial:
    """Settings of a method that were tried."""

    settings: Mapping[str, SettingValue]
    """Values by setting."""
    validation: float
    """Mean validation score over clients and development seeds."""


@dataclass(frozen=True, kw_only=True)
class TunedMethod:
    """Tried settings of a method."""

    strategy: str
    trials: tuple[TuningTrial, ...]
    seeds: tuple[int, ...] = DEVELOPMENT_SEEDS
    """Seeds of the trials."""

    @property
    def best(self) -> TuningTrial:
        """The trial with the best validation score; of equal ones the first, which is nearer to the defaults."""
        return max(self.trials, key=lambda trial: trial.validation)


RunPoints = Callable[[Sequence[Point]], Sequence[Path]]
"""Runs every point, and gives the folders of the finished runs."""


def candidates(strategy: str, number: int, *, lr: float, is_cut: bool = False) -> tuple[dict[str, SettingValue], ...]:
    """The settings that are tried of a strategy, `number` of them, the defaults first.

    Learning rates are lr, 2 lr, lr/2, 4 lr, lr/4 and so on. A cut model trains the same parts in every step: there
    is no order of parts to try.

    >>> candidates("fedavg", 3, lr=0.001)
    ({'lr': 0.001}, {'lr': 0.002}, {'lr': 0.0005})
    """
    knob, values = KNOBS.get(strategy, ("", ()))
    if not values or (is_cut and knob == "trained_parts"):
        return tuple({"lr": lr * _factor(index)} for index in range(number))
    pairs = ((total - place, place) for total in count() for place in range(min(total + 1, len(values))))
    return tuple({"lr": lr * _factor(rate), knob: values[place]} for (rate, place), _ in zip(pairs, range(number)))


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
        ConfigError: a setting contradicts the base.
        CheckpointError: a run failed; those before it stay and are not repeated.
    """
    is_cut = base.split.split != NONE
    tried = {strategy: candidates(strategy, number, lr=lr, is_cut=is_cut) for strategy in strategies}
    points = [
        point
        for strategy in strategies
        for values in tried[strategy]
        for point in grid(with_values(base, values), over={"strategy": (strategy,)}, seeds=DEVELOPMENT_SEEDS)
    ]
    scores = [_validation(folder, score) for folder in run_points(points)]
    means = np.reshape(scores, (len(strategies), number, len(DEVELOPMENT_SEEDS))).mean(axis=2).tolist()
    return tuple(
        TunedMethod(
            strategy=strategy,
            trials=tuple(
                TuningTrial(settings=values, validation=mean)
                for values, mean in zip(tried[strategy], strategy_means, strict=True)
            ),
        )
        for strategy, strategy_means in zip(strategies, means, strict=True)
    )


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
        write_sealed(folder.tuning, tuning_json(tuned))


def tuning_json(tuned: TunedMethod) -> dict[str, Any]:
    """The method as JSON holds it."""
    return asdict(tuned)


def read_tuning(folder: RunFolder) -> TunedMethod | None:
    """The trials that chose the settings of this run; None without a record.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not folder.tuning.is_file():
        return None
    return parse_tuning(read_sealed(folder.tuning))


def parse_tuning(content: Mapping[str, Any]) -> TunedMethod:
    """The method that `tuning_json` has written."""
    return TunedMethod(
        strategy=content["strategy"],
        seeds=tuple(content["seeds"]),
        trials=tuple(
            TuningTrial(settings=dict(trial["settings"]), validation=trial["validation"]) for trial in content["trials"]
        ),
    )


def _validation(folder: Path, score: str) -> float:
    summary: Mapping[str, Any] = read_json(RunFolder(folder).summary)
    value = summary.get("overall", {}).get(score, {}).get("validation", {}).get("primary")
    if not isinstance(value, float) or not isfinite(value):
        raise CheckpointError(f"run {folder} has no validation score to tune by; set --validation-samples")
    return value
