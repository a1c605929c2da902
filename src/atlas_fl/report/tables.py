"""Tables of plans, cuts and finished runs, as rich tables in eighty columns; the command line prints them.

`plan` is the content of `plan.json`, `summary` that of `summary.json`. What they do not hold is a dash.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from rich.markup import escape
from rich.table import Table

from atlas_fl.report.format import EMPTY, add_columns, cluster_name, human_bytes, new_table, number, percent, seconds
from atlas_fl.storage.json_shapes import GENERATION_METRICS

KINDS = {"activations": ("activation",), "gradients": ("gradient",), "labels, norms": ("label", "control")}
"""The columns of `crossing_table` and the kinds of messages that they sum."""


def cut_tables(plan: Mapping[str, Any]) -> list[Table]:
    """Nothing where splitting was not asked for; the reasons alone where no model is cut."""
    clients = plan["clients"]
    asked = any((client.get("split") or {}).keys() - {"shared"} for client in clients)
    tables = [reason_table(plan)] if asked else []
    if any(client.get("cut") is not None for client in clients):
        tables += [crossing_table(plan), sides_table(plan)]
    if any("host" in (client.get("split") or {}) for client in clients):
        tables.append(host_table(plan))
    if plan.get("leakage"):
        taken = {(client["task"], client.get("cut")) for client in clients}
        tables.append(leakage_table(plan["leakage"], taken=taken))
    return tables


def reason_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: where its model is cut and why, or why it is not."""
    table = new_table("Cuts")
    add_columns(table, ["client", "device", "blocks on the client", "why"], [])
    for client in plan["clients"]:
        cut, reason = client.get("cut"), (client.get("split") or {}).get("reason", EMPTY)
        words = "all" if cut is None else f"{cut} of {len(client.get('ranks', ()))}"
        table.add_row(escape(client["name"]), client.get("device", EMPTY), words, reason)
    return table


def crossing_table(plan: Mapping[str, Any]) -> Table:
    """One row a client with a cut: bytes of both directions through it in a round, in one evaluation, in planning."""
    table = new_table("What crosses the cuts in a round")
    add_columns(table, ["client"], [*KINDS, "an evaluation", "planning"])
    for client in plan["clients"]:
        if client.get("cut") is None:
            continue
        sent = client["split"]["crossing_bytes"]
        sizes = [sum(size for name, size in sent.items() if name.startswith(kinds)) for kinds in KINDS.values()]
        planned = client["split"].get("planning_bytes")
        planning = EMPTY if planned is None else human_bytes(sum(sum(phase.values()) for phase in planned.values()))
        table.add_row(
            escape(client["name"]), *map(human_bytes, [*sizes, client["split"]["evaluation_bytes"]]), planning
        )
    return table


def sides_table(plan: Mapping[str, Any]) -> Table:
    """One row a client with a cut: seconds of client, server and link, memory of the device and on the server."""
    table = new_table("Both sides of the cuts")
    times = [f"on the\n{where}" for where in ("client", "server", "link")]
    add_columns(table, ["client"], [*times, "device\nmemory", "server:\nweights", "its own"])
    for client in plan["clients"]:
        if client.get("cut") is None:
            continue
        split, memory = client["split"], client["split"]["server_memory"]
        frozen = memory["frozen weights"]
        taken = [split[f"{side}_seconds"] for side in ("client", "server", "link")]
        sizes = [client["predicted"]["memory_bytes"], frozen, sum(memory.values()) - frozen]
        table.add_row(escape(client["name"]), *map(seconds, taken), *map(human_bytes, sizes))
    table.caption = "server: the frozen weights are there once for all clients, the rest for each"
    return table


def host_table(plan: Mapping[str, Any]) -> Table:
    """One row a client with a cut: who computes its upper part and why, and its round's seconds with that host."""
    table = new_table("Hosts of the upper parts")
    add_columns(table, ["client"], ["cut"])
    add_columns(table, ["host", "why"], ["round"])
    for client in plan["clients"]:
        host = (client.get("split") or {}).get("host")
        if host is not None:
            name = host["name"] or "the server"
            table.add_row(
                escape(client["name"]), str(client["cut"]), escape(name), host["reason"], seconds(host["seconds"])
            )
    return table


