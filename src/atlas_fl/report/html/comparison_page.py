"""The page of several runs: the methods of each federation against each other, and their ranks over all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from atlas_fl.errors import ConfigError, first_of
from atlas_fl.experiment.tuning import DEVELOPMENT_SEEDS
from atlas_fl.report.comparison_tables import method_tables, pair_tables
from atlas_fl.report.federation_ranks import rank_if_several, ranks_table
from atlas_fl.report.federation_results import FederationResults, federation_results, setting_words
from atlas_fl.report.finished_runs import read_finished_run
from atlas_fl.report.format import isolate
from atlas_fl.report.html.comparison_charts import difference_chart, fronts, score_chart
from atlas_fl.report.html.elements import Block, Folded, Page, Section, Text
from atlas_fl.report.method_comparison import comparison_sentence
from atlas_fl.report.results_page import lines_in_one_place
from atlas_fl.storage.run_folder import find_run


def comparison_page(
    runs: Sequence[Path | str], *, control: str | None = None, score: Literal["final", "best"] = "final"
) -> Page:
    """The page of these runs; those that are not complete are named, those of tuning left out.

    Args:
        runs: run folders.
        control: the method that the others are compared with; by default clustered FedAvg, FedAvg or local training.
        score: the models that clients end with, or the best round by validation.

    Raises:
        ConfigError: no method is called `control`, two runs are of the same method, settings and seed, or none of the
            runs is complete.
        CheckpointError: one is no run folder, or a file in it is damaged.
        DataError: the runs of two methods differ in their clients, or a client has no test score.
    """
    folders = [find_run(run) for run in runs]
    finished = {
        folder.path: read_finished_run(folder.path, score=score) for folder in folders if folder.summary.exists()
    }
    shown = [run for run in finished.values() if run.seed not in DEVELOPMENT_SEEDS] or list(finished.values())
    if not shown:
        raise ConfigError(f"none of these {len(folders)} runs can be compared: none is complete")
    results = federation_results(shown, control=control)
    sections = [section for place, result in enumerate(results) for section in _federation(result, place)]
    compared = [result.comparison for result in results if result.comparison is not None]
    ranks = rank_if_several(compared)
    if ranks is not None:
        table = ranks_table(ranks, control=compared[0].control)
        sections.append(Section(name="ranks", title="Ranks over all federations", blocks=[table]))
    unfinished = [isolate(folder.path.name) for folder in folders if not folder.summary.exists()]
    methods = len({run.method for run in shown})
    words = results[0].title if len(results) == 1 else f"{len(results)} federations"
    best = "; scores of each client's best round by validation" if score == "best" else ""
    return Page(
        title=f"{words}: {methods} method{'' if methods == 1 else 's'} compared",
        subtitle=f"{len(shown)} runs, {len(results)} federation{'' if len(results) == 1 else 's'}{best}",
        sections=sections,
        warnings=[f"Not complete, and so not compared: {first_of(unfinished)}."] if unfinished else [],
    )


def _federation(result: FederationResults, place: int) -> list[Section]:
    """Sections of one federation: scores, differences from the control, costs."""
    notes = [result.words] if result.words else []
    if result.changed:
        notes.append(f"Settings of all its runs that are not the preset's: {setting_words(result.changed)}.")
    notes += [
        f"{name} lacks the seeds {', '.join(map(str, seeds))} of others, and is in no table."
        for name, seeds in result.incomplete.items()
    ]
    notes += [f"{name}: {text}." for name, text in (*result.own_settings.items(), *result.tuned.items())]
    notes += lines_in_one_place(result)
    comparison = result.comparison
    if comparison is None:
        notes.append("No two of its methods, the control among them, have the same seeds: there is nothing to compare.")
        return [Section(name=f"federation-{place}", title=result.title, blocks=[Text(lines=notes)])]
    first, *tables, costs_table = method_tables(comparison.rows, by_examples=bool(comparison.by_examples))
    sentence = comparison_sentence(comparison)
    notes.append(f"Means over all clients and the seeds {', '.join(map(str, comparison.seeds))}.")
    told = [Text(lines=[f"{sentence}."])] if sentence else []
    more = Folded(title="Clients and probabilities", blocks=tables)
    scores: list[Block] = [*told, score_chart(comparison, place), first, more, Text(lines=notes)]
    sections = [Section(name=f"federation-{place}", title=f"{result.title}: what came out", blocks=scores)]
    if comparison.pairs:
        title = f"{result.title}: against {comparison.control}"
        against, tests = pair_tables(comparison)
        folded = Folded(title="Tests", blocks=[tests])
        pairs: list[Block] = [difference_chart(comparison, place), against, folded]
        sections.append(Section(name=f"pairs-{place}", title=title, blocks=pairs))
    costs: list[Block] = [*fronts(comparison, place), costs_table]
    return [*sections, Section(name=f"costs-{place}", title=f"{result.title}: score against costs", blocks=costs)]
