"""Elements of a page, and its text: sections of facts, tables, charts, sentences and commands.

Everything that comes out of a run's files is text for the template, which escapes it. The styles and scripts are hashed
for the page's own Content-Security-Policy, so that a browser runs no other script and opens no connection.
"""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any, ClassVar, TypeAlias

import vl_convert
from jinja2 import DictLoader, Environment, StrictUndefined

from atlas_fl.report.html.charts import CONFIG
from atlas_fl.report.html.palette import colour_variables
from atlas_fl.report.table import Cell, Number, Table
from atlas_fl.storage.jsonl import to_json

GENERATOR = "ATLAS report"
"""Stands in every page, which is known by it."""
MOST_LEVELS = 0.5
"""Share of distinct texts in a column up to which it is written as its levels and their indices."""

LIBRARY = "window.vegaEmbed = vegaEmbed;"
"""Names that the script of the charts sets: Vega, Vega-Lite and Vega-Embed, as this one name."""

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One number or word with its name, and what it is to be held against."""

    name: str
    value: Cell
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The few numbers that a section comes down to."""

    kind: ClassVar[str] = "facts"
    facts: Sequence[Fact]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A Vega-Lite chart; `data` holds its rows by the names that the layers of `spec` have for them."""

    kind: ClassVar[str] = "chart"
    name: str
    title: str
    note: str
    spec: Mapping[str, Any]
    data: Mapping[str, Sequence[Row]]
    is_wide: bool = True

    @property
    def payload(self) -> str:
        """Spec and data as JSON that can stand inside a script element."""
        content = {"spec": self.spec, "data": {name: pack_rows(rows) for name, rows in self.data.items()}}
        return in_script(to_json(content))


@dataclass(frozen=True, kw_only=True)
class Text:
    """Sentences, each a paragraph; or with `is_list` the points of a list."""

    kind: ClassVar[str] = "text"
    lines: Sequence[str]
    is_list: bool = False


@dataclass(frozen=True, kw_only=True)
class Command:
    """Words for a terminal, and what they do."""

    kind: ClassVar[str] = "command"
    words: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Folded:
    """Elements that are shown when a reader asks for them."""

    kind: ClassVar[str] = "folded"
    title: str
    blocks: Sequence["Block"]


Block: TypeAlias = Facts | Table | Chart | Text | Command | Folded


@dataclass(frozen=True, kw_only=True)
class Section:
    """A question that people ask, and what answers it."""

    name: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole page."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    warnings: Sequence[str] = field(default=())
    links: Sequence[tuple[str, str]] = field(default=())
    """Other pages of the same server: (name, address)."""


def pack_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows of the same keys column by column, repeated texts as indices of their levels; `page.js` unpacks them."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        levels = list(dict.fromkeys(values))
        if isinstance(values[0], str) and len(levels) < MOST_LEVELS * len(values):
            index = {level: position for position, level in enumerate(levels)}
            columns[name] = {"levels": levels, "codes": [index[value] for value in values]}
        else:
            columns[name] = {"values": values}
    return {"length": len(rows), "columns": columns}


def in_script(text: str) -> str:
    """JSON in which nothing can end the script element around it."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def render(page: Page, *, state: str | None = None) -> str:
    """The text of the page: HTML with its styles, its scripts and all data inside.

    With the `state` that it was made from it asks the server that it came from for news, and loads itself again where
    that has another; else it asks nobody.
    """
    has_charts = any(_has_chart(section.blocks) for section in page.sections)
    library, news = [_chart_library()] if has_charts else [], [] if state is None else [_asset("live.js")]
    scripts = [*library, _asset("page.js"), *news]
    style = colour_variables() + _asset("page.css")
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes} 'unsafe-eval'"
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            page=page,
            generator=GENERATOR,
            has_charts=has_charts,
            look=in_script(to_json(CONFIG)),
            style=style,
            scripts=scripts,
            policy=policy if state is None else f"{policy}; connect-src 'self'",
            state=state,
        )
    )


def _has_chart(blocks: Sequence[Block]) -> bool:
    return any(isinstance(block, Chart) or (isinstance(block, Folded) and _has_chart(block.blocks)) for block in blocks)


@cache
def _environment() -> Environment:
    loader = DictLoader({"page.html.jinja": _asset("page.html.jinja")})
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["number"] = lambda cell: isinstance(cell, Number)
    return environment


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _chart_library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that sets `vegaEmbed`; it holds no end of a script element."""
    return re.sub(r"</(?=script)", r"<\\/", vl_convert.javascript_bundle(LIBRARY), flags=re.IGNORECASE)
