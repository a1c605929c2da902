"""Tables of plans, cuts and finished runs: the command line prints them in eighty columns, and pages show some.

`plan` is the content of `plan.json`, `summary` that of `summary.json`. What they do not hold is a dash.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean
from typing import Any

from atlas_fl.experiment.summary import GENERATION_METRICS
from atlas_fl.report.figure_rows import group_order
from atlas_fl.report.format import EMPTY, cluster_name, human_bytes, isolate, names_in_words, number, percent, seconds
from atlas_fl.report.table import Cell, Number, Table, count, duration, plain, share, size

KINDS = {"activations": ("activation",), "gradients": ("gradient",), "labels, norms": ("label", "control")}
"""The columns of `crossing_table` and the kinds of messages that they sum."""
SIDES = ("client", "server", "link")
K_SCORES = {
    "silhouette": "silhouette",
    "davies_bouldin": "Davies-Bouldin",
    "calinski_harabasz": "Calinski-Harabasz",
    "atlas": "ATLAS score",
    "merge_similarity": "merge at",
}
MOST_TENSORS = 4
"""Tensors of a mask with the largest and with the smallest shares that are shown."""
MOST_BLOCKS = 8
"""Blocks above which ranks are written in runs."""


def plan_tables(plan: Mapping[str, Any]) -> list[Table]:
    """Tables that `atlas plan` shows: clusters, ranks, predictions; the k table and the memory if the plan holds them.

    Whole models are not clustered and have no ranks.
    """
    clients = plan["clients"]
    clustering = plan.get("clustering") or {}
    tables = [prediction_table(plan)]
    if any(client.get("ranks") != [] for client in clients):
        tables = [_told_clusters(plan), rank_table(plan), prediction_table(plan)]
    if clustering.get("k_table"):
        tables.insert(1, k_table(clustering))
    if plan.get("sparse"):
        tables.insert(1, mask_table(plan))
    if any(client.get("memory") for client in clients):
        tables.append(memory_table(plan))
    return tables + cut_tables(plan)


def cut_tables(plan: Mapping[str, Any]) -> list[Table]:
    """Tables of cuts: none unless splitting was asked for; the reasons alone if no model is cut."""
    clients = plan["clients"]
    asked = any(client.get("split") for client in clients)
    tables = [reason_table(plan)] if asked else []
    if any(client.get("cut") is not None for client in clients):
        tables += [crossing_table(plan), sides_table(plan)]
    if any("host" in (client.get("split") or {}) for client in clients):
        tables.append(host_table(plan))
    if plan.get("leakage"):
        taken = {(client["task"], client.get("cut")) for client in clients}
        tables.append(leakage_table(plan["leakage"], taken=taken))
    return tables


def _by_client(
    title: str,
    columns: Sequence[str],
    clients: Iterable[Mapping[str, Any]],
    cells: Callable[[Mapping[str, Any]], Sequence[Cell]],
    *,
    note: str = "",
) -> Table:
    """A table with one row a client, whose name comes first."""
    rows = [[client["name"], *cells(client)] for client in clients]
    return Table(title=title, columns=("client", *columns), rows=rows, note=note)


def _cut_clients(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [client for client in plan["clients"] if client.get("cut") is not None]


def reason_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: where its model is cut and why, or why it is not."""

    def cells(client: Mapping[str, Any]) -> list[Cell]:
        cut, reason = client.get("cut"), (client.get("split") or {}).get("reason", EMPTY)
        words = "all" if cut is None else f"{cut} of {len(client.get('ranks', ()))}"
        return [client.get("device", EMPTY), words, reason]

    return _by_client("Cuts", ("device", "blocks on the client", "why"), plan["clients"], cells)


