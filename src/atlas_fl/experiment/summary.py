"""The summary of a run, `summary.json`: scores, bytes, seconds, memory and utilisation of devices.

    run        name, preset, strategy, model, seed, config_hash, rounds
    best       the round with the best mean validation score over all clients, and that score
    stopped    with `--patience`, where it ended the run early: after which round
    clients    per client: task, cluster, device, ranks, final and best scores per split, rounds to 90% and 95%, bytes,
               utilisation of the device
    tasks      per task: means over its clients, the worst client, the spread; of images, accuracy by class
    overall    the same over all clients
    attackers, honest  with `--attack`: who attacks, and the same over all others
    bytes      up, down, total; by kind, round and client; against the whole model in every round; between clients
    seconds    by phase and in sum, by round; apart, what reused results of earlier runs of the process had taken
    memory, versions, events (refused updates)
    sharing    with `kriging`: by client and group of parameters, how much of its own it keeps and why

The best round is chosen on validation and reported on test; nothing is ever chosen on test. A value that the rows of
`metrics.jsonl` do not hold is absent. "Spread within a task" measures personalisation; the spread over tasks measures
how difficult the tasks are. The utilisation of a client's device:

    memory     predicted bytes of training over the device's memory
    busy       sum over the rounds that it trained in of its predicted seconds, over the sum over all rounds of the
               predicted seconds of the slowest client that trained: 1 for a client that everyone always waits for
    measured   seconds that training it took on this machine over the seconds of all rounds, evaluation and mixing
               included; over all clients they add up to the share of training

Predicted seconds are those of the plan: download, training and upload on the client's own device.
"""

import platform
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from atlas_fl.experiment.early_stopping import best_rounds
from atlas_fl.storage.ledger import LedgerRow, Totals, totals

GENERATION_METRICS = ("perplexity", "rouge1", "rouge2", "rougeL")
"""Scores of written text; lower perplexity is better, but accuracy decides (`data.task.Metric`)."""
METRICS = (
    *("loss", "ece", "primary", "accuracy", "f1", "precision", "recall", "mcc", "pearson", "spearman", "majority"),
    *GENERATION_METRICS,
)
"""Scores in rows of evaluations."""
ROW_NAMES = (
    *("round", "client", "task", "split", "classes", "examples", "seconds", "steps", "skipped", "gain_over_majority"),
    *METRICS,
)
"""Names in rows of training and evaluations and in their summaries; each other number there is a plug-in's score."""
SHARING = ("own_share", "effective_clients", "variance_over_noise")
"""Measures of a client's row under `kriging` (`methods.kriging.MeasuredSharing`)."""
LIBRARIES = ("torch", "transformers", "peft", "safetensors", "numpy", "scikit-learn")


def versions() -> dict[str, str]:
    """The versions that a result depends on: this package, Python, the libraries, the operating system."""
    packages = {"atlas_fl": version("atlas-fl"), "python": platform.python_version()}
    return packages | {name: version(name) for name in LIBRARIES} | {"system": platform.platform(terse=True)}


def peak_memory() -> dict[str, int]:
    """The peak memory of this process in bytes: `rss_bytes`, and `vram_bytes` where a GPU was used."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there and KiB elsewhere
    peak = {"rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    # asking for the number of GPUs starts none
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    if vram_bytes := sum(torch.cuda.max_memory_allocated(index) for index in devices):
        peak["vram_bytes"] = vram_bytes
    return peak


TARGETS = {"90%": 0.90, "95%": 0.95}
"""Shares of the final validation score; rounds until they are reached measure the speed of convergence."""
STOPPED = "stopped early"
"""The event of a run that ended before its last round."""
MEASURED = "sharing measured"
"""The event of a client in a round that measured how much of its own it keeps, with a group of parameters."""

Row = Mapping[str, Any]


def further_scores(row: Row) -> list[str]:
    """The scores of plug-ins in a row of an evaluation, by name."""
    return [name for name, value in row.items() if name not in ROW_NAMES and type(value) in (int, float)]


@dataclass(frozen=True, kw_only=True)
class History:
    """The evaluations of one client, by split and then by round, rounds in rising order."""

    client: str
    task: str
    splits: Mapping[str, Mapping[int, Row]]

    def series(self, split: str, metric: str = "primary") -> dict[int, float]:
        """A metric by round; rounds where it is undefined are left out."""
        return {round: float(row[metric]) for round, row in self.splits.get(split, {}).items() if metric in row}


def histories(rows: Iterable[Row]) -> dict[str, History]:
    """The evaluations of every client, clients in the order of their first row; rows of events are passed over."""
    splits: dict[str, dict[str, dict[int, Row]]] = {}
    tasks: dict[str, str] = {}
    for row in sorted((row for row in rows if "split" in row), key=lambda row: int(row["round"])):
        tasks[row["client"]] = row["task"]
        splits.setdefault(row["client"], {}).setdefault(row["split"], {})[row["round"]] = row
    return {client: History(client=client, task=tasks[client], splits=by_split) for client, by_split in splits.items()}


def best_round(history: History) -> int | None:
    """The round with the highest validation score, the earliest of equals; None without validation rows.

    Where test rows exist, only rounds that have one can be chosen, so that the choice can be reported.
    """
    scores = history.series("validation")
    test_scores = history.series("test")
    candidates = {round: score for round, score in scores.items() if round in test_scores} if test_scores else scores
    return max(candidates, key=lambda round: (candidates[round], -round), default=None)


def rounds_to(scores: Mapping[int, float], share: float) -> int | None:
    """The first round whose score reaches this share of the last round's; None where the last is not above zero."""
    if not scores or scores[max(scores)] <= 0:
        return None
    goal = share * scores[max(scores)]
    return next(round for round in sorted(scores) if scores[round] >= goal)


