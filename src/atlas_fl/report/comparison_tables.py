"""Tables of a comparison of methods (`atlas compare`, `sweep`, `results`): terminal, page, LaTeX, CSV.

Which columns there are is said once (`METHOD_TABLES`, `PAIR_TABLES`), narrow enough for eighty columns, and all of
these but CSV are made of it. The columns of CSV are the fields of the records themselves. A test holds that a field
which none of them shows is noticed.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any, TypeVar

from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.format import EMPTY
from atlas_fl.report.method_comparison import MethodComparison, MethodRow
from atlas_fl.report.statistics import ROPE, Interval, PairedComparison
from atlas_fl.report.table import Cell, Number, Table, count, plain, size, text_of

SHOWN = 0.95
"""Posterior probability from which something is said to be shown."""
RowT = TypeVar("RowT")
MEMORY, STEPS = "device memory", "client steps"
"""Headings of the columns that are left out where nothing is known of them; others show a dash."""


def _with_half_width(mean: float, interval: Interval | None, *, sign: bool = False) -> Number:
    """The mean and half its interval, without one where all draws are alike."""
    half = "" if interval is None else f"{(interval[1] - interval[0]) / 2:.3f}"
    return Number(value=mean, text=plain(mean, sign=sign).text + (f" ±{half}" if half.strip("0.") else ""))


def _below_whole(row: MethodRow) -> Number:
    below = row.bytes_below_whole
    return Number(value=below, text=EMPTY if below is None else f"{100 * below:.2f}%")


def shown(pair: PairedComparison) -> str:
    """`worse`, `equal` or `better` where that has a posterior probability of `SHOWN` or more, and a dash else."""
    chances = {"worse": pair.bayesian.left, "equal": pair.bayesian.rope, "better": pair.bayesian.right}
    return next((word for word, chance in chances.items() if chance >= SHOWN), EMPTY)


METHOD_TABLES: Mapping[str, Mapping[str, Callable[[MethodRow], Cell]]] = {
    "Scores": {
        "mean and 95%": lambda row: _with_half_width(row.statistics.mean, row.statistics.interval),
        "std": lambda row: plain(row.statistics.std),
    },
    "Clients": {
        "worst client": lambda row: plain(row.statistics.worst_client),
        "lowest third": lambda row: plain(row.statistics.lowest_third),
        "devi-\nation": lambda row: plain(row.variance_in_tasks and row.variance_in_tasks**0.5),
        "gain": lambda row: plain(row.gain_over_majority, sign=True),
        "hurt: local": lambda row: plain(row.statistics.hurt, 2),
        "hurt: FedAvg": lambda row: plain(row.hurt_by_average, 2),
        "hurt: control": lambda row: plain(row.hurt_by_control, 2),
    },
    "Probabilities": {
        "test loss": lambda row: plain(row.loss),
        "calibration error": lambda row: plain(row.calibration_error),
    },
    "Costs": {
        "seeds": lambda row: count(row.statistics.seeds),
        "clients": lambda row: count(row.statistics.clients),
        "bytes": lambda row: size(row.num_bytes),
        "below whole": _below_whole,
        STEPS: lambda row: count(row.client_steps),
        MEMORY: lambda row: size(row.memory_bytes),
    },
}
"""Columns of the tables of methods, by title."""

PAIR_TABLES: Mapping[str, Mapping[str, Callable[[PairedComparison], Cell]]] = {
    "Against": {
        "difference and 95%": lambda pair: _with_half_width(pair.mean, pair.interval, sign=True),
        "d_z": lambda pair: plain(pair.effect_size, 1, sign=True),
        "shown": shown,
    },
    "Tests against": {
        "p": lambda pair: plain(pair.sign_flip_p),
        "p\n(Holm)": lambda pair: plain(pair.adjusted_p),
        "least\np": lambda pair: Number(value=pair.least_p, text=f"{pair.least_p:.3g}"),
        "p (Wil-\ncoxon)": lambda pair: plain(pair.wilcoxon_p),
        "P\nworse": lambda pair: plain(pair.bayesian.left, 2),
        "P\nequal": lambda pair: plain(pair.bayesian.rope, 2),
        "P\nbetter": lambda pair: plain(pair.bayesian.right, 2),
    },
}
"""Columns of the tables of methods minus the control, by title."""


NOTES = {
    "Scores": "test scores, means over clients and seeds",
    "Clients": "deviation: of clients in a task; gain: over the majority class; hurt: share of clients below it",
    "Probabilities": "test loss: cross-entropy in nats for classes; calibration error: by Guo et al. 2017",
    "Costs": (
        "below whole: bytes saved against whole models; client steps: optimizer steps of all clients, with second"
        " models and halves; device memory: predicted for the client that needs most"
    ),
    "Against": (f"paired by seed; shown: worse, equal within {ROPE:g} or better, where P is {SHOWN:g} or more"),
    "Tests against": f"p: sign flips; least p: if so many seeds differ; P: Bayesian signed-rank, equal within {ROPE:g}",
}
"""The note below each table, by its title."""


BY_EXAMPLES = "; 95%: over draws of the test examples, which own data keep in all seeds; none where all are alike"
"""End of the notes of tables whose intervals are of that kind."""


def method_tables(rows: Mapping[str, MethodRow], *, by_examples: bool = False) -> list[Table]:
    """The tables with one row a method; without those of which nothing is known, and without unknown memory."""
    tables = []
    for title, columns in METHOD_TABLES.items():
        unknown = {name for name, cell in columns.items() if all(text_of(cell(row)) == EMPTY for row in rows.values())}
        kept = {name: cell for name, cell in columns.items() if name not in unknown & {MEMORY, STEPS}}
        if len(unknown) < len(columns):
            end = BY_EXAMPLES if by_examples and title == "Scores" else ""
            tables.append(_table(title, kept, rows, note=NOTES[title] + end))
    return tables


def pair_tables(comparison: MethodComparison) -> list[Table]:
    """The tables with one row a method against the control; none of one seed."""
    ends = {"Against": BY_EXAMPLES} if comparison.by_examples else {}
    return [
        _table(f"{title} {comparison.control}", columns, comparison.pairs, note=NOTES[title] + ends.get(title, ""))
        for title, columns in PAIR_TABLES.items()
        if comparison.pairs
    ]


def first_tables(comparison: MethodComparison) -> list[Table]:
    """The two tables that answer most: the scores, and the differences from the control; of one seed, the clients."""
    first, second = method_tables(comparison.rows, by_examples=bool(comparison.by_examples))[:2]
    return [first, *(pair_tables(comparison)[:1] or [second])]


def glance_table(compared: Mapping[str, MethodComparison]) -> Table:
    """One table of all federations, by title, with one control; those methods first that gain most."""
    control = next(iter(compared.values())).control
    pairs = [comparison.pairs for comparison in compared.values()]
    names = dict.fromkeys(name for own in pairs for name in own)
    gains = {name: fmean(own[name].mean for own in pairs if name in own) for name in names}
    rows: list[list[Cell]] = [[control, *(plain(one.rows[control].statistics.mean) for one in compared.values())]]
    order = sorted(gains, key=lambda name: -gains[name])
    rows += [[name, *(_glance_cell(own.get(name)) for own in pairs)] for name in order]
    note = f"score of {control}, and of every other method the difference from it, with what is shown"
    return Table(title="At a glance", columns=("method", *compared), rows=rows, note=note)


def _glance_cell(pair: PairedComparison | None) -> Number:
    if pair is None:
        return plain(None)
    return Number(value=pair.mean, text=f"{pair.mean:+.3f} {shown(pair)}".removesuffix(f" {EMPTY}"))


def task_table(rows: Mapping[str, MethodRow]) -> Table:
    """The mean score of every task."""
    tasks = dict.fromkeys(task for row in rows.values() for task in row.tasks)
    cells: list[list[Cell]] = [[name, *(plain(row.tasks.get(task)) for task in tasks)] for name, row in rows.items()]
    return Table(title="By task", columns=("method", *tasks), rows=cells)


def _table(title: str, columns: Mapping[str, Callable[[RowT], Cell]], rows: Mapping[str, RowT], *, note: str) -> Table:
    cells = [[name, *(cell(row) for cell in columns.values())] for name, row in rows.items()]
    return Table(title=title, columns=["method", *columns], rows=cells, note=note)


def statistics_files(comparisons: Mapping[str, MethodComparison]) -> dict[str, str]:
    """The files, by name, that hold all statistics of several federations, by title: CSV in full precision, LaTeX."""
    methods: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    texts: list[str] = []
    for federation, comparison in comparisons.items():
        named = {"federation": federation}
        for name, row in comparison.rows.items():  # first how many seeds and clients there are
            methods.append({**named, "method": name, **_flat({"statistics": {}} | asdict(row))})
        named["control"] = comparison.control
        pairs += [{**named, "method": name, **_flat(asdict(pair))} for name, pair in comparison.pairs.items()]
        tables = method_tables(comparison.rows, by_examples=bool(comparison.by_examples))
        tables += [*pair_tables(comparison), task_table(comparison.rows)]
        texts += [f"% {federation}", *(f"% {table.title}\n{table.latex()}" for table in tables)]
    files = {"methods.csv": format_csv(methods), "statistics.tex": "\n".join(texts)}
    return files | ({"pairs.csv": format_csv(pairs)} if pairs else {})


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a record by name, those of records inside it behind its own; several numbers are words in one."""
    values: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            values |= _flat(value, "" if name == "statistics" else f"{name}_")
        else:
            values[prefix + name] = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return values
