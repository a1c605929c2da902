"""Figures as files: the charts and tables of a page as one Vega-Lite specification, and that as PNG and PDF.

In: elements of `report.html`. Out: a drawing, and its files. vl-convert draws without a network, in a font of its own.
"""

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from textwrap import wrap
from typing import Any

import vl_convert

from atlas_fl.report.html.charts import CONFIG, ROW, Spec, category, chart
from atlas_fl.report.html.elements import Chart
from atlas_fl.report.html.palette import theme_colours
from atlas_fl.report.table import Table, text_of
from atlas_fl.storage.files import set_aside
from atlas_fl.storage.folder_access import memory_bytes, read_named_file, write_atomic

DPI = 300
SOFTWARE = b"Software\0ATLAS"
"""Stands in every PNG, which is known by it."""
WIDTH, NARROW = 720, 330
"""Points, of which an inch has 72: of a chart, and of one that stands beside others."""
HEADING = 14
"""Letters up to which the heading of a column is one line."""
LETTER = 5.2
"""Points of a letter of a note, on average."""
FONT = "Liberation Sans, sans-serif"
FADED = 0.4
"""Opacity of lines that lie over each other."""
PROPERTIES_OF_OBJECTS = frozenset(
    (
        *("constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable", "toLocaleString", "toString"),
        *("valueOf", "__proto__", "__defineGetter__", "__defineSetter__", "__lookupGetter__", "__lookupSetter__"),
    )
)
"""Names by which Vega cannot group; a space without width makes others of them, as `page.js` does."""


def draw(blocks: Sequence[Chart | Table], *, columns: int = 1, empty: str = "") -> str:
    """Draw these charts and tables as one SVG, so many in a row; or a sentence where there is none."""
    colours = {f"var(--{name})": value for name, value in theme_colours("light").items()}
    spec = _resolve(figure_spec(blocks, columns=columns, empty=empty), colours)
    svg = str(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))
    numbers = list(dict.fromkeys(re.findall(r"gradient_\d+", svg)))  # counted on from one drawing to the next
    return re.sub(r"gradient_\d+", lambda found: f"gradient_{numbers.index(found[0])}", svg)


def figure_spec(blocks: Sequence[Chart | Table], *, columns: int = 1, empty: str = "") -> Spec:
    """One Vega-Lite specification of all blocks, with their data inside."""
    views = [_view(block, width=WIDTH if columns == 1 else NARROW) for block in blocks]
    if not views:
        sentence = {"type": "text", "text": empty, "fontSize": 13}
        views = [{"data": {"values": [{}]}, "mark": sentence, "width": WIDTH, "height": 160}]
    return {
        "config": CONFIG
        | {"font": FONT, "background": "var(--ground)", "point": {"opacity": 1}, "tick": {"opacity": 1}},
        "padding": 14,
        "concat": views,
        "columns": columns,
        "spacing": 30,
        "resolve": {"scale": dict.fromkeys(("color", "shape", "strokeDash", "opacity"), "independent")},
    }


def _view(block: Chart | Table, *, width: int) -> Spec:
    element = block if isinstance(block, Chart) else _table_chart(block)
    title = {
        "text": element.title,
        "anchor": "start",
        "fontSize": 14,
        "fontWeight": "normal",
        "color": "var(--ink)",
        "offset": 12,
    }
    if element.note:
        title |= {
            "subtitle": wrap(element.note, int(width / LETTER)),
            "subtitleColor": "var(--faint)",
            "subtitlePadding": 5,
        }
    spec: Spec = _still(element.spec, element.data)
    return {**spec, "width": width, "title": title}


def _still(node: Any, data: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """The specification with its data inside and without what only a reader's pointer does."""
    if isinstance(node, list):
        return [_still(entry, data) for entry in node]
    if not isinstance(node, dict):
        return node
    if "param" in node.get("condition", ()):
        return {"value": node["condition"]["value"]}
    if isinstance(node.get("opacity"), dict):
        value = _still(node["opacity"], data)["value"]
        node = {**node, "opacity": {"value": 1}, "strokeOpacity": {"value": 1 if value == 1 else FADED}}
    elif "opacity" in node:
        node = {**node, "opacity": 1}
    kept = {key: _still(value, data) for key, value in node.items() if key not in ("params", "tooltip")}
    if "name" in node.get("data", ()):
        kept["data"] = {"values": [dict(row) for row in data[node["data"]["name"]]]}
    return kept


def _table_chart(table: Table) -> Chart:
    """The cells of a table as text in rows and columns."""
    filled = table.without_empty()
    lines = [wrap(name, HEADING) for name in filled.columns]
    most = max(map(len, lines))
    headings = ["\n".join([""] * (most - len(words)) + words) for words in lines]
    body = [*filled.rows, *filled.footer]
    rows = [
        {"row": number, "column": heading, "text": text_of(cell)}
        for number, cells in enumerate(body)
        for heading, cell in zip(headings, cells, strict=True)
    ]
    # lines of a label follow below the first one
    above = {"orient": "top", "labelPadding": 4 + 13 * (most - 1), "labelExpr": "split(datum.label, '\\n')"}
    plain = {"labelAngle": 0, "ticks": False, "domain": False}
    encoding = {
        "x": category("column", None, order=headings, **above, **plain),
        "y": category("row", None, order=range(len(body)), labels=False, **plain),
        "text": {"field": "text"},
    }
    spec = {"data": {"name": "rows"}, "mark": {"type": "text", "fontSize": 11}, "encoding": encoding}
    spec = chart(spec, height=ROW * len(body))
    return Chart(name="table", title=table.title, note=table.note, spec=spec, data={"rows": rows})


def _resolve(node: Any, colours: Mapping[str, str]) -> Any:
    """Colours for the names of their variables, and names by which Vega can group."""
    if isinstance(node, Mapping):
        return {key: _resolve(value, colours) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_resolve(value, colours) for value in node]
    if isinstance(node, str):
        if node in PROPERTIES_OF_OBJECTS:
            return node + "\u200b"
        return colours.get(node, node)
    return node


def save_png(svg: str, path: Path, *, within: Path | None = None) -> Path:
    """Write a figure as PNG at 300 DPI in one step and return its path; the same figure gives the same bytes.

    No part of the path below `within` is a link.
    """
    image = vl_convert.svg_to_png(svg, ppi=DPI)
    chunk = b"tEXt" + SOFTWARE
    named = struct.pack(">I", len(SOFTWARE)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    header = 8 + 25  # the signature and the first chunk, behind which others may stand
    write_atomic(path, image[:header] + named + image[header:], within=within)
    return path


def save_pdf(svg: str, path: Path, *, within: Path | None = None) -> Path:
    """Write a figure as PDF in one step and return its path, unless this figure lies there already.

    vl-convert lists colours and faces of a PDF in no fixed order, so the last line has the digest of the drawing.
    """
    mark = f"\n% ATLAS {sha256(svg.encode()).hexdigest()}\n".encode()
    if not (path.is_file() and read_named_file(path, max_bytes=memory_bytes()).endswith(mark)):
        write_atomic(path, vl_convert.svg_to_pdf(svg) + mark, within=within)
    return path


def save_beside(svg: str, path: Path, *, within: Path | None = None) -> Path:
    """`save_png` into a folder of the user's: a figure that was not drawn here is kept under another name."""
    if path.is_file() and SOFTWARE not in read_named_file(path, max_bytes=memory_bytes()):
        set_aside(path)
    return save_png(svg, path, within=within)
