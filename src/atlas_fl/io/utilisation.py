"""How much of its device each client uses: of the memory, of the time of a round, and of the time measured here.

    memory     predicted bytes of training over the device's memory
    busy       sum over the rounds that it trained in of its predicted seconds, over the sum over all rounds of the
               predicted seconds of the slowest client that trained: 1 for a client that everyone always waits for
    measured   seconds that training it took on this machine over the seconds of all rounds, evaluation and mixing
               included; over all clients they add up to the share of training

Predicted seconds are those of the plan: download, training and upload on the client's own device.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def utilisation(
    plan: Mapping[str, Any], metrics: Iterable[Row], round_seconds: Mapping[int, float]
) -> dict[str, dict[str, float]]:
    """By client the shares that are known, each from 0 to 1."""
    planned = {entry["name"]: entry for entry in plan.get("clients", ())}
    trained = [row for row in metrics if row.get("split") == "train" and row["round"] > 0]
    rounds: dict[int, list[str]] = {}
    for row in trained:
        rounds.setdefault(row["round"], []).append(row["client"])
    seconds = {name: (entry.get("predicted") or {}).get("seconds") for name, entry in planned.items()}
    slowest = sum(max(seconds.get(name) or 0.0 for name in names) for names in rounds.values())
    found: dict[str, dict[str, float]] = {}
    for name, entry in planned.items():
        own, shares = [row for row in trained if row["client"] == name], _memory(entry)
        if (taken := seconds[name]) is not None and slowest > 0:
            shares["busy"] = taken * len(own) / slowest
        if round_seconds:
            shares["measured"] = sum(row.get("seconds", 0.0) for row in own) / sum(round_seconds.values())
        found[name] = shares
    return found


def _memory(entry: Row) -> dict[str, float]:
    used, total = (entry.get("predicted") or {}).get("memory_bytes"), (entry.get("memory") or {}).get("total")
    return {"memory": used / total} if used is not None and total else {}
