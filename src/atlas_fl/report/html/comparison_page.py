"""The page of several runs: the methods of each federation against each other, and their ranks over all of them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from atlas_fl.config import config_hash
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.tuning import DEVELOPMENT_SEEDS
from atlas_fl.report.comparison_tables import method_tables, pair_tables, shown
from atlas_fl.report.federation_ranks import MethodRanks, rank_if_several
from atlas_fl.report.federation_results import (
    FederationResults,
    by_federation,
    federation_results,
    setting_words,
    with_common_seeds,
)
from atlas_fl.report.finished_runs import FinishedRun, changed_flags, read_finished_run
from atlas_fl.report.format import names_in_words
from atlas_fl.report.html.charts import FAINT, category, chart, quantity, row_height, tips
from atlas_fl.report.html.comparison_charts import (
    by_mean,
    client_map,
    difference_chart,
    memory_front,
    score_chart,
    traffic_front,
)
from atlas_fl.report.html.elements import Block, Chart, Fact, Facts, Folded, Page, Row, Section, Text
from atlas_fl.report.html.palette import colour
from atlas_fl.report.method_comparison import MethodComparison
from atlas_fl.report.statistics import ROPE, PairedComparison, compare_with_control
from atlas_fl.report.table import Cell, Table, count, duration, plain, size
from atlas_fl.storage.run_folder import SHOWN_RUNS, RunFolder, find_run

RowT = TypeVar("RowT")
BEST = "; scores of each client's best round by validation"


def comparison_page(
    runs: Sequence[Path | str], *, control: str | None = None, score: Literal["final", "best"] = "final"
) -> Page:
    """The page of these runs; those that are not complete, or on seeds of tuning beside others, are named and left out.

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
    shown = [
        run
        for members in by_federation(
            [run for run in finished.values() if run.seed not in DEVELOPMENT_SEEDS] or list(finished.values())
        )
        for run in with_common_seeds(members)
    ]
    if not shown:
        raise ConfigError(f"none of these {len(folders)} runs can be compared: none is complete")
    results = federation_results(shown, control=control)
    sections = [section for place, result in enumerate(results) for section in _federation(result, place)]
    compared = {result.title: result.comparison for result in results if result.comparison is not None}
    left_out = [path.name for path, run in finished.items() if not any(run is one for one in shown)]
    unfinished = [folder.path.name for folder in folders if not folder.summary.exists()]
    return Page(
        title=_title(results, shown),
        subtitle=f"{len(shown)} runs, {len(results)} federation{'' if len(results) == 1 else 's'}"
        + (BEST if score == "best" else ""),
        sections=[*sections, *_ranks(compared), _runs(finished)],
        warnings=[
            *_names_sentence(unfinished, "not complete, and so not compared"),
            *_names_sentence(left_out, "of a seed that not every method has, or of tuning, and so not compared"),
        ],
    )


def _names_sentence(names: Sequence[str], words: str) -> list[str]:
    """A sentence on these runs, the first few by name; none where there is no run."""
    listed = names_in_words(names[:SHOWN_RUNS]) + (
        f" and {len(names) - SHOWN_RUNS} more" if len(names) > SHOWN_RUNS else ""
    )
    return [f"{len(names)} run{'' if len(names) == 1 else 's'} {words}: {listed}."] if names else []


def _title(results: Sequence[FederationResults], runs: Sequence[FinishedRun]) -> str:
    methods = {run.method for run in runs}
    words = results[0].title if len(results) == 1 else f"{len(results)} federations"
    return f"{words}: {len(methods)} method{'' if len(methods) == 1 else 's'} compared"


