"""The tables of a plan, as rich tables in eighty columns; whoever prints them is the command line.

`plan` is the content of `plan.json`. What it does not hold is a dash.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.markup import escape
from rich.table import Table

from atlas_fl.report.cut_tables import cut_tables
from atlas_fl.report.words import EMPTY, add_columns, cluster_name, human_bytes, new_table, number, percent, seconds

K_SCORES = {
    "silhouette": "silhouette",
    "davies_bouldin": "Davies-\nBouldin",
    "calinski_harabasz": "Calinski-\nHarabasz",
    "gap": "gap",
    "atlas": "ATLAS\nscore",
    "merge_similarity": "merge\nat",
}
CLUSTER_WORDS = "c_kk: agreement of a client's own halves; inside: similarity of clients; loss: on training data"
MOST_TENSORS = 4
"""Of a mask, tensors with the largest and with the smallest shares that are shown."""
MOST_BLOCKS = 8
"""Blocks above which ranks are written in runs."""


def plan_tables(plan: Mapping[str, Any]) -> list[Table]:
    """What `atlas plan` shows: clusters, ranks, predictions; the k table and the memory where the plan holds them.

    Whole models are not clustered and have no ranks.
    """
    builders = [prediction_table]
    if any(client.get("ranks") != [] for client in plan["clients"]):  # whole models have neither
        builders = [cluster_table, rank_table, prediction_table]
    if (plan.get("clustering") or {}).get("k_table"):
        builders.insert(1, k_table)
    if plan.get("sparse"):
        builders.insert(1, mask_table)
    if any(client.get("memory") for client in plan["clients"]):
        builders.append(memory_table)
    if any(client.get("planning") for client in plan["clients"]):
        builders.append(planning_table)
    return [build(plan) for build in builders] + cut_tables(plan)


def mask_table(plan: Mapping[str, Any]) -> Table:
    """Which weights may move: how many, and the tensors that keep the largest and the smallest share of theirs."""
    sparse = plan["sparse"]
    table = new_table(f"Mask ({sparse['mask']}, sparsity {sparse['sparsity']:g})")
    add_columns(table, ["tensor"], ["kept"])
    body = [(name, share) for name, share in sparse["density"].items() if not name.startswith("head.")]
    ordered = sorted(body, key=lambda entry: -entry[1])
    shown = ordered if len(ordered) <= 2 * MOST_TENSORS else [*ordered[:MOST_TENSORS], *ordered[-MOST_TENSORS:]]
    for name, share in shown:
        table.add_row(escape(name), percent(share))
    table.caption = f"{sparse['kept']:,} of {sparse['weights']:,} weights may move; all shares are in plan.json"
    return table


def cluster_table(plan: Mapping[str, Any]) -> Table:
    """One row a cluster: clients, tasks, purity, reliability, similarity inside, difficulty; below, the verdict.

    `loss` is the difficulty: the mean training loss of the members' fingerprint passes.
    """
    clustering = plan.get("clustering") or {}
    method = clustering.get("method", "none")
    table = new_table("Clusters" if method == "none" else f"Clusters ({method})")
    add_columns(table, ["cluster", "clients", "tasks"], ["size", "purity", "c_kk", "inside", "loss"])
    clients = plan["clients"]
    labels = [client.get("cluster", -1) for client in clients]
    difficulty = {row["cluster"]: row.get("difficulty") for row in clustering.get("clusters") or ()}
    for label in sorted(set(labels), key=lambda label: (label < 0, label)):
        members = [index for index, other in enumerate(labels) if other == label]
        tasks = Counter(clients[index]["task"] for index in members)
        table.add_row(
            cluster_name(label),
            escape(", ".join(clients[index]["name"] for index in members)),
            escape(", ".join(f"{task} x {count}" for task, count in tasks.most_common())),
            str(len(members)),
            number(tasks.most_common(1)[0][1] / len(members), 2),
            number(_mean(clustering.get("reliability"), members), 2),
            number(_inside(clustering.get("similarity"), members), 2),
            number(difficulty.get(label), 2),
        )
    table.caption = escape(_verdict(clustering))
    return table


def k_table(plan: Mapping[str, Any]) -> Table:
    """Every number of clusters that was weighed with all its scores; an arrow marks the chosen one."""
    rows = (plan.get("clustering") or {}).get("k_table") or ()
    shown = {name: title for name, title in K_SCORES.items() if any(row.get(name) is not None for row in rows)}
    table = new_table("Numbers of clusters")
    add_columns(table, [""], ["k", *shown.values(), "single-\ntons"])
    for row in rows:
        cells = [number(row.get(name), 3) for name in shown]
        chosen = bool(row.get("chosen"))
        singletons = EMPTY if row.get("singletons") is None else str(row["singletons"])
        table.add_row(">" if chosen else "", str(row["k"]), *cells, singletons, style="bold" if chosen else "")
    return table


def rank_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: device, cluster, the ranks from the first block to the last, the cut, the largest rank, the
    budget.
    """
    table = new_table("LoRA ranks")
    add_columns(table, ["client", "device", "cluster", "first to last block"], ["sum", "cut", "most", "budget"])
    for client in plan["clients"]:
        ranks = list(client.get("ranks", ()))
        cut, budget = client.get("cut"), client.get("budget_bytes")
        table.add_row(
            escape(client["name"]),
            client.get("device", EMPTY),
            "alone" if client.get("cluster", -1) < 0 else str(client["cluster"]),
            in_runs(ranks) or EMPTY,
            str(sum(ranks)) if ranks else EMPTY,
            "whole" if cut is None else str(cut),
            str(client.get("largest_rank", EMPTY)),
            EMPTY if budget is None else human_bytes(budget),
        )
    table.caption = (
        "cut: blocks on the client; budget: training bytes of the adapters;\n"
        "most: largest rank that every block could have within budget and profile"
    )
    return table


