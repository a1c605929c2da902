"""The page of results (`atlas results`): what stands around the tables of each federation, as one Markdown page.

Runs belong to one federation where they agree in all settings but the method, what the method sets, the seed and what
tuning varies. The page has a table of methods and of differences to the control for each (`comparison_tables`),
average ranks over all of them, and says which runs are missing. The same folders give the same bytes. Its words are
those of `results_page.md.jinja`.
"""

from collections.abc import Sequence
from functools import partial
from importlib import resources
from typing import Literal

import numpy as np
from jinja2 import Environment, StrictUndefined

from atlas_fl.config.settings import settings
from atlas_fl.config.values import to_words
from atlas_fl.errors import ConfigError
from atlas_fl.report.comparison_tables import SHOWN, first_tables, page_tables, shown
from atlas_fl.report.federation_ranks import rank_if_several, ranks_table
from atlas_fl.report.federation_results import FederationResults
from atlas_fl.report.format import EMPTY
from atlas_fl.report.method_comparison import AVERAGE, MethodComparison, comparison_sentence
from atlas_fl.report.statistics import ALPHA, ROPE, PairedComparison, least_sign_flip_p
from atlas_fl.report.table import Table

BEGINNING = "# Results\n\nWritten by `atlas results`"
"""Begins every page."""
ENOUGH = 10
"""Federations from which the approximations of the rank tests hold (Demsar 2006)."""
MODELS = {"final": "the models that they end with", "best": "their best round by validation"}


def write_page(
    results: Sequence[FederationResults],
    *,
    num_runs: int,
    control: str | None,
    score: Literal["final", "best"] = "final",
    every_table: bool = False,
) -> str:
    """The page of these federations, made of so many runs, as Markdown; of each the first two tables, or all.

    Raises:
        ConfigError: in none of them two methods, the control among them, have the same seeds.
    """
    compared = {result.title: result.comparison for result in results if result.comparison is not None}
    if not compared:
        seeds = "; ".join(f"{result.title} has {_seeds_words(result)}" for result in results)
        named = "the others" if control is None else control
        raise ConfigError(f"no method has the seeds of {named}: {seeds}; run the missing ones with `atlas compare`")
    controls = sorted({comparison.control for comparison in compared.values()})
    ranks = rank_if_several(list(compared.values()))
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    text = resources.files(__package__).joinpath("results_page.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        num_runs=num_runs,
        models=MODELS[score],
        has_average=any(AVERAGE in comparison.rows for comparison in compared.values()),
        by_examples=any(comparison.by_examples for comparison in compared.values()),
        average=AVERAGE,
        controls=controls,
        every_table=every_table,
        shown=SHOWN,
        rope=ROPE,
        alpha=ALPHA,
        enough=ENOUGH,
        glance=_glance_table(compared, controls[0]) if len(compared) > 1 and len(controls) == 1 else None,
        ranks=ranks,
        ranks_table=None if ranks is None else ranks_table(ranks, control=controls[0]),
        results=results,
        markdown=lambda table: "\n".join(table.markdown()),
        about=_about,
        tables=partial(_tables, every=every_table),
        sentence=sentence_of,
        places=lines_in_one_place,
        seeds=_seeds_words,
    )


def _tables(result: FederationResults, *, every: bool) -> list[Table]:
    if result.comparison is None:
        return []
    return page_tables(result.comparison) if every else first_tables(result.comparison)


def sentence_of(result: FederationResults) -> str:
    """The outcome of a federation as one line; empty where nothing is compared."""
    return "" if result.comparison is None else comparison_sentence(result.comparison)


def _glance_table(compared: dict[str, MethodComparison], control: str) -> Table:
    """One table of all federations, those methods first that gain most."""
    gains: dict[str, list[float]] = {}
    for comparison in compared.values():
        for name, pair in comparison.pairs.items():
            gains.setdefault(name, []).append(pair.mean)
    rows = [[control, *(f"{comparison.rows[control].statistics.mean:.3f}" for comparison in compared.values())]]
    rows += [
        [name, *(_glance_cell(comparison.pairs.get(name)) for comparison in compared.values())]
        for name in sorted(gains, key=lambda name: -float(np.mean(gains[name])))
    ]
    return Table(title="", columns=("method", *compared), rows=rows)


def _glance_cell(pair: PairedComparison | None) -> str:
    if pair is None:
        return EMPTY
    word = shown(pair)
    return f"{pair.mean:+.3f}" + ("" if word == EMPTY else f" {word}")


def _about(result: FederationResults) -> str:
    """Description of a federation: its dial, its settings, clients and seeds."""
    changed = [f"{settings()[name].flag} {' '.join(to_words(value))}" for name, value in result.changed.items()]
    own = [f"`{name}` {values}" for name, values in result.own_settings.items()]
    about = [
        result.words,
        f"all methods with {', '.join(changed)}" if changed else "",
        f"settings of each method: {', '.join(own)}" if own else "",
        "" if result.tuned else "no tuning on record",
    ]
    if result.comparison is not None:
        least = least_sign_flip_p(len(result.comparison.seeds))
        seeds = ", ".join(map(str, result.comparison.seeds))
        about += [f"{len(result.comparison.clients)} clients", f"seeds {seeds}, with which no p is below {least:.3g}"]
    return "; ".join(part for part in about if part)


def lines_in_one_place(result: FederationResults) -> list[str]:
    """A sentence on each method that has all examples in one place."""
    lines = []
    for name, scores in sorted(result.in_one_place.items()):
        is_shared = name.split()[0] == "multitask"
        what = "All examples in one place, one adapter" if is_shared else "All examples of a task in one place"
        seeds = f"{len(scores)} seed{'s' * (len(scores) > 1)}"
        lines.append(f"{what} (`{name}`): {float(np.mean(scores)):.3f} over {seeds}.")
    return lines


def _seeds_words(result: FederationResults) -> str:
    """`local 1, 2 and fedavg 3`: the seeds of each method."""
    words = [f"{name} {', '.join(map(str, seeds))}" for name, seeds in result.seeds.items()]
    return " and ".join(words) or "runs in one place alone"