def leakage_table(rows: Sequence[Mapping[str, Any]], *, taken: Collection[tuple[str, int | None]] = ()) -> Table:
    """One row a task and cut: dFIL, and the tokens that the probe reads; an arrow marks the cuts that were `taken`."""
    table = new_table("What a cut gives away")
    has_noise = any(row.get("looks", 1) > 1 for row in rows)
    averaged = ["of looks", "read in\ntheir mean"] if has_noise else []
    add_columns(
        table, ["", "task"], ["blocks on\nthe client", "dFIL", "tokens\nread", *averaged, "commonest\ntoken", "of"]
    )
    for row in rows:
        shares = [percent(row["read"])]
        shares += [str(row["looks"]), percent(row["read_averaged"])] if has_noise else []
        shares.append(percent(row["commonest"]))
        mark = ">" if (row["task"], row["blocks"]) in taken else ""
        table.add_row(mark, escape(row["task"]), str(row["blocks"]), f"{row['dfil']:.3g}", *shares, str(row["unseen"]))
    table.caption = (
        "read: by a linear probe that knows other texts of the\ntask; of: tokens of texts that it does not know;\n"
        "commonest: what always guessing that token reads"
        + (
            "\nlooks: as many as a site lets a server take, each with\nother noise; their mean has less of it"
            if has_noise
            else ""
        )
    )
    return table


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
            "none" if client.get("cluster", -1) < 0 else str(client["cluster"]),
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
    times = [f"on the\n{where}" for where in ("client", "server", "link")]
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
    measured = ", ".join(
        f"{name} {number(agreement[name], 2)}" for name in ("purity", "ari", "nmi") if name in agreement
    )
    reason, warnings = structure.get("reason", ""), list(clustering.get("warnings") or ())
    if any(reason in line for line in warnings):
        reason = ""
    lines = [CLUSTER_WORDS, reason, f"against the true tasks: {measured}" if measured else "", *warnings]
    return "\n".join(line for line in lines if line)


def _mean(values: Sequence[float] | None, members: Sequence[int]) -> float | None:
    return sum(values[index] for index in members) / len(members) if values else None


def _inside(similarity: Sequence[Sequence[float]] | None, members: Sequence[int]) -> float | None:
    """The mean similarity of pairs inside a cluster; None for a cluster of one."""
    pairs = [similarity[left][right] for left in members for right in members if left < right] if similarity else []
    return sum(pairs) / len(pairs) if pairs else None


LEGEND = (
    "best: test score of each client's best round by validation; 90% at: first round with 90% of the last validation "
    "score; spread: standard deviation over clients"
)


def closing_table(summary: Mapping[str, Any]) -> Table:
    """What a finished run shows: per task the test scores, the majority class, the worst client; bytes and time below.

    `final` is what the clients end with; `best` is each client's best round by validation, reported on test.
    """
    run = summary.get("run") or {}
    title = ", ".join(str(run[key]) for key in ("strategy", "model") if key in run)
    table = new_table(f"Test scores of {title}" if title else "Test scores")
    add_columns(table, ["task"], ["clients", "majority", "final", "over\nmajority", "best", "90%\nat", "spread"])
    table.add_column("worst client", overflow="fold")
    for task, group in (summary.get("tasks") or {}).items():
        table.add_row(escape(task), *_closing_cells(group))
    table.add_section()
    table.add_row("all", *_closing_cells(summary.get("overall") or {}), style="bold")
    table.caption = _closing_caption(summary)
    return table


def sharing_table(summary: Mapping[str, Any]) -> Table:
    """One row a group of parameters: how much of its own clients keep, and what was measured that says so."""
    table = new_table("How personal the models are")
    add_columns(table, ["parameters"], ["clients", "of their own", "as if averaged", "variance / noise"])
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for by_group in summary["sharing"].values():
        for name, row in by_group.items():
            groups.setdefault(name, []).append(row)
    for name, rows in groups.items():
        kept = _range([row["own_share"] for row in rows])
        together = fmean(row["effective_clients"] for row in rows)
        ratios = [row["variance_over_noise"] for row in rows if "variance_over_noise" in row]
        table.add_row(
            escape(name), str(len(rows)), kept, f"over {together:.1f}", f"{fmean(ratios):.2g}" if ratios else EMPTY
        )
    table.caption = (
        "as if averaged: so many clients, each counting alike;\nvariance / noise: between clients that are compared,"
        " over the noise of one"
    )
    return table