def mean_series(members: Sequence[History], split: str, metric: str = "primary") -> dict[int, float]:
    """The mean over clients by round, for the rounds in which all have a value that had one before."""
    series = [values for member in members if (values := member.series(split, metric))]
    present = {round: [values for values in series if min(values) <= round] for round in sorted(set().union(*series))}
    return {
        round: fmean(values[round] for values in group)
        for round, group in present.items()
        if all(round in scores for scores in group)
    }


def sampled_series(members: Sequence[History], split: str, metric: str) -> dict[int, float]:
    """The mean by round over the clients that have a value in it, for metrics of training under client sampling."""
    series = [member.series(split, metric) for member in members]
    return {
        round: fmean(values[round] for values in series if round in values) for round in sorted(set().union(*series))
    }


def client_scores(history: History) -> dict[str, Any]:
    """Final and best scores of one client, as `summary.json` holds them."""
    final = {split: _row_scores(rows[max(rows)]) for split, rows in history.splits.items()}
    result: dict[str, Any] = {"task": history.task, "final": final}
    if (chosen := best_round(history)) is not None:
        splits = {split: _row_scores(rows[chosen]) for split, rows in history.splits.items() if chosen in rows}
        result["best"] = {"round": chosen} | splits
    return result | {"rounds_to": _rounds_to_targets(history.series("validation"))}


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
    return result | {"rounds_to": _rounds_to_targets(mean_series(members, "validation"))}


def _row_scores(row: Row) -> dict[str, Any]:
    names = ("round", *METRICS, "examples", *further_scores(row))
    scores: dict[str, Any] = {name: row[name] for name in names if name in row}
    if "accuracy" in row and "majority" in row:
        scores["gain_over_majority"] = row["accuracy"] - row["majority"]
    return scores


def _means(scores: Sequence[Row]) -> dict[str, float]:
    """Plain means: every client counts once. A metric that a client lacks has no mean over the group."""
    if not scores:
        return {}
    every = (*METRICS, "gain_over_majority", *further_scores(scores[0]))
    names = [name for name in every if all(name in entry for entry in scores)]
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


def _rounds_to_targets(scores: Mapping[int, float]) -> dict[str, int]:
    return {name: round for name, share in TARGETS.items() if (round := rounds_to(scores, share)) is not None}


Counts = np.ndarray[Any, np.dtype[np.int64]]


def class_counts(history: History) -> tuple[Counts, Counts] | None:
    """(hits, examples) by class of a client's last test scores, (classes,) each; None where they were not counted."""
    rows = history.splits.get("test", {})
    counts = rows[max(rows)].get("classes") if rows else None
    return None if counts is None else (np.array(counts["hits"]), np.array(counts["examples"]))


def class_names(plan: Mapping[str, Any], task: str) -> list[str]:
    """The task's classes in order, as the plan names them; none where it does not."""
    rows = [row for row in plan.get("data") or () if row["task"] == task]
    return list(rows[0].get("labels", ())) if rows else []


