"""What a page says: its elements and text, its tables, and the rows of its charts, as a reader finds them."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "link", "img", "input"}


@dataclass
class Element:
    """An element with its attributes, what is inside, and all of its text."""

    name: str
    attributes: dict[str, str | None]
    children: list["Element"] = field(default_factory=list)
    pieces: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece if isinstance(piece, str) else piece.text for piece in self.pieces)

    def all(self, name: str) -> list["Element"]:
        """Every element of this name inside, in their order."""
        return [found for child in self.children for found in ([child] if child.name == name else []) + child.all(name)]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("root", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        self.open[-1].pieces.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> where </{self.open[-1].name}> is due"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].pieces.append(data)


def parse_page(text: str) -> Element:
    """The tree of a page; an element that is not closed where it must be fails."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root], f"not closed: {[element.name for element in reader.open[1:]]}"
    return reader.root


def table_of(page: Element, title: str) -> list[dict[str, float | str]]:
    """The body of the table with this caption: numbers as they are stored, words as they are shown."""
    table = next(table for table in page.all("table") if table.all("caption")[0].text == title)
    columns = [cell.text for cell in table.all("thead")[0].all("th")]
    rows = []
    for row in table.all("tbody")[0].all("tr"):
        cells = [child for child in row.children if child.name in ("td", "th")]
        rows.append(dict(zip(columns, map(_value, cells), strict=True)))
    return rows


def _value(cell: Element) -> float | str:
    numbers = cell.all("data")
    return float(str(numbers[0].attributes["value"])) if numbers else cell.text


def chart_of(page: Element, name: str) -> list[dict[str, Any]]:
    """The rows of a chart."""
    script = next(script for script in page.all("script") if script.attributes.get("id") == f"data-{name}")
    payload = json.loads(script.text)
    return [dict(zip(payload["names"], row, strict=True)) for row in payload["rows"]]


def sections_of(page: Element) -> list[str]:
    """The names of the sections, in their order."""
    return [str(section.attributes["id"]) for section in page.all("section")]
