"""After which round a run had to end, by its settings and its validation scores."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from atlas_fl.errors import CheckpointError


def last_round(path: Path, config: Mapping[str, Any]) -> int:
    """The last round of a complete run: that of its settings, or where it was to stop early the one it stopped after.

    That one is what the validation scores say, not what the run says of itself. Only with `keep = "best"` are the rows
    of the last round those of other models than the ones that decided, and the run is believed.
    """
    training, mixing = config["training"], config["mixing"]
    if not training.get("patience"):
        return int(training["rounds"])
    try:
        return _last_round(_rows(path / "metrics.jsonl"), training, mixing)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path / 'metrics.jsonl'} holds a row without its scores ({error!r}); restore it from a copy, or run again"
        ) from error


def _last_round(rows: list[dict[str, Any]], training: Mapping[str, Any], mixing: Mapping[str, Any]) -> int:
    scores: dict[int, list[float]] = {}
    for row in rows:
        if row.get("split") == "validation":
            scores.setdefault(row["round"], []).append(float(row["primary"]))
    told = {row["round"] for row in rows if row.get("event") == "stopped early" and mixing["keep"] == "best"}
    best, best_round = -math.inf, 0
    for number in sorted(scores):
        mean = fmean(scores[number])
        if mean - best > training["min_delta"]:
            best, best_round = mean, number
        waited = number - best_round >= training["patience"] or number in told
        if waited and number % mixing["aggregate_every"] == 0:
            return number
    return int(training["rounds"])


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines: Iterable[str] = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
