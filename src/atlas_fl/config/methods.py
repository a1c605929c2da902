"""The method of a config: its rule, and the settings that make it that method.

`with_method_settings` writes the settings of a published method into the config, so that the files of a run say all of
them. The registry is imported in functions, because it takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

from atlas_fl.config.schema import Config
from atlas_fl.config.settings import (
    Setting,
    check_range,
    declared_settings,
    flag_words,
    parse_setting,
    replace_settings,
    settings,
    value_of,
)
from atlas_fl.config.values import invalid_value, to_words
from atlas_fl.errors import ConfigError, check_known
from atlas_fl.plugins import registrations

if TYPE_CHECKING:
    from atlas_fl.methods.method import Method, PublishedMethod


def method_of(config: Config) -> PublishedMethod:
    """The published method of this config, or its rule as one without settings of its own."""
    from atlas_fl.methods.registry import published

    return published(config.mixing.strategy)


def rule_of(config: Config) -> str:
    """The server's rule of this config: that of its method, or what `--strategy` says."""
    return method_of(config).rule


def method_class(config: Config) -> type[Method]:
    """The method that aggregates in this config."""
    from atlas_fl.methods.registry import rule_class

    return rule_class(rule_of(config))


def knobs_of(method: type[Method]) -> Mapping[str, Setting]:
    """Annotated fields of a method that are no setting of their own, as those of a plug-in's method are, by name."""
    declared = get_type_hints(method, include_extras=True)
    return {
        knob.name: knob
        for knob in declared_settings(method, group="knob")
        if hasattr(declared[knob.name], "__metadata__") and knob.name not in settings()
    }


def knob_values(config: Config) -> dict[str, Any]:
    """Values of `--knob` by name; of a name that several methods of plug-ins have, that of the strategy counts.

    Raises:
        ConfigError: a word is no `name=value`, no method of the plug-ins has the knob, or the value is not allowed.
    """
    if not config.mixing.knob:
        return {}
    methods = {name: method for one in config.run.plugin for name, method in registrations(one, "method").items()}
    own_last = sorted(methods, key=lambda name: name == config.mixing.strategy)
    known = {name: knob for method in own_last for name, knob in knobs_of(methods[method]).items()}
    values: dict[str, Any] = {}
    for word in config.mixing.knob:
        name, sign, text = word.partition("=")
        if not sign or name in values:
            raise invalid_value("--knob", word, "name=value, each name once")
        check_known("knob", name, among=known or ["none, since no method of a plug-in of this run has any"])
        values[name] = parse_setting(known[name], text)
        check_range(known[name], values[name])
    return values


def last_aggregation(config: Config) -> int:
    """The round that the last aggregation ends."""
    return config.training.rounds - config.mixing.personal_rounds


def with_method_settings(config: Config) -> Config:
    """The config with all settings of its method; the very same where `--strategy` is a rule or nothing is missing.

    Raises:
        ConfigError: a setting has another value than the method's, and that value is not the default.
    """
    method = method_of(config)
    defaults = Config()
    for name, value in method.settings.items():
        if value_of(config, name) not in (value, value_of(defaults, name)):
            raise _contradiction(config, name, value)
    suggested = {
        name: value for name, value in method.suggested.items() if value_of(config, name) == value_of(defaults, name)
    }
    missing = {
        name: value for name, value in {**method.settings, **suggested}.items() if value_of(config, name) != value
    }
    return replace_settings(missing, base=config) if missing else config


def settings_read(config: Config) -> set[str]:
    """Settings of single methods that the method of this config reads, and what else it switches on beside it."""
    from atlas_fl.methods.registry import make, parts_of

    complete = with_method_settings(config)
    values = {name: value_of(complete, name) for name in settings()}
    method = make(method_class(complete), values)
    within = ["within"] if method.reads_within and "within" not in method.fixed else []
    return {*method.uses, *within, *(one.name for part in parts_of(method, values) for one in fields(part))}


def check_typed_settings(config: Config, flags: AbstractSet[str]) -> None:
    """Raise ConfigError where a flag that a user typed says another value than the method.

    A typed value that is the default can be told from one that nobody chose here alone.
    """
    method = method_of(config)
    defaults = Config()
    for name, value in method.settings.items():
        if settings()[name].flag in flags and value_of(config, name) != value:
            raise _contradiction(config, name, value)
    for name in method.suggested:
        if settings()[name].flag in flags and value_of(config, name) == value_of(defaults, name):
            given = flag_words(settings()[name], value_of(config, name))
            raise ConfigError(
                f"{given} switches off what --strategy {config.mixing.strategy} adds to {rule_of(config)}; take"
                f" --strategy {rule_of(config)}, or another value"
            )


def without_method_settings(config: Config) -> Config:
    """The config with the settings of its method at their defaults, as the base of runs of other strategies."""
    method = method_of(config)
    defaults = Config()
    return replace_settings({name: value_of(defaults, name) for name in method.settings}, base=config)


def _contradiction(config: Config, name: str, value: Any) -> ConfigError:
    # the preset may have set the other value: leaving the flag out would not do
    actual, needed = " ".join(to_words(value_of(config, name))), flag_words(settings()[name], value)
    strategy = config.mixing.strategy
    return ConfigError(
        f"{settings()[name].flag} is {actual}, and --strategy {strategy} is {needed}; set {needed}, or take another"
        " strategy"
    )
