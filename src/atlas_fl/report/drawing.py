"""Figures as files: the charts of a page as one Vega-Lite specification, and that as PNG and PDF.

In: charts of `report.html`. Out: a drawing, and its files. vl-convert draws without a network, in a font of its own.
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

from atlas_fl.report.html.charts import Chart, Spec, look
from atlas_fl.report.html.elements import asset
from atlas_fl.storage.files import set_aside
from atlas_fl.storage.folder_access import memory_bytes, read_named_file, write_atomic

DPI = 300
SOFTWARE = b"Software\0ATLAS"
"""Stands in every PNG, which is known by it."""
WIDTH, NARROW = 720, 330
"""Points, of which an inch has 72: of a chart, and of one that stands beside others."""
LETTER = 5.2
"""Points of a letter of a note, on average."""
FONT = "Liberation Sans, sans-serif"
PROPERTIES_OF_OBJECTS = frozenset(
    (
        *("constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable", "toLocaleString", "toString"),
        *("valueOf", "__proto__", "__defineGetter__", "__defineSetter__", "__lookupGetter__", "__lookupSetter__"),
    )
)
"""Names by which Vega cannot group; a space without width makes others of them, as `page.js` does."""


def draw(charts: Sequence[Chart], *, columns: int = 1) -> str:
    """Draw these charts as one SVG, so many in a row."""
    spec = {
        "config": {**look(), "font": FONT, "background": "var(--ground)"},
        "padding": 14,
        "concat": [_view(chart, width=WIDTH if columns == 1 else NARROW) for chart in charts],
        "columns": columns,
        "spacing": 30,
        "resolve": {"scale": dict.fromkeys(("color", "shape", "strokeDash", "opacity"), "independent")},
    }
    light = asset("page.css").partition("@media")[0]
    colours = {f"var(--{name})": value for name, value in re.findall(r"--([\w-]+):(#\w+)", light)}
    svg = str(vl_convert.vegalite_to_svg(_resolve(spec, colours), allowed_base_urls=[]))
    numbers = list(dict.fromkeys(re.findall(r"gradient_\d+", svg)))  # counted on from one drawing to the next
    return re.sub(r"gradient_\d+", lambda found: f"gradient_{numbers.index(found[0])}", svg)


def _view(chart: Chart, *, width: int) -> Spec:
    title = {"text": chart.title, "subtitle": wrap(chart.note, int(width / LETTER))}
    return {**chart.spec, "data": {"values": list(chart.rows)}, "width": width, "title": title}


def _resolve(node: Any, colours: Mapping[str, str]) -> Any:
    """Colours for their variables, names by which Vega can group, and nothing that only a reader's pointer does."""
    if isinstance(node, Mapping):
        if "param" in node.get("condition", ()):
            return {"value": node["condition"]["value"]}
        return {key: _resolve(value, colours) for key, value in node.items() if key != "params"}
    if isinstance(node, list | tuple):
        return [_resolve(value, colours) for value in node]
    if isinstance(node, str):
        return node + "\u200b" if node in PROPERTIES_OF_OBJECTS else colours.get(node, node)
    return node


def save_png(svg: str, path: Path, *, within: Path | None = None) -> Path:
    """Write a figure as PNG at 300 DPI in one step and return its path; the same figure gives the same bytes.

    No part of the path below `within` is a link. A file that was not drawn here is kept under another name.
    """
    if path.is_file() and SOFTWARE not in read_named_file(path, max_bytes=memory_bytes()):
        set_aside(path)
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
