"""Chart of a sweep: score over a setting, with error bars over seeds."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from atlas_fl.report.html.charts import Chart, Row, chart, row_height

EVENLY = "iid"
"""The end of an axis of classes per client: all of them."""
WORDS = {"nc": "classes per client (N_c)", "local_steps": "local steps (J)", "lr": "learning rate"}
"""Names of settings in a figure, if their own do not say it."""
NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)


def sweep_chart(changes: Sequence[Mapping[str, str]], scores: Sequence[float], *, note: str = "") -> Chart:
    """Mean score by value, with error bars over seeds: numbers along the bottom and joined, words at the left.

    Along the axis goes the first setting whose values are numbers, or the first one if there is none; there is a line
    for every combination of the others. Words stand in the order of their scores, the best above.

    Args:
        changes: of each run, the swept settings that it differs in; seeds are runs of equal settings.
        scores: of each run, the mean test score of its clients.
        note: more to say below the chart.
    """
    swept = {name: list(dict.fromkeys(changed[name] for changed in changes)) for name in changes[0]}
    along = next((name for name in swept if _are_numbers(swept[name])), next(iter(swept)))
    is_numeric = _are_numbers(swept[along])
    cells: dict[str, dict[str, list[float]]] = {}
    for changed, score in zip(changes, scores, strict=True):
        line = ", ".join(f"{word_of(name)} {value}" for name, value in changed.items() if name != along)
        value = changed[along] if is_numeric else changed[along].replace("_", " ")
        cells.setdefault(line, {}).setdefault(value, []).append(score)
    rows = []
    for line, by_value in cells.items():
        for value, of_seeds in by_value.items():
            rows += _rows(line, value, of_seeds)

    def place(row: Row) -> float:
        if not is_numeric:
            return -float(row["mean"])
        return float("inf") if row["value"] == EVENLY else float(row["value"])

    rows.sort(key=place)
    values = list(dict.fromkeys(row["value"] for row in rows))
    seeds = len(rows) // sum(map(len, cells.values()))
    how = "mean over clients, one seed"
    if seeds > 1:
        how = f"mean over clients and {seeds} seeds; bars: std over seeds; dots: each seed"
    return chart(
        "sweep_numbers" if is_numeric else "sweep_words",
        rows,
        name="sweep",
        how="; ".join(part for part in (how, note) if part),
        axis=word_of(along),
        score="test score",
        values=values,
        lines=list(cells),
        legend={"columns": 2, "labelLimit": 340} if any(cells) else None,
        height=300 if is_numeric else max(160, row_height(len(values) * len(cells))),
    )


def _rows(line: str, value: str, scores: Sequence[float]) -> list[Row]:
    """A row for each seed of a cell, with the mean and the spread of the cell."""
    mean = fmean(scores)
    std = stdev(scores) if len(scores) > 1 else 0.0
    cell = {"line": line, "value": value, "mean": mean, "low": mean - std, "high": mean + std}
    return [{**cell, "of_seed": score} for score in scores]


def word_of(setting: str) -> str:
    """Name of a setting in a figure."""
    return WORDS.get(setting, setting.replace("_", " "))


def _are_numbers(values: Sequence[str]) -> bool:
    numbers = [value for value in values if value != EVENLY]
    return bool(numbers) and all(map(NUMBER.fullmatch, numbers))
