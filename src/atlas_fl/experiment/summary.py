"""The summary of a run, `summary.json`: scores, bytes, seconds, memory and utilisation of devices.

    run        name, federation, preset, strategy, model, seed, config_hash, rounds
    best       the round with the best mean validation score over all clients, and that score
    stopped    with `--patience`, where it ended the run early: after which round
    clients    per client: task, cluster, device, ranks, final and best scores per split, rounds to 90% and 95%, bytes,
               utilisation of the device; test precision, recall and F1 by class
    tasks      per task: its metric, means over its clients, the worst client, the spread; the same by class
    sites      where some have clients of several tasks: per site the same over its clients, and their names
    overall    the same over all clients
    attackers, honest  with `--attack`: who attacks, and the same over all others
    steps      optimizer steps of all clients in all rounds, of second models and of halves too
    bytes      up, down, total; by kind, round and client; against the whole model in every round; between clients
    seconds    by phase and in sum, by round; apart, what reused results of earlier runs of the process had taken
    alone      with `--alone`: per client its test score together and alone, the gain and its interval
               (`experiment.alone`); their means, seconds
    memory, versions, events (refused updates)
    sharing    with `kriging`: by client and group of parameters, how much of its own it keeps and why

The best round is chosen on validation and reported on test; nothing is ever chosen on test. A value that the rows of
`metrics.jsonl` do not hold is absent. "Spread within a task" measures personalisation; the spread over tasks measures
how difficult the tasks are. The utilisation of a client's device:

    memory     predicted bytes of training over the device's memory
    busy       sum over the rounds that it trained in of its predicted seconds, over the sum over all rounds of the
               predicted seconds of the slowest client that trained: 1 for a client that everyone always waits for

Predicted seconds are those of the plan: download, training and upload on the client's own device.
"""

import platform
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from atlas_fl.data.clients import group_by, site_of
from atlas_fl.data.metrics import class_table
from atlas_fl.errors import first_of
from atlas_fl.frozen import Frozen
from atlas_fl.storage.ledger import LedgerRow, Totals, totals

GENERATION_METRICS = ("perplexity", "rouge1", "rouge2", "rougeL", "exact_match", "preferred")
"""Scores of written text; lower perplexity is better, but accuracy decides (`data.task.Metric`)."""
METRICS = (
    *("loss", "ece", "primary"),
    *("accuracy", "balanced_accuracy", "f1", "micro_f1", "macro_f1", "auroc", "precision", "recall", "mcc"),
    *("pearson", "spearman", "majority"),
    *GENERATION_METRICS,
)
"""Scores in rows of evaluations."""
ROW_NAMES = (
    *("round", "client", "task", "split", "classes", "examples", "seconds", "skipped", "gain_over_majority"),
    *("steps", "head_steps", "extra_steps", "epsilon", "noise_multiplier", "paid_steps"),
    *METRICS,
)
"""Names in rows of training and evaluations and in their summaries; each other number there is a plug-in's score."""
SHARING = ("own_share", "effective_clients", "variance_over_noise")
"""Measures of a client's row under `kriging` (`methods.kriging.MeasuredSharing`)."""
LOWEST = -1.0
"""The lowest score of any metric: that of settings whose models give outputs that are no numbers."""
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

MOST_NAMED = 3
"""Clients that lose which a sentence names."""

Row = Mapping[str, Any]


def further_scores(row: Row) -> list[str]:
    """The scores of plug-ins in a row of an evaluation, by name."""
    return [name for name, value in row.items() if name not in ROW_NAMES and type(value) in (int, float)]


class History(Frozen):
    """The evaluations of one client, by split and then by round, rounds in rising order."""

    client: str
    task: str
    splits: Mapping[str, Mapping[int, Row]]

    def series(self, split: str, metric: str = "primary") -> dict[int, float]:
        """A metric by round; rounds where it is undefined are left out.

        Validation chooses the best round, and no round is chosen in which outputs are no numbers: its row has no loss.
        """
        needed = {metric, "loss"} if split == "validation" else {metric}
        return {round: float(row[metric]) for round, row in self.splits.get(split, {}).items() if needed <= row.keys()}


