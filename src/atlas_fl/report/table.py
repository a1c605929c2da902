"""A table of words and numbers, made once: rich prints it, a page and a figure show it, Markdown and LaTeX hold it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any, TypeAlias

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text as RichText

from atlas_fl.frozen import Frozen
from atlas_fl.report.format import EMPTY, evenly, human_bytes, number, percent, seconds

HEADING = 9
"""Letters of a line of a heading above numbers on the terminal."""
LEAST_SHARE = 0.001
"""Least share that a percentage of one decimal tells from nothing."""
MOST_NARROW = 4
"""Columns up to which a table may stand beside something else."""


class Number(Frozen):
    """A number as it is stored, and as people read it."""

    value: float | None
    text: str


Cell: TypeAlias = str | Number


def plain(value: float | None, digits: int = 3, *, sign: bool = False) -> Number:
    """A number with so many decimals; a dash where there is none."""
    return Number(value=value, text=number(value, digits, sign=sign))


def count(value: float | None) -> Number:
    """A whole number."""
    return Number(value=value, text=EMPTY if value is None else f"{value:,.0f}".replace(",", "\u202f"))


def size(value: float | None) -> Number:
    """Bytes in the unit that people read."""
    return Number(value=value, text=EMPTY if value is None else human_bytes(value))


def duration(value: float | None) -> Number:
    """Seconds in the unit that people read."""
    return Number(value=value, text=EMPTY if value is None else seconds(value))


def share(value: float | None) -> Number:
    """A share from 0 to 1 as a percentage."""
    if value is None or not 0 < value < LEAST_SHARE:
        return Number(value=value, text=EMPTY if value is None else percent(value))
    return Number(value=value, text=f"below {percent(LEAST_SHARE)}")


def word(value: str | None) -> str:
    """A word; a dash where there is none."""
    return value or EMPTY


def text_of(cell: Cell) -> str:
    """The cell as people read it."""
    return cell.text if isinstance(cell, Number) else cell


class Table(Frozen):
    """A table; a reader of a page can sort it by any column, and `footer` stays below."""

    title: str
    columns: Sequence[str]
    """Headings; one with its own line breaks, as `devi-\\nation`, has these on the terminal alone."""
    rows: Sequence[Sequence[Cell]]
    footer: Sequence[Sequence[Cell]] = ()
    note: str = ""
    bold_row: int | None = None
    """On the terminal."""

    def without_empty(self) -> "Table":
        """The same table without columns in which nothing is known."""
        rows = [*self.rows, *self.footer]
        is_empty = [all(text_of(row[index]) == EMPTY for row in rows) for index in range(len(self.columns))]
        return self.without([name for name, empty in zip(self.columns, is_empty, strict=True) if empty])

    def without(self, names: Collection[str]) -> "Table":
        """The same table without the columns of these names."""
        kept = [index for index, name in enumerate(self.columns) if name not in names]
        columns = [self.columns[index] for index in kept]
        body, footer = ([[row[index] for index in kept] for row in part] for part in (self.rows, self.footer))
        return replace(self, columns=columns, rows=body, footer=footer)

    @property
    def is_wide(self) -> bool:
        """True if it takes the whole width of the page."""
        return len(self.columns) > MOST_NARROW or bool(self.note)

    @property
    def numeric(self) -> list[bool]:
        """By column, whether it holds numbers."""
        rows = [*self.rows, *self.footer]
        return [any(isinstance(row[index], Number) for row in rows) for index in range(len(self.columns))]

    def __rich__(self) -> RichTable:
        """The table on the terminal: numbers are never wrapped, so that 80 columns fold words alone."""
        table = RichTable(title=escape(self.title), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.title_justify = table.caption_justify = "left"
        for column, is_number in zip(self.columns, self.numeric, strict=True):
            if is_number:
                table.add_column(_broken(escape(column)), justify="right", no_wrap=True)
            else:
                table.add_column(escape(column), overflow="fold")
        for index, row in enumerate(self.rows):
            table.add_row(*[RichText(text_of(cell)) for cell in row], style="bold" if index == self.bold_row else None)
        if self.footer:
            table.add_section()
        for row in self.footer:
            table.add_row(*[RichText(text_of(cell)) for cell in row], style="bold")
        table.caption = escape(self.note) or None
        return table

    @property
    def headings(self) -> list[str]:
        """Headings on one line."""
        return [column.replace("-\n", "").replace("\n", " ") for column in self.columns]

    def markdown(self) -> Iterator[str]:
        """The lines of the table as Markdown; the first column names things as code."""
        yield f"| {' | '.join(self.headings)} |"
        yield f"|{'---|' * len(self.columns)}"
        for name, *cells in self.rows:
            yield f"| `{text_of(name)}` | {' | '.join(map(text_of, cells))} |"

    def latex(self) -> str:
        """The table as LaTeX (booktabs)."""
        alignment = "".join("r" if index else "l" for index in range(len(self.columns)))
        lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", _latex_row(self.headings), r"\midrule"]
        lines += [_latex_row([text_of(cell) for cell in row]) for row in self.rows]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


Entry: TypeAlias = Mapping[str, Any]
"""An entry of a plan or a summary."""
Columns: TypeAlias = Mapping[str, Callable[[Entry], Cell]]
"""The cell of an entry by the heading of its column."""


def table_of(title: str, columns: Columns, entries: Iterable[Entry], *, note: str = "") -> Table:
    """A table with one row an entry; of many entries some, which the note says."""
    known = list(entries)
    rows = [[cell(entry) for cell in columns.values()] for entry in evenly(known)]
    part = f"{len(rows):,} of {len(known):,} rows, evenly spaced" if len(rows) < len(known) else ""
    return Table(title=title, columns=list(columns), rows=rows, note="\n".join(filter(None, (note, part))))


def cell_at(path: str, form: Callable[[Any], Cell] = word) -> Callable[[Entry], Cell]:
    """The cell of what lies in an entry at this path ("predicted.seconds"); `form` of None where nothing does."""

    def cell(entry: Entry) -> Cell:
        value: Any = entry
        for name in path.split("."):
            value = (value or {}).get(name)
        return form(value)

    return cell


def _broken(heading: str) -> str:
    return heading if "\n" in heading else "\n".join(wrap(heading, HEADING, break_long_words=False))


LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$ "}
)
"""Characters that LaTeX would take for commands, escaped: `fedavg_cluster` is `fedavg\\_cluster`."""


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_latex_cell, cells)) + r" \\"


def _latex_cell(text: str) -> str:
    """Signed numbers in mathematics, where a minus is no hyphen; `+0.031 ±0.002` is `$+0.031$ $\\pm$ 0.002`."""
    words = text.translate(LATEX).split(" ")
    return " ".join(f"${word}$" if word[:1] in ("+", "-") and len(word) > 1 else word for word in words)
