"""The tables of a plan whose models are cut: where and why, what crosses, what both sides take, what it gives away."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from atlas_fl.report.words import EMPTY, add_columns, human_bytes, new_table, percent, seconds

KINDS = {"activations": ("activation",), "gradients": ("gradient",), "labels, norms": ("label", "control")}
"""The columns of `crossing_table` and the kinds of messages that they sum."""


def cut_tables(plan: Mapping[str, Any]) -> list[Table]:
    """Nothing where splitting was not asked for; the reasons alone where no model is cut."""
    clients = plan["clients"]
    found = [reason_table(plan)] if any(client.get("split") for client in clients) else []
    if any(client.get("cut") is not None for client in clients):
        found += [crossing_table(plan), sides_table(plan)]
    if any("host" in (client.get("split") or {}) for client in clients):
        found.append(host_table(plan))
    if plan.get("leakage"):
        taken = {(client["task"], client.get("cut")) for client in clients}
        found.append(leakage_table(plan["leakage"], taken=taken))
    return found


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
        told = EMPTY if planned is None else human_bytes(sum(sum(phase.values()) for phase in planned.values()))
        table.add_row(escape(client["name"]), *map(human_bytes, [*sizes, client["split"]["evaluation_bytes"]]), told)
    return table


def sides_table(plan: Mapping[str, Any]) -> Table:
    """One row a client with a cut: seconds of client, server and link, memory of the device and on the server."""
    table = new_table("Both sides of the cuts")
    times = [f"on the\n{place}" for place in ("client", "server", "link")]
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
    add_columns(table, ["", "task"], ["blocks on\nthe client", "dFIL", "tokens\nread", "commonest\ntoken", "of"])
    for row in rows:
        shares = [percent(row[name]) for name in ("read", "commonest")]
        mark = ">" if (row["task"], row["blocks"]) in taken else ""
        table.add_row(mark, escape(row["task"]), str(row["blocks"]), f"{row['dfil']:.3g}", *shares, str(row["unseen"]))
    table.caption = (
        "read: by a linear probe that knows other texts of the\ntask; of: tokens of texts that it does not know;\n"
        "commonest: what always guessing that token reads"
    )
    return table
