"""The tables of a plan and of a run, as rich tables; whoever prints them is the command line.

`plan` is the content of `plan.json`, `summary` that of `summary.json`. What they do not hold is a dash.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from atlas_fl.io.scores import WRITTEN
from atlas_fl.report.compare import ComparisonRow as ComparisonRow
from atlas_fl.report.compare import by_strategy as by_strategy
from atlas_fl.report.compare import comparison_rows as comparison_rows
from atlas_fl.report.export import comparison_table as comparison_table
from atlas_fl.report.export import tasks_table as tasks_table
from atlas_fl.report.export import to_csv as to_csv
from atlas_fl.report.export import to_latex as to_latex
from atlas_fl.report.words import EMPTY, add_columns, cluster_name, human_bytes, new_table, number, percent, seconds

K_SCORES = {
    "silhouette": "silhouette",
    "davies_bouldin": "Davies-Bouldin",
    "calinski_harabasz": "Calinski-Harabasz",
    "gap": "gap",
    "atlas": "ATLAS score",
    "merge_similarity": "merge at",
}


def plan_tables(plan: Mapping[str, Any]) -> list[Table]:
    """What `atlas plan` shows: clusters, ranks, predictions; the k table and the memory where the plan holds them."""
    builders = [cluster_table, rank_table, prediction_table]
    if (plan.get("clustering") or {}).get("k_table"):
        builders.insert(1, k_table)
    if any(client.get("memory") for client in plan["clients"]):
        builders.append(memory_table)
    return [build(plan) for build in builders]


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
    add_columns(table, [""], ["k", *shown.values(), "singletons"])
    for row in rows:
        cells = [number(row.get(name), 3) for name in shown]
        chosen = bool(row.get("chosen"))
        singletons = EMPTY if row.get("singletons") is None else str(row["singletons"])
        table.add_row(">" if chosen else "", str(row["k"]), *cells, singletons, style="bold" if chosen else "")
    return table


def rank_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: task, device, cluster, the rank of every layer, the cut, the largest rank, the budget."""
    layers = max((len(client.get("ranks", ())) for client in plan["clients"]), default=0)
    table = new_table("LoRA ranks by layer")
    text = ["client", "task", "device", "cluster"]
    add_columns(table, text, [*(str(layer) for layer in range(layers)), "sum", "cut", "most", "budget"])
    for client in plan["clients"]:
        ranks = list(client.get("ranks", ()))
        cut, budget = client.get("cut"), client.get("budget_bytes")
        table.add_row(
            *(escape(client["name"]), escape(client["task"]), client.get("device", EMPTY)),
            "alone" if client.get("cluster", -1) < 0 else str(client["cluster"]),
            *(str(rank) for rank in ranks),
            *[EMPTY] * (layers - len(ranks)),
            str(sum(ranks)) if ranks else EMPTY,
            "whole" if cut is None else str(cut),
            str(client.get("largest_rank", EMPTY)),
            EMPTY if budget is None else human_bytes(budget),
        )
    table.caption = (
        "cut: blocks on the client; most: largest rank that every layer could have within the budget and the profile;\n"
        "budget: training bytes of the adapters"
    )
    return table


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
    add_columns(table, ["client", "device"], headings)
    table.columns[1].no_wrap = True
    for client in plan["clients"]:
        memory = client.get("memory") or {}
        cells = [human_bytes(memory[part]) if part in memory else EMPTY for part in shown]
        table.add_row(escape(client["name"]), client.get("device", EMPTY), *cells)
    return table


def closing_table(summary: Mapping[str, Any]) -> Table:
    """What a finished run shows: per task the test scores, the majority class, the worst client; bytes and time below.

    `final` is what the clients end with; `best` is each client's best round by validation, reported on test.
    """
    run = summary.get("run") or {}
    title = ", ".join(str(run[key]) for key in ("strategy", "model") if key in run)
    table = new_table(f"Test scores of {title}" if title else "Test scores")
    add_columns(table, ["task"], ["clients", "majority", "final", "gain", "best", "90% at", "spread"])
    table.add_column("worst client", no_wrap=True)
    for task, group in (summary.get("tasks") or {}).items():
        table.add_row(escape(task), *_closing_cells(group))
    table.add_section()
    table.add_row("all", *_closing_cells(summary.get("overall") or {}), style="bold")
    table.caption = _closing_caption(summary)
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
    """Bytes with the reduction, time, peak memory, devices, refused updates: a line each, where they are known."""
    sent, memory = summary.get("bytes") or {}, summary.get("memory") or {}
    lines = [_written(task, group) for task, group in (summary.get("tasks") or {}).items() if _has_written(group)]
    if "total" in sent:
        saved = (sent.get("full_model") or {}).get("reduction")
        than = "" if saved is None else f", {percent(saved)} less than the whole model in every round"
        lines.append(f"{human_bytes(sent['up'])} up, {human_bytes(sent['down'])} down{than}")
    times = [f"{seconds((summary.get('seconds') or {})['total'])}"] if "total" in (summary.get("seconds") or {}) else []
    peaks = [f"{human_bytes(size)} of {name.removesuffix('_bytes').upper()} at most" for name, size in memory.items()]
    if times or peaks:
        lines.append(", ".join([*times, *peaks]))
    used = [client.get("utilisation") or {} for client in (summary.get("clients") or {}).values()]
    words = {"busy": "of a round busy", "memory": "of the memory used"}
    shares = [f"{_range([one[name] for one in used if name in one])} {text}" for name, text in words.items()
              if any(name in one for one in used)]  # fmt: skip
    lines.extend([f"devices: {', '.join(shares)}"] if shares else [])
    refused = ((summary.get("events") or {}).get("count") or {}).get("refused", 0)
    lines.extend([f"{refused} update{'' if refused == 1 else 's'} refused"] if refused else [])
    return "\n".join(lines)


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


def _written(task: str, group: Mapping[str, Any]) -> str:
    """Final test perplexity of a task that writes text and, where it has prompts, ROUGE; `final` is its accuracy."""
    test = _test_scores(group)
    found = [f"{kind.replace('rouge', 'ROUGE-')} {number(test[kind], 3)}" for kind in WRITTEN[1:] if kind in test]
    return ", ".join([f"{escape(task)} writes: perplexity {number(test['perplexity'], 2)}", *found])


def _verdict(clustering: Mapping[str, Any]) -> str:
    structure, agreement = clustering.get("structure") or {}, clustering.get("agreement") or {}
    known = ", ".join(f"{name} {number(agreement[name], 2)}" for name in ("purity", "ari", "nmi") if name in agreement)
    lines = [structure.get("reason", ""), f"against the true tasks: {known}" if known else ""]
    return "\n".join([line for line in lines if line] + list(clustering.get("warnings") or ()))


def _mean(values: Sequence[float] | None, members: Sequence[int]) -> float | None:
    return sum(values[index] for index in members) / len(members) if values else None


def _inside(similarity: Sequence[Sequence[float]] | None, members: Sequence[int]) -> float | None:
    """The mean similarity of pairs inside a cluster; None for a cluster of one."""
    pairs = [similarity[left][right] for left in members for right in members if left < right] if similarity else []
    return sum(pairs) / len(pairs) if pairs else None
