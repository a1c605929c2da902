"""`atlas leakage`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from atlas_fl.cli.live import show, show_progress
from atlas_fl.cli.parse import parse
from atlas_fl.cli.settings import base_config, check_target, holds_json
from atlas_fl.cli.words import split
from atlas_fl.config import Config, validate


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

    from atlas_fl.io.results import write_json
    from atlas_fl.planning import measure_leakage
    from atlas_fl.report.cut_tables import leakage_table

    with show_progress() as on_event:
        found = measure_leakage(config, cuts=options.cuts or None, on_event=on_event)
    rows = [asdict(row) for row in found]
    show([leakage_table(rows)])
    if options.to is not None:
        write_json(Path(options.to), rows)
    return 0
