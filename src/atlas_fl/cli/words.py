"""The words of a command line before they are parsed: spellings made one, unknown flags caught."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atlas_fl.errors import ConfigError, nearest, shown

ALIASES = {"--ablation": "--strategy", "--mode": "--preset"}
"""Flags of earlier programs and what they are called here."""

JOINED = frozenset({"--task", "--device", "--over", "--server", "--client", "--arrive", "--without", "--allow"})
"""Flags with a list that may be given several times instead of once with several words."""

LONGEST = 4096
"""Characters of a word: as many as a path may have."""

_FLAG = re.compile(r"-(?!inf$|nan$)[A-Za-z-]")


@dataclass(frozen=True)
class Words:
    """A flag and the words up to the next one; the words before the first flag have the flag ``."""

    flag: str
    values: tuple[str, ...]
    is_joined_by_sign: bool = False
    """Whether it was written as `--flag=value`."""


def split(args: Sequence[str]) -> tuple[Words, ...]:
    """The command line flag by flag; hyphens for underscores, and today's names for those of `ALIASES`.

    Raises:
        ConfigError: a word is longer than any value may be.
    """
    groups = [Words("", ())]
    for word in args:
        if len(word) > LONGEST:
            flag, sign, value = word.partition("=") if is_flag(word) else (groups[-1].flag, "=", word)
            told = f"{flag} has {shown(value)}" if flag and sign else f"there is {shown(word)}"
            raise ConfigError(f"{told}; allowed: a word of at most {LONGEST:,} characters; shorten it")
        if not is_flag(word):
            last = groups[-1]
            groups[-1] = Words(last.flag, (*last.values, word), last.is_joined_by_sign and not last.values)
            continue
        name, sign, value = word.partition("=")
        flag = name.replace("_", "-")
        groups.append(Words(ALIASES.get(flag, flag), (value,) if sign else (), bool(sign)))
    return tuple(groups)


def join(groups: Iterable[Words]) -> list[str]:
    """The words of a command line again; the lists of `JOINED` flags that stand in several places become one."""
    merged: dict[str, Words] = {}
    others: list[Words] = []
    for group in groups:
        if group.flag not in JOINED:
            others.append(group)
            continue
        before = merged.get(group.flag, Words(group.flag, ()))
        merged[group.flag] = Words(group.flag, before.values + group.values)
    return [word for group in (*others, *merged.values()) for word in _spelled(group)]


def last_value(groups: Iterable[Words], flag: str) -> str | None:
    """The value that counts for a flag; None where it is not given, or without a value, which the parser tells."""
    values = [group.values[0] for group in groups if group.flag == flag and group.values]
    return values[-1] if values else None


def check_flags(groups: Iterable[Words], *, known: Sequence[str], command: str) -> None:
    """Nothing where every flag is known.

    Raises:
        ConfigError: one is not; the message has the one that is near, where one is.
    """
    for group in groups:
        if group.flag and group.flag not in known:
            hint = nearest(group.flag, known)
            raise ConfigError(f"unknown flag {shown(group.flag)}{hint} see `{command} --help`")


def is_flag(word: str) -> bool:
    """Whether the word is a flag: -1, -.5 and -inf are numbers."""
    return _FLAG.match(word) is not None


def _spelled(group: Words) -> list[str]:
    if group.is_joined_by_sign:
        return [f"{group.flag}={group.values[0]}", *group.values[1:]]
    return [*([group.flag] if group.flag else []), *group.values]
