"""`atlas audit`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from atlas_fl.cli.live import show, show_progress
from atlas_fl.cli.parse import parse
from atlas_fl.cli.words import split

MISMATCH = 1


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Recompute every round of a run that was made with --audit, from its plan, in float64 and by other code than the
    run's; compare what clients loaded with what the server sent; exits with 1 on any mismatch."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or its name in --runs-dir."""
    others: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="OTHER ...")] = ()
    """More runs: no two that should differ may have the same final models."""
    runs_dir: str = "runs"
    """Where run folders lie."""


def audit(words: Sequence[str]) -> int:
    """Audit the runs that these words name; 0 if all is well, 1 if not."""
    options = parse(AuditOptions(run=tyro.MISSING), split(words), command="atlas audit")

    from atlas_fl.audit import audit as audit_run
    from atlas_fl.cli.tables import audit_table, failure_lines
    from atlas_fl.io.folder import find_run

    run, *others = [find_run(name, runs_dir=options.runs_dir).path for name in (options.run, *options.others)]
    with show_progress() as tell:
        report = audit_run(run, tuple(others), on_event=tell)
    show([audit_table(report.rounds()), *failure_lines(report.failures)])
    verdict = "audit passed" if report.ok else f"audit FAILED: {len(report.failures)} checks did not hold"
    show(f"{name} has no digests of its files: an earlier version wrote it" for name in report.undigested)
    if report.unseen:
        show(
            [
                f"{len(report.unseen)} clients keep what they do not share at their sites; of that part the audit sees"
                " the digest alone, and what trained it is the clients' own word"
            ]
        )
    show([f"{verdict} ({len(report.rows)} checks)"])
    return 0 if report.ok else MISMATCH
