"""Errors that a user can mend (AtlasError), and how they are worded: one line, with the nearest known name."""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

MAX_REPR_CHARACTERS = 60
"""Most characters of a value in a message: fewer than fit on a line, so that nothing breaks it."""
MAX_LINE_CHARACTERS = 500
"""Most characters of another machine's words in a message."""
MOST_NAMES = 8
"""Most names in a message."""
UNTOLD = "it cannot do this; its own screen says why"
"""A site's reason as its server gets it: the line itself may name its paths, or what it spent elsewhere."""


class AtlasError(Exception):
    """A mistake that the user can mend; the command line prints it as one line and exits with 2."""


class ConfigError(AtlasError):
    """A setting that is unknown, out of range or in contradiction with another."""


class DataError(AtlasError):
    """Data that is missing, malformed or that leaks between splits."""


class BudgetError(AtlasError):
    """A device or byte budget into which nothing fits."""


class ModelError(AtlasError):
    """A model that cannot be found, loaded or adapted."""


class CheckpointError(AtlasError):
    """A run folder or checkpoint that is absent, damaged or of another configuration."""


class ProtocolError(AtlasError):
    """A client update that the server cannot accept."""

    def __init__(self, message: str, *, logged: str = "") -> None:
        super().__init__(message)
        self.logged = logged or message
        """The line for the server's own log, which may say more of other clients than the refused one may know."""


def short_repr(value: object) -> str:
    """The value as one short line, for a message.

    >>> short_repr("a"), short_repr("7" * 5000)
    ("'a'", 'a number of 5,000 digits')
    """
    if isinstance(value, str) and len(value) > MAX_REPR_CHARACTERS and value.lstrip("+-").isdecimal():
        return f"a number of {len(value.lstrip('+-')):,} digits"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_REPR_CHARACTERS else f"{text[:MAX_REPR_CHARACTERS]}..."


def one_line(text: object, *, limit: int = MAX_LINE_CHARACTERS) -> str:
    """Another machine's words as a terminal may have them: one line, without control codes, of bounded length.

    >>> one_line("a\\x1b[2J\\nb")
    'a?[2J?b'
    """
    return replace_unprintable(str(text)[:limit])


def replace_unprintable(text: str) -> str:
    """The text with a question mark for every character that moves a cursor, breaks a line or cannot be seen.

    >>> replace_unprintable("naïve\\tb")
    'naïve?b'
    """
    return "".join(character if character.isprintable() else "?" for character in text)


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> ConfigError:
    """The error for a name that no registry holds, with the nearest known name.

    >>> str(unknown_name("strategy", "fedavgg", ["local", "fedavg"]))
    "unknown strategy 'fedavgg'; did you mean 'fedavg'? known: fedavg, local"
    """
    names = sorted(choices)
    return ConfigError(f"unknown {kind} {short_repr(name)}{did_you_mean(name, names)} known: {', '.join(names)}")


def check_known(kind: str, *names: object, among: Collection[str]) -> None:
    """Raise ConfigError, with the nearest known name, for the first of these names that is none of the known ones."""
    for name in names:
        if name not in among:
            raise unknown_name(kind, name, among)


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Link from an unknown name to the rest of a message: the known name that is near it, where there is one.

    >>> did_you_mean("fedavgg", ["local", "fedavg"]), did_you_mean("foo", ["local", "fedavg"])
    ("; did you mean 'fedavg'?", ';')
    """
    matches = get_close_matches(str(name), list(choices), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ";"


def first_of(names: Sequence[object], *, most: int = MOST_NAMES) -> str:
    """The first names with commas between them, and how many more there are."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")
