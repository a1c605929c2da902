"""A comparison as a table for the screen, as CSV and as LaTeX."""

import csv
from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO

from rich.markup import escape
from rich.table import Table

from atlas_fl.report.compare import ComparisonRow
from atlas_fl.report.words import EMPTY, add_columns, human_bytes, new_table, number, seconds


def comparison_table(rows: Sequence[ComparisonRow], *, title: str = "Comparison") -> Table:
    """One row a group, in eighty columns; the best mean and the best worst client are bold."""
    table = new_table(title)
    add_columns(table, ["run"], ["seeds", "mean", "std", "worst\nclient", "gain over\nlocal", "bytes", "time"])
    best = {name: max((_value(row, name) for row in rows), default=0.0) for name in ("mean", "worst")}
    for row in rows:
        table.add_row(
            escape(row.name),
            str(row.seeds),
            _bold(number(row.mean, 3), _value(row, "mean") == best["mean"]),
            number(row.std, 3),
            _bold(number(row.worst, 3), _value(row, "worst") == best["worst"]),
            number(row.gain_over_local, 3, sign=True),
            human_bytes(row.bytes_up + row.bytes_down),
            EMPTY if row.seconds is None else seconds(row.seconds),
        )
    table.caption = "test scores of the tasks' own metrics; std over seeds of the mean over clients"
    if any(row.gain_over_local is None for row in rows):
        table.caption += f"\ngain over local: {EMPTY} where no run of strategy local has the same seed and settings"
    return table


def tasks_table(rows: Sequence[ComparisonRow]) -> Table:
    """One row a group: the gain over guessing the majority class, and the mean score of every task."""
    table, tasks = new_table("By task"), _tasks(rows)
    add_columns(table, ["run"], ["gain over\nmajority", *tasks])
    for row in rows:
        gain = number(row.gain_over_majority, 3, sign=True)
        table.add_row(escape(row.name), gain, *(number(row.tasks.get(task), 3) for task in tasks))
    return table


def to_csv(rows: Sequence[ComparisonRow]) -> str:
    """The rows as CSV with a header, full precision, one column a task (`task:NAME`); unknown values are empty."""
    tasks = _tasks(rows)
    plain = [name for name in ComparisonRow.__dataclass_fields__ if name != "tasks"]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*plain, *(f"task:{task}" for task in tasks)])
    for row in rows:
        values = asdict(row)
        writer.writerow([*(values[name] for name in plain), *(row.tasks.get(task) for task in tasks)])
    return text.getvalue()


def to_latex(rows: Sequence[ComparisonRow]) -> str:
    """The rows as a LaTeX table (booktabs): mean with std, worst client, gain over local, by task, bytes."""
    tasks = _tasks(rows)
    headings = ["run", "mean", "worst client", "gain over local", *tasks, "bytes"]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(_escaped, headings)) + r" \\", r"\midrule"]
    for row in rows:
        spread = "" if row.std is None else rf" $\pm$ {number(row.std, 3)}"
        cells = [
            _escaped(row.name),
            number(row.mean, 3) + spread,
            number(row.worst, 3),
            EMPTY if row.gain_over_local is None else f"${number(row.gain_over_local, 3, sign=True)}$",
            *(number(row.tasks.get(task), 3) for task in tasks),
            human_bytes(row.bytes_up + row.bytes_down),
        ]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _tasks(rows: Sequence[ComparisonRow]) -> list[str]:
    return list(dict.fromkeys(task for row in rows for task in row.tasks))


def _value(row: ComparisonRow, name: str) -> float:
    value = getattr(row, name)
    return float("-inf") if value is None else float(value)


def _bold(text: str, yes: bool) -> str:
    return f"[bold]{text}[/bold]" if yes and text != EMPTY else text


def _escaped(text: str) -> str:
    r"""Text with what LaTeX would take for a command written out: `fedavg_cluster` is `fedavg\_cluster`."""
    commands = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(commands.get(letter, "\\" + letter if letter in "&%$#_{}" else letter) for letter in text)