def crossing_table(plan: Mapping[str, Any]) -> Table:
    """One row a client with a cut: bytes of both directions through it in a round and in one evaluation."""

    def cells(client: Mapping[str, Any]) -> list[Cell]:
        split = client["split"]
        sent = split["crossing_bytes"]
        sizes = [sum(length for name, length in sent.items() if name.startswith(kinds)) for kinds in KINDS.values()]
        return [size(length) for length in (*sizes, split["evaluation_bytes"])]

    columns = (*KINDS, "an evaluation")
    return _by_client("What crosses the cuts in a round", columns, _cut_clients(plan), cells)


def sides_table(plan: Mapping[str, Any]) -> Table:
    """One row a client with a cut: seconds of client, server and link, memory of the device and on the server."""

    def cells(client: Mapping[str, Any]) -> list[Cell]:
        split, memory = client["split"], client["split"]["server_memory"]
        frozen = memory["frozen weights"]
        taken = [duration(split[f"{side}_seconds"]) for side in SIDES]
        sizes = (client["predicted"]["memory_bytes"], frozen, sum(memory.values()) - frozen)
        return [*taken, *map(size, sizes)]

    columns = (*(f"on the {side}" for side in SIDES), "device memory", "server: weights", "its own")
    note = "server: the frozen weights are there once for all clients, the rest for each"
    return _by_client("Both sides of the cuts", columns, _cut_clients(plan), cells, note=note)


def host_table(plan: Mapping[str, Any]) -> Table:
    """One row a client with a cut: who computes its upper part and why."""

    def cells(client: Mapping[str, Any]) -> list[Cell]:
        host = client["split"]["host"]
        return [count(client["cut"]), host["name"] or "the server", host["reason"]]

    hosted = [client for client in plan["clients"] if (client.get("split") or {}).get("host") is not None]
    return _by_client("Hosts of the upper parts", ("cut", "host", "why"), hosted, cells)


def leakage_table(rows: Sequence[Mapping[str, Any]], *, taken: Collection[tuple[str, int | None]] = ()) -> Table:
    """One row a task and cut: dFIL, and the tokens that the probe reads; an arrow marks the cuts that were `taken`."""
    has_noise = any(row.get("looks", 1) > 1 for row in rows)
    cells: list[list[Cell]] = []
    for row in rows:
        dfil = row.get("dfil")
        looks, averaged = (row.get("looks"), row.get("read_averaged")) if has_noise else (None, None)
        cells.append(
            [
                ">" if (row["task"], row["blocks"]) in taken else EMPTY,
                *(row["task"], count(row["blocks"])),
                Number(value=dfil, text=EMPTY if dfil is None else f"{dfil:.3g}"),
                share(row["read"]),
                *(count(looks), share(averaged), share(row["commonest"]), count(row.get("unseen"))),
            ]
        )
    columns = (
        *("taken", "task", "blocks on the client", "dFIL", "tokens read", "looks", "read in their mean"),
        *("commonest token", "of tokens"),
    )
    note = (
        "tokens read: by a linear probe that knows other texts of the task, in one look; looks: as many as a site lets"
        " a server take, whose noise averages away; commonest token: what always guessing it reads; dFIL: Fisher"
        " information leakage"
    )
    return Table(title="What a cut gives away", columns=columns, rows=cells, note=note).without_empty()


def mask_table(plan: Mapping[str, Any]) -> Table:
    """Which weights may move: how many, and the tensors that keep the largest and the smallest share of theirs."""
    sparse = plan["sparse"]
    body = [(name, kept) for name, kept in sparse["density"].items() if not name.startswith("head.")]
    ordered = sorted(body, key=lambda entry: -entry[1])
    shown = ordered if len(ordered) <= 2 * MOST_TENSORS else [*ordered[:MOST_TENSORS], *ordered[-MOST_TENSORS:]]
    return Table(
        title=f"Mask ({sparse['mask']}, sparsity {sparse['sparsity']:g})",
        columns=("tensor", "kept"),
        rows=[[name, share(kept)] for name, kept in shown],
        note=f"{sparse['kept']:,} of {sparse['weights']:,} weights may move; all shares are in plan.json",
    )


