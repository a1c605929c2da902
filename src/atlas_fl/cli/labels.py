"""What tells runs apart in a table or figure."""

from collections.abc import Sequence
from pathlib import Path

from atlas_fl.config import differences, load_config, value_of
from atlas_fl.config.kinds import to_words

UNTOLD = frozenset({"preset"})
"""Settings that say nothing beside the others that they set."""


def labels_of(named: Sequence[Path]) -> list[str]:
    """The settings that these runs differ in; their paths where one is no run, or two differ in nothing."""
    paths = [str(path) for path in named]
    if len(named) < 2 or not all((path / "config.toml").is_file() for path in named):
        return paths
    configs = [load_config(path / "config.toml") for path in named]
    differ = dict.fromkeys(name for config in configs for name in differences(configs[0], config) if name not in UNTOLD)
    labels = [
        ", ".join(f"{name} {' '.join(to_words(value_of(config, name)))}" for name in differ) for config in configs
    ]
    return labels if len(set(labels)) == len(labels) else paths
