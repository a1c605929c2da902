"""Tables of a comparison of methods (`atlas compare`, `atlas results`): terminal, Markdown, LaTeX, CSV, JSON.

Which columns there are is said once (`METHOD_TABLES`, `PAIR_TABLES`), narrow enough for eighty columns, and all of
these but CSV and JSON are made of it. The columns of CSV are the fields of the records themselves, and JSON has the
records as they are. A test holds that a field which none of them shows is noticed.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from rich.markup import escape
from rich.table import Table

from atlas_fl.experiment.tuning import TunedMethod, value_words
from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.format import EMPTY, add_columns, human_bytes, new_table, number, seconds
from atlas_fl.report.method_comparison import MethodComparison, MethodRow
from atlas_fl.report.score_table import escape_latex
from atlas_fl.report.statistics import ROPE, Interval, PairedComparison, least_sign_flip_p
from atlas_fl.storage.folder_access import open_named_file

SHOWN = 0.95
"""Posterior probability from which something is said to be shown."""
BY_SEED = "By seed"
"""The table that has a column as wide as there are seeds, for files alone."""
RowT = TypeVar("RowT")


@dataclass(frozen=True, kw_only=True)
class Column(Generic[RowT]):
    """One column of numbers."""

    heading: str
    """In at most two lines."""
    cell: Callable[[RowT], str]
    left_out_if_empty: bool = False
    """Where no row has it, as in files of before it was there; other columns show a dash."""


def _half_width(interval: Interval | None) -> str:
    return "" if interval is None else f" ±{(interval[1] - interval[0]) / 2:.3f}"


def _ends(interval: Interval | None) -> str:
    return EMPTY if interval is None else f"{interval[0]:.3f}..{interval[1]:.3f}"


def _time(count: float | None) -> str:
    return EMPTY if count is None else seconds(count)


def _whole_time(row: MethodRow) -> str:
    return EMPTY if row.seconds is None else seconds(row.seconds + (row.reused_seconds or 0.0))


def shown(pair: PairedComparison) -> str:
    """`worse`, `equal` or `better` where that has a posterior probability of `SHOWN` or more, and a dash else."""
    chances = {"worse": pair.bayesian.left, "equal": pair.bayesian.rope, "better": pair.bayesian.right}
    return next((word for word, chance in chances.items() if chance >= SHOWN), EMPTY)


METHOD_TABLES: Mapping[str, tuple[Column[MethodRow], ...]] = {
    "Scores": (
        Column(
            heading="mean\nand 95%",
            cell=lambda row: number(row.statistics.mean, 3) + _half_width(row.statistics.interval),
        ),
        Column(heading="std", cell=lambda row: number(row.statistics.std, 3)),
        Column(heading="middle\nhalf", cell=lambda row: number(row.statistics.interquartile_mean, 3)),
        Column(heading="95% by\nseeds", cell=lambda row: _ends(row.statistics.interquartile_interval)),
        Column(heading="95%\nstratified", cell=lambda row: _ends(row.statistics.stratified_interval)),
    ),
    "Clients": (
        Column(heading="worst\nclient", cell=lambda row: number(row.statistics.worst_client, 3)),
        Column(heading="lowest\nthird", cell=lambda row: number(row.statistics.lowest_third, 3)),
        Column(
            heading="devi-\nation",
            cell=lambda row: EMPTY if row.variance_in_tasks is None else number(row.variance_in_tasks**0.5, 3),
        ),
        Column(heading="over\nguess", cell=lambda row: number(row.gain_over_majority, 3, sign=True)),
        Column(heading="hurt:\nlocal", cell=lambda row: number(row.statistics.hurt, 2)),
        Column(heading="hurt:\nFedAvg", cell=lambda row: number(row.hurt_by_average, 2)),
        Column(heading="hurt:\ncontrol", cell=lambda row: number(row.hurt_by_control, 2)),
    ),
    "Probabilities": (
        Column(heading="test\nloss", cell=lambda row: number(row.loss, 3)),
        Column(heading="calibration\nerror", cell=lambda row: number(row.calibration_error, 3)),
    ),
    "Costs": (
        Column(heading="\nseeds", cell=lambda row: str(row.statistics.seeds)),
        Column(heading="\nclients", cell=lambda row: str(row.statistics.clients)),
        Column(heading="\nbytes", cell=lambda row: human_bytes(row.num_bytes)),
        Column(
            heading="below\nwhole",
            cell=lambda row: EMPTY if row.bytes_below_whole is None else f"{100 * row.bytes_below_whole:.2f}%",
        ),
        Column(
            heading="device\nmemory",
            cell=lambda row: EMPTY if row.memory_bytes is None else human_bytes(row.memory_bytes),
            left_out_if_empty=True,
        ),
        Column(heading="\ntime", cell=_whole_time),
        Column(heading="\nreused", cell=lambda row: _time(row.reused_seconds)),
    ),
}
"""Columns of the tables of methods, by title."""

PAIR_TABLES: Mapping[str, tuple[Column[PairedComparison], ...]] = {
    "Against": (
        Column(
            heading="difference\nand 95%",
            cell=lambda pair: number(pair.mean, 3, sign=True) + _half_width(pair.interval),
        ),
        Column(heading="d_z", cell=lambda pair: number(pair.effect_size, 1, sign=True)),
        Column(heading="P (run\nbeats run)", cell=lambda pair: number(pair.probability_of_improvement, 2)),
        Column(
            heading="seeds\nneeded", cell=lambda pair: EMPTY if pair.seeds_needed is None else str(pair.seeds_needed)
        ),
        Column(heading="shown", cell=shown),
    ),
    "Tests against": (
        Column(heading="p", cell=lambda pair: number(pair.sign_flip_p, 3)),
        Column(heading="p\n(Holm)", cell=lambda pair: number(pair.adjusted_p, 3)),
        Column(heading="least\np", cell=lambda pair: f"{pair.least_p:.3g}"),
        Column(heading="p (Wil-\ncoxon)", cell=lambda pair: number(pair.wilcoxon_p, 3)),
        Column(heading="P\nworse", cell=lambda pair: number(pair.bayesian.left, 2)),
        Column(heading="P\nequal", cell=lambda pair: number(pair.bayesian.rope, 2)),
        Column(heading="P\nbetter", cell=lambda pair: number(pair.bayesian.right, 2)),
    ),
    BY_SEED: (
        Column(heading="differences", cell=lambda pair: " ".join(f"{value:+.3f}" for value in pair.differences)),
    ),
}
"""Columns of the tables of methods minus the control, by title."""


def reading(comparison: MethodComparison) -> dict[str, str]:
    """What stands below each table, by its title."""
    least = least_sign_flip_p(len(comparison.seeds))
    return {
        "Scores": (
            f"test scores over {len(comparison.seeds)} seeds and {len(comparison.clients)} clients; std: over seeds of"
            " the mean over clients; middle half: interquartile mean over seeds x tasks; its 95% by a bootstrap of"
            " whole seeds, and stratified: of seeds inside each task"
        ),
        "Clients": (
            "deviation: between the clients of a task; over guess: gain over guessing the commonest class; hurt: share"
            f" of clients that score less than with local training, FedAvg, or the control, {comparison.control}"
        ),
        "Probabilities": (
            "test loss: cross-entropy in nats where labels are classes; calibration error: how far the confidence in"
            " predictions is from their accuracy (Guo et al. 2017)"
        ),
        "Costs": (
            "below whole: bytes not sent of those of whole models; device memory: what training takes of the client"
            " that needs most, as the plan predicts it; time: of a run, with what the results had taken that it reused"
            " from earlier runs (reused); frozen states that are kept are not in it"
        ),
        "Against": (
            f"paired by seed; shown: worse, equal within {ROPE:g} or better, where P is {SHOWN:g} or more;"
            " P (run beats run): of runs of any two seeds; seeds needed: for a difference of that size, power .8"
        ),
        "Tests against": (
            f"p by sign flips, at least {least:.3g} with {len(comparison.seeds)} seeds, Holm over the rows; least p:"
            f" where so many seeds differ; P: Bayesian signed-rank, equal within {ROPE:g}"
        ),
    }


def _method_tables(comparison: MethodComparison) -> Iterator[tuple[str, tuple[Column[MethodRow], ...]]]:
    """The tables of methods of which something is known."""
    rows = comparison.rows.values()
    for title, columns in METHOD_TABLES.items():
        said = {column.heading for column in columns if any(column.cell(row) != EMPTY for row in rows)}
        if said:
            yield title, tuple(column for column in columns if column.heading in said or not column.left_out_if_empty)


def terminal_tables(comparison: MethodComparison) -> Iterator[Table]:
    """Tables of eighty columns: one row a method, then one row a method against the control."""
    notes = reading(comparison)
    for title, columns in _method_tables(comparison):
        yield _terminal_table(title, columns, comparison.rows, note=notes[title])
    for title, pair_columns in PAIR_TABLES.items() if comparison.pairs else ():
        if title != BY_SEED:
            name = f"{title} {comparison.control}"
            yield _terminal_table(name, pair_columns, comparison.pairs, note=notes[title])


def _terminal_table(title: str, columns: Sequence[Column[RowT]], rows: Mapping[str, RowT], *, note: str) -> Table:
    table = new_table(title)
    add_columns(table, ["method"], [column.heading for column in columns])
    for name, row in rows.items():
        table.add_row(escape(name), *(column.cell(row) for column in columns))
    table.caption = note
    return table


def markdown_tables(comparison: MethodComparison) -> Iterator[str]:
    """The lines of all tables as Markdown, each below its title."""
    for title, columns in _method_tables(comparison):
        yield from ("", f"*{title}*", "", *_markdown_table("method", columns, comparison.rows))
    for title, pair_columns in PAIR_TABLES.items() if comparison.pairs else ():
        name = _pair_title(title, comparison)
        yield from ("", f"*{name}*", "", *_markdown_table("method", pair_columns, comparison.pairs))


def _pair_title(title: str, comparison: MethodComparison) -> str:
    return f"Minus {comparison.control}, by seed" if title == BY_SEED else f"{title} {comparison.control}"


def _markdown_table(first: str, columns: Sequence[Column[RowT]], rows: Mapping[str, RowT]) -> Iterator[str]:
    yield f"| {first} | {' | '.join(map(_plain_heading, columns))} |"
    yield f"|{'---|' * (len(columns) + 1)}"
    for name, row in rows.items():
        yield f"| `{name}` | {' | '.join(column.cell(row) for column in columns)} |"


def _plain_heading(column: Column[Any]) -> str:
    """On one line, a word that was broken whole again."""
    return column.heading.replace("-\n", "").replace("\n", " ").strip()


def markdown(comparison: MethodComparison, tuned: Sequence[TunedMethod] = ()) -> str:
    """All tables as Markdown, how to read them, and what was tried of each method, the best first."""
    seeds = ", ".join(map(str, comparison.seeds))
    lines = [
        f"Seeds {seeds}; {len(comparison.clients)} clients; control `{comparison.control}`.",
        *markdown_tables(comparison),
        "",
        *(f"- {title}: {note}" for title, note in reading(comparison).items()),
    ]
    if tuned:
        lines += ["", "| method | tried on development seeds: settings (validation) |", "|---|---|"]
        lines += [f"| `{method.strategy}` | {_trials(method)} |" for method in tuned]
    return "\n".join([*lines, ""])


def _trials(method: TunedMethod) -> str:
    ordered = sorted(method.trials, key=lambda trial: trial.validation, reverse=True)
    words = [" ".join(f"{name} {value_words(value)}" for name, value in trial.settings.items()) for trial in ordered]
    return "; ".join(f"{one} ({trial.validation:.3f})" for one, trial in zip(words, ordered, strict=True))


def latex(comparison: MethodComparison) -> str:
    """All tables as LaTeX (booktabs), each below a comment with its title."""
    tables = [_latex_table(title, columns, comparison.rows) for title, columns in _method_tables(comparison)]
    tables += [
        _latex_table(_pair_title(title, comparison), columns, comparison.pairs)
        for title, columns in PAIR_TABLES.items()
        if comparison.pairs
    ]
    return "\n".join(tables)


def _latex_table(title: str, columns: Sequence[Column[RowT]], rows: Mapping[str, RowT]) -> str:
    headings = ["method", *map(_plain_heading, columns)]
    lines = [f"% {title}", rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule"]
    lines += [" & ".join(map(escape_latex, headings)) + r" \\", r"\midrule"]
    for name, row in rows.items():
        lines.append(" & ".join([escape_latex(name), *(_latex_cell(column.cell(row)) for column in columns)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_cell(text: str) -> str:
    """Signed numbers in mathematics, where a minus is no hyphen; `+0.031 ±0.002` is `$+0.031$ $\\pm$ 0.002`."""
    words = [rf"$\pm$ {word[1:]}" if word.startswith("±") else word for word in map(escape_latex, text.split(" "))]
    return " ".join(f"${word}$" if word[0] in "+-" and len(word) > 1 else word for word in words)


def methods_csv(comparisons: Mapping[str, MethodComparison]) -> str:
    """A row for each federation and method with every field of `MethodRow`, in full precision; unknown ones empty."""
    rows = [
        {"federation": federation, "method": name, **flat_values(row)}
        for federation, comparison in comparisons.items()
        for name, row in comparison.rows.items()
    ]
    return _csv(["federation", "method", *flat_names(MethodRow)], rows)


def pairs_csv(comparisons: Mapping[str, MethodComparison]) -> str:
    """A row for each federation and method with every field of `PairedComparison` of it minus the control."""
    rows = [
        {"federation": federation, "method": name, "control": comparison.control, **flat_values(pair)}
        for federation, comparison in comparisons.items()
        for name, pair in comparison.pairs.items()
    ]
    return _csv(["federation", "method", "control", *flat_names(PairedComparison)], rows)


def _csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    return format_csv(names, [[row.get(name) for name in names] for row in rows])


def comparison_json(comparison: MethodComparison, tuned: Sequence[TunedMethod] = ()) -> str:
    """All of it as strict JSON, and what was tried of each method."""
    tuning = {method.strategy: [asdict(trial) for trial in method.trials] for method in tuned}
    return json.dumps({**asdict(comparison), "tuning": tuning}, indent=1, allow_nan=False) + "\n"


def statistics_files(comparisons: Mapping[str, MethodComparison]) -> dict[str, str]:
    """The files, by name, that hold all statistics of several federations, by title."""
    return {
        "methods.csv": methods_csv(comparisons),
        "pairs.csv": pairs_csv(comparisons),
        "statistics.json": json.dumps(
            {federation: asdict(comparison) for federation, comparison in comparisons.items()},
            indent=1,
            allow_nan=False,
        )
        + "\n",
        "statistics.tex": "\n".join(
            f"% {federation}\n{latex(comparison)}" for federation, comparison in comparisons.items()
        ),
    }


def is_methods_csv(path: Path) -> bool:
    """Whether a file begins as `methods_csv` writes it."""
    with open_named_file(path, max_bytes=sys.maxsize) as file:
        return (
            file.readline(1000).rstrip(b"\r\n") == ",".join(["federation", "method", *flat_names(MethodRow)]).encode()
        )


def flat_names(record: type[Any], prefix: str = "") -> list[str]:
    """The columns of a record: its fields, those of records inside it in their place, an interval as two."""
    names: list[str] = []
    for name, kind in get_type_hints(record).items():
        if is_dataclass(kind):
            assert isinstance(kind, type)
            names += flat_names(kind, _prefix(name))
        else:
            names += [f"{prefix}{name}_low", f"{prefix}{name}_high"] if kind == Interval | None else [prefix + name]
    return names


def flat_values(record: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a record by the names that `flat_names` gives them; several numbers are words of one cell."""
    values: dict[str, Any] = {}
    kinds = get_type_hints(type(record))
    for field in fields(record):
        value, name = getattr(record, field.name), prefix + field.name
        if is_dataclass(value):
            values |= flat_values(value, _prefix(field.name))
        elif kinds[field.name] == Interval | None:
            values |= dict(zip((f"{name}_low", f"{name}_high"), value or (None, None), strict=True))
        else:
            values[name] = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return values


def _prefix(name: str) -> str:
    return "" if name == "statistics" else f"{name}_"  # a method's own numbers go by their names