def histories(rows: Iterable[Row]) -> dict[str, History]:
    """The evaluations of every client, clients in the order of their first row; rows of events are passed over."""
    splits: dict[str, dict[str, dict[int, Row]]] = {}
    tasks: dict[str, str] = {}
    for row in sorted((row for row in rows if "split" in row), key=lambda row: int(row["round"])):
        tasks[row["client"]] = row["task"]
        splits.setdefault(row["client"], {}).setdefault(row["split"], {})[row["round"]] = row
    return {client: History(client=client, task=tasks[client], splits=by_split) for client, by_split in splits.items()}


def best_rounds(scores: Mapping[int, float], count: int) -> tuple[int, ...]:
    """The rounds with the highest scores, at most `count`, the best first and the earlier of equals first.

    >>> best_rounds({1: 0.5, 2: 0.75, 3: 0.75, 4: 0.25}, 2)
    (2, 3)
    """
    return tuple(sorted(scores, key=lambda round: (-scores[round], round))[:count])


def last_improvement(scores: Mapping[int, float], *, min_delta: float = 0.0) -> int:
    """The last round whose score exceeds that of the last better one before it by more than `min_delta`.

    The first round that was evaluated counts as better than nothing; without scores it is round 0. Small steps add up:

    >>> last_improvement({1: 0.5, 2: 0.5625, 3: 0.625, 4: 0.625}, min_delta=0.1)
    3
    """
    last, best = 0, float("-inf")
    for round in sorted(scores):
        if scores[round] - best > min_delta:
            last, best = round, scores[round]
    return last


def should_stop(scores: Mapping[int, float], *, patience: int, min_delta: float = 0.0) -> bool:
    """True if the newest score is `patience` rounds or more behind the last better one; never with a patience of 0.

    Patience is that of Goodfellow, Bengio, Courville, Deep Learning (2016), algorithm 7.1, counted in rounds and not in
    evaluations, so that a coarser `--eval-every` does not stretch it.

    >>> [should_stop({1: 0.5, 2: 0.25, 3: 0.5}, patience=rounds) for rounds in (0, 1, 2, 3)]
    [False, True, True, False]
    """
    if not patience or not scores:
        return False
    return max(scores) - last_improvement(scores, min_delta=min_delta) >= patience


def best_round(history: History) -> int | None:
    """The round with the highest validation score, the earliest of equals; None without validation rows.

    Where test rows exist, only rounds that have one can be chosen, so that the choice can be reported.
    """
    scores = history.series("validation")
    test_scores = history.series("test")
    candidates = {round: score for round, score in scores.items() if round in test_scores} if test_scores else scores
    return next(iter(best_rounds(candidates, 1)), None)


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
    values = primary.values()
    return {
        "worst_client": {"client": worst} | dict(tested[worst]),
        "spread": {"std": pstdev(values), "range": max(values) - min(values)},
    }


def _rounds_to_targets(scores: Mapping[int, float]) -> dict[str, int]:
    return {name: round for name, share in TARGETS.items() if (round := rounds_to(scores, share)) is not None}


def class_scores(members: Sequence[History], *, plan: Mapping[str, Any]) -> dict[str, Any]:
    """`classes`: by class, the test examples of these clients, precision, recall and F1; `accuracy` is the recall.

    Every example counts once in its client's last test, each scored by the model of its own client. A class without
    examples has none of them, and the result is empty where the clients' rows have no counts.
    """
    rows = [history.splits["test"] for history in members if history.splits.get("test")]
    counts = [tested[max(tested)]["classes"] for tested in rows if "classes" in tested[max(tested)]]
    if not counts:
        return {}
    pooled = {name: np.sum([count[name] for count in counts], axis=0) for name in counts[0]}
    table = class_table(**pooled)
    names = next(row["labels"] for row in plan["data"] if row["task"] == members[0].task)
    classes = {}
    for index, name in enumerate(names):
        total = int(pooled["examples"][index])
        values = {score: by_class[index] for score, by_class in table.items()} if total else {}
        classes[name] = {"examples": total, **values, **({"accuracy": values["recall"]} if total else {})}
    return {"classes": classes}


