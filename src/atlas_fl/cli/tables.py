"""The tables that close a run and an audit."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from atlas_fl.cli.units import bytes_text, score_text, seconds_text, signed_text


def outcome(folder: Path, summary: Mapping[str, Any], *, complete: bool) -> Iterator[RenderableType]:
    """What a run has come to, from the content of `summary.json`; for one that is not complete, how to go on."""
    yield client_table(summary["clients"], overall=summary["overall"])
    yield from _closing_lines(summary)
    yield f"run folder: {folder}"
    if not complete:
        yield f"not complete yet; go on with: atlas resume {folder}"


def client_table(clients: Mapping[str, Mapping[str, Any]], *, overall: Mapping[str, Any]) -> Table:
    """Final test scores of every client beside the majority class, and the means."""
    table = Table(
        title="Scores on the test split after the last round", title_justify="left", title_style="bold", box=None
    )
    for name in ("client", "device"):
        table.add_column(name, no_wrap=True)
    for name in ("cluster", "ranks", "score", "accuracy", "majority", "gain", "sent"):
        table.add_column(name, justify="right")
    for name, client in clients.items():
        sent = client.get("bytes", {})
        cluster = client.get("cluster", -1)
        table.add_row(
            name,
            str(client.get("device", "-")),
            "alone" if cluster < 0 else str(cluster),
            _ranks(client.get("ranks", ())),
            *_scores(client.get("final", {}).get("test", {})),
            bytes_text(sent.get("up", 0) + sent.get("down", 0)),
        )
    table.add_section()
    table.add_row("mean", "", "", "", *_scores(overall.get("final", {}).get("test", {})), "")
    return table


def audit_table(rows: Sequence[Any]) -> Table:
    """The rows of an audit; their fields are the columns."""
    first = rows[0] if rows else {}
    names = list(first if isinstance(first, Mapping) else vars(first))
    table = Table(title="Audit", title_justify="left", title_style="bold", box=None)
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        values = row if isinstance(row, Mapping) else vars(row)
        table.add_row(*(_cell(values[name]) for name in names))
    return table


def _closing_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    worst = summary["overall"].get("final", {}).get("worst_client")
    if worst:
        yield f"worst client: {worst['client']} {score_text(worst.get('primary'))}"
    sent, full = summary["bytes"], summary["bytes"].get("full_model")
    against = f", {full['reduction']:.2%} less than the whole model every round" if full else ""
    yield f"bytes: {bytes_text(sent['up'])} up, {bytes_text(sent['down'])} down{against}"
    seconds = summary["seconds"]
    phases = ", ".join(f"{name} {seconds_text(taken)}" for name, taken in seconds["phases"].items())
    kept = summary.get("memory", {}).items()
    memory = ", ".join(f"{name.removesuffix('_bytes')} {bytes_text(size)}" for name, size in kept)
    yield f"time: {seconds_text(seconds['total'])} ({phases})" + (f"; peak memory: {memory}" if memory else "")
    for refused in summary.get("events", {}).get("refused", ()):
        yield f"refused: {refused['client']} in round {refused['round']}: {refused['reason']}"


def _scores(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return (
        score_text(row.get("primary")),
        score_text(row.get("accuracy")),
        score_text(row.get("majority")),
        signed_text(row.get("gain_over_majority")),
    )


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if min(ranks) == max(ranks) else f"{min(ranks)}-{max(ranks)}"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "ok" if value else "FAILED"
    return f"{value:.2g}" if isinstance(value, float) else str(value)