def _federation(result: FederationResults, place: int) -> list[Section]:
    """Sections of one federation: scores, differences from the control, costs."""
    notes = [result.words] if result.words else []
    if result.changed:
        notes.append(f"Settings of all its runs that are not the preset's: {setting_words(result.changed)}.")
    notes += [
        f"{name} lacks the seeds {', '.join(map(str, seeds))} of others, and is in no table."
        for name, seeds in result.incomplete.items()
    ]
    notes += [
        f"{name}, in one place and with one client a task: {', '.join(plain(score).text for score in scores)}."
        for name, scores in result.in_one_place.items()
    ]
    comparison = result.comparison
    if comparison is None:
        notes.append("No two of its methods, the control among them, have the same seeds: there is nothing to compare.")
        return [Section(name=f"federation-{place}", title=result.title, blocks=[Text(lines=notes)])]
    blocks: list[Block] = [_facts(comparison), *([Text(lines=notes)] if notes else [])]
    blocks.append(score_chart(comparison, place))
    *tables, costs_table = method_tables(_sorted(comparison.rows, by_mean(comparison)))
    blocks += [*tables, client_map(comparison, place)]
    sections = [Section(name=f"federation-{place}", title=f"{result.title}: what came out", blocks=blocks)]
    if comparison.pairs:
        pairs: list[Block] = [Text(lines=_equal_in_practice(comparison)), difference_chart(comparison, place)]
        order = sorted(comparison.pairs, key=lambda name: -comparison.pairs[name].mean)
        pairs += pair_tables(replace(comparison, pairs=_sorted(comparison.pairs, order)))
        sections.append(
            Section(name=f"pairs-{place}", title=f"{result.title}: against {comparison.control}", blocks=pairs)
        )
    in_memory = memory_front(comparison, place)
    costs: list[Block] = [
        traffic_front(comparison, place),
        *([in_memory] if in_memory else []),
        costs_table,
    ]
    costs += _settings_of_methods(result)
    return [*sections, Section(name=f"costs-{place}", title=f"{result.title}: score against costs", blocks=costs)]


def _sorted(rows: Mapping[str, RowT], names: Sequence[str]) -> dict[str, RowT]:
    return {name: rows[name] for name in names}


def _facts(comparison: MethodComparison) -> Facts:
    means = {name: row.statistics.mean for name, row in comparison.rows.items()}
    best = max(means, key=lambda name: means[name])
    control = comparison.rows[comparison.control].statistics.mean
    return Facts(
        facts=[
            Fact(name="methods", value=count(len(means))),
            Fact(name="seeds", value=count(len(comparison.seeds)), note=", ".join(map(str, comparison.seeds))),
            Fact(name="clients", value=count(len(comparison.clients))),
            Fact(name="highest mean", value=plain(means[best]), note=best),
            Fact(name="control", value=plain(control), note=comparison.control),
        ]
    )


def _settings_of_methods(result: FederationResults) -> list[Block]:
    words = {**{name: [text] for name, text in result.own_settings.items()}}
    for name, text in result.tuned.items():
        words.setdefault(name, []).append(text)
    rows = [[name, "; ".join(parts)] for name, parts in words.items()]
    table = Table(title="Settings", columns=("method", "settings of its own, and how they were chosen"), rows=rows)
    return [Folded(title="Settings of the methods", blocks=[table])] if rows else []


def _equal_in_practice(comparison: MethodComparison) -> list[str]:
    """Sentences on the methods that are better, equal or worse in practice than the control, and than the best."""
    best = by_mean(comparison)[0]
    lines = [_verdicts(comparison.pairs, comparison.control)]
    if best != comparison.control:
        scores = {name: np.asarray(values, np.float64) for name, values in comparison.scores.items()}
        lines.append(_verdicts(compare_with_control(scores, control=best, seed=0), best, is_best=True))
    return lines


def _verdicts(pairs: Mapping[str, PairedComparison], control: str, *, is_best: bool = False) -> str:
    """`Against X: better: a, b; equal within 0.01: c; not decided: d.`"""
    groups: dict[str, list[str]] = {"better": [], "equal": [], "worse": []}
    undecided: list[str] = []
    for name, pair in sorted(pairs.items(), key=lambda item: -item[1].mean):
        groups.get(shown(pair), undecided).append(name)
    titles = {"better": "better", "equal": f"equal within {ROPE:g}", "worse": "worse"}
    parts = [f"{titles[verdict]}: {', '.join(names)}" for verdict, names in groups.items() if names]
    parts += [f"not decided: {', '.join(undecided)}"] if undecided else []
    return f"Against {control}{', the highest mean' if is_best else ''}: {'; '.join(parts)}."


