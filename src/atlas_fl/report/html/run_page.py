"""The page of one run, in the order in which people ask."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from atlas_fl.config import config_hash, differences, load_config
from atlas_fl.config.files import read_tables
from atlas_fl.config.presets import find_preset, presets
from atlas_fl.config.settings import settings
from atlas_fl.config.values import to_words
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.experiment.summary import attack_note
from atlas_fl.report.finished_runs import changed_flags, read_summary
from atlas_fl.report.html.elements import Block, Chart, Command, Folded, Page, Section, Text
from atlas_fl.report.html.run_clients import data_of_clients, likeness, moving_weights, ranks, sharing
from atlas_fl.report.html.run_costs import leakage, memory, mishaps, time, traffic
from atlas_fl.report.html.run_scores import convergence, outcome
from atlas_fl.report.record import Record, read_record
from atlas_fl.report.table import Table
from atlas_fl.storage.digests import check_files
from atlas_fl.storage.run_folder import RunFolder, find_run

Summary = Mapping[str, Any]
FigureOf: TypeAlias = Callable[[Record], Chart | None]
"""(what a run has recorded) -> a chart of it; None where the run has nothing to show."""
PLUGIN_FIGURES: dict[str, FigureOf] = {}
"""Figures of plug-ins, by the name of their file."""


def run_page(run: Path | str) -> Page:
    """The page of a run; of one that is not complete, of its rounds up to the newest checkpoint.

    A section for which the run's files hold nothing is left out.

    Raises:
        CheckpointError: this is no run folder, or a file in it is damaged.
    """
    folder = find_run(run)
    record = read_record(folder.path)
    summary = read_summary(folder.path) if folder.summary.exists() else None
    sections = [
        outcome(record, summary),
        data_of_clients(record),
        likeness(record),
        ranks(record),
        sharing(record),
        moving_weights(record),
        convergence(record),
        traffic(record, summary),
        memory(record, summary),
        time(record, summary),
        mishaps(record),
        leakage(record),
        _plugin_section(record),
        _settings_section(folder, summary),
    ]
    last = max((row["round"] for row in record.metrics), default=0)
    attack = attack_note(summary or {})
    warnings = [*([] if summary is not None else [_incomplete_note(last)]), *([attack] if attack else [])]
    return Page(
        title=record.name,
        subtitle=_subtitle((summary or {}).get("run") or {}, last),
        sections=[section for section in sections if section is not None],
        warnings=warnings,
    )


def plugin_charts(record: Record) -> dict[str, Chart]:
    """The charts that plug-ins make of a run, by the name of their file."""
    charts = {name: figure(record) for name, figure in PLUGIN_FIGURES.items()}
    return {name: chart for name, chart in charts.items() if chart is not None}


def _plugin_section(record: Record) -> Section | None:
    charts = [*plugin_charts(record).values()]
    return Section(name="plugins", title="Figures of plug-ins", blocks=charts) if charts else None


def _incomplete_note(last: int) -> str:
    """Sentence on a run without a summary."""
    done = f"Shown is what was saved after round {last}." if last else "No round has been saved yet."
    return f"This run is not complete. {done}"


def _subtitle(run: Mapping[str, Any], last: int) -> str:
    words = [f"{name} {run[name]}" for name in ("preset", "strategy", "model", "seed") if run.get(name) is not None]
    return ", ".join(["one run", *words, f"{last} round{'' if last == 1 else 's'}"])


def _settings_section(folder: RunFolder, summary: Summary | None) -> Section:
    """Section on the differences from the preset, all settings, versions, and the commands that repeat the run.

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
