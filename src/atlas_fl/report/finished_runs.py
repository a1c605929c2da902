"""Finished runs and their scores: read from run folders, written to and read from the CSV of `atlas results --csv`.

A row says how to make its run again: a preset and the flags in which the run differs from it. The hash of the run's
settings stands beside them, so that a row whose words mean something else by now is found. Folders of runs are large
and stay where they were made; a file of rows can be kept beside the page that was written from it, added to, and read
by whatever reads CSV.
"""

import csv
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any, Literal

from atlas_fl.config import Config, config_hash, differences, load_config
from atlas_fl.config.methods import with_method_settings
from atlas_fl.config.presets import find_preset
from atlas_fl.config.settings import replace_settings, settings
from atlas_fl.config.values import from_words, to_words
from atlas_fl.errors import CheckpointError, ConfigError, DataError, short_repr
from atlas_fl.experiment.tuning import (
    DEVELOPMENT_SEEDS,
    TunedMethod,
    has_settings,
    parse_tuning,
    read_tuning,
    tuning_json,
    value_words,
)
from atlas_fl.report.csv_text import format_csv, unescape_cell
from atlas_fl.storage.digests import read_checked
from atlas_fl.storage.folder_access import MOST_JSON_BYTES, files_below, open_named_file, read_named_file
from atlas_fl.storage.jsonl import from_json
from atlas_fl.storage.run_folder import RunFolder, find_run

LARGEST = 1e18
"""Largest number of bytes or seconds in a file of rows."""
SUMMARY_ENTRIES = ("run", "overall", "tasks", "clients", "bytes")
"""Entries of a summary that its readers use."""
COLUMNS = (
    *("preset", "dial", "strategy", "seed", "mean", "gain_over_majority", "bytes", "bytes_below_whole", "seconds"),
    *("seconds_reused", "memory_bytes", "loss", "calibration_error", "clients", "tasks", "scores", "flags", "tuning"),
    "config_hash",
)
"""Columns of the file. `clients`, `tasks` and `scores` have one word a client; `tuning` is the JSON of what was tried,
empty without a record of it; what flags or scores say as well (strategy, seed, mean) is there for readers."""


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """Scores and costs of one finished run, as a comparison needs them."""

    seed: int
    tasks: Mapping[str, str]
    """By client, the task."""
    scores: Mapping[str, float]
    """By client, the test score in the task's own metric."""
    loss: float | None
    """Mean test loss; None where a run does not say, or its tasks have losses of different kinds."""
    calibration_error: float | None
    """Mean expected calibration error (`data.metrics.calibration_error`); None where a run does not say."""
    gain_over_majority: float | None
    """Mean accuracy above the majority class."""
    num_bytes: int
    """Both directions."""
    bytes_below_whole: float | None
    """Share of the bytes that it does not send of those of whole models in every round."""
    seconds: float | None
    """Wall-clock time."""
    reused_seconds: float | None
    """Seconds of the results that it reused from earlier runs of its process; None if a run does not say."""
    memory_bytes: float | None
    """Memory that training takes of the device of the client that needs most, as predicted; None where a plan does not
    predict it."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run with a summary."""

    config: Config
    scores: RunScores
    tuning: TunedMethod | None = None
    """The record of its tuning; None if there is none."""

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.config.run.seed

    @property
    def method(self) -> str:
        """Its strategy."""
        return self.config.mixing.strategy


def read_summary(run: Path | str) -> Mapping[str, Any]:
    """The content of `summary.json` of a complete run.

    Raises:
        CheckpointError: the run is missing or not complete.
    """
    folder = find_run(run)
    if not folder.summary.exists():
        raise CheckpointError(f"run {folder.path} is not complete: it has no summary.json; atlas resume {folder.path}")
    return read_checked(folder, folder.summary, *SUMMARY_ENTRIES)


def read_scores(run: Path | str, *, score: Literal["final", "best"] = "final") -> RunScores:
    """Scores of a run folder: of the models that clients end with, or of the best round by validation.

    Raises:
        CheckpointError: the run is missing or not complete.
        DataError: a client has no test score.
    """
    summary = read_summary(run)
    clients = summary["clients"]
    if not clients:
        raise DataError(f"run {run} has no client in its summary; restore summary.json from a copy, or run again")
    try:
        scores = {name: float(entry[score]["test"]["primary"]) for name, entry in clients.items()}
    except KeyError as error:
        raise DataError(f"run {run} has no test score of every client ({error}); run it again") from None
    return RunScores(
        seed=int(summary["run"]["seed"]),
        tasks={name: str(entry.get("task", "")) for name, entry in clients.items()},
        scores=scores,
        loss=_mean_of(clients, score, "loss"),
        calibration_error=_mean_of(clients, score, "ece"),
        gain_over_majority=summary["overall"][score].get("test", {}).get("gain_over_majority"),
        num_bytes=summary["bytes"]["up"] + summary["bytes"]["down"],
        bytes_below_whole=summary["bytes"].get("full_model", {}).get("reduction"),
        seconds=summary.get("seconds", {}).get("total"),
        reused_seconds=summary.get("seconds", {}).get("reused"),
        memory_bytes=_most_memory(clients),
    )