def _closing_cells(group: Mapping[str, Any]) -> list[str]:
    final, best = group.get("final") or {}, group.get("best") or {}
    test, worst = final.get("test") or {}, final.get("worst_client") or {}
    reached = (group.get("rounds_to") or {}).get("90%")
    return [
        str(group.get("clients", EMPTY)),
        number(test.get("majority"), 3),
        number(test.get("primary"), 3),
        number(test.get("gain_over_majority"), 3, sign=True),
        number((best.get("test") or {}).get("primary"), 3),
        EMPTY if reached is None else str(reached),
        number((final.get("spread") or {}).get("std"), 3),
        f"{escape(worst['client'])} {number(worst.get('primary'), 3)}" if worst else EMPTY,
    ]


def _closing_caption(summary: Mapping[str, Any]) -> str:
    """What the columns mean; then bytes with the reduction, time, peak memory, devices, refused updates."""
    sent, memory = summary.get("bytes") or {}, summary.get("memory") or {}
    lines = [LEGEND, *_stopping_notes(summary)]
    lines += [
        _writing_scores(task, group) for task, group in (summary.get("tasks") or {}).items() if _has_written(group)
    ]
    if "total" in sent:
        lines.append(f"{human_bytes(sent['up'])} up, {human_bytes(sent['down'])} down{_than_whole(sent)}")
        if "between_clients" in sent:
            lines.append(f"{human_bytes(sent['between_clients'])} of it between clients, past the server")
        if "relayed" in sent:
            lines.append(f"{human_bytes(sent['relayed'])} of it between clients, handed on by the server")
    times = [f"{seconds((summary.get('seconds') or {})['total'])}"] if "total" in (summary.get("seconds") or {}) else []
    peaks = [f"{human_bytes(size)} of {name.removesuffix('_bytes').upper()} at most" for name, size in memory.items()]
    if times or peaks:
        lines.append(", ".join([*times, *peaks]))
    clients = (summary.get("clients") or {}).values()
    used, parts = [client.get("utilisation") or {} for client in clients], [client.get("memory") for client in clients]
    beside = ", activations not counted" if any(part and "activations" not in part for part in parts) else ""
    words = {"busy": "of a round busy", "memory": f"of the memory used{beside}"}
    ranges = {name: [device[name] for device in used if name in device] for name in words}
    shares = [f"{_range(ranges[name])} {text}" for name, text in words.items() if ranges[name]]
    lines.extend([f"devices: {', '.join(shares)}"] if shares else [])
    refused = ((summary.get("events") or {}).get("count") or {}).get("refused", 0)
    lines.extend([f"{refused} update{'' if refused == 1 else 's'} refused"] if refused else [])
    return "\n".join(lines)


def _than_whole(sent: Mapping[str, Any]) -> str:
    """How much less or more than the whole model; nothing where whole models were sent and no mask saved any."""
    saved = (sent.get("full_model") or {}).get("reduction")
    if saved is None or (saved <= 0 and "weights" in (sent.get("by_kind") or {})):
        return ""
    return f", {percent(abs(saved))} {'less' if saved >= 0 else 'more'} than the whole model in every round"


def _stopping_notes(summary: Mapping[str, Any]) -> list[str]:
    """When a run stopped early, and after which round its mean validation score was best."""
    if "stopped" not in summary:
        return []
    after, best = summary["stopped"]["round"], summary["best"]
    return [f"stopped early after round {after}; best in round {best['round']}: validation {best['validation']:.3f}"]


def _range(shares: Sequence[float]) -> str:
    """The least and the largest share, or the one that all have.

    >>> _range([0.25, 1.0, 0.5])
    '25.0% to 100.0%'
    """
    least, most = percent(min(shares)), percent(max(shares))
    return least if least == most else f"{least} to {most}"


def _test_scores(group: Mapping[str, Any]) -> Mapping[str, Any]:
    scores: Mapping[str, Any] = (group.get("final") or {}).get("test") or {}
    return scores


def _has_written(group: Mapping[str, Any]) -> bool:
    return "perplexity" in _test_scores(group)


def _writing_scores(task: str, group: Mapping[str, Any]) -> str:
    """Final test perplexity of a task that writes text and, where it has prompts, ROUGE; `final` is its accuracy."""
    test = _test_scores(group)
    scores = [
        f"{kind.replace('rouge', 'ROUGE-')} {number(test[kind], 3)}" for kind in GENERATION_METRICS[1:] if kind in test
    ]
    return ", ".join([f"{escape(task)} writes: perplexity {number(test['perplexity'], 2)}", *scores])
