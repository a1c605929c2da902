"""The result of an audit as plain data: AuditReport, a row for each check of a client in a round."""

from typing import NamedTuple

from atlas_fl.frozen import Frozen


class AuditRow(NamedTuple):
    """One thing that was checked."""

    check: str
    """The word of a check, such as `record`, `loaded` or `mixed` (`docs/resume-and-audit.md`)."""
    client: str
    """The client; empty for what concerns everyone."""
    detail: str = ""
    """Fault, where it did not hold; else empty."""
    error: float | None = None
    """Largest relative error, where something was compared by value."""
    round: int = 0
    """The round; 0 for what concerns the whole run."""
    run: str = ""
    """The run folder's name."""

    @property
    def ok(self) -> bool:
        """True if it held."""
        return not self.detail


class AuditReport(Frozen):
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
        return not self.failures

    @property
    def failures(self) -> tuple[AuditRow, ...]:
        """Rows that did not hold."""
        return tuple(row for row in self.rows if not row.ok)

    def rounds(self) -> dict[tuple[str, int], list[AuditRow]]:
        """The rows of each run and round."""
        by_round: dict[tuple[str, int], list[AuditRow]] = {}
        for row in self.rows:
            by_round.setdefault((row.run, row.round), []).append(row)
        return by_round
