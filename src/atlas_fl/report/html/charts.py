"""Charts of pages and figures: Vega-Lite specifications out of `charts.yaml`, filled with titles, names and rows.

Names out of a run's files stand in rows, domains and titles alone: never in an expression, a field name or a style.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import yaml

from atlas_fl.frozen import Frozen
from atlas_fl.packaged import packaged_text

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


class Chart(Frozen):
    """A Vega-Lite chart of these rows."""

    name: str
    title: str
    note: str
    spec: Mapping[str, Any]
    rows: Sequence[Row]
    is_wide: bool = True


def chart(entry: str, rows: Sequence[Row], *, name: str = "", spec: str = "", **values: Any) -> Chart:
    """A chart of an entry of `charts.yaml`.

    Args:
        entry: its title and note, and unless `spec` names another its specification.
        rows: of the chart.
        name: of the chart, by default that of the entry.
        spec: the entry of its specification.
        values: what the title and the note name in braces and the specification with a `$`; `height` and `is_wide`.
    """
    options = {"height": 240, "is_wide": True} | _specs()[entry] | values
    return Chart(
        name=name or entry,
        title=options["title"].format(**values),
        note=options["note"].format(**values),
        spec={"width": "container", "height": options["height"]} | _fill(_specs()[spec or entry]["spec"], options),
        rows=rows,
        is_wide=options["is_wide"],
    )


def heat_map(entry: str, rows: Sequence[Row], *, domain: Sequence[float] = (), **values: Any) -> Chart:
    """Rows by columns, a colour for the value of each cell, and where they are few its number too.

    Args:
        entry: of `charts.yaml`: the fields of columns (`x`), lines (`y`) and colours (`value`), and how they are shown.
        rows: a row for each cell.
        domain: the ends of the colours; by default those of the values.
        values: `columns` and `lines`, their names in order if these are not those of the rows, and those of `chart`.
    """
    cells = {"y": "client", "x_title": None, "label_limit": 130, **_specs()[entry], **values}
    columns = values.get("columns") or list(dict.fromkeys(row[cells["x"]] for row in rows))
    lines = values.get("lines") or list(dict.fromkeys(row[cells["y"]] for row in rows))
    numbers = [row[cells["value"]] for row in rows]
    low, high = domain or (min(numbers), max(numbers))
    is_numbered = len(columns) <= MOST_NUMBERED_COLUMNS and len(lines) <= MOST_NUMBERED_ROWS
    letters = len(columns) * max(len(column) if isinstance(column, str) else 0 for column in columns)
    shown = {
        "legend": cells["value"],
        "height": row_height(len(lines)),
        "angle": 0 if letters <= MOST_LEVEL_LETTERS else -60,
        "is_dark": f"datum['{cells['value']}'] < {(low + high) / 2!r}",
    }
    drawn = shown | cells | {"columns": columns, "lines": lines, "domain": [low, high]}
    return chart(entry, rows, spec="numbered_heat_map" if is_numbered else "heat_map", **drawn)


def row_height(rows: int) -> int:
    """Height of an axis of names in pixels: a line for each, thinner if there are many."""
    return min(ROW * rows, TALLEST)


def colour(index: int) -> str:
    """The CSS variable of a task, a method or another series, by its place."""
    return f"var(--series-{index % SERIES})"


def look() -> Spec:
    """The look of all charts, in Vega-Lite's `config`."""
    config: Spec = _specs()["config"]
    return config


@cache
def _specs() -> Mapping[str, Any]:
    specs: Mapping[str, Any] = yaml.safe_load(packaged_text(__package__, "charts.yaml"))
    return specs


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: _fill(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_fill(value, values) for value in node]
    return values[node[1:]] if isinstance(node, str) and node.startswith("$") else node
