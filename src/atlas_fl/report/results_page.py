"""The page of results (`atlas results`): what stands around the tables of each federation, as one Markdown page.

Runs belong to one federation where they agree in all settings but the method, what the method sets, the seed and what
tuning varies. The page has a table of methods and of differences to the control for each (`comparison_tables`),
average ranks over all of them, and says which runs are missing. The same folders give the same bytes.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from atlas_fl.config.settings import settings
from atlas_fl.config.values import to_words
from atlas_fl.errors import ConfigError
from atlas_fl.report.comparison_tables import SHOWN, markdown_tables, shown
from atlas_fl.report.federation_ranks import MethodRanks, rank_if_several
from atlas_fl.report.federation_results import FederationResults
from atlas_fl.report.format import EMPTY
from atlas_fl.report.method_comparison import AVERAGE
from atlas_fl.report.statistics import ALPHA, ROPE, PairedComparison, least_sign_flip_p
from atlas_fl.report.table import Cell, Table, plain

ENOUGH = 10
"""Federations from which the approximations of the rank tests hold (Demsar 2006)."""


def write_page(results: Sequence[FederationResults], *, num_runs: int, control: str) -> str:
    """The page of these federations, made of so many runs, as Markdown.

    Raises:
        ConfigError: in none of them two methods, the control among them, have the same seeds.
    """
    if all(result.comparison is None for result in results):
        seeds = "; ".join(f"{result.title} has {seeds_words(result)}" for result in results)
        raise ConfigError(f"no method has the seeds of {control}: {seeds}; run the missing ones with `atlas compare`")
    ranks = rank_if_several([result.comparison for result in results if result.comparison is not None])
    lines = [
        "# Results",
        "",
        f"Written by `atlas results` from the files of {num_runs} finished runs, and by nothing else. Scores are those"
        " on clients' own test examples of the models that they end with. Seeds are the units of every test.",
        *_reading(control),
        *_glance_lines(results, control),
        *([] if ranks is None else ["", "## Over all federations", "", *_rank_lines(ranks, control)]),
    ]
    for result in results:
        lines += ["", f"## {result.title}", "", *_federation_lines(result)]
    return "\n".join([*lines, ""])


def _reading(control: str) -> list[str]:
    return [
        "",
        "How to read the tables:",
        "",
        "- *mean and 95%*: over seeds of the mean over clients, with Student's interval, and *std* over seeds; *middle"
        " half*: the interquartile mean over seeds x tasks, its interval by a bootstrap of whole seeds and by the"
        " stratified one, which draws seeds inside each task.",
        "- *worst client*, *lowest third*: over seeds, of each seed's lowest client and of its lowest third;"
        " *deviation*: of the scores of the clients of one task, the root of their mean variance over tasks and seeds.",
        f"- *hurt*: share of clients, over seeds, that score less than with local training, with FedAvg (`{AVERAGE}`),"
        f" or with the control `{control}`.",
        "- *over guess*: gain over guessing the commonest class; *below whole*: bytes that it does not send of those"
        " of whole models in every round; *device memory*: what training takes of the client that needs most, as the"
        " plan predicts it.",
        "- *test loss*: cross-entropy in nats where labels are classes; *calibration error*: how far the confidence in"
        " predictions is from their accuracy (Guo et al. 2017). A dash: the runs do not say, or their tasks have losses"
        " of different kinds.",
        "- *time*: of a run, with what the results had taken that it reused from runs before it in the same process;"
        " *reused* is that part. Frozen states that are kept on the disk or in memory are not in it. A dash: the runs"
        " do not say, and their time is too low where others ran before them.",
        "- *p*: exact sign flips of the differences of the seeds, with Holm's correction over the rows of a table, and"
        " Wilcoxon's signed ranks. Where seeds are few p cannot be small; *least p* says how small.",
        f"- *shown*: what has a posterior probability of {SHOWN:g} or more (Bayesian signed-rank): better, worse, or"
        f" equal within {ROPE:g}; a dash where the seeds do not tell. *P (run beats run)*: chance that a run of the"
        " method scores more than one of the control, whatever their seeds; *seeds needed*: for a difference of that"
        " size, power .8.",
    ]


def _glance_lines(results: Sequence[FederationResults], control: str) -> Iterator[str]:
    """One table of all federations, those methods first that gain most; nothing where only one is compared."""
    titles = [result.title for result in results if result.comparison is not None]
    compared = [result.comparison for result in results if result.comparison is not None]
    if len(compared) < 2:
        return
    gains: dict[str, list[float]] = {}
    for comparison in compared:
        for name, pair in comparison.pairs.items():
            gains.setdefault(name, []).append(pair.mean)
    yield from (
        "",
        "## At a glance",
        "",
        f"The score of `{control}`, and of every other method the difference from it, with what is *shown*.",
        "",
    )
    rows = [[control, *(f"{comparison.rows[control].statistics.mean:.3f}" for comparison in compared)]]
    rows += [
        [name, *(_glance_cell(comparison.pairs.get(name)) for comparison in compared)]
        for name in sorted(gains, key=lambda name: -float(np.mean(gains[name])))
    ]
    yield from Table(title="", columns=("method", *titles), rows=rows).markdown()


def _glance_cell(pair: PairedComparison | None) -> str:
    if pair is None:
        return EMPTY
    word = shown(pair)
    return f"{pair.mean:+.3f}" + ("" if word == EMPTY else f" {word}")


def _rank_lines(ranks: MethodRanks, control: str) -> Iterator[str]:
    yield (
        f"Average rank over {ranks.federations} federations, 1 the best: Friedman p {ranks.friedman_p:.3f}; ranks that"
        f" are {ranks.critical_difference:.2f} apart differ at {ALPHA:g} (Nemenyi)."
        + ("" if ranks.federations >= ENOUGH else f" Below {ENOUGH} federations these tests are coarse.")
    )
    rows: list[list[Cell]] = []
    for name, rank in sorted(ranks.average_ranks.items(), key=lambda item: item[1]):
        against = ranks.against_control.get(name)
        rows.append([name, plain(rank, 2), plain(None if against is None else against.adjusted_p)])
    columns = ("method", "average rank", f"p against `{control}` (Holm)")
    yield from ("", *Table(title="", columns=columns, rows=rows).markdown())


def _federation_lines(result: FederationResults) -> Iterator[str]:
    about = [result.words, _settings_words(result)]
    comparison = result.comparison
    if comparison is not None:
        least = least_sign_flip_p(len(comparison.seeds))
        seeds = ", ".join(map(str, comparison.seeds))
        about += [f"{len(comparison.clients)} clients", f"seeds {seeds}, with which no p is below {least:.3g}"]
    yield "; ".join(part for part in about if part) + "."
    yield from _tuning_lines(result)
    if comparison is not None:
        yield from markdown_tables(comparison)
    for name, scores in sorted(result.in_one_place.items()):
        is_shared = name.split()[0] == "multitask"
        what = "All examples in one place, one adapter" if is_shared else "All examples of a task in one place"
        yield from (
            "",
            f"{what} (`{name}`): {float(np.mean(scores)):.3f} over {len(scores)} seed{'s' * (len(scores) > 1)}.",
        )
    if comparison is None and result.seeds:
        yield from ("", f"No comparison: no method has the seeds of the control. There are {seeds_words(result)}.")
    for name, missing in result.incomplete.items():
        yield from ("", f"`{name}` lacks the seeds {', '.join(map(str, missing))} and is in no table.")


def seeds_words(result: FederationResults) -> str:
    """`local 1, 2 and fedavg 3`: the seeds of each method."""
    words = [f"{name} {', '.join(map(str, seeds))}" for name, seeds in result.seeds.items()]
    return " and ".join(words) or "runs in one place alone"


def _settings_words(result: FederationResults) -> str:
    changed = ", ".join(
        f"{settings()[name].flag} {' '.join(to_words(value))}" for name, value in result.changed.items()
    )
    words = [f"all methods with {changed}"] if changed else []
    if result.own_settings:
        own = ", ".join(f"`{name}` {values}" for name, values in result.own_settings.items())
        words.append(f"settings of each method: {own}")
    words += [] if result.tuned else ["no tuning on record"]
    return "; ".join(words)


def _tuning_lines(result: FederationResults) -> Iterator[str]:
    """Settings that were tried of each method, and the methods without a record of it."""
    if not result.tuned:
        return
    yield from ("", "Tuned by validation:", "")
    yield from (f"- `{name}`: {words}" for name, words in result.tuned.items())
    if untuned := [f"`{name}`" for name in result.seeds if name not in result.tuned]:
        yield f"- no tuning on record: {', '.join(untuned)}"
