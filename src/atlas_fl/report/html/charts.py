"""Vega-Lite specifications of the kinds of charts that pages hold, made of field names and of the page's colours.

Names out of a run's files stand in rows, domains and options alone: never in an expression, a field name or a style.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from atlas_fl.report.html.palette import colour

Spec = dict[str, Any]

TALLEST = 960
"""Pixels that the rows of a heat map take at most, where each has one."""
ROW = 22
LEAST_ROW = 4
MOST_NUMBERED_COLUMNS = 14
"""Columns up to which a heat map has the number in each cell: more would not fit on a telephone."""
MOST_NUMBERED_ROWS = 44
MOST_LEVEL_LETTERS = 36
MOST_TICKS = 8
BAR = {"x": {"value": -9}, "x2": {"value": -3}}
"""Where the bar of a row's task lies, in pixels left of the cells."""
INK = "var(--ink)"
FAINT = "var(--faint)"
LINE = "var(--line)"
_TEXT = {"labelColor": INK, "titleColor": FAINT, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11}
CONFIG: Spec = {
    "background": None,
    "view": {"stroke": None},
    "axis": _TEXT
    | {"gridColor": LINE, "domainColor": LINE, "tickColor": LINE, "labelLimit": 130, "labelSeparation": 4},
    "legend": _TEXT
    | {
        "orient": "top",
        "labelLimit": 200,
        "titleLimit": 320,
        "columns": 3,
        "layout": {"top": {"direction": "vertical"}},
    }
    | {"symbolBaseFillColor": INK, "symbolBaseStrokeColor": INK},
    "text": {"fill": INK},
}
"""The look of all charts but their font, of which a page has the reader's own."""


def chart(spec: Mapping[str, Any], *, height: Any = 240) -> Spec:
    """As wide as the page has room for it, and so many pixels high."""
    return {"width": "container", "height": height, **spec}


def quantity(
    field: str, title: str | None, *, form: str = "", zero: bool = False, domain: Sequence[float] = (), **axis: Any
) -> Spec:
    """An axis of numbers."""
    scale: Spec = {"zero": zero} | ({"domain": list(domain)} if domain else {"nice": True})
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale,
        "axis": {"labelFlush": False, "tickCount": MOST_TICKS} | ({"format": form} if form else {}) | axis,
    }


def category(field: str, title: str | None, *, order: Sequence[Any], **axis: Any) -> Spec:
    """An axis of these names in their order, with or without a row for each."""
    return {"field": field, "type": "nominal", "title": title, "scale": {"domain": list(order)}, "axis": axis}


def rounds(title: str | None = "round") -> Spec:
    """The axis of rounds."""
    return quantity("round", title, form="d", tickMinStep=1, grid=False)


def colours(
    field: str, title: str | None, *, domain: Sequence[Any], values: Sequence[str] = (), **changes: Any
) -> Spec:
    """A colour for each name, by default that of its place."""
    scale = {"domain": list(domain), "range": list(values) or [colour(index) for index in range(len(domain))]}
    return {"field": field, "type": "nominal", "title": title, "scale": scale, **changes}


def tips(*fields: tuple[str, str, str]) -> list[Spec]:
    """Tooltip of a mark: field, title, and the format of a number or nothing for a text."""
    return [
        {"field": field, "title": title} | ({"type": "quantitative", "format": form} if form else {"type": "nominal"})
        for field, title, form in fields
    ]


def row_height(rows: int) -> int:
    """Height of an axis of names in pixels: a line for each, thinner if there are many."""
    return min(ROW * rows, max(TALLEST, LEAST_ROW * rows))


