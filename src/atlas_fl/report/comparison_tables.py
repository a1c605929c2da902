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

from atlas_fl.experiment.tuning import TunedMethod, value_words
from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.format import EMPTY, human_bytes, number, seconds
from atlas_fl.report.method_comparison import MethodComparison, MethodRow
from atlas_fl.report.statistics import ROPE, Interval, PairedComparison, least_sign_flip_p
from atlas_fl.report.table import Cell, Number, Table
from atlas_fl.storage.folder_access import open_named_file

SHOWN = 0.95
"""Posterior probability from which something is said to be shown."""
RowT = TypeVar("RowT")


@dataclass(frozen=True, kw_only=True)
class Column(Generic[RowT]):
    """One column of numbers."""

    heading: str
    cell: Callable[[RowT], str]
    left_out_if_empty: bool = False
    """If no row has it; other columns show a dash."""


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
            heading="mean and 95%",
            cell=lambda row: number(row.statistics.mean, 3) + _half_width(row.statistics.interval),
        ),
        Column(heading="std", cell=lambda row: number(row.statistics.std, 3)),
        Column(heading="middle half", cell=lambda row: number(row.statistics.interquartile_mean, 3)),
        Column(heading="95% by seeds", cell=lambda row: _ends(row.statistics.interquartile_interval)),
        Column(heading="95% stratified", cell=lambda row: _ends(row.statistics.stratified_interval)),
    ),
    "Clients": (
        Column(heading="worst client", cell=lambda row: number(row.statistics.worst_client, 3)),
        Column(heading="lowest third", cell=lambda row: number(row.statistics.lowest_third, 3)),
        Column(
            heading="devi-\nation",
            cell=lambda row: EMPTY if row.variance_in_tasks is None else number(row.variance_in_tasks**0.5, 3),
        ),
        Column(heading="over guess", cell=lambda row: number(row.gain_over_majority, 3, sign=True)),
        Column(heading="hurt: local", cell=lambda row: number(row.statistics.hurt, 2)),
        Column(heading="hurt: FedAvg", cell=lambda row: number(row.hurt_by_average, 2)),
        Column(heading="hurt: control", cell=lambda row: number(row.hurt_by_control, 2)),
    ),
    "Probabilities": (
        Column(heading="test loss", cell=lambda row: number(row.loss, 3)),
        Column(heading="calibration error", cell=lambda row: number(row.calibration_error, 3)),
    ),
    "Costs": (
        Column(heading="seeds", cell=lambda row: str(row.statistics.seeds)),
        Column(heading="clients", cell=lambda row: str(row.statistics.clients)),
        Column(heading="bytes", cell=lambda row: human_bytes(row.num_bytes)),
        Column(
            heading="below whole",
            cell=lambda row: EMPTY if row.bytes_below_whole is None else f"{100 * row.bytes_below_whole:.2f}%",
        ),
        Column(
            heading="device memory",
            cell=lambda row: EMPTY if row.memory_bytes is None else human_bytes(row.memory_bytes),
            left_out_if_empty=True,
        ),
        Column(heading="time", cell=_whole_time),
        Column(heading="reused", cell=lambda row: _time(row.reused_seconds)),
    ),
}
"""Columns of the tables of methods, by title."""

PAIR_TABLES: Mapping[str, tuple[Column[PairedComparison], ...]] = {
    "Against": (
        Column(
            heading="difference and 95%",
            cell=lambda pair: number(pair.mean, 3, sign=True) + _half_width(pair.interval),
        ),
        Column(heading="d_z", cell=lambda pair: number(pair.effect_size, 1, sign=True)),
        Column(heading="P (run beats run)", cell=lambda pair: number(pair.probability_of_improvement, 2)),
        Column(
            heading="seeds needed", cell=lambda pair: EMPTY if pair.seeds_needed is None else str(pair.seeds_needed)
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
}
"""Columns of the tables of methods minus the control, by title."""
BY_SEED = (
    Column[PairedComparison](
        heading="differences", cell=lambda pair: " ".join(f"{value:+.3f}" for value in pair.differences)
    ),
)
"""Column as wide as there are seeds, for files alone."""


def reading(comparison: MethodComparison) -> dict[str, str]:
    """The note below each table, by its title."""
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


def comparison_tables(comparison: MethodComparison) -> list[Table]:
    """All tables: one row a method, then one row a method against the control."""
    notes = reading(comparison)
    control = comparison.control
    tables = []
    for title, columns in METHOD_TABLES.items():
        known = [any(column.cell(row) != EMPTY for row in comparison.rows.values()) for column in columns]
        kept = [column for column, is_known in zip(columns, known) if is_known or not column.left_out_if_empty]
        if any(known):
            tables.append(_table(title, kept, comparison.rows, note=notes[title]))
    for title, pair_columns in PAIR_TABLES.items() if comparison.pairs else ():
        tables.append(_table(f"{title} {control}", pair_columns, comparison.pairs, note=notes[title]))
    if comparison.pairs:
        tables.append(_table(f"Minus {control}, by seed", BY_SEED, comparison.pairs))
    return tables


def _table(title: str, columns: Sequence[Column[RowT]], rows: Mapping[str, RowT], *, note: str = "") -> Table:
    cells: list[list[Cell]] = [
        [name, *(Number(value=None, text=column.cell(row)) for column in columns)] for name, row in rows.items()
    ]
    return Table(title=title, columns=["method", *(column.heading for column in columns)], rows=cells, note=note)


def terminal_tables(comparison: MethodComparison) -> list[Table]:
    """The tables that fit eighty columns; differences by seed are as wide as there are seeds."""
    return [table for table in comparison_tables(comparison) if table.note]


def markdown_tables(comparison: MethodComparison) -> Iterator[str]:
    """The lines of all tables as Markdown, each below its title."""
    for table in comparison_tables(comparison):
        yield from ("", f"*{table.title}*", "", *table.markdown())


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
    return "\n".join(f"% {table.title}\n{table.latex()}" for table in comparison_tables(comparison))


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
    """Return whether a file begins as `methods_csv` writes it."""
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