def class_scores(members: Sequence[History], *, plan: Mapping[str, Any]) -> dict[str, Any]:
    """`classes`: by class, the test examples of these clients and the share of them that was recognised.

    Every image counts once, each scored by the model of its own client. A class without examples has no accuracy, and
    the result is empty where the clients' rows have no counts.
    """
    counts = [client_counts for member in members if (client_counts := class_counts(member)) is not None]
    if not counts:
        return {}
    hits, examples = (np.sum([client_counts[index] for client_counts in counts], axis=0) for index in (0, 1))
    names = class_names(plan, members[0].task) or [str(index) for index in range(len(hits))]
    return {
        "classes": {
            name: {"examples": int(total)} | ({"accuracy": float(right / total)} if total else {})
            for name, right, total in zip(names, hits, examples, strict=True)
        }
    }


def utilisation(
    plan: Mapping[str, Any], metrics: Iterable[Row], round_seconds: Mapping[int, float]
) -> dict[str, dict[str, float]]:
    """Utilisation of each client's device, each share from 0 to 1."""
    planned = {entry["name"]: entry for entry in plan.get("clients", ())}
    trained = [row for row in metrics if row.get("split") == "train" and row["round"] > 0]
    rounds: dict[int, list[str]] = {}
    for row in trained:
        rounds.setdefault(row["round"], []).append(row["client"])
    seconds = {name: (entry.get("predicted") or {}).get("seconds") for name, entry in planned.items()}
    slowest = sum(max(seconds.get(name) or 0.0 for name in names) for names in rounds.values())
    result: dict[str, dict[str, float]] = {}
    for name, entry in planned.items():
        client_rows, shares = [row for row in trained if row["client"] == name], _memory_share(entry)
        if (predicted := seconds[name]) is not None and slowest > 0:
            shares["busy"] = predicted * len(client_rows) / slowest
        if round_seconds:
            shares["measured"] = sum(row.get("seconds", 0.0) for row in client_rows) / sum(round_seconds.values())
        result[name] = shares
    return result


def _memory_share(entry: Row) -> dict[str, float]:
    used, total = (entry.get("predicted") or {}).get("memory_bytes"), (entry.get("memory") or {}).get("total")
    return {"memory": used / total} if used is not None and total else {}


