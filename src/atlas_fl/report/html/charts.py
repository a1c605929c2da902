"""Charts of pages and figures: Vega-Lite specifications out of `charts.yaml`, filled with titles, names and rows.

Names out of a run's files stand in rows, domains and titles alone: never in an expression, a field name or a style.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, ClassVar, TypeAlias

import yaml

Row: TypeAlias = Mapping[str, Any]
Spec: TypeAlias = dict[str, Any]

SERIES = 10
"""Colours of tasks, methods and other series, which are variables of `page.css`."""
TALLEST = 960
"""Pixels that the rows of a chart take at most, where each has one."""
ROW = 22
MOST_NUMBERED_COLUMNS = 14
"""Columns up to which a heat map has the number in each cell: more would not fit on a telephone."""
MOST_NUMBERED_ROWS = 44
MOST_LEVEL_LETTERS = 36
"""Letters of all columns up to which their names lie level."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A Vega-Lite chart of these rows."""

    kind: ClassVar[str] = "chart"
    name: str
    title: str
    note: str
    spec: Mapping[str, Any]
    rows: Sequence[Row]
    is_wide: bool = True


def chart(spec: str, rows: Sequence[Row], *, name: str = "", title: str, note: str, **values: Any) -> Chart:
    """A chart of `charts.yaml`; `values` are what it names with a `$`, and its `height` and `is_wide`."""
    sizes = {"width": "container", "height": values.get("height", 240)}
    is_wide = values.get("is_wide", True)
    filled = sizes | _fill(_specs()[spec], values)
    return Chart(name=name or spec, title=title, note=note, spec=filled, rows=rows, is_wide=is_wide)


def heat_map(
    name: str,
    rows: Sequence[Row],
    *,
    x: str,
    y: str = "client",
    value: str,
    title: str,
    note: str,
    form: str,
    domain: Sequence[float] = (),
    **values: Any,
) -> Chart:
    """Rows by columns, a colour for the value of each cell, and where they are few its number too.

    Args:
        name: of the chart.
        rows: a row for each cell.
        x: the field of the columns; `columns` has their names in order, if these are not those of the rows.
        y: the field of the lines; `lines` likewise.
        value: the field that colours a cell.
        title: of the chart.
        note: of the chart.
        form: the way in which numbers are written.
        domain: the ends of the colours; by default those of the values.
        values: `columns`, `lines`, `x_title`, `legend`, `label_limit`, and those of `chart`.
    """
    columns, lines = (values.get(key) or _distinct(rows, field) for key, field in (("columns", x), ("lines", y)))
    held = [row[value] for row in rows]
    low, high = domain or (min(held), max(held))
    is_numbered = len(columns) <= MOST_NUMBERED_COLUMNS and len(lines) <= MOST_NUMBERED_ROWS
    letters = len(columns) * max(len(column) if isinstance(column, str) else 0 for column in columns)
    usual = {"x_title": None, "label_limit": 130, "legend": value, "height": row_height(len(lines))}
    filled = usual | values | {"x": x, "y": y, "value": value, "form": form, "columns": columns, "lines": lines}
    return chart(
        "numbered_heat_map" if is_numbered else "heat_map",
        rows,
        name=name,
        title=title,
        note=note,
        domain=[low, high],
        angle=0 if letters <= MOST_LEVEL_LETTERS else -60,
        is_dark=f"datum['{value}'] < {(low + high) / 2!r}",
        **filled,
    )


def _distinct(rows: Sequence[Row], field: str) -> list[Any]:
    return list(dict.fromkeys(row[field] for row in rows))


def row_height(rows: int) -> int:
    """Height of an axis of names in pixels: a line for each, thinner if there are many."""
    return min(ROW * rows, TALLEST)


def colour(index: int) -> str:
    """The CSS variable of a task, a method or another series, by its place."""
    return f"var(--series-{index % SERIES})"


def look() -> Spec:
    """The look of all charts, in Vega-Lite's `config`."""
    found: Spec = _specs()["config"]
    return found


@cache
def _specs() -> Mapping[str, Any]:
    specs: Mapping[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("charts.yaml").read_text("utf-8"))
    return specs


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: _fill(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_fill(value, values) for value in node]
    return values[node[1:]] if isinstance(node, str) and node.startswith("$") else node
