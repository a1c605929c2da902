"""Searches over runs that cost nothing: what a run scores is a formula of its settings."""

import csv
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from atlas_fl.cli.main import main
from atlas_fl.config import Config, RunConfig, config_hash, load_config, run_folder, to_toml, validate
from atlas_fl.config.presets import find_preset
from atlas_fl.errors import ConfigError
from atlas_fl.events import OnEvent, RoundFinished
from atlas_fl.experiment.search import SearchResult, parse_space, run_search
from atlas_fl.storage.extras import install_command

SPACE = parse_space(["lr=1e-4..1e-1:log", "local-epochs=1..3", "schedule=constant,cosine"])


class KilledError(Exception):
    pass


def scores_of(config: Config, *, round: int) -> tuple[float, float]:
    """(validation, test): validation is best at a rate of .003, test at .09."""
    rate, grown = math.log10(config.training.lr or 1.0), 1 - 0.5**round
    return grown * (1 - abs(rate - math.log10(3e-3)) / 3), grown * (1 - abs(rate - math.log10(9e-2)) / 3)


@pytest.fixture
def base(tmp_path: Path) -> Config:
    smallest = find_preset("smoke")
    training = replace(smallest.training, rounds=3)
    return replace(smallest, training=training, run=RunConfig(preset="smoke", runs_dir=str(tmp_path)))


