"""The outcome of a run as one JSON document, `summary.json`.

    run        name, preset, strategy, model, seed, config_hash, rounds
    best       the round with the best mean validation score over all clients, and that score
    stopped    with `--patience`, where it ended the run early: after which round
    clients    per client: task, cluster, device, ranks, final and best scores per split, rounds to 90% and 95%, bytes,
               utilisation of the device (`io.utilisation`)
    tasks      per task: means over its clients, the worst client, the spread; of images, accuracy by class
    overall    the same over all clients
    attackers, honest  with `--attack`: who attacks, and the same over all others
    bytes      up, down, total; by kind, round and client; against the whole model in every round; between clients
    seconds    by phase and in sum, by round
    memory, versions, events (refused updates), clustering
    hosts      with `--topology paired`: by cut client, in how many rounds who computed its upper part
    leakage    with `--leakage`: what the cuts that were taken give away, by task

"Spread within a task" is what personalisation can be judged by; the spread over tasks is the tasks' own difficulty.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from atlas_fl.io.by_class import classes_of
from atlas_fl.io.ledger import Totals, from_json, totals
from atlas_fl.io.scores import STOPPED, History, Row, client_scores, group_scores, histories, mean_series
from atlas_fl.io.utilisation import utilisation
from atlas_fl.stopping import best_rounds


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
        memory: peak bytes by kind, as `machine.peak_memory` gives them.
        versions: as `machine.versions` gives them.
        full_model_bytes: encoded bytes of the whole model, to compare with sending it in every round.
        round_seconds: wall-clock seconds by round.
        attackers: clients that attack in this simulation.
    """
    found = histories(metrics)
    sent = totals(from_json(row) for row in ledger)
    rounds = [int(row["round"]) for row in metrics]
    # before the first evaluation only those have rows that have trained
    sizes = Counter(entry["task"] for entry in plan.get("clients", ()) if "task" in entry)
    return {
        "run": dict(run) | {"rounds": max(rounds, default=0)},
        **_best(found),
        **_stopped(metrics),
        "overall": group_scores(list(found.values())) | {"clients": max(len(found), sizes.total())},
        **_honest(found, attackers),
        "tasks": {
            task: group_scores(members) | {"clients": max(len(members), sizes[task])} | classes_of(members, plan=plan)
            for task, members in by_task(found).items()
        },
        "clients": _clients(found, sent, plan, utilisation(plan, metrics, round_seconds or {})),
        "clustering": _clustering(plan),
        **_leakage(plan),
        **_hosts(metrics),
        "bytes": _bytes(sent) | _reduction(sent, metrics, full_model_bytes),
        "seconds": _seconds(phase_seconds, round_seconds or {}),
        "memory": dict(memory),
        "events": _events(metrics),
        "versions": dict(versions),
    }


def _honest(found: Mapping[str, History], attackers: Sequence[str]) -> dict[str, Any]:
    """The scores of those who do not attack, where somebody does."""
    honest = [history for client, history in found.items() if client not in attackers]
    return {"attackers": list(attackers), "honest": group_scores(honest)} if attackers else {}


def honest_line(summary: Mapping[str, Any]) -> str:
    """What an attack left of the honest clients' final test scores, as one line; empty where nobody attacked."""
    scores = summary.get("honest", {}).get("final", {})
    if "test" not in scores:
        return ""
    worst = scores["worst_client"]
    return (
        f"simulated attackers: {', '.join(summary['attackers'])}; the others have a test score of"
        f" {scores['test']['primary']:.3f} (worst {worst['client']} {worst['primary']:.3f})"
    )


def by_task(found: Mapping[str, History]) -> dict[str, list[History]]:
    """The clients' histories by task, tasks in the order of their first client."""
    groups: dict[str, list[History]] = {}
    for history in found.values():
        groups.setdefault(history.task, []).append(history)
    return groups


