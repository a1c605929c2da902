"""Elements of a page, and its text: sections of facts, tables, charts, sentences and commands.

Everything that comes out of a run's files is text for the template, which escapes it. The styles and scripts are hashed
for the page's own Content-Security-Policy, so that a browser runs no other script and opens no connection.
"""

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import cache
from hashlib import sha256
from typing import TypeAlias

import vl_convert
from jinja2 import Environment, StrictUndefined, Template

from atlas_fl.frozen import Frozen
from atlas_fl.packaged import packaged_text
from atlas_fl.report.html.charts import Chart, look
from atlas_fl.report.table import Cell, Number, Table
from atlas_fl.storage.jsonl import to_json

GENERATOR = "ATLAS report"
"""Stands in every page, which is known by it."""
BEGINNING = "# Results\n\nWritten by `atlas results`"
"""Begins every page as Markdown."""
LIBRARY = "window.vegaEmbed = vegaEmbed;"
"""Names that the script of the charts sets: Vega, Vega-Lite and Vega-Embed, as this one name."""


class Facts(Frozen):
    """The few numbers that a page comes down to: (name, value, what it is to be held against)."""

    facts: Sequence[tuple[str, Cell, str]]


class Text(Frozen):
    """Sentences, each a paragraph."""

    lines: Sequence[str]


class Command(Frozen):
    """Words for a terminal or out of a file, and what they do."""

    words: str
    what: str


class Folded(Frozen):
    """Elements that are shown when a reader asks for them."""

    title: str
    blocks: Sequence["Block"]


Block: TypeAlias = Facts | Table | Chart | Text | Command | Folded


class Section(Frozen):
    """A question that people ask, and what answers it."""

    name: str
    title: str
    blocks: Sequence[Block]


class Page(Frozen):
    """A whole page."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    warnings: Sequence[str] = field(default=())


def render(page: Page) -> str:
    """The text of the page: HTML with its styles, its scripts and all data inside; it asks nobody."""
    has_charts = any(isinstance(block, Chart) for section in page.sections for block in section.blocks)
    scripts = [*([_chart_library()] if has_charts else []), asset("page.js")]
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return _template().render(
        page=page,
        generator=GENERATOR,
        has_charts=has_charts,
        look=in_script(to_json(look())),
        style=asset("page.css"),
        scripts=scripts,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes} 'unsafe-eval'",
    )


def markdown(page: Page, *, folded: bool) -> str:
    """The page as Markdown: its texts and tables, with those that are folded or not; charts are left out."""
    head = [f"{BEGINNING}: {page.title}; {page.subtitle}.", *page.warnings]
    notes: set[str] = set()
    for section in page.sections:
        paragraphs = [*_paragraphs(section.blocks, notes=notes, folded=folded)]
        head += [f"## {section.title}", *paragraphs] if paragraphs else []
    return "\n\n".join(head) + "\n"


def _paragraphs(blocks: Sequence[Block], *, notes: set[str], folded: bool) -> Iterator[str]:
    """Paragraphs of these elements; a note that is among `notes` is not said again."""
    for block in blocks:
        if isinstance(block, Text):
            yield from block.lines
        elif isinstance(block, Folded) and folded:
            yield from _paragraphs(block.blocks, notes=notes, folded=folded)
        elif isinstance(block, Table):
            yield f"*{block.title}*"
            yield "\n".join(block.without_empty().markdown())
            if block.note not in {*notes, ""}:
                notes.add(block.note)
                yield f"Note: {block.note}."


def payload(chart: Chart) -> str:
    """Spec and rows of a chart as JSON that can stand inside a script element."""
    names = list(dict.fromkeys(name for row in chart.rows for name in row))
    rows = [[row.get(name) for name in names] for row in chart.rows]
    return in_script(to_json({"spec": chart.spec, "names": names, "rows": rows}))


def in_script(text: str) -> str:
    """JSON in which nothing can end the script element around it."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.tests["number"] = lambda cell: isinstance(cell, Number)
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["payload"] = payload
    return environment.from_string(asset("page.html.jinja"))


@cache
def asset(name: str) -> str:
    """A file beside this one: a template, a script, a style sheet."""
    return packaged_text(__package__, name)


@cache
def _chart_library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that sets `vegaEmbed`; it holds no end of a script element."""
    return re.sub(r"</(?=script)", r"<\\/", vl_convert.javascript_bundle(LIBRARY), flags=re.IGNORECASE)
