"""A plan as tables: who is in which cluster and why, the ranks, and what a round will cost."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from atlas_fl.cli.units import bytes_text, score_text, seconds_text


def plan_tables(plan: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The tables of a plan, given as the content of `plan.json`; parts that it lacks are left out."""
    clients = plan["clients"]
    clustering = plan.get("clustering") or {}
    yield client_table(clients, reliability=clustering.get("reliability") or ())
    if clustering.get("k_table"):
        yield k_table(clustering["k_table"], method=clustering.get("method", ""))
    yield from clustering_lines(clustering)
    yield rank_table(clients)
    yield cost_table(clients)
    yield from (f"note: {line}" for line in plan.get("notes", ()))


def client_table(clients: Sequence[Mapping[str, Any]], *, reliability: Sequence[float]) -> Table:
    """Task, device, cluster and examples of every client."""
    table = _table("Clients", "client", "task", "device", "cluster", "examples", "own halves agree")
    for index, client in enumerate(clients):
        own = score_text(reliability[index]) if reliability else "-"
        cells = (client["name"], client["task"], client["device"], _cluster(client["cluster"]), client["examples"], own)
        table.add_row(*map(str, cells))
    return table


def k_table(rows: Sequence[Mapping[str, Any]], *, method: str) -> Table:
    """Every number of clusters that was considered, with its scores; the chosen one is marked."""
    hidden = ("chosen", "labels")
    names = [name for name in rows[0] if name not in hidden]
    table = _table(f"Number of clusters (by {method})", "", *(name.replace("_", " ") for name in names))
    for row in rows:
        table.add_row("->" if row.get("chosen") else "", *(_cell(row.get(name)) for name in names))
    return table


def clustering_lines(clustering: Mapping[str, Any]) -> Iterator[str]:
    """The verdict on structure, and the agreement with the true tasks where it is known."""
    verdict = clustering.get("structure") or {}
    if "reason" in verdict:
        yield f"structure: {verdict['reason']}"
    agreement = clustering.get("agreement") or {}
    if scores := {name: value for name, value in agreement.items() if isinstance(value, float)}:
        yield "against the true tasks: " + ", ".join(f"{name} {value:.2f}" for name, value in scores.items())


def rank_table(clients: Sequence[Mapping[str, Any]]) -> Table:
    """The rank of every layer and client, and the cut between client and server where there is one."""
    layers = max(len(client["ranks"]) for client in clients)
    has_cut = any(client.get("cut") is not None for client in clients)
    table = _table("Ranks by layer", "client", *map(str, range(layers)), "sum", *(["cut"] if has_cut else []))
    for client in clients:
        cut = [_cell(client.get("cut"))] if has_cut else []
        table.add_row(client["name"], *map(str, client["ranks"]), str(sum(client["ranks"])), *cut)
    return table


def cost_table(clients: Sequence[Mapping[str, Any]]) -> Table:
    """Predicted bytes, seconds and memory of one round of every client."""
    table = _table("Predicted for one round", "client", "up", "down", "memory", "of", "time")
    for client in clients:
        cost = client["predicted"]
        table.add_row(
            client["name"],
            *(bytes_text(cost[name]) for name in ("up_bytes", "down_bytes", "memory_bytes")),
            bytes_text(client["memory"]["total"]),
            seconds_text(cost["seconds"]),
        )
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column in ("task", "device") else "right")
    return table


def _cluster(label: int) -> str:
    return "alone" if label < 0 else str(label)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return score_text(value)
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "-" if value is None else str(value)
