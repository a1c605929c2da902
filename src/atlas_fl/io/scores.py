"""What the rows of `metrics.jsonl` say about a client: final and best scores, gains, rounds to a target.

The best round is chosen on validation and reported on test; nothing is ever chosen on test. A value that the rows do
not hold is absent from the result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from atlas_fl.io.shapes import METRICS

TARGETS = {"90%": 0.90, "95%": 0.95}
"""Shares of the final validation score; rounds until they are reached measure the speed of convergence."""
STOPPED = "stopped early"
"""The event of a run that ended before its last round."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class History:
    """The evaluations of one client, by split and then by round, rounds in rising order."""

    client: str
    task: str
    splits: Mapping[str, Mapping[int, Row]]

    def series(self, split: str, metric: str = "primary") -> dict[int, float]:
        """A metric by round; rounds where it is undefined are left out."""
        return {at: float(row[metric]) for at, row in self.splits.get(split, {}).items() if metric in row}


def histories(rows: Iterable[Row]) -> dict[str, History]:
    """The evaluations of every client, clients in the order of their first row; rows of events are passed over."""
    splits: dict[str, dict[str, dict[int, Row]]] = {}
    tasks: dict[str, str] = {}
    for row in sorted((row for row in rows if "split" in row), key=lambda row: int(row["round"])):
        tasks[row["client"]] = row["task"]
        splits.setdefault(row["client"], {}).setdefault(row["split"], {})[row["round"]] = row
    return {client: History(client=client, task=tasks[client], splits=found) for client, found in splits.items()}


def best_round(history: History) -> int | None:
    """The round with the highest validation score, the earliest of equals; None without validation rows.

    Where test rows exist, only rounds that have one can be chosen, so that the choice can be reported.
    """
    scores = history.series("validation")
    tested = history.series("test")
    candidates = {at: score for at, score in scores.items() if at in tested} if tested else scores
    return max(candidates, key=lambda at: (candidates[at], -at), default=None)


def rounds_to(scores: Mapping[int, float], share: float) -> int | None:
    """The first round whose score reaches this share of the last round's; None where the last is not above zero."""
    if not scores or scores[max(scores)] <= 0:
        return None
    goal = share * scores[max(scores)]
    return next(at for at in sorted(scores) if scores[at] >= goal)


def mean_series(members: Sequence[History], split: str, metric: str = "primary") -> dict[int, float]:
    """The mean over clients by round, for the rounds in which all have a value that had one before."""
    series = [found for member in members if (found := member.series(split, metric))]
    there = {at: [found for found in series if min(found) <= at] for at in sorted(set().union(*series))}
    return {at: fmean(found[at] for found in those) for at, those in there.items() if all(at in one for one in those)}


def sampled_series(members: Sequence[History], split: str, metric: str) -> dict[int, float]:
    """The mean by round over the clients that have a value in it: of training, which a round has of those it drew."""
    series = [member.series(split, metric) for member in members]
    return {at: fmean(own[at] for own in series if at in own) for at in sorted(set().union(*series))}


def client_scores(history: History) -> dict[str, Any]:
    """Final and best scores of one client, as `summary.json` holds them."""
    final = {split: _scores(rows[max(rows)]) for split, rows in history.splits.items()}
    result: dict[str, Any] = {"task": history.task, "final": final}
    if (chosen := best_round(history)) is not None:
        splits = {split: _scores(rows[chosen]) for split, rows in history.splits.items() if chosen in rows}
        result["best"] = {"round": chosen} | splits
    return result | {"rounds_to": _targets(history.series("validation"))}


def group_scores(members: Sequence[History]) -> dict[str, Any]:
    """Means over clients, the worst client and the spread, for the clients of a task or for all."""
    result: dict[str, Any] = {"clients": len(members)}
    scores = {member.client: client_scores(member) for member in members}
    for when in ("final", "best"):
        per_split = {
            split: _means([entry[when][split] for entry in scores.values() if split in entry.get(when, {})])
            for split in ("train", "validation", "test")
        }
        result[when] = {split: means for split, means in per_split.items() if means}
        tested = {client: entry[when]["test"] for client, entry in scores.items() if "test" in entry.get(when, {})}
        result[when] |= _extremes(tested)
    return result | {"rounds_to": _targets(mean_series(members, "validation"))}


def _scores(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {name: row[name] for name in ("round", *METRICS, "examples") if name in row}
    if "accuracy" in row and "majority" in row:
        found["gain_over_majority"] = row["accuracy"] - row["majority"]
    return found


def _means(scores: Sequence[Row]) -> dict[str, float]:
    """Plain means: every client counts once. A metric that a client lacks has no mean over the group."""
    names = [name for name in (*METRICS, "gain_over_majority") if scores and all(name in entry for entry in scores)]
    return {name: fmean(entry[name] for entry in scores) for name in names}


def _extremes(tested: Mapping[str, Row]) -> dict[str, Any]:
    """The worst client and the spread of the test scores over clients."""
    primary = {client: entry["primary"] for client, entry in tested.items() if "primary" in entry}
    if not primary:
        return {}
    worst = min(primary, key=lambda client: primary[client])
    values = list(primary.values())
    result: dict[str, Any] = {"worst_client": {"client": worst} | dict(tested[worst])}
    result["spread"] = {"std": pstdev(values), "range": max(values) - min(values)}
    gains = {client: entry["gain_over_majority"] for client, entry in tested.items() if "gain_over_majority" in entry}
    if gains:
        least = min(gains, key=lambda client: gains[client])
        result["worst_gain"] = {"client": least, "gain_over_majority": gains[least]}
    return result


def _targets(scores: Mapping[int, float]) -> dict[str, int]:
    return {name: at for name, share in TARGETS.items() if (at := rounds_to(scores, share)) is not None}