def summarise(
    *,
    run: Mapping[str, Any],
    metrics: Sequence[Row],
    ledger: Sequence[Row],
    plan: Mapping[str, Any],
    phase_seconds: Mapping[str, float],
    memory: Mapping[str, int],
    versions: Mapping[str, str],
    full_model_bytes: int | None = None,
    round_seconds: Mapping[int, float] | None = None,
    attackers: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        run: name, preset, strategy, model, seed and config_hash; copied as it is.
        metrics: the rows of `metrics.jsonl`.
        ledger: the rows of `ledger.jsonl`.
        plan: the content of `plan.json`; every part of it may be absent.
        phase_seconds: wall-clock seconds by phase, summed over the sessions of the run.
        memory: peak bytes by kind, as `peak_memory` gives them.
        versions: as `versions` gives them.
        full_model_bytes: encoded bytes of the whole model, to compare with sending it in every round.
        round_seconds: wall-clock seconds by round.
        attackers: clients that attack in this simulation.
    """
    by_client = histories(metrics)
    traffic = totals(LedgerRow(**row) for row in ledger)
    rounds = [int(row["round"]) for row in metrics]
    # before the first evaluation only those have rows that have trained
    sizes = Counter(entry["task"] for entry in plan.get("clients", ()) if "task" in entry)
    return {
        "run": dict(run) | {"rounds": max(rounds, default=0)},
        **_best_round_entry(by_client),
        **_early_stopping_entry(metrics),
        "overall": group_scores(list(by_client.values())) | {"clients": max(len(by_client), sizes.total())},
        **_honest_scores(by_client, attackers),
        "tasks": {
            task: group_scores(members) | {"clients": max(len(members), sizes[task])} | class_scores(members, plan=plan)
            for task, members in by_task(by_client).items()
        },
        "clients": _clients(by_client, traffic, plan, utilisation(plan, metrics, round_seconds or {})),
        **_sharing(metrics),
        "bytes": _bytes(traffic) | _reduction(traffic, metrics, full_model_bytes),
        "seconds": _seconds(phase_seconds, round_seconds or {}),
        "memory": dict(memory),
        "events": _events(metrics),
        "versions": dict(versions),
    }


def _honest_scores(by_client: Mapping[str, History], attackers: Sequence[str]) -> dict[str, Any]:
    """The attackers, and the scores of all other clients; empty without attackers."""
    honest = [history for client, history in by_client.items() if client not in attackers]
    return {"attackers": list(attackers), "honest": group_scores(honest)} if attackers else {}


def attack_note(summary: Mapping[str, Any]) -> str:
    """The honest clients' final test scores under attack, as one line; empty without attackers."""
    scores = summary.get("honest", {}).get("final", {})
    if "test" not in scores:
        return ""
    worst = scores["worst_client"]
    return (
        f"simulated attackers: {', '.join(summary['attackers'])}; the others have a test score of"
        f" {scores['test']['primary']:.3f} (worst {worst['client']} {worst['primary']:.3f})"
    )


def by_task(by_client: Mapping[str, History]) -> dict[str, list[History]]:
    """The clients' histories by task, tasks in the order of their first client."""
    groups: dict[str, list[History]] = {}
    for history in by_client.values():
        groups.setdefault(history.task, []).append(history)
    return groups


def _clients(
    by_client: Mapping[str, History], traffic: Totals, plan: Mapping[str, Any], used: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    planned = {entry["name"]: entry for entry in plan.get("clients", ())}
    return {
        client: {key: planned.get(client, {})[key] for key in _PLANNED if key in planned.get(client, {})}
        | client_scores(history)
        | {"bytes": traffic.by_client.get(client, {"up": 0, "down": 0})}
        | ({"utilisation": dict(used[client])} if used.get(client) else {})
        for client, history in by_client.items()
    }


_PLANNED = ("device", "cluster", "ranks", "cut", "examples", "budget_bytes", "memory", "predicted")


def _best_round_entry(by_client: Mapping[str, History]) -> dict[str, Any]:
    scores = mean_series(list(by_client.values()), "validation")
    best = best_rounds(scores, 1)
    return {"best": {"round": best[0], "validation": scores[best[0]]}} if best else {}


def _early_stopping_entry(metrics: Sequence[Row]) -> dict[str, Any]:
    rounds = [row["round"] for row in metrics if row.get("event") == STOPPED]
    return {"stopped": {"round": rounds[0]}} if rounds else {}


def _sharing(metrics: Sequence[Row]) -> dict[str, Any]:
    """The last measurement of sharing by client and group of parameters."""
    by_client: dict[str, dict[str, Any]] = {}
    for row in (row for row in metrics if row.get("event") == MEASURED):
        numbers = {name: row[name] for name in SHARING if name in row}
        by_client.setdefault(row["client"], {})[row["parameters"]] = numbers | {"round": row["round"]}
    return {"sharing": by_client} if by_client else {}


def _bytes(traffic: Totals) -> dict[str, Any]:
    return {
        "up": traffic.up,
        "down": traffic.down,
        "total": traffic.total,
        "by_kind": traffic.by_kind,
        "by_round": {str(round): entry for round, entry in sorted(traffic.by_round.items())},
    } | {name: size for name in ("between_clients", "relayed") if (size := getattr(traffic, name))}


def _reduction(traffic: Totals, metrics: Sequence[Row], full_model_bytes: int | None) -> dict[str, Any]:
    """Bytes relative to sending the whole model down and up once for every client that trained in a round.

    A client whose update was refused has trained as well.
    """
    trained = {(row["round"], row["client"]) for row in metrics if _has_trained(row)}
    if full_model_bytes is None or not trained:
        return {}
    full = 2 * full_model_bytes * len(trained)
    reduction = 1 - traffic.total / full
    return {"full_model": {"model_bytes": full_model_bytes, "total": full, "reduction": reduction}}


def _has_trained(row: Row) -> bool:
    return bool(row["round"] > 0 and (row.get("split") == "train" or row.get("event") == "refused"))


def _seconds(phase_seconds: Mapping[str, float], round_seconds: Mapping[int, float]) -> dict[str, Any]:
    seconds: dict[str, Any] = {"phases": dict(phase_seconds), "total": sum(phase_seconds.values())}
    if round_seconds:
        seconds["rounds"] = {str(round): duration for round, duration in sorted(round_seconds.items())}
        seconds["round_mean"] = fmean(round_seconds.values())
    return seconds


def _events(metrics: Sequence[Row]) -> dict[str, Any]:
    """Counts of events, and the refused updates themselves."""
    events = [row for row in metrics if "event" in row]
    refused = [{key: row[key] for key in ("round", "client", "reason")} for row in events if row["event"] == "refused"]
    return {"count": dict(Counter(str(row["event"]) for row in events)), "refused": refused}
