"""Tables of plans, cuts and finished runs: the command line prints them in eighty columns, and pages show some.

`plan` is the content of `plan.json`, `summary` that of `summary.json`. What they do not hold is a dash.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean

from atlas_fl.data.clients import group_by
from atlas_fl.experiment.summary import GENERATION_METRICS
from atlas_fl.report.format import EMPTY, cluster_name, human_bytes, isolate, names_in_words, number, percent, seconds
from atlas_fl.report.table import (
    Cell,
    Columns,
    Entry,
    Number,
    Table,
    cell_at,
    count,
    duration,
    plain,
    share,
    size,
    table_of,
)

CLIENT: Columns = {"client": cell_at("name"), "device": cell_at("device")}


def plan_tables(plan: Entry) -> list[Table]:
    """Tables that `atlas plan` shows: clusters, ranks, predictions; k table, mask, memory and cuts if there are any.

    Whole models are not clustered and have no ranks.
    """
    clients = plan["clients"]
    has_ranks = any(client.get("ranks") for client in clients)
    k_rows = plan["clustering"].get("k_table")
    tables = [_cluster_table(plan)] if has_ranks else []
    tables += [k_table(k_rows)] if k_rows else []
    tables += [_mask_table(plan["sparse"])] if plan.get("sparse") else []
    tables += [table_of("LoRA ranks", RANKS, clients, note=RANKS_NOTE)] if has_ranks else []
    tables.append(table_of("Predicted for each round", PREDICTED, clients))
    tables += [_memory_table(clients)] if any(client.get("memory") for client in clients) else []
    if any(client.get("split") for client in clients):
        tables.append(table_of("Cuts", CUTS, clients).without_empty())
    return tables


def _cluster_table(plan: Entry) -> Table:
    """One row a cluster: size, tasks, purity, reliability, similarity, difficulty, clients; the verdict below."""
    clustering = plan["clustering"]
    measured = {row["cluster"]: row for row in clustering.get("clusters") or ()}
    groups = group_by(plan["clients"], lambda client: int(client["cluster"]))
    entries = [
        measured.get(label, {}) | {"cluster": label, "members": groups[label]}
        for label in sorted(groups, key=lambda label: (label < 0, label))
    ]
    method = clustering.get("method", "none")
    title = "Clusters" if method == "none" else f"Clusters ({method})"
    return table_of(title, CLUSTERS, entries, note="\n".join([CLUSTERS_NOTE, *_verdict(clustering)]))


def _tasks_of(entry: Entry) -> str:
    tasks = Counter(client["task"] for client in entry["members"])
    return ", ".join(f"{isolate(task)} x {times}" for task, times in tasks.most_common())


CLUSTERS: Columns = {
    "cluster": cell_at("cluster", cluster_name),
    "size": lambda entry: count(len(entry["members"])),
    "tasks": _tasks_of,
    "purity": cell_at("purity", lambda value: plain(value, 2)),
    "own halves agree": cell_at("reliability", lambda value: plain(value, 2)),
    "similarity inside": cell_at("cohesion", lambda value: plain(value, 2)),
    "loss": cell_at("difficulty", lambda value: plain(value, 2)),
    "clients": lambda entry: names_in_words(client["name"] for client in entry["members"]),
}
CLUSTERS_NOTE = (
    "own halves agree: the agreement of a client's two sketches; loss: mean training loss of the fingerprints"
)


def _verdict(clustering: Entry) -> list[str]:
    reason = (clustering.get("structure") or {}).get("reason", "")
    warnings = clustering.get("warnings") or ()
    reasons = [] if not reason or any(reason in line for line in warnings) else [reason]
    measured = ", ".join(f"{name} {number(value, 2)}" for name, value in (clustering.get("agreement") or {}).items())
    return [*reasons, *([f"against the true tasks: {measured}"] if measured else []), *warnings]


def k_table(rows: Sequence[Entry]) -> Table:
    """Every number of clusters that was weighed, with its scores."""
    note = "Davies-Bouldin: lower is better; of all others higher"
    table = table_of("Numbers of clusters that were weighed", K_COLUMNS, rows, note=note)
    chosen = next((index for index, row in enumerate(rows) if row.get("chosen")), None)
    return replace(table, bold_row=chosen).without_empty()


K_COLUMNS: Columns = {
    "k": cell_at("k", count),
    "choice": lambda row: "chosen" if row.get("chosen") else EMPTY,
    "silhouette": cell_at("silhouette", plain),
    "Davies-Bouldin": cell_at("davies_bouldin", plain),
    "Calinski-Harabasz": cell_at("calinski_harabasz", plain),
    "ATLAS score": cell_at("atlas", plain),
    "merge at": cell_at("merge_similarity", plain),
    "clusters of one": cell_at("singletons", count),
}


def _mask_table(sparse: Entry) -> Table:
    """The share of each layer's weights that may move."""
    title = f"Mask ({sparse['mask']}, sparsity {sparse['sparsity']:g})"
    rows = [[name, share(kept)] for name, kept in sparse["layers"].items()]
    note = f"{sparse['kept']:,} of {sparse['weights']:,} weights may move"
    return Table(title=title, columns=("layer", "kept"), rows=rows, note=note)


