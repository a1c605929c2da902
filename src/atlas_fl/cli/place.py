"""`atlas place`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from atlas_fl.cli.live import show, show_progress
from atlas_fl.cli.parse import parse
from atlas_fl.cli.words import split


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
    from atlas_fl.io.folder import find_run
    from atlas_fl.placing import place_client

    folder = find_run(options.run, runs_dir=options.runs_dir).path
    with show_progress() as on_event:
        found = place_client(
            folder, task=options.task, samples=options.samples, device=options.device, on_event=on_event
        )
    show(placement(found))
    return 0
