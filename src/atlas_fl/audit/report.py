"""The result of an audit as plain data: AuditReport, a row for each check of a client in a round."""

from dataclasses import dataclass
from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that was checked in a round."""

    check: str
    """The word of `AuditRow.check`."""
    client: str
    """The client; empty for what concerns everyone."""
    fault: str
    """Finding, where it did not hold; else empty."""
    error: float | None = None
    """Largest relative error, where something was compared by value."""


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One thing that was checked."""

    run: str
    """The run folder's name."""
    round: int
    """The round; 0 for what concerns the whole run."""
    client: str
    """The client; empty for what concerns everyone."""
    check: str
    """The word of a check, such as `record`, `loaded` or `mixed` (`docs/resume-and-audit.md`)."""
    ok: bool
    """True if it held."""
    error: float | None = None
    """Largest relative error, where something was compared by value."""
    detail: str = ""
    """Finding, where it did not hold."""


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """One line of the table: a round of a run."""

    run: str
    """The run folder's name."""
    round: int
    """The round; 0 for the whole run."""
    checks: int
    """Number of checks."""
    failed: int
    """Number of checks that failed."""
    worst_error: float | None
    """Largest relative error of the round."""
    first_failure: str
    """First failure; empty without one."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Everything that was checked."""

    rows: tuple[AuditRow, ...]
    """In the order of runs, rounds and clients."""
    unseen: tuple[str, ...] = ()
    """`RUN: CLIENT` of everyone who keeps a part of its model at its site. Of it an audit knows the digest: that the
    server left it alone, and that the client says to have loaded what it kept; not what is in it."""

    unchecked: tuple[str, ...] = ()
    """A line for every run whose method is a plug-in's, on what was not computed a second time."""

    @property
    def ok(self) -> bool:
        """True if everything held."""
        return all(row.ok for row in self.rows)

    @property
    def failures(self) -> tuple[AuditRow, ...]:
        """Rows that did not hold."""
        return tuple(row for row in self.rows if not row.ok)

    def rounds(self) -> tuple[RoundSummary, ...]:
        """One line for each round of each run."""
        by_round: dict[tuple[str, int], list[AuditRow]] = {}
        for row in self.rows:
            by_round.setdefault((row.run, row.round), []).append(row)
        return tuple(_summary(run, round, rows) for (run, round), rows in by_round.items())


def _summary(run: str, round: int, rows: list[AuditRow]) -> RoundSummary:
    errors = [row.error for row in rows if row.error is not None]
    failed = [row for row in rows if not row.ok]
    first = (
        " ".join(part for part in (failed[0].client, failed[0].check + ":", failed[0].detail) if part) if failed else ""
    )
    return RoundSummary(
        run=run,
        round=round,
        checks=len(rows),
        failed=len(failed),
        worst_error=max(errors, default=None),
        first_failure=first,
    )