def _in_runs(ranks: Sequence[int]) -> str:
    """Ranks block by block; equal neighbours are one word with their number.

    >>> _in_runs([4, 4, 8, 16, 16, 16])
    '4x2 8 16x3'
    """
    lengths = [(rank, len(list(same))) for rank, same in groupby(ranks)]
    return " ".join(str(rank) if times == 1 else f"{rank}x{times}" for rank, times in lengths)


RANKS: Columns = {
    **CLIENT,
    "cluster": cell_at("cluster", lambda cluster: "none" if cluster < 0 else str(cluster)),
    "first to last block": cell_at("ranks", _in_runs),
    "sum": cell_at("ranks", lambda ranks: count(sum(ranks))),
    "cut": cell_at("cut", lambda cut: Number(value=cut, text="whole" if cut is None else str(cut))),
    "most": cell_at("largest_rank", count),
    "budget": cell_at("budget_bytes", size),
}
RANKS_NOTE = (
    "cut: blocks on the client; budget: training bytes of the adapters;\n"
    "most: largest rank that every block could have within budget and profile"
)


def _share_of_device(client: Entry) -> Cell:
    used, total = client["predicted"].get("memory_bytes"), client["memory"].get("total")
    return share(used / total if used is not None and total else None)


PREDICTED: Columns = {
    **CLIENT,
    "up": cell_at("predicted.up_bytes", size),
    "down": cell_at("predicted.down_bytes", size),
    "time": cell_at("predicted.seconds", duration),
    "memory": cell_at("predicted.memory_bytes", size),
    "of the device": _share_of_device,
}


def _memory_table(clients: Sequence[Entry]) -> Table:
    """One row a client: where the memory of its device goes, part by part."""
    parts = dict.fromkeys(part for client in clients for part in client["memory"] if part != "total")
    cells = {part.removesuffix("_bytes").replace("_", " "): cell_at(f"memory.{part}", size) for part in parts}
    note = "" if "activations" in parts else "activations are not predicted and come on top"
    return table_of("Memory on the device", {"client": CLIENT["client"], **cells}, clients, note=note)


def _host(client: Entry) -> str:
    host = (client.get("split") or {}).get("host")
    return EMPTY if host is None else f"{host['name'] or 'the server'}: {host['reason']}"


CUTS: Columns = {
    **CLIENT,
    "blocks on the client": lambda own: "all" if own["cut"] is None else f"{own['cut']} of {len(own['ranks'])}",
    "why": cell_at("split.reason"),
    "host of the upper part": _host,
}


