"""`atlas export`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from atlas_fl.cli.live import show
from atlas_fl.cli.parse import parse
from atlas_fl.cli.settings import new_folder
from atlas_fl.cli.words import split


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

    from atlas_fl.export import export as export_client
    from atlas_fl.io.folder import find_run

    to, folder = new_folder(options.to), find_run(options.run, runs_dir=options.runs_dir).path
    show([f"wrote {export_client(folder, client=options.client, to=to, round=options.round)}"])
    return 0
