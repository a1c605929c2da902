"""Tables that a command prints at its end: outcome of a run, audit, cluster of a newcomer."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from atlas_fl.audit.report import AuditRow
from atlas_fl.experiment.summary import gain_note
from atlas_fl.planning.place_client import ClientPlacement
from atlas_fl.report.format import EMPTY, cluster_name
from atlas_fl.report.table import Cell, Number, Table, count, plain
from atlas_fl.report.tables import closing_table, site_tables

SHOWN_FAILURES = 10


def outcome(folder: Path, summary: Mapping[str, Any], *, complete: bool) -> Iterator[RenderableType]:
    """Result of a run, from the content of `summary.json`; for one that is not complete, how to go on."""
    if line := gain_note(summary):
        yield line
    yield closing_table(summary)
    yield from site_tables(summary)
    for refused in (summary.get("events") or {}).get("refused", ()):
        yield f"refused: {refused['client']} in round {refused['round']}: {refused['reason']}"
    yield f"run folder: {folder}"
    if not complete:
        yield f"not complete yet; go on with: atlas resume {folder}"


def placement(newcomer: ClientPlacement) -> Iterator[RenderableType]:
    """Where a newcomer belongs: a line for each cluster of the run with an arrow at its own, and the verdict."""
    assigned = newcomer.placement
    rows: list[list[Cell]] = []
    for label, clients in newcomer.members.items():
        arrow = ">" if label == assigned.cluster else ""
        rows.append([arrow, cluster_name(label), ", ".join(clients), plain(assigned.similarity.get(label), 2)])
    yield Table(title=f"Place of {newcomer.name}", columns=("", "cluster", "clients", "similarity"), rows=rows)
    halves = f"its halves agree to {assigned.reliability:.2f} over {newcomer.examples} examples"
    verdict = f"belongs to cluster {assigned.cluster}"
    if assigned.cluster < 0:
        verdict = "is undecided, as its halves tell little: give more rows"
    yield f"{newcomer.name} {verdict}; {halves}"


def audit_table(rounds: Mapping[tuple[str, int], Sequence[AuditRow]]) -> Table:
    """A line for each audited round."""
    rows: list[list[Cell]] = []
    for (run, round), checks in rounds.items():
        worst = max((row.error for row in checks if row.error is not None), default=None)
        rows.append(
            [
                run,
                Number(value=round, text=str(round) if round else "all"),
                *(count(len(checks)), count(sum(not row.ok for row in checks))),
                Number(value=worst, text=EMPTY if worst is None else f"{worst:.1e}"),
            ]
        )
    return Table(title="Audit", columns=("run", "round", "checks", "failed", "worst error"), rows=rows)


def failure_lines(failures: Sequence[AuditRow]) -> Iterator[str]:
    """Failed checks, a line each; beyond the first `SHOWN_FAILURES` only how many there are."""
    for row in failures[:SHOWN_FAILURES]:
        where = " ".join(part for part in (f"round {row.round}" if row.round else "", row.client, row.check) if part)
        yield f"FAILED {row.run} {where}: {row.detail}"
    if (hidden := len(failures) - SHOWN_FAILURES) > 0:
        yield f"and {hidden} more"
