"""`atlas report`, `audit`, `export`, `place` and `leakage`: what is done with a finished run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from atlas_fl.cli.arguments import base_config, check_target, holds_json, new_folder, parse, split
from atlas_fl.cli.display import show, show_progress
from atlas_fl.config import Config, validate
from atlas_fl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Draw the figures of runs at 300 DPI, into the folder `figures` of each."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Folders of runs, or their names in --runs-dir."""
    runs_dir: str = "runs"
    """Where run folders lie."""


def report(words: Sequence[str]) -> int:
    """Draw the figures of the runs that these words name; 0."""
    options = parse(ReportOptions(runs=tyro.MISSING), split(words), command="atlas report")

    if not options.runs:
        raise ConfigError(
            "no run is named; give the folder of a run, or its name in --runs-dir; see `atlas report --help`"
        )

    from atlas_fl.report.figures import draw_all
    from atlas_fl.storage.run_folder import find_run

    for name in options.runs:
        show(str(path) for path in draw_all(find_run(name, runs_dir=options.runs_dir).path))
    return 0


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

    from atlas_fl.audit.check import audit_run as audit_run
    from atlas_fl.cli.tables import audit_table, failure_lines
    from atlas_fl.storage.run_folder import find_run

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


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write the model of one client: adapter and head as `PeftModel.from_pretrained` reads them, or of a run that
    trained whole models all of it, as `AutoModelForImageClassification.from_pretrained` does."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or its name in --runs-dir."""
    client: str
    """Name of the client, such as movie-0, or its number from 0 on in the order of the plan."""
    to: str
    """A new folder to write to."""
    round: str | None = None
    """`best` for the round with the best mean validation score, or a number; the last one by default. Rounds of before
    are there where `--keep-best` or `--keep-checkpoints` kept them."""
    runs_dir: str = "runs"
    """Where run folders lie."""


def export(words: Sequence[str]) -> int:
    """Export what these words name; 0."""
    default = ExportOptions(run=tyro.MISSING, client=tyro.MISSING, to=tyro.MISSING)
    options = parse(default, split(words), command="atlas export")

    from atlas_fl.experiment.export import export_client as export_client
    from atlas_fl.storage.run_folder import find_run

    to, folder = new_folder(options.to), find_run(options.run, runs_dir=options.runs_dir).path
    show([f"wrote {export_client(folder, client=options.client, to=to, round=options.round)}"])
    return 0


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Say to which cluster of a run a newcomer belongs: its fingerprint is taken as the run took those of its clients;
    trains nothing federally and writes nothing."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or its name in --runs-dir."""
    task: str
    """The newcomer's data: your own as `name=path`, with text=, pair= and label= as needed, or a task's name."""
    samples: int | None = None
    """Training examples that it has; as many as a client of the run by default."""
    device: str | None = None
    """Its device, a profile's name or your own description; shows the ranks that it would have."""
    runs_dir: str = "runs"
    """Where run folders lie."""


def place(words: Sequence[str]) -> int:
    """Print the place of the newcomer that these words describe; 0."""
    default = PlaceOptions(run=tyro.MISSING, task=tyro.MISSING)
    options = parse(default, split(words), command="atlas place")

    from atlas_fl.cli.tables import placement
    from atlas_fl.planning.place_client import place_client
    from atlas_fl.storage.run_folder import find_run

    folder = find_run(options.run, runs_dir=options.runs_dir).path
    with show_progress() as on_event:
        newcomer = place_client(
            folder, task=options.task, samples=options.samples, device=options.device, on_event=on_event
        )
    show(placement(newcomer))
    return 0


@dataclass(frozen=True, kw_only=True)
class LeakageOptions:
    """Show what a cut at each block would give away of every task's texts over --wire and with --wire-noise: dFIL, and
    how many tokens a linear probe reads. Trains nothing and writes nothing but with --to."""

    config: str | None = None
    """A TOML or YAML file of settings, such as the config.toml of a run."""
    cuts: tuple[int, ...] = ()
    """Blocks on the client; every possible number by default."""
    to: str | None = None
    """Write the table as JSON to this file as well."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def leakage(words: Sequence[str]) -> int:
    """Print what cuts give away under what these words say; 0."""
    groups = split(words)
    options = parse(LeakageOptions(settings=base_config(groups)), groups, command="atlas leakage")
    config = validate(options.settings)
    check_target(options.to, example="leakage.json", is_own=lambda path: holds_json(path, keys=("dfil", "blocks")))

    from atlas_fl.planning.planner import measure_leakage
    from atlas_fl.report.tables import leakage_table
    from atlas_fl.storage.jsonl import write_json

    with show_progress() as on_event:
        measured = measure_leakage(config, cuts=options.cuts or None, on_event=on_event)
    rows = [asdict(row) for row in measured]
    show([leakage_table(rows)])
    if options.to is not None:
        write_json(Path(options.to), rows)
    return 0