def cluster_table(plan: Mapping[str, Any]) -> Table:
    """One row a cluster: size, tasks, purity, reliability, similarity inside, difficulty, clients."""
    measured = {row["cluster"]: row for row in (plan.get("clustering") or {}).get("clusters") or ()}
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for client in plan["clients"]:
        groups.setdefault(client.get("cluster", -1), []).append(client)
    rows: list[list[Cell]] = []
    for label in sorted(groups, key=lambda label: (label < 0, label)):
        tasks = Counter(client["task"] for client in groups[label])
        row = measured.get(label, {})
        rows.append(
            [
                cluster_name(label),
                count(len(groups[label])),
                ", ".join(f"{isolate(task)} x {times}" for task, times in tasks.most_common()),
                *(plain(row.get(name), 2) for name in ("purity", "reliability", "cohesion", "difficulty")),
                names_in_words(client["name"] for client in groups[label]),
            ]
        )
    return Table(
        title="Clusters",
        columns=("cluster", "size", "tasks", "purity", "own halves agree", "similarity inside", "loss", "clients"),
        rows=rows,
        note="own halves agree: the agreement of a client's two sketches; loss: mean training loss of the fingerprints",
    )


def _told_clusters(plan: Mapping[str, Any]) -> Table:
    """The clusters with the method that found them, and the verdict below."""
    table = cluster_table(plan)
    clustering = plan.get("clustering") or {}
    method = clustering.get("method", "none")
    title = table.title if method == "none" else f"{table.title} ({method})"
    return replace(table, title=title, note="\n".join([table.note, *_verdict(clustering)]))


def _verdict(clustering: Mapping[str, Any]) -> list[str]:
    reason = (clustering.get("structure") or {}).get("reason", "")
    agreement = clustering.get("agreement") or {}
    warnings = clustering.get("warnings") or ()
    measured = ", ".join(
        f"{name} {number(agreement[name], 2)}" for name in ("purity", "ari", "nmi") if name in agreement
    )
    is_said = not reason or any(reason in line for line in warnings)
    return [
        *([] if is_said else [reason]),
        *([f"against the true tasks: {measured}"] if measured else []),
        *warnings,
    ]


def k_table(clustering: Mapping[str, Any]) -> Table:
    """Every number of clusters that was weighed, with its scores."""
    rows: Sequence[Mapping[str, Any]] = clustering.get("k_table") or ()
    shown = [name for name in K_SCORES if any(row.get(name) is not None for row in rows)]
    cells = [
        [
            count(row.get("k")),
            "chosen" if row.get("chosen") else "",
            *(plain(row.get(name)) for name in shown),
            count(row.get("singletons")),
        ]
        for row in rows
    ]
    return Table(
        title="Numbers of clusters that were weighed",
        columns=("k", "choice", *(K_SCORES[name] for name in shown), "clusters of one"),
        rows=cells,
        note="Davies-Bouldin: lower is better; of all others higher",
        bold_row=next((index for index, row in enumerate(rows) if row.get("chosen")), None),
    )


def rank_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: device, cluster, ranks from the first block to the last, cut, largest rank, budget."""

    def cells(client: Mapping[str, Any]) -> list[Cell]:
        ranks, cut = list(client.get("ranks", ())), client.get("cut")
        return [
            client.get("device", EMPTY),
            "none" if client.get("cluster", -1) < 0 else str(client["cluster"]),
            in_runs(ranks) or EMPTY,
            count(sum(ranks) if ranks else None),
            Number(value=cut, text="whole" if cut is None else str(cut)),
            count(client.get("largest_rank")),
            size(client.get("budget_bytes")),
        ]

    columns = ("device", "cluster", "first to last block", "sum", "cut", "most", "budget")
    note = "cut: blocks on the client; budget: training bytes of the adapters;\n"
    note += "most: largest rank that every block could have within budget and profile"
    return _by_client("LoRA ranks", columns, plan["clients"], cells, note=note)


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
    return " ".join(str(rank) if times == 1 else f"{rank}x{times}" for rank, times in lengths)


def prediction_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: predicted bytes, seconds and memory of a round, and the share of the device's memory."""

    def cells(client: Mapping[str, Any]) -> list[Cell]:
        predicted, total = client.get("predicted") or {}, (client.get("memory") or {}).get("total")
        used = predicted.get("memory_bytes")
        return [
            client.get("device", EMPTY),
            *(size(predicted.get(name)) for name in ("up_bytes", "down_bytes")),
            *(duration(predicted.get("seconds")), size(used)),
            share(used / total if used is not None and total else None),
        ]

    columns = ("device", "up", "down", "time", "memory", "of the device")
    return _by_client("Predicted for each round", columns, plan["clients"], cells)


