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
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from atlas_fl.config import Config, config_hash, differences, load_config, methods, presets
from atlas_fl.config.settings import replace_settings, settings
from atlas_fl.config.values import LARGEST, from_words, to_words
from atlas_fl.data.clients import group_by, whole_of
from atlas_fl.errors import AtlasError, CheckpointError, ConfigError, DataError
from atlas_fl.experiment.tuning import DEVELOPMENT_SEEDS, TunedMethod, has_settings, parse_tuning, read_tuning
from atlas_fl.frozen import Frozen
from atlas_fl.report.csv_text import format_csv, unescape_cell
from atlas_fl.storage import digests, folder_access, jsonl, tensors
from atlas_fl.storage.run_folder import RunFolder, find_run

NUMBERS = {
    **{"gain_over_majority": "gain_over_majority", "bytes": "num_bytes", "bytes_below_whole": "bytes_below_whole"},
    **{name: name for name in ("client_steps", "memory_bytes", "loss", "calibration_error")},
}
"""Fields of `Measures` by their columns of the file."""
SUMMARY_ENTRIES = ("run", "overall", "tasks", "clients", "bytes")
"""Entries of a summary that its readers use."""
COLUMNS = (
    *("preset", "dial", "strategy", "seed", "mean", *NUMBERS, "clients", "tasks", "scores", "flags", "tuning"),
    "config_hash",
)
"""Columns of the file. `clients`, `tasks` and `scores` have one word a client; `tuning` is the JSON of what was tried,
empty without a record of it; what flags or scores say as well (strategy, seed, mean) is there for readers."""


class Measures(Frozen):
    """Numbers of one run, or the means over several; each but the bytes is None where a run does not say."""

    loss: float | None
    """Mean test loss, cross-entropy in nats where labels are classes; None too where tasks have other kinds of it."""
    calibration_error: float | None
    """Mean expected calibration error (`data.metrics.calibration_error`)."""
    gain_over_majority: float | None
    """Mean accuracy above the majority class."""
    num_bytes: float
    """Both directions."""
    bytes_below_whole: float | None
    """Share of the bytes that it does not send of those of whole models in every round."""
    client_steps: float | None
    """Optimizer steps of all clients in all rounds."""
    memory_bytes: float | None
    """Memory that training takes of the device of the client that needs most, as the plan predicts it."""


class RunScores(Measures):
    """Scores and costs of one finished run, as a comparison needs them."""

    seed: int
    tasks: Mapping[str, str]
    """By client, the task."""
    scores: Mapping[str, float]
    """By client, the test score in the task's own metric."""
    resampled: Mapping[str, Any] | None = None
    """By client, final test scores over draws of its examples, (draws,); None of a row of a file, and of data that are
    not a user's own."""


