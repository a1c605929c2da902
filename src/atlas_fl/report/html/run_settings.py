"""The section of a run's page on its settings, and on the commands that repeat it."""

import shlex
from collections.abc import Mapping
from typing import Any

from atlas_fl.config import config_hash, differences, load_config
from atlas_fl.config.files import read_tables
from atlas_fl.config.presets import find_preset, presets
from atlas_fl.config.settings import settings
from atlas_fl.config.values import to_words
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.report.finished_runs import changed_flags
from atlas_fl.report.html.elements import Block, Command, Folded, Section, Table, Text
from atlas_fl.storage.digests import check_files
from atlas_fl.storage.run_folder import RunFolder

Summary = Mapping[str, Any]


def settings_section(folder: RunFolder, summary: Summary | None) -> Section:
    """What was set otherwise than in the preset, all settings, versions, and how to make the run again.

    A run of an earlier version whose settings this version does not know gets the settings as its file has them.

    Raises:
        CheckpointError: `config.toml` is damaged.
    """
    check_files(folder, folder.config)
    blocks = [*_commands(folder), *_all_settings(folder), *_versions(summary)]
    return Section(name="settings", title="Settings, and how to make it again", blocks=blocks)


def _commands(folder: RunFolder) -> list[Block]:
    name = shlex.quote(f"{folder.path.name}/config.toml")
    same = Command(
        words=f"atlas run --config {name} --name again",
        what="From the run's own file with every setting alike, in the folder in which the run lies:",
    )
    try:
        config = load_config(folder.config, within=folder.path)
        usual = find_preset(config.run.preset, dial=config.run.dial) if config.run.preset in presets() else None
    except ConfigError as error:
        return [Text(lines=[f"This version of ATLAS does not read these settings: {error}"]), same]
    if usual is None:
        return [same]
    flags = ["--preset", config.run.preset, *([] if config.run.dial is None else ["--dial", str(config.run.dial)])]
    words = shlex.join(["atlas", "run", *flags, *changed_flags(config)])
    rows = [
        [settings()[name].flag, " ".join(to_words(value)), " ".join(to_words(preset))]
        for name, (preset, value) in differences(usual, config).items()
    ]
    changed = Table(
        title=f"Set otherwise than in the preset {config.run.preset}", columns=("flag", "here", "preset"), rows=rows
    )
    short = Command(words=words, what=f"With flags; settings {config_hash(config):.8}:")
    return [short, same, *([changed] if rows else [])]


def _all_settings(folder: RunFolder) -> list[Block]:
    try:
        tables = read_tables(folder.config, within=folder.path)
    except ConfigError as error:
        raise CheckpointError(f"damaged file {folder.config}: {error}") from None
    rows = [
        [table, name, str(value)]
        for table, values in tables.items()
        for name, value in (values.items() if isinstance(values, dict) else [("", values)])
    ]
    table = Table(title="config.toml", columns=("part", "setting", "value"), rows=rows)
    return [Folded(title=f"All {len(rows)} settings", blocks=[table])]


def _versions(summary: Summary | None) -> list[Block]:
    rows = [[name, str(version)] for name, version in ((summary or {}).get("versions") or {}).items()]
    return [Table(title="Versions", columns=("what", "version"), rows=rows)] if rows else []