def _most_memory(clients: Mapping[str, Any]) -> float | None:
    needed = [entry.get("predicted", {}).get("memory_bytes") for entry in clients.values()]
    return None if None in needed else max(needed)


def _mean_of(clients: Mapping[str, Any], score: str, metric: str) -> float | None:
    """The mean of a metric of the test scores over clients; None where one has none, or means another thing by it."""
    tests = [entry[score]["test"] for entry in clients.values()]
    kinds = {next((name for name in ("mcc", "perplexity") if name in test), "") for test in tests}
    values = [test.get(metric) for test in tests]
    return None if None in values or len(kinds) > 1 else sum(values) / len(values)


def find_finished_runs(places: Sequence[Path | str]) -> tuple[FinishedRun, ...]:
    """All finished runs below these folders and in these CSV files, each once; those of development seeds aside.

    Raises:
        ConfigError: there is none, a place is not there, or a row of a file is none of a run.
        CheckpointError: the settings or the summary of one cannot be read.
        DataError: one has no test score of every client.
    """
    if missing := [place for place in places if not str(place) or not Path(place).exists()]:
        raise ConfigError(f"there is no folder or file {str(missing[0])!r}; name folders of runs or files of --csv")
    files = [Path(place) for place in places if Path(place).is_file()]
    named = [Path(place) for place in places if Path(place).is_dir()]
    found = sorted({path.parent for place in named for path in files_below(place) if path.name == "summary.json"})
    folders = [path for path in found if RunFolder(path).config.exists() or RunFolder(path).plan.exists()]
    runs = {config_hash(run.config): run for file in files for run in read_csv(file)}
    for folder in folders:
        if load_config(RunFolder(folder).config, within=folder).run.seed not in DEVELOPMENT_SEEDS:
            run = read_finished_run(folder)
            runs[config_hash(run.config)] = run
    if not runs:
        raise ConfigError(f"no finished run below {', '.join(map(str, places))}; run `atlas compare` first")
    return tuple(sorted(runs.values(), key=_order))


def read_finished_run(run: Path | str, *, score: Literal["final", "best"] = "final") -> FinishedRun:
    """The finished run of this folder, with the scores that are asked for.

    Raises:
        ConfigError: its settings are of another version, or not those that its record of tuning says were chosen.
        CheckpointError: the run is missing or not complete, or its settings cannot be read.
        DataError: a client has no test score.
    """
    folder = find_run(run)
    config = load_config(folder.config, within=folder.path)
    found = FinishedRun(config=config, scores=read_scores(folder.path, score=score), tuning=read_tuning(folder))
    _check_tuning(found, str(folder.tuning))
    return found


def _check_tuning(run: FinishedRun, where: str) -> None:
    """Raise ConfigError unless the run has the settings that its record of tuning says were chosen."""
    if run.tuning is not None and not has_settings(run.config, run.tuning.best):
        chosen = " ".join(f"{name} {value_words(value)}" for name, value in run.tuning.best.settings.items())
        raise ConfigError(f"{where} says that tuning chose {chosen}, and the run has others; take that record away")


def _order(run: FinishedRun) -> tuple[str, int, str, int, str]:
    settings_of_run = run.config.run
    dial = -1 if settings_of_run.dial is None else settings_of_run.dial
    return settings_of_run.preset, dial, run.method, run.seed, config_hash(run.config)


def to_csv(runs: Iterable[FinishedRun]) -> str:
    """The rows of these runs, with a header; numbers in full precision, unknown ones empty."""
    rows: list[list[object]] = []
    for run in runs:
        scores = run.scores
        rows.append(
            [
                *(run.config.run.preset, run.config.run.dial, run.method, run.seed),
                sum(scores.scores.values()) / len(scores.scores),
                *(scores.gain_over_majority, scores.num_bytes, scores.bytes_below_whole, scores.seconds),
                *(scores.reused_seconds, scores.memory_bytes, scores.loss, scores.calibration_error),
                *(_words(values) for values in (scores.scores, scores.tasks.values(), scores.scores.values())),
                shlex.join(changed_flags(run.config)),
                None if run.tuning is None else json.dumps(tuning_json(run.tuning)),
                config_hash(run.config),
            ]
        )
    return format_csv(COLUMNS, rows)


