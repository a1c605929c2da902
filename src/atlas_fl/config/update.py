"""Settings changed by name."""

from collections.abc import Mapping
from typing import Any

from atlas_fl.config.fields import Setting, from_values, settings, unknown_setting
from atlas_fl.config.groups import Config
from atlas_fl.config.kinds import from_text, wrong_kind


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with these settings: `with_values(config, {"eta": 0.5, "tasks": ["movie", "trec"]})`.

    Names are those of the flags, with hyphens or underscores. Values may also be text, as on a command line, with the
    parts of a list joined by `+`. Ranges are not looked at: that is what `validate` does.

    Raises:
        ConfigError: there is no setting of this name, or the text spells no value of its type.
    """
    found = {find_setting(name): value for name, value in values.items()}
    return from_values({setting.name: _value(setting, value) for setting, value in found.items()}, base=config)


def _value(setting: Setting, value: Any) -> Any:
    if isinstance(value, str):
        return parse(setting, value)
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


def parse(setting: Setting, text: str) -> Any:
    """The value of this setting that the text spells.

    Raises:
        ConfigError: it spells none.
    """
    try:
        return from_text(text, setting.kind)
    except ValueError:
        raise wrong_kind(setting.flag, text, setting.kind) from None
