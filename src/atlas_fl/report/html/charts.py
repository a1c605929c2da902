"""Vega-Lite specifications of the kinds of charts that pages hold, made of field names and of the page's colours.

Names out of a run's files stand in rows, domains and options alone: never in an expression, a field name or a style.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
INK = "var(--ink)"
FAINT = "var(--faint)"


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
    """An axis of names in this order."""
    return {"field": field, "type": "nominal", "title": title, "sort": list(order), "axis": axis}


def rounds(title: str | None = "round") -> Spec:
    """The axis of rounds."""
    return quantity("round", title, form="d", tickMinStep=1, grid=False)


def colours(field: str, title: str | None, *, domain: Sequence[Any], values: Sequence[str], **changes: Any) -> Spec:
    """A colour for each name."""
    scale = {"domain": list(domain), "range": list(values)}
    return {"field": field, "type": "nominal", "title": title, "scale": scale, **changes}


def tips(*fields: tuple[str, str, str]) -> list[Spec]:
    """What hovering shows: field, title, and the format of a number or nothing for a text."""
    return [
        {"field": field, "title": title} | ({"type": "quantitative", "format": form} if form else {"type": "nominal"})
        for field, title, form in fields
    ]


def row_height(rows: int) -> int:
    """Of an axis of names in pixels: a line for each, thinner where there are many."""
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
    few = len(x["sort"]) <= MOST_NUMBERED_COLUMNS and len(y["sort"]) <= MOST_NUMBERED_ROWS
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
        height=row_height(len(y["sort"])),
    )


def line(stroke: str, *, width: float = 2, points: int = 30) -> Spec:
    """A line of one colour through points of this size."""
    return {"type": "line", "color": stroke, "strokeWidth": width, "point": {"size": points, "color": stroke}}


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