@pytest.fixture
def lived(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Rounds that runs may still last before the process is killed; one number, to be changed."""
    left = [math.inf]

    def run(config: Config, *, on_event: OnEvent, resume: bool) -> None:
        assert resume
        folder = run_folder(config)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(to_toml(config))
        folder.plan.write_text("{}")
        done = len(folder.metrics.read_text().splitlines()) // 2 if folder.metrics.exists() else 0
        for round in range(done + 1, config.training.rounds + 1):
            if left[0] <= 0:
                raise KilledError
            left[0] -= 1
            validation, test = scores_of(config, round=round)
            common = {"round": round, "client": "a-0", "task": "a"}
            with folder.metrics.open("a") as file:
                for split, primary in (("validation", validation), ("test", test)):
                    file.write(json.dumps({**common, "split": split, "primary": primary, "loss": 1.0}) + "\n")
            told = {"round": round, "rounds": 3, "loss": 1.0, "seconds": 0.0, "bytes": 0}
            on_event(RoundFinished(scores={"a-0": validation}, **told))
        folder.summary.write_text("{}")

    monkeypatch.setattr("atlas_fl.experiment.run.run_config", run)
    return left


def outcome(found: SearchResult) -> list[Any]:
    return list(found.trials)


@pytest.mark.slow
def test_a_search_that_is_killed_anywhere_ends_as_one_that_is_not(base: Config, lived, tmp_path: Path) -> None:
    whole = run_search(base, space=SPACE, trials=11)
    elsewhere = replace(base, run=replace(base.run, runs_dir=str(tmp_path / "b")))
    for rounds in (4, 1, math.inf):
        lived[0] = rounds
        try:
            parts = run_search(elsewhere, space=SPACE, trials=11)
        except KilledError:
            continue
    assert outcome(parts) == outcome(whole)
    assert parts.settings.read_text().replace('/b"', '"') == whole.settings.read_text()


def test_more_trials_go_on_and_the_first_ones_stay(base: Config, lived: list[float]) -> None:
    few = run_search(base, space=SPACE, trials=1)
    more = run_search(base, space=SPACE, trials=3)
    assert outcome(more)[:1] == outcome(few)
    lived[0] = 0
    told: list[str] = []
    again = run_search(base, space=SPACE, trials=3, on_trial=lambda _, __, state: told.append(state))
    assert outcome(again) == outcome(more)
    assert told == ["finished"] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("lived")
def test_the_best_is_best_on_validation_and_better_than_chance(base: Config) -> None:
    found = run_search(base, space=SPACE, trials=25)
    rates = [float(trial["lr"]) for trial in found.trials]
    assert 1e-3 < float(found.best["lr"]) < 9e-3
    assert found.best["validation"] == max(trial["validation"] for trial in found.trials)
    missed = [abs(math.log10(rate / 3e-3)) for rate in rates]
    assert sum(missed[10:]) / 15 < sum(missed[:10]) / 10  # ten by chance, then by the estimators
    assert {trial["schedule"] for trial in found.trials} == {"constant", "cosine"}
    assert {trial["local_epochs"] for trial in found.trials} == {"1", "2", "3"}


@pytest.mark.usefixtures("lived")
def test_the_best_settings_are_a_config_of_a_run_of_its_own(base: Config) -> None:
    found = run_search(base, space=SPACE, trials=2)
    best = validate(load_config(found.settings))
    trial = load_config(Path(base.run.runs_dir) / found.best["run"] / "config.toml")
    assert config_hash(best) == config_hash(trial)
    assert repr(best.training.lr) == found.best["lr"]
    assert run_folder(best).path == Path(base.run.runs_dir) / f"{found.settings.stem}-best"


@pytest.mark.usefixtures("lived")
def test_another_seed_tries_other_settings(base: Config) -> None:
    other = replace(base, run=replace(base.run, seed=7))
    first, second = (run_search(config, space=SPACE, trials=2) for config in (base, other))
    assert first.settings != second.settings
    assert first.trials[0]["lr"] != second.trials[0]["lr"]


@pytest.mark.usefixtures("lived")
def test_searches_of_one_name_and_other_settings_have_files_of_their_own(base: Config) -> None:
    named = replace(base, run=replace(base.run, name="mine"))
    found = run_search(named, space=SPACE, trials=1)
    assert re.fullmatch(r"mine-[0-9a-f]{8}\.toml", found.settings.name)
    assert found.trials[0]["run"].startswith("mine-s42-")
    other = run_search(named, space=parse_space(["lr=1e-4..1:log"]), trials=1)
    assert found.settings != other.settings


@pytest.mark.usefixtures("lived")
@pytest.mark.parametrize(
    ("change", "trials", "message"),
    [
        ({}, 0, "--trials is 0; allowed: at least 1"),
        ({"max_rounds": 1}, 2, "--max-rounds is 1; here every run goes to its end"),
    ],
)
def test_nothing_is_begun_with_a_mistake(
    base: Config, tmp_path: Path, change: dict[str, Any], trials: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_search(replace(base, run=replace(base.run, **change)), space=SPACE, trials=trials)
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_one_line_says_what_to_install(base: Config, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("search"))):
        run_search(base, space=SPACE, trials=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("lived")
def test_the_command_ends_in_a_table_a_csv_and_the_best_settings(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    words = ["search", "--preset", "smoke", "--over", "lr=1e-4..1e-1:log", "--over", "schedule=constant,cosine"]
    words += ["--trials", "3", "--name", "mine", "--runs-dir", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "trial 2 (3 of 3): lr=" in printed and "starts ..." in printed
    table = [row.split() for row in printed.splitlines() if row[:2] in (" 0", " 1", " 2")]
    (file,) = tmp_path.glob("mine-????????.csv")
    lines = list(csv.reader(file.read_text().splitlines()))
    assert lines[0] == ["trial", "lr", "schedule", "validation", "best_round", "rounds", "run"]
    for shown, line in zip(table, lines[1:], strict=True):
        assert float(shown[1]) == pytest.approx(float(line[1]), rel=5e-3)
        assert shown[2] == line[2] and float(shown[3]) == pytest.approx(float(line[3]), abs=5e-5)
    best = max(lines[1:], key=lambda line: float(line[3]))
    assert f"best: trial {best[0]}, {best[-1]}" in " ".join(printed.split())
    assert printed.splitlines()[-1] == f"the best settings: atlas run --config {file.with_suffix('.toml')}"
    assert main([*words[:-1], str(tmp_path / "other"), "--over", "lr=1..0"]) == 2
    assert main(words[:3] + words[7:]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("atlas: --over is missing; allowed: a setting and its")