def _ranks(compared: Mapping[str, MethodComparison]) -> list[Section]:
    """Average ranks over federations; nothing where too few are comparable."""
    ranks = rank_if_several(list(compared.values()))
    if ranks is None:
        return []
    control = next(iter(compared.values())).control
    words = [
        f"Over {ranks.federations} federations ({', '.join(compared)}) of the {len(ranks.average_ranks)} methods that"
        " all have.",
        f"Friedman's test that all are alike: p {ranks.friedman_p:.3f}. Average ranks that are"
        f" {ranks.critical_difference:.2f} or more apart differ at 5% (Nemenyi).",
    ]
    rows: list[list[Cell]] = []
    for name, rank in sorted(ranks.average_ranks.items(), key=lambda item: item[1]):
        against = ranks.against_control.get(name)
        z, p = (None, None) if against is None else (against.z, against.adjusted_p)
        rows.append([name, plain(rank, 2), plain(z, 2), plain(p)])
    table = Table(
        title="Average ranks",
        columns=("method", "average rank", f"z against {control}", "p (Holm)"),
        rows=rows,
        note="1 is the best; of methods with equal scores in a federation the mean of their ranks",
    )
    return [
        Section(name="ranks", title="Ranks over all federations", blocks=[Text(lines=words), _rank_chart(ranks), table])
    ]


def _rank_chart(ranks: MethodRanks) -> Chart:
    """Average ranks, and the critical difference as a line from the best one."""
    order = sorted(ranks.average_ranks, key=lambda name: ranks.average_ranks[name])
    best = ranks.average_ranks[order[0]]
    rows: list[Row] = [{"method": name, "rank": ranks.average_ranks[name]} for name in order]
    critical = [{"method": order[0], "from": best, "to": best + ranks.critical_difference}]
    y = category("method", None, order=order, labelOverlap="greedy")
    layers = [
        {
            "data": {"name": "critical"},
            "mark": {"type": "rule", "color": FAINT, "strokeWidth": 5, "opacity": 0.5},
            "encoding": {"x": quantity("from", "average rank"), "x2": {"field": "to"}, "y": y},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 90, "color": colour(0), "opacity": 1},
            "encoding": {
                "x": quantity("rank", "average rank"),
                "y": y,
                "tooltip": tips(("method", "method", ""), ("rank", "average rank", ".3f")),
            },
        },
    ]
    return Chart(
        name="ranks",
        title="Average rank of every method, the best first",
        note="grey: as far as a rank may lie from the best one without differing from it (Nemenyi, 5%)",
        spec=chart({"data": {"name": "rows"}, "layer": layers}, height=row_height(len(order))),
        data={"rows": rows, "critical": critical},
    )


def _runs(finished: Mapping[Path, FinishedRun]) -> Section:
    """Every run, and the command that makes it again."""
    rows: list[list[Cell]] = []
    for path, run in finished.items():
        scores = list(run.scores.scores.values())
        dial = [] if run.config.run.dial is None else ["--dial", str(run.config.run.dial)]
        words = ["atlas", "run", "--preset", run.config.run.preset, *dial, *changed_flags(run.config)]
        rows.append(
            [
                RunFolder(path).path.name,
                run.method,
                count(run.seed),
                plain(sum(scores) / len(scores)),
                *(size(run.scores.num_bytes), duration(run.scores.seconds)),
                *(f"{config_hash(run.config):.8}", shlex.join(words)),
            ]
        )
    columns = ("run", "method", "seed", "mean test score", "bytes", "time", "settings", "command")
    table = Table(title="Runs", columns=columns, rows=rows)
    return Section(
        name="runs", title="The runs, and how to make them again", blocks=[Folded(title="All runs", blocks=[table])]
    )