def leakage_table(rows: Iterable[Entry]) -> Table:
    """One row a task and cut: the tokens that the probe reads."""
    columns: Columns = {
        "task": cell_at("task"),
        "blocks on the client": cell_at("blocks", count),
        "tokens read": cell_at("read", share),
        "looks": cell_at("looks", lambda looks: count(None if looks == 1 else looks)),
        "read in their mean": lambda row: share(None if row.get("looks", 1) == 1 else row.get("read_averaged")),
        "commonest token": cell_at("commonest", share),
        "of tokens": cell_at("unseen", count),
    }
    return table_of("What a cut gives away", columns, rows, note=LEAKAGE_NOTE).without_empty()


LEAKAGE_NOTE = (
    "tokens read: by a linear probe that knows other texts of the task, in one look; looks: as many as a site lets"
    " a server take, whose noise averages away; commonest token: what always guessing it reads"
)


def _with_interval(name: str) -> Callable[[Entry], Cell]:
    def cell(entry: Entry) -> Cell:
        if name not in entry:
            return EMPTY
        values = (entry[name + end] for end in ("", "_low", "_high"))
        return Number(value=entry[name], text="{:.3f}\n{:.3f}-{:.3f}".format(*values))

    return cell


ATTACK_COLUMNS: Columns = {
    "server": cell_at("server"),
    "epsilon": cell_at("epsilon", lambda epsilon: plain(epsilon, 2)),
    "test score": cell_at("score", plain),
    "AUC": _with_interval("auc"),
    "found at 1% false": _with_interval("tpr_1"),
    "found at 10% false": _with_interval("tpr_10"),
    "updates": cell_at("updates", count),
    "read": cell_at("read", count),
    "right": cell_at("right", share),
    "by chance": cell_at("right_chance", share),
    "placed": cell_at("placed", share),
    "placed by chance": cell_at("placed_chance", share),
    "sentences": cell_at("sentences", count),
    "lower bound": cell_at("bound", lambda bound: plain(bound, 2)),
    "right guesses": cell_at("correct", count),
    "of guesses": cell_at("guesses", count),
    "property": cell_at("property"),
    "examples": cell_at("examples", count),
    "error": cell_at("error", plain),
    "error by chance": cell_at("error_chance", plain),
    "correlation": cell_at("correlation", plain),
}
ATTACK_NOTES: Mapping[str, str] = {
    "membership": "AUC: 0.500 is guessing; found: share of the members, where this share of others is taken for"
    " members, which is also what guessing finds; intervals of 95% over shadow clients",
    "tokens": "read: different tokens; right: those of the client's texts; placed: right ones among tokens read at a"
    " place of a text; by chance: the same against another client's texts; sentences: every word at its place; a"
    " hostile server stays inside what a site checks",
    "canaries": "epsilon: spent, by the accountant; lower bound: by guesses, at 95%; a low one proves nothing",
    "properties": "error: mean distance of the predicted share of texts from the true one; by chance: of the mean"
    " share; correlation: of predicted and true shares; 0 is guessing",
}


def attack_table(attack: str, rows: Iterable[Entry]) -> Table:
    """One row a server: what the attack on a client learns, and what guessing does."""
    entries = list(rows)
    title = f"{attack} of {entries[0]['client']}"
    return table_of(title, ATTACK_COLUMNS, entries, note=ATTACK_NOTES[attack]).without_empty()


def closing_table(summary: Entry) -> Table:
    """Outcome of a finished run: by task the test scores, the majority class, the worst client; bytes and time below.

    `final` is what the clients end with; `best` is each client's best round by validation, reported on test.
    """
    run = summary.get("run", {})
    title = ", ".join(str(run[key]) for key in ("strategy", "model") if key in run)
    groups = [{"task": task, **group} for task, group in summary["tasks"].items()]
    table = table_of(f"Test scores of {title}" if title else "Test scores", SCORES, groups, note=_closing_note(summary))
    return replace(table, footer=[["all", *[cell(summary["overall"]) for cell in list(SCORES.values())[1:]]]])


def site_tables(summary: Entry) -> list[Table]:
    """One row a site, where sites have clients of several tasks: means over its clients, and the gain of these."""
    gains = summary.get("alone", {}).get("clients", {})
    groups = [
        {"task": site, "gains": [gains[name]["gain"] for name in group["names"] if name in gains], **group}
        for site, group in summary.get("sites", {}).items()
    ]
    return [table_of("Test scores by site", SITES, groups, note=SITES_NOTE).without_empty()] if groups else []


