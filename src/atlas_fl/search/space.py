"""What a search may choose from: a range of numbers, or a few values, for each setting."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, TypeAlias

from atlas_fl.config import Config, validate, with_values
from atlas_fl.config.fields import Setting
from atlas_fl.config.kinds import inner_of, whole_number
from atlas_fl.config.toml import WORD_OR_NUMBER
from atlas_fl.config.update import find_setting, parse
from atlas_fl.errors import ConfigError
from atlas_fl.sweep import parse_over

LOG = "log"
MOST_CHECKED = 256
_NUMBER = r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"
_NUMBERS = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(.*))?")
_ANYTHING = re.compile(r"(.*?)\.\.([^:]*)(?::(.*))?")


@dataclass(frozen=True, kw_only=True)
class Span:
    """The numbers from `low` to `high`, both among them."""

    low: float
    high: float
    whole: bool
    """Whether only whole numbers are meant."""
    log: bool = False
    """Whether each power of ten is as likely as another."""


Space: TypeAlias = Mapping[str, Span | tuple[str, ...]]
"""By setting, what is to choose from; single values are texts, as on a command line."""


def parse_space(texts: Sequence[str]) -> dict[str, Span | tuple[str, ...]]:
    """What texts such as `lr=1e-4..1e-2:log`, `local-steps=4..16` and `weight-decay=0,1e-4` let a search choose from.

    Raises:
        ConfigError: a text is no sweep (`sweep.parse_over`), or its range has no numbers or a wrong end.
    """
    return {name: _choices(find_setting(name), parts) for name, parts in parse_over(texts).items()}


def check_space(base: Config, space: Space) -> None:
    """Nothing where the ends of the ranges and the values, each with each, are settings of a run that can be.

    Raises:
        AtlasError: a combination is none; of very many only the first are looked at.
    """
    ends = {name: _ends(choices) for name, choices in space.items()}
    for values in islice(product(*ends.values()), MOST_CHECKED):
        validate(with_values(base, dict(zip(ends, values))))


def plain(space: Space) -> dict[str, Any]:
    """The space as JSON holds it."""
    return {
        name: list(choices) if isinstance(choices, tuple) else [choices.low, choices.high, choices.log]
        for name, choices in space.items()
    }


def text_of(value: Any) -> str:
    """A chosen value as a command line spells it, to the last digit."""
    return value if isinstance(value, str) else repr(value)


def _ends(choices: Span | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(choices, tuple):
        return choices
    ends = (choices.low, choices.high)
    return tuple(text_of(int(end) if choices.whole else end) for end in ends)


def _choices(setting: Setting, parts: tuple[str, ...]) -> Span | tuple[str, ...]:
    whole = _is_whole(setting)
    spans = [part for part in parts if (_NUMBERS if whole is None else _ANYTHING).fullmatch(part)]
    if not spans:
        return parts
    text = f"--over {setting.name}={','.join(parts)}"
    if whole is None:
        raise ConfigError(f"{text} is a range, and {setting.name} is no number; give its values, with commas between")
    if len(parts) > 1:
        raise ConfigError(f"{text} has a range beside other values; give one range, or values with commas between")
    match = _ANYTHING.fullmatch(spans[0])
    assert match is not None, "it has just matched"
    low, high = (_number(setting, end, whole=whole) for end in match.groups()[:2])
    if match[3] not in (None, LOG):
        raise ConfigError(f"{text} ends in :{match[3]}; allowed: :log, or nothing; write {setting.name}=LOW..HIGH:log")
    if not low < high:
        raise ConfigError(f"{text} does not rise; allowed: the low end first; write {setting.name}=LOW..HIGH")
    if match[3] == LOG and low <= 0:
        raise ConfigError(f"{text} begins at {match[1]}; allowed on a log scale: above 0; raise the low end")
    return Span(low=low, high=high, whole=whole, log=match[3] == LOG)


def _is_whole(setting: Setting) -> bool | None:
    """Whether the setting takes whole numbers alone; None where it takes no numbers."""
    if setting.name in WORD_OR_NUMBER:
        return True
    kind = inner_of(setting.kind) or setting.kind
    return kind is int if kind in (int, float) else None


def _number(setting: Setting, text: str, *, whole: bool) -> float:
    value = whole_number(text) if setting.name in WORD_OR_NUMBER else parse(setting, text)
    if value is None:
        raise ConfigError(
            f"--over {setting.name} has {text!r} as an end of its range; allowed: a{' whole' if whole else ''} number;"
            f" write {setting.name}=LOW..HIGH"
        )
    return float(value)