def memory_table(plan: Mapping[str, Any]) -> Table:
    """One row a client: where the memory of its device goes, part by part."""
    parts = dict.fromkeys(part for client in plan["clients"] for part in client.get("memory") or ())
    shown = [part for part in parts if part != "total"]

    def cells(client: Mapping[str, Any]) -> list[Cell]:
        return [size((client.get("memory") or {}).get(part)) for part in shown]

    columns = [part.removesuffix("_bytes").replace("_", " ") for part in shown]
    note = "" if "activations" in parts else "activations are not predicted and come on top"
    return _by_client("Memory on the device", columns, plan["clients"], cells, note=note)


LEGEND = (
    "best: test score of each client's best round by validation; 90%: first round with 90% of the last validation "
    "score; spread: standard deviation over clients"
)


def closing_table(summary: Mapping[str, Any]) -> Table:
    """Outcome of a finished run: by task the test scores, the majority class, the worst client; bytes and time below.

    `final` is what the clients end with; `best` is each client's best round by validation, reported on test.
    """
    run = summary.get("run") or {}
    title = ", ".join(str(run[key]) for key in ("strategy", "model") if key in run)
    tasks: Mapping[str, Mapping[str, Any]] = summary.get("tasks") or {}
    return Table(
        title=f"Test scores of {title}" if title else "Test scores",
        columns=("task", *GROUP_COLUMNS, "90%", "spread", "worst client"),
        rows=[[task, *_closing_cells(group)] for task, group in tasks.items()],
        footer=[["all", *_closing_cells(summary.get("overall") or {})]],
        note=_closing_note(summary),
    )


GROUP_COLUMNS = ("clients", "majority", "final", "over majority", "best")
"""Columns of `group_cells` but the last two, which are the first round with 90% of the last score and the spread."""


def group_cells(group: Mapping[str, Any]) -> list[Cell]:
    """Test scores of the clients of a task, or of all: `GROUP_COLUMNS`, 90% in round, spread."""
    final, best = group.get("final") or {}, group.get("best") or {}
    test = final.get("test") or {}
    return [
        count(group.get("clients")),
        plain(test.get("majority")),
        plain(test.get("primary")),
        plain(test.get("gain_over_majority"), sign=True),
        plain((best.get("test") or {}).get("primary")),
        count((group.get("rounds_to") or {}).get("90%")),
        plain((final.get("spread") or {}).get("std")),
    ]


def _closing_cells(group: Mapping[str, Any]) -> list[Cell]:
    worst = (group.get("final") or {}).get("worst_client") or {}
    return [*group_cells(group), f"{worst['client']} {number(worst.get('primary'), 3)}" if worst else EMPTY]


