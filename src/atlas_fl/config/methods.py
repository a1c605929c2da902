"""The method of a config: its rule, and the settings that make it that method.

`with_method_settings` writes the settings of a published method into the config, so that the files of a run say all of
them. The registry is imported in functions, because it takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from atlas_fl.config.schema import Config
from atlas_fl.config.settings import flag_words, replace_settings, settings, value_of
from atlas_fl.config.values import to_words
from atlas_fl.errors import ConfigError

if TYPE_CHECKING:
    from atlas_fl.methods.method import Method, PublishedMethod


def published_methods() -> Mapping[str, PublishedMethod]:
    """Every published method that is a rule with settings, by name."""
    from atlas_fl.methods.registry import METHODS

    return METHODS


def rule_of(config: Config) -> str:
    """The server's rule of this config: that of its method, or what `--strategy` says."""
    name = config.mixing.strategy
    method = published_methods().get(name)
    return name if method is None else method.rule


def method_class(config: Config) -> type[Method]:
    """The method that aggregates in this config."""
    from atlas_fl.methods.registry import rule_class

    return rule_class(rule_of(config))


def is_of_method(strategy: str, setting: str) -> bool:
    """Return whether this setting is what makes a published method the one that it is."""
    method = published_methods().get(strategy)
    return method is not None and setting in method.settings


def last_aggregation(config: Config) -> int:
    """The round that the last aggregation ends."""
    return config.training.rounds - config.mixing.personal_rounds


def with_method_settings(config: Config) -> Config:
    """The config with all settings of its method; the very same where `--strategy` is a rule or nothing is missing.

    Raises:
        ConfigError: a setting has another value than the method's, and that value is not the default.
    """
    method = published_methods().get(config.mixing.strategy)
    if method is None:
        return config
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


OF_LAPLACIAN = frozenset({"--eta", "--eta-decay", "--laplacian", "--layer-weighting"})
"""Flags that have a meaning under the Laplacian alone."""


def check_typed_settings(config: Config, flags: AbstractSet[str]) -> None:
    """Raise ConfigError where a flag that a user typed says another value than the method.

    A typed value that is the default can be told from one that nobody chose here alone.
    """
    strategy = config.mixing.strategy
    from atlas_fl.methods.registry import RULES

    rule = RULES.get(rule_of(config))  # None of a plug-in's, which is not loaded yet, and of an unknown one
    if rule is not None and rule.asks_once and (of_laplacian := sorted(flags & OF_LAPLACIAN)):
        raise ConfigError(
            f"{of_laplacian[0]} is a setting of the Laplacian, and --strategy {strategy} measures how much is shared;"
            " leave it out, or take the strategy atlas_laplacian"
        )
    if strategy == "atlas" and "--within" in flags:
        raise ConfigError(
            "--within says whether kriging asks clusters what to average, and --strategy atlas does;"
            " leave it out, or take --strategy kriging"
        )
    method = published_methods().get(strategy)
    if method is None:
        return
    defaults = Config()
    for name, value in method.settings.items():
        if settings()[name].flag in flags and value_of(config, name) != value:
            raise _contradiction(config, name, value)
    for name in method.suggested:
        if settings()[name].flag in flags and value_of(config, name) == value_of(defaults, name):
            raise _switched_off(config, name)


def check_swept_setting(config: Config, name: str) -> None:
    """Raise ConfigError unless a sweep may give this setting the value that it has here."""
    check_typed_settings(config, {settings()[name].flag})


def without_method_settings(config: Config) -> Config:
    """The config with the settings of its method at their defaults, as the base of runs of other strategies."""
    method = published_methods().get(config.mixing.strategy)
    if method is None:
        return config
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


def _switched_off(config: Config, name: str) -> ConfigError:
    given, rule = flag_words(settings()[name], value_of(config, name)), rule_of(config)
    return ConfigError(
        f"{given} switches off what --strategy {config.mixing.strategy} adds to {rule}; take --strategy {rule}, or"
        " another value"
    )
