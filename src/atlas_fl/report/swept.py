"""A sweep as what its figure shows: along which setting, in which lines, with which scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from atlas_fl.report.compare import read_summary

EVENLY = "iid"
"""The end of an axis of classes per client: all of them."""

WORDS = {
    "nc": "classes per client (N_c)",
    "local_steps": "local steps (J)",
    "lr": "learning rate",
}
"""How settings are called whose names do not say it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The runs of one combination of values."""

    scores: tuple[float, ...]
    """Of each seed: the final test score, mean over clients; none where a run has no test scores."""

    @property
    def mean(self) -> float:
        """Over seeds; NaN where there is none."""
        return fmean(self.scores) if self.scores else float("nan")

    @property
    def std(self) -> float:
        """Standard deviation over seeds (n - 1); 0 for one seed."""
        return stdev(self.scores) if len(self.scores) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Swept:
    """A sweep: one setting along the axis, a line for every combination of the others."""

    along: str
    """The setting of the axis."""
    values: tuple[str, ...]
    """Its values: numbers in rising order with `iid` behind them, or words, the best first."""
    is_numeric: bool
    lines: Mapping[str, Mapping[str, Cell]]
    """By the values of the other settings, and by the value on the axis; the line of a sweep over one setting is ``."""
    metric: str
    """`accuracy` where that is every task's metric, else `score`."""
    seeds: int


def read_swept(changes: Sequence[Mapping[str, str]], runs: Sequence[Path | str]) -> Swept:
    """What complete runs say, each with the swept settings that it differs in; seeds are runs of equal settings.

    Along the axis goes the first setting whose values are numbers, or the first one if there is none.

    Raises:
        CheckpointError: a run is missing or not complete.
    """
    values = {name: tuple(dict.fromkeys(own[name] for own in changes)) for name in changes[0]}
    along = next((name for name in values if _are_numbers(values[name])), next(iter(values)))
    tests = [_test(read_summary(run)) for run in runs]
    found: dict[str, dict[str, list[float]]] = {}
    for own, test in zip(changes, tests, strict=True):
        line = ", ".join(f"{word_of(name)} {value}" for name, value in own.items() if name != along)
        cell = found.setdefault(line, {}).setdefault(own[along], [])
        cell.extend([test["primary"]] if "primary" in test else [])
    lines = {
        line: {value: Cell(scores=tuple(scores)) for value, scores in cells.items()} for line, cells in found.items()
    }
    is_accuracy = all(test.get("accuracy") == test.get("primary") for test in tests)
    return Swept(
        along=along,
        values=_ordered(values[along], lines),
        is_numeric=_are_numbers(values[along]),
        lines=lines,
        metric="accuracy" if is_accuracy else "score",
        seeds=max(len(cell.scores) for cells in lines.values() for cell in cells.values()),
    )


def word_of(setting: str) -> str:
    """What a setting is called in a figure."""
    return WORDS.get(setting, setting.replace("_", " "))


def _test(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = summary["overall"]["final"].get("test", {})
    return found


def _are_numbers(values: Sequence[str]) -> bool:
    numbers = [value for value in values if value != EVENLY]
    return bool(numbers) and all(_number(value) is not None for value in numbers)


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _ordered(values: Sequence[str], lines: Mapping[str, Mapping[str, Cell]]) -> tuple[str, ...]:
    if _are_numbers(values):
        return tuple(sorted(values, key=lambda value: (value == EVENLY, _number(value) or 0.0)))
    means = {value: fmean(cells[value].mean for cells in lines.values() if value in cells) for value in values}
    return tuple(sorted(values, key=lambda value: means[value], reverse=True))