def _closing_note(summary: Mapping[str, Any]) -> str:
    """Meaning of the columns; then bytes with the reduction, time, peak memory, devices, refused updates."""
    sent = summary.get("bytes") or {}
    lines = [LEGEND, *_stopping_notes(summary), *_writing_notes(summary.get("tasks") or {})]
    if "total" in sent:
        lines.append(f"{human_bytes(sent['up'])} up, {human_bytes(sent['down'])} down{_than_whole(sent)}")
        if "between_clients" in sent:
            lines.append(f"{human_bytes(sent['between_clients'])} of it between clients, past the server")
        if "relayed" in sent:
            lines.append(f"{human_bytes(sent['relayed'])} of it between clients, handed on by the server")
    taken = (summary.get("seconds") or {}).get("total")
    peaks = (summary.get("memory") or {}).items()
    costs = [] if taken is None else [seconds(taken)]
    costs += [f"{human_bytes(peak)} of {name.removesuffix('_bytes').upper()} at most" for name, peak in peaks]
    if costs:
        lines.append(", ".join(costs))
    lines += _device_notes((summary.get("clients") or {}).values())
    refused = ((summary.get("events") or {}).get("count") or {}).get("refused", 0)
    if refused:
        lines.append(f"{refused} update{'' if refused == 1 else 's'} refused")
    return "\n".join(lines)


def _device_notes(clients: Collection[Mapping[str, Any]]) -> list[str]:
    """Utilisation of the devices."""
    parts = [client.get("memory") for client in clients]
    beside = ", activations not counted" if any(part and "activations" not in part for part in parts) else ""
    words = {"busy": "of a round busy", "memory": f"of the memory used{beside}"}
    used = [client.get("utilisation") or {} for client in clients]
    ranges = {name: [device[name] for device in used if name in device] for name in words}
    shares = [f"{_range(ranges[name])} {text}" for name, text in words.items() if ranges[name]]
    return [f"devices: {', '.join(shares)}"] if shares else []


def _than_whole(sent: Mapping[str, Any]) -> str:
    """Bytes saved or added against the whole model; empty if whole models were sent and no mask saved any."""
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


def _writing_notes(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Final test perplexity of the tasks that write text and, if they have prompts, ROUGE; `final` is accuracy."""
    notes = []
    for task, group in tasks.items():
        test = (group.get("final") or {}).get("test") or {}
        if "perplexity" in test:
            scores = [f"perplexity {number(test['perplexity'], 2)}"]
            scores += [
                f"{kind.replace('rouge', 'ROUGE-')} {number(test[kind], 3)}"
                for kind in GENERATION_METRICS[1:]
                if kind in test
            ]
            notes.append(f"{task} writes: {', '.join(scores)}")
    return notes


def _range(shares: Sequence[float]) -> str:
    """The least and the largest share, or the one that all have.

    >>> _range([0.25, 1.0, 0.5])
    '25.0% to 100.0%'
    """
    least, most = percent(min(shares)), percent(max(shares))
    return least if least == most else f"{least} to {most}"


def sharing_table(summary: Mapping[str, Any]) -> Table:
    """The table of `sharing_of_groups` of a finished run."""
    rows = [{"parameters": group, **row} for by_group in summary["sharing"].values() for group, row in by_group.items()]
    return replace(sharing_of_groups(rows), title="How personal the models are")


def sharing_of_groups(rows: Iterable[Mapping[str, Any]]) -> Table:
    """One row a group of parameters: how much of its own clients keep, and the measurement that says so."""
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(row["parameters"], []).append(row)
    cells: list[list[Cell]] = []
    for group, members in sorted(by_group.items(), key=lambda item: group_order(item[0])):
        own = [row["own_share"] for row in members]
        together = fmean(row["effective_clients"] for row in members)
        ratios = [row["variance_over_noise"] for row in members if row.get("variance_over_noise") is not None]
        ratio = plain(fmean(ratios) if ratios else None, 2)
        cells.append([group, count(len(members)), share(min(own)), share(max(own)), plain(together, 1), ratio])
    return Table(
        title="By group of parameters",
        columns=("parameters", "clients", "least of its own", "most", "as if averaged over", "variance over noise"),
        rows=cells,
        note=(
            "as if averaged over: so many clients, each counting alike; variance over noise: between clients that are"
            " compared, over the noise of one"
        ),
    )
