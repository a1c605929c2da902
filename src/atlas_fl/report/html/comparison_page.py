"""The page of several runs (`atlas report`, `compare`, `results`): the methods of each federation against each other.

The same runs give the same page; `render` makes HTML of it, `markdown` Markdown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from atlas_fl.errors import ConfigError, first_of
from atlas_fl.experiment.tuning import DEVELOPMENT_SEEDS, TunedMethod
from atlas_fl.report.comparison_tables import glance_table, method_tables, pair_tables
from atlas_fl.report.federation_ranks import rank_if_several, ranks_table
from atlas_fl.report.federation_results import FederationResults, federation_results, lines_in_one_place, setting_words
from atlas_fl.report.finished_runs import read_finished_run
from atlas_fl.report.format import isolate
from atlas_fl.report.html.comparison_charts import difference_chart, fronts, score_chart
from atlas_fl.report.html.elements import Block, Folded, Page, Section, Text
from atlas_fl.report.method_comparison import AVERAGE, comparison_sentence
from atlas_fl.report.table import Table, count, plain
from atlas_fl.storage.run_folder import find_run

SAID_ELSEWHERE = {"seeds", "clients", "std", "d_z"}
"""Columns that a page leaves out: its words have the first two, its intervals say the others, the CSV has all."""


def comparison_page(runs: Sequence[Path | str], *, control: str | None = None) -> Page:
    """The page of these runs; those that are not complete are named, those of tuning left out.

    Args:
        runs: run folders.
        control: the method that the others are compared with; by default clustered FedAvg, FedAvg or local training.

    Raises:
        ConfigError: no method is called `control`, two runs are of the same method, settings and seed, or none of the
            runs is complete.
        CheckpointError: one is no run folder, or a file in it is damaged.
        DataError: the runs of two methods differ in their clients, or a client has no test score.
    """
    folders = [find_run(run) for run in runs]
    finished = [read_finished_run(folder.path) for folder in folders if folder.summary.exists()]
    shown = [run for run in finished if run.seed not in DEVELOPMENT_SEEDS] or finished
    if not shown:
        raise ConfigError(f"none of these {len(folders)} runs can be compared: none is complete")
    page = federations_page(federation_results(shown, control=control))
    unfinished = [isolate(folder.path.name) for folder in folders if not folder.summary.exists()]
    warnings = [f"Not complete, and so not compared: {first_of(unfinished)}."] if unfinished else []
    return replace(page, warnings=warnings)


def federations_page(results: Sequence[FederationResults], *, score: Literal["final", "best"] = "final") -> Page:
    """The page of these federations: all of them at a glance, then each."""
    compared = {result.title: result.comparison for result in results if result.comparison is not None}
    ranks = rank_if_several(list(compared.values()))
    controls = {comparison.control for comparison in compared.values()}
    over_all = [glance_table(compared)] if len(compared) > 1 and len(controls) == 1 else []
    over_all += [] if ranks is None else [ranks_table(ranks, control=next(iter(compared.values())).control)]
    sections = [Section(name="ranks", title="Over all federations", blocks=over_all)] if over_all else []
    sections += [section for place, result in enumerate(results) for section in _federation(result, place)]
    rows = [row for result in results for row in (*result.seeds.items(), *result.in_one_place.items())]
    methods = len({name.split()[0] for name, _ in rows})
    words = results[0].title if len(results) == 1 else f"{len(results)} federations"
    best = "; scores of each client's best round by validation" if score == "best" else ""
    return Page(
        title=f"{words}: {methods} method{'' if methods == 1 else 's'} compared",
        subtitle=f"{sum(len(runs) for _, runs in rows)} runs{best}",
        sections=sections,
    )


def _federation(result: FederationResults, place: int) -> list[Section]:
    """Sections of one federation: scores, differences from the control, costs; from the second on some are folded."""
    comparison = result.comparison
    words = Text(lines=_words(result))
    if comparison is None:
        return [Section(name=f"federation-{place}", title=result.title, blocks=[words, *_tuning(result.tuned)])]
    hurt = {"hurt: control"} if comparison.control == AVERAGE else set()
    first, *tables, totals = method_tables(comparison.rows, by_examples=bool(comparison.by_examples))
    more = Folded(title="Clients and probabilities", blocks=[table.without(hurt) for table in tables])
    chart = score_chart(comparison, place)
    scores: list[Block] = [words, chart, _open_in_the_first(first, place), *_tuning(result.tuned), more]
    sections = [Section(name=f"federation-{place}", title=f"{result.title}: what came out", blocks=scores)]
    if comparison.pairs:
        title = f"{result.title}: against {comparison.control}"
        against, tests = (table.without(SAID_ELSEWHERE) for table in pair_tables(comparison))
        beside = [_open_in_the_first(against, place), Folded(title="Tests", blocks=[tests])]
        pairs: list[Block] = [difference_chart(comparison, place), *beside]
        sections.append(Section(name=f"pairs-{place}", title=title, blocks=pairs))
    costs: list[Block] = [*fronts(comparison, place), _open_in_the_first(totals, place)]
    return [*sections, Section(name=f"costs-{place}", title=f"{result.title}: score against costs", blocks=costs)]


def _open_in_the_first(table: Table, place: int) -> Block:
    """The table without what the page says elsewhere, folded from the second federation on."""
    table = table.without(SAID_ELSEWHERE)
    return Folded(title=table.title, blocks=[table]) if place else table


def _words(result: FederationResults) -> list[str]:
    """The outcome of a federation, its dial and settings, what was tried of each method, and what is missing."""
    compared = result.comparison
    own = ", ".join(
        f"{name} {words}"
        for name, words in result.own_settings.items()
        if name not in result.tuned
        or any(word.split("=")[0] not in result.tuned[name].best.settings for word in words.split())
    )
    untuned = ", ".join(name for name in result.seeds if name not in result.tuned)
    lines = [
        comparison_sentence(compared),
        result.words,
        f"Settings of all its runs: {setting_words(result.changed)}" if result.changed else "",
        f"Settings of each method: {own}" if own else "",
        *dict.fromkeys(method.tried for method in result.tuned.values()),
        f"No tuning on record of all runs: {untuned}" if untuned else "",
        *(f"{name} lacks the seeds {_listed(seeds)}, and is in no table" for name, seeds in result.incomplete.items()),
        *lines_in_one_place(result),
        f"No method has the seeds of the control; there are {result.seed_words}",
    ]
    if compared is not None:
        lines[-1] = f"Means over {len(compared.clients)} clients and the seeds {_listed(compared.seeds)}"
    return [f"{line}." for line in lines if line]


def _tuning(tuned: Mapping[str, TunedMethod]) -> list[Block]:
    """The chosen settings of each method, a table; nothing where none was tuned."""
    rows = [(name, count(len(one.trials)), one.chosen, plain(one.best.validation)) for name, one in tuned.items()]
    return [Table(title="Tuning", columns=("method", "tried", "chosen", "validation"), rows=rows)] if rows else []


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
