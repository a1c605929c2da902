"""Settings that contradict each other, a row of `conflicts.tsv` for each pair or three: `atlas list conflicts`.

A row has settings with the values that do not go together, the reason and the remedy. In both sentences `{0}`, `{1}`
and `{2}` stand for the flags with their values, and `{candidates}` for the ranks of `--candidates`. Values are `set`
(other than the default), `above` or `below` a number, one or several joined by `or`, `other than` these, or a name of
`NAMED`. `rule` is the server's rule: the strategy, or the rule of a published method.
"""

from collections.abc import Callable, Mapping
from csv import QUOTE_NONE, DictReader
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from atlas_fl.config.methods import is_of_method, rule_of
from atlas_fl.config.schema import AUTO, NONE, Config, cuts_by_name
from atlas_fl.config.settings import settings, value_of
from atlas_fl.config.values import from_text, to_words
from atlas_fl.errors import ConfigError

RULE = "rule"
LEAVE_ONE = "leave one of them out"
HALVES = "atlas or kriging"
"""Rules that compare halves. One of them is the default, so their rows come last, after all that a user typed."""

NAMED: Mapping[str, Callable[[Any], bool]] = {
    "not a number": lambda value: not value.isdecimal(),
    "without a cut": lambda value: set(cuts_by_name(value).values()) == {NONE},
    "with auto": lambda value: AUTO in cuts_by_name(value).values(),
    "A without B, or B without A": lambda value: ("A" in value) != ("B" in value),
    "with A and B": lambda value: {"A", "B"} <= set(value),
    "without A or B": lambda value: not {"A", "B"} <= set(value),
    "other than A B head": lambda value: set(value) != {"A", "B", "head"},
    "without head": lambda value: "head" not in value,
}
"""Conditions on a value beside equality and order."""


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Two or three settings with the values that contradict each other."""

    setting: str
    value: str
    other: str
    other_value: str
    reason: str
    remedy: str
    third: str = ""
    """Empty in the row of a pair."""
    third_value: str = ""

    @property
    def values(self) -> list[tuple[str, str]]:
        """(setting, value) of each."""
        values = [(self.setting, self.value), (self.other, self.other_value), (self.third, self.third_value)]
        return [value for value in values if value[0]]

    def applies(self, config: Config) -> bool:
        """Return true for a config with all values."""
        return all(_has(config, name, words) for name, words in self.values)

    def message(self, config: Config) -> str:
        """One line with the values, the reason and the remedy."""
        flags = [_flag_words(config, name) for name, _ in self.values]
        candidates = ", ".join(map(str, config.ranks.candidates))
        remedy = self.remedy
        strategy = config.mixing.strategy
        if remedy == LEAVE_ONE and is_of_method(strategy, self.setting):
            remedy = f"leave {{1}} out, or take another strategy than {strategy}, which sets {flags[0].split()[0]}"
        return f"{self.reason}; {remedy}".format(*flags, candidates=candidates)


@cache
def conflicts(table: str = "conflicts.tsv") -> tuple[Conflict, ...]:
    """All rows of this table, in the order in which they are checked."""
    text = resources.files(__package__).joinpath(table).read_text(encoding="utf-8")
    rows = DictReader(text.splitlines(), delimiter="\t", quoting=QUOTE_NONE, restval="")
    return tuple(Conflict(**row) for row in rows)


def check_conflicts(config: Config, *, of_halves: bool = False) -> None:
    """Raise ConfigError for the first conflict of the config, of rules that compare halves or of all others."""
    for conflict in conflicts():
        if (conflict.value == HALVES) is of_halves and conflict.applies(config):
            raise ConfigError(conflict.message(config))


def _has(config: Config, name: str, words: str) -> bool:
    value: Any = rule_of(config) if name == RULE else value_of(config, name)
    first, _, rest = words.partition(" ")
    if words == "set":
        return bool(value != value_of(Config(), name))
    if words in NAMED:
        return NAMED[words](value)
    if first in ("above", "below"):
        return bool(value > float(rest) if first == "above" else value < float(rest))
    kind = str if name == RULE else settings()[name].kind
    listed = [from_text(word, kind) for word in words.removeprefix("other than ").split(" or ")]
    return (value in listed) is not words.startswith("other than ")


def flag_of(name: str) -> str:
    """The flag of a setting, or of the rule."""
    return "--strategy" if name == RULE else settings()[name].flag


def _flag_words(config: Config, name: str) -> str:
    value = config.mixing.strategy if name == RULE else value_of(config, name)
    if isinstance(value, bool):
        return flag_of(name) if value else flag_of(name).replace("--", "--no-", 1)
    words = f"{value:g}" if isinstance(value, float) else " ".join(to_words(value))
    return f"{flag_of(name)} {words}"
