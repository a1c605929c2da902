"""What a drawing says: the words of an SVG, and which of them cover each other or leave it."""

import re
from xml.etree import ElementTree

from PIL import ImageFont

Box = tuple[str, float, float, float, float]


def text_of(svg: str) -> str:
    """The words, each on a line of its own."""
    return "\n".join("".join(element.itertext()) for element in _elements(svg) if element.tag.endswith("}text"))


def overlaps(svg: str) -> list[tuple[str, str]]:
    """Pairs of level words that cover each other, and those that leave the drawing."""
    root = ElementTree.fromstring(svg)
    boxes = _boxes(root, 0.0, 0.0)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    outside = [
        (text, "outside")
        for text, left, top, right, bottom in boxes
        if left < -1 or top < -1 or right > width + 1 or bottom > height + 1
    ]
    pairs = [
        (one[0], other[0])
        for index, one in enumerate(boxes)
        for other in boxes[index + 1 :]
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ]
    return outside + pairs


def _elements(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter())


def _boxes(element: ElementTree.Element, x: float, y: float) -> list[Box]:
    """The boxes of all words inside, a pixel smaller than they are on each side; turned words are left out."""
    transform = element.get("transform", "")
    moved = re.search(r"translate\(([-\d.e]+),([-\d.e]+)\)", transform)
    if moved:
        x += float(moved[1])
        y += float(moved[2])
    if element.tag.endswith("}text") and "rotate" not in transform and element.get("opacity") != "0":
        size = float(element.get("font-size", "11px").removesuffix("px"))
        spans = list(element) or [element]
        lines = ["".join(span.itertext()) for span in spans]
        widths = [ImageFont.load_default(size).getlength(line) for line in lines]
        shift = {"end": 1.0, "middle": 0.5}.get(element.get("text-anchor", ""), 0.0)
        return [
            (
                line,
                x - shift * width + 1,
                y + row * 1.15 * size - 0.7 * size,
                x + (1 - shift) * width - 1,
                y + row * 1.15 * size,
            )
            for row, (line, width) in enumerate(zip(lines, widths))
            if line.strip()
        ]
    return [box for child in element for box in _boxes(child, x, y)]
