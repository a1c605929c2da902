"""The errors that a user can cause, each with one line that says what to do."""

from collections.abc import Iterable
from difflib import get_close_matches

SHOWN_CHARACTERS = 60
"""Of a value in a message: fewer than fit on a line, so that nothing breaks it."""
LINE_CHARACTERS = 500
"""Of what another machine says, in a message."""


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


def shown(value: object) -> str:
    """The value as one short line, for a message.

    >>> shown("a"), shown("7" * 5000)
    ("'a'", 'a number of 5,000 digits')
    """
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS and value.lstrip("+-").isdecimal():
        return f"a number of {len(value.lstrip('+-')):,} digits"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def one_line(text: object, *, most: int = LINE_CHARACTERS) -> str:
    """What another machine says, as a terminal may have it: one line, without control codes, of bounded length.

    >>> one_line("a\\x1b[2J\\nb")
    'a?[2J?b'
    """
    return printable(str(text)[:most])


def printable(text: str) -> str:
    """The text with a question mark for every character that moves a cursor, breaks a line or cannot be seen.

    >>> printable("naïve\\tb")
    'naïve?b'
    """
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def unknown(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that no registry holds, with the nearest known name.

    >>> str(unknown("strategy", "fedavgg", ["local", "fedavg"]))
    "unknown strategy 'fedavgg'; did you mean 'fedavg'? known: fedavg, local"
    """
    names = sorted(known)
    return ConfigError(f"unknown {kind} {shown(name)}{nearest(name, names)} known: {', '.join(names)}")


def nearest(name: object, known: Iterable[str]) -> str:
    """What links an unknown name to the rest of a message: the known name that is near it, where there is one.

    >>> nearest("fedavgg", ["local", "fedavg"]), nearest("foo", ["local", "fedavg"])
    ("; did you mean 'fedavg'?", ';')
    """
    near = get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ";"
