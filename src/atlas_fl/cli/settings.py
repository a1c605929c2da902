"""Where the settings of a command come from: a recipe, over it a file, over both the flags; and where it may write."""

import json
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from atlas_fl.cli.words import Words, last_value
from atlas_fl.config import Config, load_config
from atlas_fl.config.toml import load_values
from atlas_fl.errors import ConfigError
from atlas_fl.presets import find_preset

DEFAULT_PRESET = "quick"


def base_config(groups: Sequence[Words]) -> Config:
    """The config that `--preset` and `--config` give, before any other flag.

    A file may name its recipe itself; naming another one beside it is refused, because the file's settings would
    then stand under a name that is not theirs.

    Raises:
        ConfigError: the recipe is unknown, the file is wrong, or they name two recipes.
    """
    named, file = last_value(groups, "--preset"), last_value(groups, "--config")
    if file is None:
        return find_preset(named or DEFAULT_PRESET)
    written = load_values(file).get("preset")
    if named and written and named != written:
        raise ConfigError(
            f"--preset {named} contradicts {file}, which is made from preset {written}; leave --preset out, "
            "or take preset out of the file"
        )
    return load_config(file, base=find_preset(named or written or DEFAULT_PRESET))


def new_folder(to: str) -> Path:
    """The folder that `--to` names; raises `ConfigError` where something is there that it would mix with."""
    path = Path(to)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"--to is {path}, and there is something already; name a folder that is new or empty")
    return path


def check_target(to: str | None, *, example: str, is_own: Callable[[Path], bool]) -> None:
    """Nothing where `--to` is not given, or is a file in a folder that is there, and new or of the command itself.

    Raises:
        ConfigError: it is a folder, in no folder, or a file that the command has not written.
    """
    if to is None:
        return
    path = Path(to)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--to is {to}; allowed: a file in a folder that exists; name one such as {example}")
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or not is_own(path)):
        raise ConfigError(
            f"--to is {to}, and what lies there was not written by this command; name a new file such as {example}"
        )


def holds_json(path: Path, *, keys: Collection[str]) -> bool:
    """Whether a file holds JSON of which the mapping, or every one of a list of them, has these keys."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    rows = found if isinstance(found, list) else [found]
    return bool(rows) and all(isinstance(row, dict) and set(keys) <= row.keys() for row in rows)