def _words(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


def changed_flags(config: Config) -> list[str]:
    """The flags in which a run differs from its preset, each with the words of its value."""
    changed = differences(find_preset(config.run.preset, dial=config.run.dial), config)
    return [word for name, (_, value) in changed.items() for word in (settings()[name].flag, *to_words(value))]


def is_csv(path: Path) -> bool:
    """Return whether a file begins as `to_csv` writes it."""
    with open_named_file(path, max_bytes=sys.maxsize) as file:
        header = file.readline(1000).rstrip(b"\r\n")
    return header == ",".join(COLUMNS).encode()


def read_csv(path: Path) -> list[FinishedRun]:
    """The runs of a file that `to_csv` has written, in its order.

    Raises:
        ConfigError: it is none, a row does not say what one says, or the flags of a row mean other settings than those
            that its run had: a preset has changed since.
    """
    if not is_csv(path):
        raise ConfigError(f"{path} is no file of runs; give folders of runs, or a CSV file that `atlas results` wrote")
    try:
        text = read_named_file(path, max_bytes=MOST_JSON_BYTES).decode(errors="replace")
        rows = list(enumerate(csv.DictReader(StringIO(text, newline="")), start=2))
    except csv.Error as error:
        raise ConfigError(f"{path} cannot be read ({error}); restore the file") from None
    return [_read_row(row, f"line {line} of {path}") for line, row in rows]


def _read_row(row: Mapping[str, Any], where: str) -> FinishedRun:
    try:
        if None in row or None in row.values():
            raise ValueError("it has more or fewer cells than the header has names")
        row = {name: unescape_cell(cell) for name, cell in row.items()}
        config = _config_of(row)
        scores = _scores_of(row, config.run.seed)
        tuning = _tuning_of(row)
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(f"{where} is no row of a run ({error}); restore the file, or take the line out") from None
    if config_hash(config) != row["config_hash"]:
        raise ConfigError(
            f"{where} is of a run {row['config_hash']:.16}, and its flags mean {config_hash(config)} today: a preset"
            " has changed since; take such lines out and run them again"
        )
    run = FinishedRun(config=config, scores=scores, tuning=tuning)
    _check_tuning(run, where)
    return run


def _tuning_of(row: Mapping[str, Any]) -> TunedMethod | None:
    if not row["tuning"]:
        return None
    content = from_json(row["tuning"])
    tuning = parse_tuning(content)
    if len({frozenset(trial.settings) for trial in tuning.trials}) != 1:
        raise ValueError("the column tuning has trials of different settings")
    for trial in tuning.trials:
        for value in (trial.validation, *trial.settings.values()):
            if not isinstance(value, int | float) and not str(value).isidentifier():
                raise ValueError(f"the column tuning has the value {short_repr(value)}")
    return tuning


def _config_of(row: Mapping[str, Any]) -> Config:
    base = find_preset(row["preset"], dial=int(row["dial"]) if row["dial"] else None)
    words: dict[str, list[str]] = {}
    for word in shlex.split(row["flags"]):
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            words[name] = []
        elif not words:
            raise ValueError(f"the column flags begins with {word:.40}")
        else:
            words[name].append(word)
    values = {name: from_words(own, settings()[name].kind) for name, own in words.items()}
    return with_method_settings(replace_settings(values, base=base))  # what its strategy means today


def _scores_of(row: Mapping[str, Any], seed: int) -> RunScores:
    clients, tasks, scores = (row[name].split(" ") for name in ("clients", "tasks", "scores"))
    return RunScores(
        seed=seed,
        tasks=dict(zip(clients, tasks, strict=True)),
        scores={name: float(score) for name, score in zip(clients, scores, strict=True)},
        loss=_number(row["loss"]),
        calibration_error=_number(row["calibration_error"]),
        gain_over_majority=_number(row["gain_over_majority"], least=-1.0),
        num_bytes=_whole_number(row["bytes"]),
        bytes_below_whole=_number(row["bytes_below_whole"], least=-inf),
        seconds=_number(row["seconds"]),
        reused_seconds=_number(row["seconds_reused"]),
        memory_bytes=_number(row["memory_bytes"]),
    )


def _whole_number(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(int(LARGEST))):
        raise ValueError(f"{text:.40} is no number of bytes")
    return int(text)


def _number(text: str, *, least: float = 0.0) -> float | None:
    value = float(text) if text else None
    least = max(least, -LARGEST)
    if value is not None and not least <= value <= LARGEST:
        raise ValueError(f"{text} is no number of at least {least:g} and at most {LARGEST:g}")
    return value