def _clients(
    found: Mapping[str, History], sent: Totals, plan: Mapping[str, Any], used: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    planned = {entry["name"]: entry for entry in plan.get("clients", ())}
    return {
        client: {key: planned.get(client, {})[key] for key in _PLANNED if key in planned.get(client, {})}
        | client_scores(history)
        | {"bytes": sent.by_client.get(client, {"up": 0, "down": 0})}
        | ({"utilisation": dict(used[client])} if used.get(client) else {})
        for client, history in found.items()
    }


_PLANNED = ("device", "cluster", "ranks", "cut", "examples", "budget_bytes", "memory", "predicted")


def _clustering(plan: Mapping[str, Any]) -> dict[str, Any]:
    clustering = plan.get("clustering") or {}
    kept = ("method", "labels", "agreement", "structure", "explained_variance", "warnings")
    return {key: clustering[key] for key in kept if clustering.get(key) is not None}


def _best(found: Mapping[str, History]) -> dict[str, Any]:
    scores = mean_series(list(found.values()), "validation")
    best = best_rounds(scores, 1)
    return {"best": {"round": best[0], "validation": scores[best[0]]}} if best else {}


def _stopped(metrics: Sequence[Row]) -> dict[str, Any]:
    after = [row["round"] for row in metrics if row.get("event") == STOPPED]
    return {"stopped": {"round": after[0]}} if after else {}


def _leakage(plan: Mapping[str, Any]) -> dict[str, Any]:
    taken = {(client["task"], client.get("cut")) for client in plan.get("clients", ()) if "task" in client}
    rows = [dict(row) for row in plan.get("leakage") or () if (row["task"], row["blocks"]) in taken]
    return {"leakage": rows} if rows else {}


def _hosts(metrics: Sequence[Row]) -> dict[str, Any]:
    rows = [row for row in metrics if row.get("event") == "hosted" and row["work"] == "training"]
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row["client"], Counter())[row["host"]] += 1
    return {"hosts": {client: dict(counts) for client, counts in found.items()}} if found else {}


def _bytes(sent: Totals) -> dict[str, Any]:
    return {
        "up": sent.up,
        "down": sent.down,
        "total": sent.total,
        "by_kind": sent.by_kind,
        "by_round": {str(at): entry for at, entry in sorted(sent.by_round.items())},
    } | {name: size for name in ("between_clients", "relayed") if (size := getattr(sent, name))}


def _reduction(sent: Totals, metrics: Sequence[Row], full_model_bytes: int | None) -> dict[str, Any]:
    """Against sending the whole model down and up once for every client that trained in a round.

    A client whose update was refused has trained as well.
    """
    trained = {(row["round"], row["client"]) for row in metrics if _has_trained(row)}
    if full_model_bytes is None or not trained:
        return {}
    full = 2 * full_model_bytes * len(trained)
    entry = {"model_bytes": full_model_bytes, "client_rounds": len(trained), "total": full}
    return {"full_model": entry | {"reduction": 1 - sent.total / full}}


def _has_trained(row: Row) -> bool:
    return bool(row["round"] > 0 and (row.get("split") == "train" or row.get("event") == "refused"))


def _seconds(phase_seconds: Mapping[str, float], round_seconds: Mapping[int, float]) -> dict[str, Any]:
    seconds: dict[str, Any] = {"phases": dict(phase_seconds), "total": sum(phase_seconds.values())}
    if round_seconds:
        seconds["rounds"] = {str(at): taken for at, taken in sorted(round_seconds.items())}
        seconds["round_mean"] = fmean(round_seconds.values())
    return seconds


def _events(metrics: Sequence[Row]) -> dict[str, Any]:
    """How often each event happened, the refused updates themselves, and whose were missing how often."""
    events = [row for row in metrics if "event" in row]
    refused = [{key: row[key] for key in ("round", "client", "reason")} for row in events if row["event"] == "refused"]
    missing = dict(Counter(row["client"] for row in events if row["event"] == "missing"))
    count = dict(Counter(str(row["event"]) for row in events))
    return {"count": count, "refused": refused} | ({"missing": missing} if missing else {})
