"""`atlas report`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from atlas_fl.cli.live import show
from atlas_fl.cli.parse import parse
from atlas_fl.cli.words import split
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

    from atlas_fl.io.folder import find_run
    from atlas_fl.report.plots import draw_all

    for name in options.runs:
        show(str(path) for path in draw_all(find_run(name, runs_dir=options.runs_dir).path))
    return 0
