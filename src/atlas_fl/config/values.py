"""Values of a declared type, from what a file holds or a user types: the only place that converts.

A kind is an annotation of the settings: bool, int, float, str, a `Literal` of texts, a tuple of these, or one of
these or None. Nothing is guessed: a number is not a text, and true is not 1.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, auto
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from atlas_fl.errors import ConfigError, short_repr
from atlas_fl.ranges import LARGEST as LARGEST

NONE = "none"
LIST_SEPARATOR = "+"
_SWITCH = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class Form:
    """Form of a setting that is no number, or of all numbers of a list."""

    fits: Callable[[Any], bool]
    allowed: str


class Mark(Enum):
    """Property of a setting, beside its range."""

    COMMON = auto()
    """Shown by `--help`; the others by `--help all`."""
    SESSION = auto()
    """No part of a run's identity, because it changes no number: folders, the length of a session, records, processes
    and their caches. The folder of secrets has this mark, too: secrets do change numbers, and a resumed run compares
    them with digests (`experiment.recorder.check_provenance`)."""
    WORD_OR_NUMBER = auto()
    """A word or a number, so that a file may hold `ranks = 8` without quotes."""
    OF_ADAPTERS = auto()
    """Without effect on whole models."""
    OF_WHOLE_MODELS = auto()
    """Without effect on adapters."""
    OF_IMAGES = auto()
    """Without effect on texts."""
    OF_SGD = auto()
    """Without effect on AdamW."""


def describe(kind: Any) -> str:
    """Words for a value of this kind.

    >>> describe(tuple[int, ...] | None)
    'a list of whole numbers, or none'
    """
    if (inner := unwrap_optional(kind)) is not None:
        return f"{describe(inner)}, or {NONE}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        item, size = item_kind(kind)
        words = describe(item)
        if size:
            return f"{size} times {words}"
        return f"a list, each {words}" if words.startswith("one of") else f"a list of {words.split(' ', 1)[1]}s"
    return _WORDS[kind]


def convert_value(value: Any, kind: Any) -> Any:
    """The value as this kind; whole numbers pass as numbers, and the text `none` as None.

    Raises:
        ValueError: it is of another type; the message says what it had to be.
    """
    if (inner := unwrap_optional(kind)) is not None:
        return None if value is None or value == NONE else convert_value(value, inner)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        item, size = item_kind(kind)
        if size in (0, len(value)):
            return tuple(convert_value(part, item) for part in value)
    if get_origin(kind) is Literal and isinstance(value, str) and value in get_args(kind):
        return value
    if kind in (bool, int, str) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float):
        with suppress(OverflowError):
            return float(value)
    raise _conversion_error(value, kind)


def from_words(words: Sequence[str], kind: Any) -> Any:
    """The value that these words of a command line spell.

    Raises:
        ValueError: they spell no value of this kind; the message says what it had to be.
    """
    if get_origin(kind) is tuple:
        item, size = item_kind(kind)
        items = [] if list(words) == [NONE] else words
        if size not in (0, len(items)):
            raise _conversion_error(" ".join(words), kind)
        return tuple(from_words([word], item) for word in items)
    (word,) = words
    if (inner := unwrap_optional(kind)) is not None:
        return None if word.lower() == NONE else from_words([word], inner)
    try:
        return convert_value(_parse_scalar(word, kind), kind)
    except ValueError:
        raise _conversion_error(word, kind) from None


def from_text(text: str, kind: Any) -> Any:
    """The value that one piece of text spells; the parts of a list are joined by `+`.

    Raises:
        ValueError: it spells no value of this kind.
    """
    return from_words(text.split(LIST_SEPARATOR) if get_origin(kind) is tuple else [text], kind)


def to_words(value: Any) -> list[str]:
    """The words that `from_words` reads back as this value.

    >>> to_words((2, 5)), to_words(None), to_words(()), to_words(0.1)
    (['2', '5'], ['none'], ['none'], ['0.1'])
    """
    if value is None or value == ():
        return [NONE]
    if isinstance(value, tuple):
        return [word for part in value for word in to_words(part)]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def unwrap_optional(kind: Any) -> Any:
    """`T` for the kind `T | None`, and None for every other kind."""
    if get_origin(kind) not in (Union, UnionType):
        return None
    others = [part for part in get_args(kind) if part is not NoneType]
    return others[0] if len(others) == 1 else None


def item_kind(kind: Any) -> tuple[Any, int]:
    """The kind of a tuple's parts and how many there must be; 0 for any number."""
    parts = get_args(kind)
    return (parts[0], 0) if parts[-1] is Ellipsis else (parts[0], len(parts))


def parse_integer(text: str) -> int | None:
    """The number that a text spells in its only spelling, and None for any other text.

    >>> parse_integer("8"), parse_integer("08"), parse_integer("auto")
    (8, None, None)
    """
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST))
    return int(text) if is_number and str(int(text)) == text else None


def invalid_value(setting: str, value: object, allowed: str) -> ConfigError:
    """The error for a setting with a wrong value."""
    return ConfigError(f"{setting} is {short_repr(value)}; allowed: {allowed}; set it to that, or leave it out")


def wrong_kind(setting: str, value: object, kind: Any) -> ConfigError:
    """The error for a setting whose value is not of its kind, with the nearest choice where one is near."""
    if (near := _closest_choice(value, kind)) is None:
        return invalid_value(setting, value, describe(kind))
    return ConfigError(f"{setting} is {short_repr(value)}; allowed: {describe(kind)}; did you mean {near!r}?")


def _conversion_error(value: object, kind: Any) -> ValueError:
    near = _closest_choice(value, kind)
    hint = "" if near is None else f"; did you mean {near!r}?"
    return ValueError(f"{short_repr(value)} is not {describe(kind)}{hint}")


def _closest_choice(value: object, kind: Any) -> str | None:
    """The choice that a text was meant to be: not cpu, where it is gpu."""
    if not isinstance(value, str) or get_origin(kind) is not Literal:
        return None
    return next(iter(get_close_matches(value.lower(), get_args(kind), n=1, cutoff=0.7)), None)


def _parse_scalar(word: str, kind: Any) -> object:
    if kind is bool:
        return _SWITCH.get(word.lower(), word)
    return kind(word) if kind in (int, float) else word
