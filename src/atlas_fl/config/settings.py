"""The settings as one table (group, flag, type, help), and changes to a config by the names of settings."""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, get_type_hints

from atlas_fl.config.schema import Config, ServerConfig
from atlas_fl.config.values import Form, Mark, from_text, to_words, wrong_kind
from atlas_fl.errors import ConfigError, did_you_mean, short_repr
from atlas_fl.methods.knobs import Range, Tried, documented_fields


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting."""

    name: str
    """Its key in a file; the flag has hyphens."""
    group: str
    """The table of the file that it stands in."""
    kind: Any
    """Its type, as annotated."""
    help: str
    """Its docstring, on one line."""
    range: Range | None = None
    """Range of its number or numbers."""
    form: Form | None = None
    """Form of its value."""
    marks: frozenset[Mark] = frozenset()
    tried: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)
    """Values that the tuning of a strategy tries, by its name."""

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return "--" + self.name.replace("_", "-")


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting by its name, in the order of the groups."""
    table: dict[str, Setting] = {}
    for group, cls in group_classes().items():
        help_of = field_docs(cls)
        declared = get_type_hints(cls, include_extras=True)
        for name, kind in get_type_hints(cls).items():
            assert name not in table, f"two groups share the name {name}"
            extras = getattr(declared[name], "__metadata__", ())
            table[name] = Setting(
                name=name,
                group=group,
                kind=kind,
                help=help_of[name],
                range=next((extra for extra in extras if isinstance(extra, Range)), None),
                form=next((extra for extra in extras if isinstance(extra, Form)), None),
                marks=frozenset(extra for extra in extras if isinstance(extra, Mark)),
                tried={one: extra.values for extra in extras if isinstance(extra, Tried) for one in extra.strategies},
            )
    return MappingProxyType(table)


@cache
def group_classes() -> Mapping[str, type[Any]]:
    """The dataclass of every group by the group's name."""
    return MappingProxyType({**get_type_hints(Config), "server": ServerConfig})


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
    groups = {group: replace(getattr(base, group), **changes) for group, changes in by_group.items()}
    return replace(base, **groups)


def field_docs(cls: type[Any]) -> dict[str, str]:
    """Docstrings below the fields of a dataclass in its source, on one line each: Python itself does not keep them.

    The fields of the classes that it extends are among them.
    """
    docs = {name: text for one in reversed(cls.__mro__) if is_dataclass(one) for name, text in _own_docs(one).items()}
    return docs | {one.name: one.metadata["help"] for one in fields(cls) if one.metadata}


@cache
def _own_docs(cls: Callable[..., Any]) -> dict[str, str]:
    if cls is ServerConfig:
        return {}
    (node,) = ast.parse(inspect.getsource(cls)).body
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


def parse_setting(setting: Setting, text: str) -> Any:
    """The value of this setting that the text spells.

    Raises:
        ConfigError: it spells none.
    """
    try:
        return from_text(text, setting.kind)
    except ValueError:
        raise wrong_kind(setting.flag, text, setting.kind) from None