def utilisation(planned: Mapping[str, Row], metrics: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Utilisation of each planned client's device, each share from 0 to 1."""
    rows = [row for row in metrics if row.get("split") == "train" and row["client"] in planned]
    seconds = {name: entry["predicted"]["seconds"] for name, entry in planned.items()}
    by_round = group_by(rows, lambda row: int(row["round"]))
    slowest = sum(max(seconds[row["client"]] for row in of_round) for of_round in by_round.values())
    trained = Counter(row["client"] for row in rows)
    return {
        name: {
            "memory": entry["predicted"]["memory_bytes"] / entry["memory"]["total"],
            "busy": seconds[name] * trained[name] / slowest if slowest else 0.0,
        }
        for name, entry in planned.items()
    }


def summarise(
    *,
    run: Mapping[str, Any],
    metrics: Sequence[Row],
    ledger: Sequence[Row],
    plan: Mapping[str, Any],
    phase_seconds: Mapping[str, float],
    round_seconds: Mapping[int, float],
    memory: Mapping[str, int],
    full_model_bytes: int,
    attackers: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        run: name, preset, strategy, model, seed and config_hash; copied as it is.
        metrics: the rows of `metrics.jsonl`.
        ledger: the rows of `ledger.jsonl`.
        plan: the content of `plan.json`.
        phase_seconds: wall-clock seconds by phase, summed over the sessions of the run.
        round_seconds: wall-clock seconds by round.
        memory: peak bytes by kind, as `peak_memory` gives them.
        full_model_bytes: encoded bytes of the whole model, to compare with sending it in every round.
        attackers: clients that attack in this simulation.
    """
    by_client = histories(metrics)
    traffic = totals(LedgerRow(**row) for row in ledger)
    planned = {entry["name"]: entry for entry in plan["clients"]}
    used = utilisation(planned, metrics)
    # before the first evaluation only those have rows that have trained
    sizes = Counter(entry["task"] for entry in planned.values())
    metrics_of_tasks = {row["task"]: {"metric": row["metric"]} for row in plan.get("data", ()) if "metric" in row}
    events = [row for row in metrics if "event" in row]
    sites = group_by(by_client.values(), lambda history: site_of(history.client, history.task))
    stops = [{"round": row["round"]} for row in events if row["event"] == STOPPED]
    refused = [{key: row[key] for key in ("round", "client", "reason")} for row in events if row["event"] == "refused"]
    validation = mean_series(list(by_client.values()), "validation")
    result: dict[str, Any] = {
        "run": dict(run) | {"rounds": max((int(row["round"]) for row in metrics), default=0)},
        "overall": group_scores(list(by_client.values())) | {"clients": max(len(by_client), sizes.total())},
        "tasks": {
            task: metrics_of_tasks.get(task, {})
            | group_scores(members)
            | {"clients": max(len(members), sizes[task])}
            | class_scores(members, plan=plan)
            for task, members in group_by(by_client.values(), lambda history: history.task).items()
        },
        "clients": {
            client: {key: planned[client][key] for key in _PLANNED}
            | client_scores(history)
            | class_scores([history], plan=plan)
            | {"bytes": traffic.by_client.get(client, {"up": 0, "down": 0}), "utilisation": used[client]}
            for client, history in by_client.items()
        },
        "steps": sum(
            int(row.get(name, 0)) for row in metrics if row.get("split") == "train" for name in ("steps", "extra_steps")
        ),
        "bytes": _bytes(traffic, metrics, full_model_bytes),
        "seconds": {
            "phases": dict(phase_seconds),
            "total": sum(phase_seconds.values()),
            "rounds": {str(round): duration for round, duration in sorted(round_seconds.items())},
            "round_mean": fmean(round_seconds.values() or [0.0]),
        },
        "memory": dict(memory),
        "events": {"count": dict(Counter(str(row["event"]) for row in events)), "refused": refused},
        "versions": versions(),
    }
    for best in best_rounds(validation, 1):
        result["best"] = {"round": best, "validation": validation[best]}
    if len(sites) < len(by_client):
        names = {site: {"names": [member.client for member in members]} for site, members in sites.items()}
        result["sites"] = {site: group_scores(members) | names[site] for site, members in sites.items()}
    if stops:
        result["stopped"] = stops[0]
    if attackers:
        honest = [history for client, history in by_client.items() if client not in attackers]
        result |= {"attackers": list(attackers), "honest": group_scores(honest)}
    return result | _sharing(events)


_PLANNED = ("device", "cluster", "ranks", "cut", "examples", "budget_bytes", "memory", "predicted")


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


def gain_note(summary: Mapping[str, Any]) -> str:
    """The gains of the clients from training together, as one line; empty where none was trained alone.

    >>> loss = {"gain": -0.01, "interval": [-0.04, 0.02]}
    >>> gains = {"movie-0": {"gain": 0.1, "interval": [0.02, 0.18]}, "movie-1": loss}
    >>> gain_note({"alone": {"clients": gains, "of": 2, "mean": {"gain": 0.045, "interval": [0.01, 0.08]}}})
    '1 of 2 clients gains from training together, mean +0.045; movie-1 loses 0.010 (within noise)'
    """
    if "alone" not in summary:
        return ""
    found = summary["alone"]
    clients, mean = found["clients"], found["mean"]
    gaining = [name for name, entry in clients.items() if entry["gain"] > 0]
    losing = sorted((name for name in clients if clients[name]["gain"] < 0), key=lambda name: clients[name]["gain"])
    number = f"{len(gaining)} of {len(clients)} clients"
    number += f" (a sample of {found['of']})" if found["of"] > len(clients) else ""
    words = [f"{name} loses {-clients[name]['gain']:.3f}{noise_word(clients[name])}" for name in losing[:MOST_NAMED]]
    words += [f"{len(losing) - MOST_NAMED} more lose"] if len(losing) > MOST_NAMED else []
    same = [name for name, entry in clients.items() if entry["gain"] == 0]
    words += [f"{first_of(same)} neither gain{'s' * (len(same) == 1)} nor lose{'s' * (len(same) == 1)}"] if same else []
    verb = "gains" if len(gaining) == 1 else "gain"
    line = f"{number} {verb} from training together, mean {mean['gain']:+.3f}{noise_word(mean)}"
    return "; ".join([line, *([", ".join(words)] if words else [])])


def noise_word(entry: Mapping[str, Any]) -> str:
    """` (within noise)` where the interval of a gain holds zero."""
    low, high = entry["interval"]
    return " (within noise)" if low <= 0 <= high else ""


def _sharing(events: Sequence[Row]) -> dict[str, Any]:
    """The last measurement of sharing by client and group of parameters."""
    by_client: dict[str, dict[str, Any]] = {}
    for row in (row for row in events if row["event"] == MEASURED):
        numbers = {name: row[name] for name in SHARING if name in row}
        by_client.setdefault(row["client"], {})[row["parameters"]] = numbers | {"round": row["round"]}
    return {"sharing": by_client} if by_client else {}


def _bytes(traffic: Totals, metrics: Sequence[Row], full_model_bytes: int) -> dict[str, Any]:
    """Bytes in sum and by kind and round, and relative to the whole model down and up for every client that trained.

    A client whose update was refused has trained as well.
    """
    sums: dict[str, Any] = {
        "up": traffic.up,
        "down": traffic.down,
        "total": traffic.total,
        "by_kind": traffic.by_kind,
        "by_round": {str(round): entry for round, entry in sorted(traffic.by_round.items())},
    }
    if traffic.between_clients:
        sums["between_clients"] = traffic.between_clients
    trained = {
        (row["round"], row["client"]) for row in metrics if row.get("split") == "train" or row.get("event") == "refused"
    }
    if trained:
        full = 2 * full_model_bytes * len(trained)
        sums["full_model"] = {"total": full, "reduction": 1 - traffic.total / full}
    return sums
