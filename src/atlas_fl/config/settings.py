"""The settings as one table (group, flag, type, help), and changes to a config by the names of settings."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_origin, get_type_hints

from atlas_fl.config.schema import Config
from atlas_fl.config.values import (
    Form,
    Mark,
    convert_value,
    from_text,
    invalid_value,
    item_kind,
    to_words,
    unwrap_optional,
    wrong_kind,
)
from atlas_fl.errors import ConfigError, did_you_mean, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.methods.knobs import Tried, documented_fields, knobs_class
from atlas_fl.ranges import Range


@dataclass(frozen=True)
class Positional:
    """Mark of an option that is words without a flag, such as `Annotated[str, Positional("RUN")]`."""

    metavar: str


class Setting(Frozen):
    """One setting, or an option of a command."""

    name: str
    """Its key in a file."""
    flag: str
    """The spelling on the command line; empty for a positional option."""
    metavar: str
    """Placeholder of its value; empty for a switch."""
    group: str
    """The table of the file that it stands in."""
    kind: Any
    """Its type, as annotated."""
    default: Any
    """Its value where nobody sets it; `dataclasses.MISSING` of an option that a command cannot do without."""
    help: str
    """Its docstring, on one line."""
    range: Range | None = None
    """Range of its number or numbers."""
    form: Form | None = None
    """Form of its value."""
    marks: frozenset[Mark] = frozenset()
    tried: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)
    """Values that the tuning of a strategy tries, by its name."""


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting by its name, in the order of the groups."""
    table: dict[str, Setting] = {}
    for group, cls in group_classes().items():
        for setting in declared_settings(cls, group=group):
            assert setting.name not in table, f"two groups share the name {setting.name}"
            table[setting.name] = setting
    return MappingProxyType(table)


def declared_settings(cls: type[Any], *, group: str) -> Iterator[Setting]:
    """The fields of a dataclass as settings of a group; those of `knob`, which is a setting itself, have its flag."""
    prefix = "--knob " if group == "knob" else "--"
    # docstrings below the fields, those of the classes that it extends too: Python itself does not keep them
    docs = {name: text for one in reversed(cls.__mro__) if is_dataclass(one) for name, text in _own_docs(one).items()}
    help_of = docs | {one.name: one.metadata["help"] for one in fields(cls) if one.metadata}
    declared = get_type_hints(cls, include_extras=True)
    kinds = get_type_hints(cls)
    for own in fields(cls):
        extras = getattr(declared[own.name], "__metadata__", ())
        words = next((extra.metavar for extra in extras if isinstance(extra, Positional)), None)
        yield Setting(
            name=own.name,
            flag="" if words else prefix + own.name.rstrip("_").replace("_", "-"),
            metavar=words or metavar(kinds[own.name]),
            group=group,
            kind=kinds[own.name],
            default=own.default,
            help=help_of.get(own.name, ""),
            range=next((extra for extra in extras if isinstance(extra, Range)), None),
            form=next((extra for extra in extras if isinstance(extra, Form)), None),
            marks=frozenset(extra for extra in extras if isinstance(extra, Mark)),
            tried={one: extra.values for extra in extras if isinstance(extra, Tried) for one in extra.strategies},
        )


def metavar(kind: Any) -> str:
    """Placeholder of a value of this kind; empty for a switch."""
    if get_origin(kind) is Literal:
        return "CHOICE"
    if get_origin(kind) is tuple:
        item, size = item_kind(kind)
        return " ".join([metavar(item)] * size) if size else f"{metavar(item)} ..."
    return {int: "INT", float: "NUMBER", str: "TEXT"}.get(unwrap_optional(kind) or kind, "")


@cache
def group_classes() -> Mapping[str, type[Any]]:
    """The dataclass of every group by the group's name."""
    return MappingProxyType({**get_type_hints(Config), "server": knobs_class()})


def value_of(config: Config, name: str) -> Any:
    """The value of the setting with this name."""
    return getattr(getattr(config, settings()[name].group), name)


def unknown_setting(name: str, *, where: str = "") -> ConfigError:
    """The error for a setting that does not exist, with the nearest that does, where one is near."""
    location, hint = f" in {where}" if where else "", did_you_mean(name, settings())
    return ConfigError(f"unknown setting {short_repr(name)}{location}{hint} `atlas run --help` explains them all")


def replace_settings(values: Mapping[str, Any], *, base: Config) -> Config:
    """`base` with these values by the settings' names; their types are the caller's business."""
    by_group: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_group.setdefault(settings()[name].group, {})[name] = value
    return replace(base, **{group: replace(getattr(base, group), **changes) for group, changes in by_group.items()})


@cache
def _own_docs(cls: Callable[..., Any]) -> dict[str, str]:
    try:
        source = inspect.getsource(cls)
    except OSError:  # a class that a call has made, as that of the knobs
        return {}
    (node,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(node, ast.ClassDef)
    return documented_fields(node)


def flag_words(setting: Setting, value: Any) -> str:
    """The flag with this value, as on a command line."""
    if isinstance(value, bool):
        return setting.flag if value else setting.flag.replace("--", "--no-", 1)
    return f"{setting.flag} {value:g}" if isinstance(value, float) else " ".join([setting.flag, *to_words(value)])


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with these settings: `with_values(config, {"eta": 0.5, "tasks": ["movie", "trec"]})`.

    Names are those of the flags, with hyphens or underscores. Values may also be text, as on a command line, with the
    parts of a list joined by `+`. Ranges are not looked at: that is what `validate` does.

    Raises:
        ConfigError: there is no setting of this name, or the text spells no value of its type.
    """
    values_by_setting = {find_setting(name): value for name, value in values.items()}
    return replace_settings(
        {setting.name: _convert(setting, value) for setting, value in values_by_setting.items()}, base=config
    )


def _convert(setting: Setting, value: Any) -> Any:
    if isinstance(value, str):
        return parse_setting(setting, value)
    return tuple(value) if isinstance(value, list) else value


def find_setting(name: str) -> Setting:
    """The setting with this name, given with hyphens or underscores.

    Raises:
        ConfigError: there is none; the message has the nearest name.
    """
    table = settings()
    key = name.strip().removeprefix("--").replace("-", "_")
    if key not in table:
        raise unknown_setting(name)
    return table[key]


def check_kind(setting: Setting, value: Any) -> None:
    """Raise ConfigError unless the value is of its type, and every text printable and not empty."""
    try:
        # a list is unequal to the tuple that it should be; NaN, unequal to itself, is a matter of ranges
        is_valid = bool(convert_value(value, setting.kind) == value or value != value)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise wrong_kind(setting.flag, value, setting.kind)
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and not (text and text.isprintable()):
            raise invalid_value(setting.flag, text, "printable text that is not empty")


def check_range(setting: Setting, value: Any) -> None:
    """Raise ConfigError unless every number is finite and in its range, and the value has its form."""
    for number in value if isinstance(value, tuple) else (value,):
        if setting.range is not None and number is not None and not setting.range.fits(number):
            raise invalid_value(setting.flag, value, setting.range.describe(number))
    if setting.form is not None and not setting.form.fits(value):
        raise invalid_value(setting.flag, value, setting.form.allowed)


def parse_setting(setting: Setting, text: str) -> Any:
    """The value of this setting that the text spells.

    Raises:
        ConfigError: it spells none.
    """
    try:
        return from_text(text, setting.kind)
    except ValueError:
        raise wrong_kind(setting.flag, text, setting.kind) from None