class FinishedRun(Frozen):
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
        CheckpointError: the run is missing, not complete, or not what was written.
    """
    folder = find_run(run)
    if not folder.summary.exists():
        raise CheckpointError(f"run {folder.path} is not complete: it has no summary.json; atlas resume {folder.path}")
    return digests.read_checked(folder, folder.summary, *SUMMARY_ENTRIES)


def read_finished_run(run: Path | str, *, score: Literal["final", "best"] = "final") -> FinishedRun:
    """The finished run of this folder: its scores are of the models that clients end with, or of the best round.

    Raises:
        ConfigError: its settings are of another version, or not those that its record of tuning says were chosen.
        CheckpointError: the run is missing or not complete, or its settings cannot be read.
        DataError: a client has no test score.
    """
    folder = find_run(run)
    summary = read_summary(run)
    config = load_config(folder.config, within=folder.path)
    scores = _scores_of_summary(summary, score, run)
    if score == "final" and folder.resampled.is_file() and len(scores.scores) == len(summary["clients"]):
        digests.check_files(folder, folder.resampled)
        draws = tensors.read_tensors(folder.resampled, within=folder.path)
        scores = replace(scores, resampled={name: values.numpy() for name, values in draws.items()})
    found = FinishedRun(config=config, scores=scores, tuning=read_tuning(folder))
    _check_tuning(found, str(folder.tuning))
    return found


def _scores_of_summary(summary: Mapping[str, Any], score: str, run: Path | str) -> RunScores:
    clients = summary["clients"]
    try:
        parts = group_by(clients, whole_of)
        tests = {name: _mean_test([clients[part][score]["test"] for part in own]) for name, own in parts.items()}
        scores = {name: float(test["primary"]) for name, test in tests.items()}
    except KeyError as error:
        raise DataError(f"run {run} has no test score of every client ({error}); run it again") from None
    needed = [entry.get("predicted", {}).get("memory_bytes") for entry in clients.values()]
    is_whole = len(tests) == len(clients)
    return RunScores(
        seed=int(summary["run"]["seed"]),
        tasks={name: str(clients[own[0]].get("task", "")) for name, own in parts.items()},
        scores=scores,
        loss=_mean_of(tests, "loss"),
        calibration_error=_mean_of(tests, "ece"),
        gain_over_majority=summary["overall"][score]["test"].get("gain_over_majority") if is_whole else None,
        num_bytes=summary["bytes"]["up"] + summary["bytes"]["down"],
        bytes_below_whole=summary["bytes"].get("full_model", {}).get("reduction"),
        client_steps=summary.get("steps"),
        memory_bytes=None if None in needed else max(needed),
    )


def _mean_test(tests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The test scores of a client; of one in parts the means over the examples of all."""
    if len(tests) == 1:
        return tests[0]
    examples = [test["examples"] for test in tests]
    numbers = [name for name in tests[0] if all(type(test.get(name)) in (int, float) for test in tests)]
    return {name: np.average([test[name] for test in tests], weights=examples).item() for name in numbers}


def _mean_of(tests: Mapping[str, Mapping[str, Any]], metric: str) -> float | None:
    """The mean of a metric of the test scores over clients; None where one has none, or means another thing by it."""
    kinds = {next((name for name in ("mcc", "perplexity") if name in test), "") for test in tests.values()}
    values: list[Any] = [test.get(metric) for test in tests.values()]
    return None if None in values or len(kinds) > 1 else sum(values) / len(values)


def find_finished_runs(places: Sequence[Path | str]) -> tuple[FinishedRun, ...]:
    """All finished runs below these folders and in these CSV files, each once; those of development seeds aside.

    Raises:
        ConfigError: there is none, a place is not there, or a row of a file is none of a run.
        CheckpointError: the settings or the summary of one cannot be read.
        DataError: one has no test score of every client.
    """
    runs: dict[str, FinishedRun] = {}
    for place in places:
        if not str(place) or not Path(place).exists():
            raise ConfigError(f"there is no folder or file {str(place)!r}; name folders of runs or files of --csv")
        found = read_csv(Path(place)) if Path(place).is_file() else _runs_below(Path(place))
        runs |= {config_hash(run.config): run for run in found}
    if not runs:
        raise ConfigError(f"no finished run below {', '.join(map(str, places))}; run `atlas compare` first")
    return tuple(sorted(runs.values(), key=_order))


def _runs_below(place: Path) -> list[FinishedRun]:
    folders = [RunFolder(path.parent) for path in folder_access.files_below(place) if path.name == "summary.json"]
    own = [folder for folder in folders if not folder.is_reference()]
    runs = [read_finished_run(folder.path) for folder in own if folder.config.exists() or folder.plan.exists()]
    return [run for run in runs if run.seed not in DEVELOPMENT_SEEDS]


def _check_tuning(run: FinishedRun, where: str) -> None:
    """Raise ConfigError unless the run has the settings that its record of tuning says were chosen."""
    if run.tuning is not None and not has_settings(run.config, run.tuning.best):
        raise ConfigError(f"{where} says that tuning chose {run.tuning.best}, and the run has others; take it away")


def _order(run: FinishedRun) -> tuple[str, int, str, int, str]:
    settings_of_run = run.config.run
    dial = -1 if settings_of_run.dial is None else settings_of_run.dial
    return settings_of_run.preset, dial, run.method, run.seed, config_hash(run.config)