def heat_map(
    *,
    x: Spec,
    y: Spec,
    value: str,
    title: str,
    form: str,
    tooltip: Sequence[Spec],
    scheme: str = "viridis",
    domain: tuple[float, float],
    text: tuple[str, str] | None = None,
    levels: Sequence[float] = (),
) -> Spec:
    """Rows by columns, a colour for the value of each cell, and where they are few its number too.

    Args:
        x: the columns, an axis of names.
        y: the rows, an axis of names.
        value: the field that colours a cell.
        title: its name.
        form: how the legend writes it.
        tooltip: what hovering over a cell shows.
        scheme: of Vega; the high end is light in `viridis` and dark in all others.
        domain: the ends of the colours.
        text: the field that is written into a cell and its format, where it is another one.
        levels: all values, in rising order, where they are few and each has a colour of its own.
    """
    num_columns, num_rows = (len(axis["scale"]["domain"]) for axis in (x, y))
    few = num_columns <= MOST_NUMBERED_COLUMNS and num_rows <= MOST_NUMBERED_ROWS
    written, written_form = text or (value, form)
    middle = levels[len(levels) // 2] if len(levels) > 1 else sum(domain) / 2
    colour: Spec = {"field": value, "title": title}
    if levels:
        colour |= {"type": "ordinal", "scale": {"scheme": scheme, "domain": list(levels)}, "legend": {"columns": 8}}
    else:
        scale = {"scheme": scheme, "domain": list(domain)}
        colour |= {"type": "quantitative", "scale": scale, "legend": {"format": form, "gradientLength": 160}}
    cells = {
        "mark": {"type": "rect", "stroke": "var(--ground)", "strokeWidth": 1 if few else 0},
        "encoding": {"color": colour, "tooltip": list(tooltip)},
    }
    light, dark = ("#ffffff", "#14181d") if scheme == "viridis" else ("#14181d", "#ffffff")
    numbers = {
        "mark": {"type": "text", "fontSize": 10},
        "encoding": {
            "text": {"field": written, "type": "quantitative", "format": written_form},
            "color": {"condition": {"test": f"datum['{value}'] < {middle!r}", "value": light}, "value": dark},
            "tooltip": list(tooltip),
        },
    }
    return chart(
        {"data": {"name": "rows"}, "encoding": {"x": x, "y": y}, "layer": [cells, numbers] if few else [cells]},
        height=row_height(num_rows),
    )


def line(stroke: str, *, width: float = 2, points: int = 30) -> Spec:
    """A line of one colour through points of this size."""
    return {"type": "line", "color": stroke, "strokeWidth": width, "point": {"size": points, "color": stroke}}


def of_clients(spec: Spec, rows: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> tuple[Spec, dict[str, Any]]:
    """A heat map of clients with a bar in the colour of each one's task, and lines between clusters; its further data.

    Args:
        spec: the heat map, with clients as its rows.
        rows: of each client in the order of the map: `client`, `task` and `cluster`.
        tasks: all tasks in the order of their colours.
    """
    task = colours("task", "task", domain=tasks)
    starts = [row for row, before in zip(rows[1:], rows) if row["cluster"] < 0 or row["cluster"] != before["cluster"]]
    y = spec["encoding"]["y"] | {"axis": {**spec["encoding"]["y"]["axis"], "offset": 12, "ticks": False}}
    bar = {"data": {"name": "clients"}, "mark": {"type": "rect"}, "encoding": {**BAR, "color": task}}
    edge = {
        "data": {"name": "starts"},
        "mark": {"type": "rule", "color": INK},
        "encoding": {
            "x": {"value": 0},
            "x2": {"value": "width"},
            "y": {name: y[name] for name in y if name != "scale"} | {"bandPosition": 0},
        },
    }
    further = {
        "encoding": {**spec["encoding"], "y": y},
        "layer": [*spec["layer"], bar, *([edge] if starts else [])],
        "resolve": {"scale": {"color": "independent"}},
    }
    bars = [{"client": row["client"], "task": row["task"]} for row in rows]
    return spec | further, {"clients": bars} | ({"starts": starts} if starts else {})


def class_axis(classes: Sequence[Any]) -> Spec:
    """The columns of a heat map by class: names lie level where they are short and few."""
    angle = 0 if len(classes) * max(len(str(name)) for name in classes) <= MOST_LEVEL_LETTERS else -60
    return category("class", None, order=classes, labelOverlap="greedy", labelAngle=angle)


def picker(field: str, names: Sequence[str], *, everyone: str, label: str) -> Spec:
    """A menu by which a reader picks one name out; the keyboard reaches it."""
    return {
        "name": "picked",
        "select": {"type": "point", "fields": [field], "on": "click", "clear": "dblclick"},
        "bind": {"input": "select", "options": [None, *names], "labels": [everyone, *names], "name": f"{label} "},
    }


def rule_at(field: str, *, data: str, dash: Sequence[int] = (5, 4)) -> Spec:
    """A level line at a value."""
    return {
        "data": {"name": data},
        "mark": {"type": "rule", "color": INK, "strokeDash": list(dash), "strokeWidth": 1},
        "encoding": {"x": None, "y": {"field": field, "type": "quantitative"}},
    }