def _worst_client(group: Entry) -> str:
    worst = group.get("final", {}).get("worst_client")
    return f"{worst['client']} {number(worst.get('primary'), 3)}" if worst else EMPTY


SCORES: Columns = {
    "task": cell_at("task"),
    "clients": cell_at("clients", count),
    "majority": cell_at("final.test.majority", plain),
    "final": cell_at("final.test.primary", plain),
    "over majority": cell_at("final.test.gain_over_majority", lambda gain: plain(gain, sign=True)),
    "best": cell_at("best.test.primary", plain),
    "90%": cell_at("rounds_to.90%", count),
    "spread": cell_at("final.spread.std", plain),
    "worst client": _worst_client,
}
SITES: Columns = {
    "site": SCORES["task"],
    "clients": lambda group: names_in_words(group["names"]),
    **{name: SCORES[name] for name in ("majority", "final", "best")},
    "over alone": lambda group: plain(fmean(group["gains"]) if group["gains"] else None, sign=True),
}
SITES_NOTE = "means over the clients of a site, one for each of its tasks or parts, on one device"
LEGEND = (
    "best: test score of each client's best round by validation; 90%: first round with 90% of the last validation "
    "score; spread: standard deviation over clients"
)


def _closing_note(summary: Entry) -> str:
    """Meaning of the columns; then bytes with the reduction, time, peak memory, refused updates."""
    lines = [LEGEND]
    if "stopped" in summary:
        after, best = summary["stopped"]["round"], summary["best"]
        lines.append(
            f"stopped early after round {after}; best in round {best['round']}: validation {best['validation']:.3f}"
        )
    named = {task: group.get("metric", "accuracy") for task, group in summary["tasks"].items()}
    judged = [f"{isolate(task)} by {isolate(metric)}" for task, metric in named.items() if metric != "accuracy"]
    lines += [f"scored: {', '.join(judged)}{', others by accuracy' * (len(judged) < len(named))}"] if judged else []
    lines += _writing_notes(summary["tasks"])
    if "bytes" in summary:
        sent = summary["bytes"]
        lines.append(f"{human_bytes(sent['up'])} up, {human_bytes(sent['down'])} down{_than_whole(sent)}")
        if "between_clients" in sent:
            lines.append(f"{human_bytes(sent['between_clients'])} of it between clients, past the server")
        peaks = [
            f"{human_bytes(peak)} of {name.removesuffix('_bytes').upper()} at most"
            for name, peak in summary.get("memory", {}).items()
        ]
        lines.append(", ".join([seconds(summary["seconds"]["total"]), *peaks]))
        refused = summary.get("events", {}).get("count", {}).get("refused", 0)
        lines += [f"{refused} update{'' if refused == 1 else 's'} refused"] if refused else []
    return "\n".join(lines)


def _than_whole(sent: Entry) -> str:
    """Bytes saved or added against the whole model; empty if nothing, or whole models without a mask were sent."""
    saved = sent.get("full_model", {}).get("reduction")
    if saved is None or not sent["total"] or (saved <= 0 and "weights" in sent["by_kind"]):
        return ""
    return f", {percent(abs(saved))} {'less' if saved >= 0 else 'more'} than the whole model in every round"


def _writing_notes(tasks: Mapping[str, Entry]) -> list[str]:
    """Final test perplexity of the tasks that write text and, if they have prompts, ROUGE; `final` is accuracy."""
    notes = []
    for task, group in tasks.items():
        test = group.get("final", {}).get("test", {})
        if "perplexity" in test:
            scores = [f"perplexity {number(test['perplexity'], 2)}"]
            scores += [
                f"{kind.replace('rouge', 'ROUGE-').replace('_', ' ')} {number(test[kind], 3)}"
                for kind in GENERATION_METRICS[1:]
                if kind in test
            ]
            notes.append(f"{task} writes: {', '.join(scores)}")
    return notes
