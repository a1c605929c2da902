"""Presets: the configs of `presets.toml`. Flags and files change single settings of one; some have a dial.

A dial (`--preset NAME --dial 0..4`) is a known difference between the clients of a federation, at five amounts. Each
amount is settings that fit a user's own tasks as well.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from atlas_fl.config.schema import Config
from atlas_fl.config.settings import replace_settings, settings, value_of, with_values
from atlas_fl.config.values import invalid_value, to_words
from atlas_fl.errors import ConfigError, check_known
from atlas_fl.frozen import Frozen
from atlas_fl.packaged import packaged_tables

MIDDLE = 2
"""The amount of a dial where none is given."""


class Dial(Frozen):
    """A difference between the clients of a federation, at five amounts."""

    what: str
    """The difference."""
    words: tuple[str, ...]
    """The five amounts, for people."""
    settings: tuple[Mapping[str, Any], ...]
    """The settings of each amount."""


class Preset(Frozen):
    """One recipe."""

    about: str
    settings: Mapping[str, Any]
    """Its settings that are not at their default."""
    dial: Dial | None


@cache
def presets() -> Mapping[str, Preset]:
    """Every preset by its name."""
    recipes: dict[str, Preset] = {}
    for name, table in packaged_tables(__package__, "presets.toml").items():
        inherited = recipes[table.pop("like")].settings if "like" in table else {}
        recipes[name] = Preset(
            about=table.pop("about"),
            dial=_read_dial(table.pop("dial")) if "dial" in table else None,
            settings={**inherited, **table},
        )
    return MappingProxyType(recipes)


def _read_dial(table: dict[str, Any]) -> Dial:
    what = table.pop("what")
    words = tuple(table.pop("words"))
    amounts = zip(*table.values(), strict=True)
    return Dial(what=what, words=words, settings=tuple(dict(zip(table, values)) for values in amounts))


def find_preset(name: str, *, dial: int | None = None) -> Config:
    """The config of this preset, its dial turned to this amount.

    Raises:
        ConfigError: there is none of this name, the message has the nearest; or it has no such dial.
    """
    check_known("preset", name, among=presets())
    preset = presets()[name]
    config = with_values(Config(), {**preset.settings, "preset": name})
    return config if preset.dial is None and dial is None else turn_dial(config, MIDDLE if dial is None else dial)


def preset_of(config: Config) -> Config:
    """The config that a config's preset and dial give; the defaults where there is no such preset."""
    return find_preset(config.run.preset, dial=config.run.dial) if config.run.preset in presets() else Config()


def dial_of(preset: str, dial: int) -> Dial:
    """The dial of a preset; raises ConfigError unless it has one, with this amount."""
    turned = {name: recipe.dial for name, recipe in presets().items() if recipe.dial is not None}
    if preset not in turned:
        raise ConfigError(f"--dial is {dial}, and --preset {preset} has no dial; those with one: {', '.join(turned)}")
    if not 0 <= dial <= 4:
        raise invalid_value("--dial", dial, "0 to 4")
    return turned[preset]


def turn_dial(config: Config, dial: int) -> Config:
    """The config with the dial of its preset at another amount; all that the dial does not turn stays.

    Raises:
        ConfigError: its preset has no dial, or not this amount.
    """
    values = dial_of(config.run.preset, dial).settings[dial]
    return with_values(replace(config, run=replace(config.run, dial=dial)), values)


def check_dial(config: Config) -> None:
    """Raise ConfigError where the preset has no such dial, or the settings are those of another amount."""
    preset, dial = config.run.preset, config.run.dial
    if dial is None:
        return
    changed = _changed_settings(config, dial)
    for other in range(len(dial_of(preset, dial).settings)):
        if changed and not _changed_settings(config, other):
            flag = settings()[changed[0]].flag
            raise ConfigError(
                f"--dial is {dial}, and {flag} is that of dial {other} of {preset}; turn the dial with the preset"
                f" (--preset {preset} --dial {dial}, find_preset({preset!r}, dial={dial})), or say --dial {other}"
            )


def _changed_settings(config: Config, dial: int) -> list[str]:
    """The settings that are not as this amount of the dial has them."""
    turned = turn_dial(config, dial)
    names = dial_of(config.run.preset, dial).settings[dial]
    return [name for name in names if value_of(config, name) != value_of(turned, name)]


def dial_note(config: Config) -> tuple[str, ...]:
    """One line with the dial of this federation and its amount; none without a dial."""
    preset, amount = config.run.preset, config.run.dial
    if amount is None or preset not in presets():
        return ()
    dial = dial_of(preset, amount)
    line = f"federation {preset}, dial {amount} of 0 to 4: {dial.what}: {dial.words[amount]}"
    if changed := _changed_settings(config, amount):
        own = (" ".join([settings()[name].flag, *to_words(value_of(config, name))]) for name in changed)
        line += f"; but here {', '.join(own)}"
    return (line,)


OWN_DEVICES = ("laptop_8gb",)
"""The device of all clients of a user's own data where nobody names one: none is small by its place in the list."""
OWN_RANKS = "8"
"""Their ranks: of one device there is one rank, so that methods compare on equal terms and FedAvg has one model."""
_SIZES = ("samples", "validation_samples", "test_samples")


def with_own_data(config: Config, rows: Sequence[str], *, tasks: Sequence[str] | None, said: Collection[str]) -> Config:
    """A preset's config for a user's own data: these rows of `--task`, and the `tasks` that the user names beside them.

    The preset's tasks go unless the user names some. Where all tasks are the user's own, all clients have one device
    and one rank, and all examples are dealt out unless the preset limits them. `said` are the settings that the user
    gives, which stay.
    """
    own = {row.partition("=")[0].partition(",")[0] for row in rows}
    if not own:
        return config
    changes: dict[str, Any] = {"tasks": ()} if tasks is None else {}
    if own.issuperset(tasks or ()):
        changes["devices"] = OWN_DEVICES
        if not {"devices", "trainable"}.intersection(said):  # whole models have no ranks
            changes["ranks"] = OWN_RANKS
        limited = presets()[config.run.preset].settings if config.run.preset in presets() else {}
        changes |= dict.fromkeys(name for name in _SIZES if name not in limited)
    return replace_settings({name: value for name, value in changes.items() if name not in said}, base=config)


def federation_name(config: Config) -> str:
    """The name of a config's federation: the user's own tasks where it has no others, else its preset.

    A preset with a dial, which makes the user's clients differ, stands behind them.

    >>> federation_name(with_values(Config(), {"tasks": (), "task": ("triage=notes.csv,client=hospital",)}))
    'triage'
    """
    own = list(dict.fromkeys(row.partition("=")[0].partition(",")[0] for row in config.data.task))
    if not own or not set(config.data.tasks) <= set(own):
        return config.run.preset
    name = "+".join(own)[:MOST_TITLE]
    return name if config.run.dial is None else f"{name}-{config.run.preset}"


MOST_TITLE = 60
"""Characters of a federation's name, which is part of the names of files."""