def in_runs(ranks: Sequence[int]) -> str:
    """Ranks block by block; in deep models equal neighbours are one word with their number.

    >>> in_runs([4, 4, 8, 16, 16, 16])
    '4 4 8 16 16 16'
    >>> in_runs([4, 4, 8, 16, 16, 16, 16, 16, 16, 32])
    '4x2 8 16x6 32'
    """
    if len(ranks) <= MOST_BLOCKS:
        return " ".join(map(str, ranks))
    lengths = [(rank, len(list(same))) for rank, same in groupby(ranks)]
    return " ".join(str(rank) if count == 1 else f"{rank}x{count}" for rank, count in lengths)


def prediction_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: predicted bytes, seconds and memory of a round, and the share of the device's memory."""
    table = new_table("Predicted for each round")
    add_columns(table, ["client", "device"], ["up", "down", "time", "memory", "of the device"])
    for client in plan["clients"]:
        predicted, total = client.get("predicted") or {}, (client.get("memory") or {}).get("total")
        sizes = [predicted.get(name) for name in ("up_bytes", "down_bytes", "memory_bytes")]
        up, down, used = (EMPTY if size is None else human_bytes(size) for size in sizes)
        taken = EMPTY if predicted.get("seconds") is None else seconds(predicted["seconds"])
        share = percent(sizes[2] / total) if sizes[2] is not None and total else EMPTY
        table.add_row(escape(client["name"]), client.get("device", EMPTY), up, down, taken, used, share)
    return table


def memory_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: where the memory of its device goes, part by part."""
    parts = dict.fromkeys(part for client in plan["clients"] for part in client.get("memory") or ())
    shown = [part for part in parts if part != "total"]
    table = new_table("Memory on the device")
    headings = [part.removesuffix("_bytes").replace("_", " ").replace(" ", "\n", 1) for part in shown]
    add_columns(table, ["client"], headings)
    for client in plan["clients"]:
        memory = client.get("memory") or {}
        cells = [human_bytes(memory[part]) if part in memory else EMPTY for part in shown]
        table.add_row(escape(client["name"]), *cells)
    if "activations" not in parts:
        table.caption = "activations are not predicted and come on top"
    return table


def planning_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: seconds of planning on its device, the server and the link; memory of the largest phase."""
    table = new_table("Planning, predicted")
    times = [f"on the\n{place}" for place in ("client", "server", "link")]
    add_columns(table, ["client"], [*times, "device\nmemory", "server:\nits own", "taken by"])
    for client in plan["clients"]:
        phases = client.get("planning") or {}
        if not phases:
            table.add_row(escape(client["name"]), *[EMPTY] * 6)
            continue
        taken = [sum(phase[f"{side}_seconds"] for phase in phases.values()) for side in ("client", "server", "link")]
        most = [max(phase[name] for phase in phases.values()) for name in ("memory_bytes", "server_memory_bytes")]
        longest = max(phases, key=lambda name: phases[name]["client_seconds"])
        table.add_row(escape(client["name"]), *map(seconds, taken), *map(human_bytes, most), longest)
    table.caption = "by the devices' profiles; taken by: the phase that takes the client longest"
    return table


def _verdict(clustering: Mapping[str, Any]) -> str:
    structure, agreement = clustering.get("structure") or {}, clustering.get("agreement") or {}
    known = ", ".join(f"{name} {number(agreement[name], 2)}" for name in ("purity", "ari", "nmi") if name in agreement)
    reason, warnings = structure.get("reason", ""), list(clustering.get("warnings") or ())
    if any(reason in line for line in warnings):
        reason = ""
    lines = [CLUSTER_WORDS, reason, f"against the true tasks: {known}" if known else "", *warnings]
    return "\n".join(line for line in lines if line)


def _mean(values: Sequence[float] | None, members: Sequence[int]) -> float | None:
    return sum(values[index] for index in members) / len(members) if values else None


def _inside(similarity: Sequence[Sequence[float]] | None, members: Sequence[int]) -> float | None:
    """The mean similarity of pairs inside a cluster; None for a cluster of one."""
    pairs = [similarity[left][right] for left in members for right in members if left < right] if similarity else []
    return sum(pairs) / len(pairs) if pairs else None
