"""`atlas search`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from atlas_fl.cli.live import going_on, show, show_progress
from atlas_fl.cli.parse import parse
from atlas_fl.cli.settings import base_config
from atlas_fl.cli.sweep import WORDS, label_of
from atlas_fl.cli.words import split
from atlas_fl.config import Config, validate
from atlas_fl.errors import ConfigError
from atlas_fl.events import PhaseStarted
from atlas_fl.sweep import Point, RunState


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Search for the settings with the best validation score by tree-structured Parzen estimators; each trial is a run.
    The same command goes on where it was stopped. Ends in a table, a CSV file and best.toml."""

    over: tuple[str, ...] = ()
    """A setting and its range, `lr=1e-4..1e-2:log` or `local-steps=4..16`, or its values, `weight-decay=0,1e-4`; may be
    repeated."""
    trials: int = 20
    """Trials of the whole search, those of before among them."""
    pruner: Literal["none", "median"] = "none"
    """`median` gives up a run whose best validation score so far is below the median of the others at that round."""
    config: str | None = None
    """A TOML or YAML file of settings, such as the config.toml of a run."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def search(words: Sequence[str]) -> int:
    """Run the search that these words say; 0."""
    groups = split(words)
    options = parse(SearchOptions(settings=base_config(groups)), groups, command="atlas search")
    if not options.over:
        raise ConfigError("--over is missing; allowed: a setting and its range; write --over lr=1e-4..1e-2:log")
    validate(options.settings)

    from atlas_fl.io.atomic import write_atomic
    from atlas_fl.report.search import search_csv, search_table
    from atlas_fl.search.space import parse_space
    from atlas_fl.search.trials import BEST, TABLE
    from atlas_fl.search.trials import search as run_search

    with show_progress() as on_event, going_on("the same command"):

        def announce(number: int, point: Point, state: RunState) -> None:
            trial = f"trial {number} ({number + 1} of {options.trials}): {label_of(point)}"
            on_event(PhaseStarted(f"{trial} {WORDS[state]}"))

        found = run_search(
            options.settings,
            space=parse_space(options.over),
            trials=options.trials,
            pruner=options.pruner,
            on_trial=announce,
            on_event=on_event,
        )
    write_atomic(found.folder / TABLE, search_csv(found.trials).encode())
    show([search_table(found), f"the same as CSV: {found.folder / 'trials.csv'}"])
    show([f"the best settings: atlas run --config {found.folder / BEST}"])
    return 0