def to_csv(runs: Iterable[FinishedRun]) -> str:
    """The rows of these runs, with a header; numbers in full precision, unknown ones empty."""
    rows: list[dict[str, object]] = []
    for run in runs:
        scores = run.scores
        words = {"clients": scores.scores, "tasks": scores.tasks.values(), "scores": scores.scores.values()}
        values = {
            "preset": run.config.run.preset,
            "dial": run.config.run.dial,
            "strategy": run.method,
            "seed": run.seed,
            "mean": sum(scores.scores.values()) / len(scores.scores),
            **{column: getattr(scores, name) for column, name in NUMBERS.items()},
            **{column: " ".join(map(str, held)) for column, held in words.items()},
            "flags": shlex.join(changed_flags(run.config)),
            "tuning": None if run.tuning is None else json.dumps(asdict(run.tuning)),
            "config_hash": config_hash(run.config),
        }
        rows.append({column: values[column] for column in COLUMNS})
    return format_csv(rows)


def changed_flags(config: Config) -> list[str]:
    """The flags in which a run differs from its preset, each with the words of its value."""
    changed = differences(presets.find_preset(config.run.preset, dial=config.run.dial), config)
    return [word for name, (_, value) in changed.items() for word in (settings()[name].flag, *to_words(value))]


def run_command(config: Config) -> str:
    """The command that makes a run of these settings."""
    dial = [] if config.run.dial is None else ["--dial", str(config.run.dial)]
    return shlex.join(["atlas", "run", "--preset", config.run.preset, *dial, *changed_flags(config)])


def begins_with(path: Path, *, text: str = ",".join(COLUMNS)) -> bool:
    """Return whether a file begins with this text, by default as `to_csv` writes it."""
    with folder_access.open_named_file(path, max_bytes=sys.maxsize) as file:
        return file.read(len(text)) == text.encode()


def read_csv(path: Path) -> list[FinishedRun]:
    """The runs of a file that `to_csv` has written, in its order.

    Raises:
        ConfigError: it is none, a row does not say what one says, or the flags of a row mean other settings than those
            that its run had: a preset has changed since.
    """
    if not begins_with(path):
        raise ConfigError(f"{path} is no file of runs; give folders of runs, or a CSV file that `atlas results` wrote")
    try:
        text = folder_access.read_named_file(path, max_bytes=folder_access.MOST_JSON_BYTES).decode(errors="replace")
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
        tuning = parse_tuning(jsonl.from_json(row["tuning"])) if row["tuning"] else None
        run = FinishedRun(config=config, scores=_scores_of(row, config.run.seed), tuning=tuning)
    except (ValueError, KeyError, TypeError, AttributeError, AtlasError) as error:
        raise ConfigError(f"{where} is no row of a run ({error}); restore the file, or take the line out") from None
    if config_hash(config) != row["config_hash"]:
        raise ConfigError(
            f"{where} is of a run {row['config_hash']:.16}, and its flags mean {config_hash(config)} today: a preset"
            " has changed since; take such lines out and run them again"
        )
    _check_tuning(run, where)
    return run


def _config_of(row: Mapping[str, Any]) -> Config:
    base = presets.find_preset(row["preset"], dial=int(row["dial"]) if row["dial"] else None)
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
    return methods.with_method_settings(replace_settings(values, base=base))  # what its strategy means today


def _scores_of(row: Mapping[str, Any], seed: int) -> RunScores:
    clients, tasks, scores = (row[name].split(" ") for name in ("clients", "tasks", "scores"))
    known: dict[str, Any] = {field: _number(row[name]) if row[name] else None for name, field in NUMBERS.items()}
    return RunScores(
        seed=seed,
        tasks=dict(zip(clients, tasks, strict=True)),
        scores={name: _number(score) for name, score in zip(clients, scores, strict=True)},
        **known | {"num_bytes": _number(row["bytes"])},
    )


def _number(text: str) -> float:
    value = int(text) if text.isdecimal() else float(text)
    if not abs(value) <= LARGEST:
        raise ValueError(f"{text:.40} is no number of at most {LARGEST:g}")
    return value
