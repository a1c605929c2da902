"""Format numbers, bytes, seconds and names for people; used by tables and figures alike."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeVar

EMPTY = "-"
"""The sign of a value that is not known: never a number."""
MOST_SHOWN = 200
"""Most clients that a chart names, and most rows of a table of a run."""
T = TypeVar("T")


def evenly(items: Sequence[T]) -> Sequence[T]:
    """These, or of many `MOST_SHOWN` that are evenly spaced, the first and the last among them."""
    last = len(items) - 1
    places = range(MOST_SHOWN) if last >= MOST_SHOWN else ()
    return [items[place * last // (MOST_SHOWN - 1)] for place in places] or items


def number(value: float | None, digits: int, *, sign: bool = False) -> str:
    """The value with this many decimals, or a dash where there is none."""
    if value is None:
        return EMPTY
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def percent(share: float) -> str:
    """A share as a percentage, with the decimals that tell it from 100%.

    >>> [percent(share) for share in (0.5, 0.987, 0.99964, 1.0)]
    ['50.0%', '98.7%', '99.96%', '100.0%']
    """
    text = f"{100 * share:.1f}%"
    return f"{100 * share:.2f}%" if text == "100.0%" and share < 1 else text


def seconds(count: float) -> str:
    """Seconds in the unit that people read.

    >>> [seconds(count) for count in (0.0123, 1.25, 61.2, 7384)]
    ['12 ms', '1.2 s', '1.0 min', '2.1 h']
    """
    if count < 1:
        return f"{1000 * count:.0f} ms"
    if count < 60:
        return f"{count:.1f} s"
    return f"{count / 60:.1f} min" if count < 3600 else f"{count / 3600:.1f} h"


def human_bytes(count: float) -> str:
    """Bytes in the unit that people read, powers of 1000.

    >>> [human_bytes(count) for count in (0, 999, 4096, 12_345_678)]
    ['0 B', '999 B', '4.1 kB', '12 MB']
    """
    units = ("B", "kB", "MB", "GB", "TB")
    step = 0
    while abs(count) >= 999.5 and step < len(units) - 1:
        count, step = count / 1000, step + 1
    return f"{count:.1f} {units[step]}" if step and abs(count) < 9.95 else f"{count:.0f} {units[step]}"


def cluster_name(cluster: int) -> str:
    """Name of a cluster in figures and tables; -1 is none."""
    return "no cluster" if cluster < 0 else f"cluster {cluster}"


def isolate(name: str) -> str:
    """A name for the middle of a sentence: one that runs from right to left does not turn the words behind it."""
    turns = any(unicodedata.bidirectional(character) not in _LEFT_TO_RIGHT for character in name)
    return f"\u2068{name}\u2069" if turns else name


_LEFT_TO_RIGHT = frozenset(("L", "EN", "ES", "ET", "CS", "WS", "ON", "NSM", "S", "B", ""))


def names_in_words(names: Iterable[str]) -> str:
    """Names with commas between them."""
    return ", ".join(map(isolate, names))
