import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.config import Config, run_folder, to_toml, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.config.schema import RunConfig
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.experiment.sweep import (
    LAMBDA_SWEEP,
    SEEDS,
    chosen_seeds,
    comparison_name,
    grid,
    parse_over,
    run_all,
    run_state,
    same_steps,
    seeds,
)


def leave(config: Config, *, complete: bool) -> Path:
    """What a run of this config leaves behind, as far as a sweep looks at it."""
    folder = run_folder(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(to_toml(config), encoding="utf-8")
    folder.plan.write_text("{}", encoding="utf-8")
    if complete:
        folder.summary.write_text(json.dumps({}), encoding="utf-8")
    return folder.path


@pytest.fixture
def base(tmp_path: Path) -> Config:
    laplacian = with_values(find_preset("smoke"), {"strategy": "atlas_laplacian"})
    return replace(laplacian, run=RunConfig(preset="smoke", runs_dir=str(tmp_path)))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs that were really run, in order."""
    found: list[Config] = []

    def run(config: Config, **options: Any) -> None:
        assert options["resume"] is True
        found.append(config)
        leave(config, complete=True)

    monkeypatch.setattr("atlas_fl.experiment.run.run_config", run)
    return found


def test_the_published_seeds_come_first() -> None:
    assert SEEDS == (42, 123, 456, 789, 1024)
    assert seeds(3) == (42, 123, 456)
    assert seeds(7) == (*SEEDS, 2001, 2002)
    with pytest.raises(ConfigError, match="--seeds is 0; allowed: 1 to 1000, how many"):
        seeds(0)


def test_several_numbers_are_the_seeds_themselves() -> None:
    assert chosen_seeds((3,)) == seeds(3)
    assert chosen_seeds((9001, 7)) == (9001, 7)
    with pytest.raises(ConfigError, match=r"--seeds is \[7, 8, 7\]; allowed: how many, or two seeds and more"):
        chosen_seeds((7, 8, 7))
    with pytest.raises(ConfigError, match=r"--seeds is \[\]; allowed"):
        chosen_seeds(())


def test_swept_values_are_read_from_texts() -> None:
    found = parse_over(["eta=0, 0.1,0.1", "clients-per-task=2", "task=a=b.csv"])
    assert found == {"eta": ("0", "0.1"), "clients_per_task": ("2",), "task": ("a=b.csv",)}
    assert parse_over([LAMBDA_SWEEP]) == {"eta": ("0", "0.01", "0.1", "0.5", "1")}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["etta=1"], r"unknown setting 'etta'; did you mean 'eta'\?"),
        (["foo=1"], r"unknown setting 'foo'; `atlas run --help` explains them all$"),
        (["eta"], "--over is 'eta'; allowed: a setting and its values; write eta=VALUE,VALUE"),
        (["eta=1,,2"], "--over is 'eta=1,,2'; allowed: a setting and its values"),
        (["eta=1", "--eta=2"], "--over sweeps eta twice"),
        (["preset=smoke,quick"], "--over sweeps preset, which changes no number of a run"),
        (["audit=true,false"], "--over sweeps audit, which changes no number of a run"),
        (["seed=1,2"], "--over is .seed=1,2.; seeds are not swept; a sweep has --seeds NUMBER, a search --seed"),
    ],
)
def test_a_wrong_sweep_is_one_line(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_over(texts)


def test_the_grid_has_every_combination_with_seeds_innermost(base: Config) -> None:
    points = grid(base, over={"eta": ["0", "0.5"], "share": ["head", "A+B"]}, seeds=(1, 2))
    assert [(p.config.mixing.eta, p.config.mixing.share, p.config.run.seed) for p in points] == [
        (eta, share, seed) for eta in (0.0, 0.5) for share in (("head",), ("A", "B")) for seed in (1, 2)
    ]
    assert points[-1].changes == {"eta": "0.5", "share": "A+B"}
    assert len({run_folder(point.config).path for point in points}) == len(points)


def test_a_named_sweep_has_a_name_for_every_run(base: Config) -> None:
    named = replace(base, run=replace(base.run, name="mine"))
    points = grid(named, over={"eta": ["0", "0.5"]}, seeds=(1, 2))
    names = [point.config.run.name or "" for point in points]
    assert len(set(names)) == 4
    assert all(name.startswith("mine-s") for name in names)


def test_all_points_are_checked_before_the_first_is_run(base: Config) -> None:
    with pytest.raises(ConfigError, match=r"--eta is 3.0; allowed: at least 0, below 2"):
        grid(base, over={"eta": ["0", "3"]}, seeds=(1,))
    with pytest.raises(ConfigError, match="--max-rounds is 1; here every run goes to its end"):
        grid(replace(base, run=replace(base.run, max_rounds=1)), over={"eta": ["0"]}, seeds=(1,))


def test_more_classes_than_a_task_has_are_refused_before_the_first_run(tmp_path: Path) -> None:
    base = with_values(find_preset("vision-quick"), {"runs_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="--nc is 50 classes a client and the task has 10; give 1 to 10"):
        grid(base, over=parse_over(["nc=1,5,10,50,iid"]), seeds=(42,))
    assert len(grid(base, over=parse_over(["nc=1,5,10,iid"]), seeds=(42,))) == 4
    with pytest.raises(ConfigError, match="4 clients of 2 classes leave some of the 10 classes to nobody"):
        grid(with_values(base, {"clients_per_task": "4"}), over={"nc": ("2",)}, seeds=(42,))


def test_strategies_of_clusters_are_points_of_a_grid_for_whole_models_too(tmp_path: Path) -> None:
    base = with_values(find_preset("vision-quick"), {"runs_dir": str(tmp_path)})
    assert len(grid(base, over={"strategy": ("local", "fedavg_cluster")}, seeds=(42,))) == 2
    assert len(grid(with_values(base, {"tune": "lora"}), over={"strategy": ("local", "atlas")}, seeds=(42,))) == 2


def test_finished_runs_are_left_alone_and_begun_ones_go_on(base: Config, ran: list[Config]) -> None:
    points = grid(base, over={"eta": ["0", "0.1", "0.5"]}, seeds=(42,))
    leave(points[0].config, complete=True)
    leave(points[1].config, complete=False)
    told: list[tuple[int, str, str]] = []
    folders = run_all(points, on_run=lambda index, point, state: told.append((index, point.changes["eta"], state)))
    assert told == [(0, "0", "finished"), (1, "0.1", "unfinished"), (2, "0.5", "new")]
    assert [config.mixing.eta for config in ran] == [0.1, 0.5]
    assert folders == tuple(run_folder(point.config).path for point in points)
    ran.clear()
    assert run_all(points) == folders
    assert ran == []


def test_a_folder_of_another_run_is_not_taken_for_this_one(base: Config, ran: list[Config]) -> None:
    config = replace(base, run=replace(base.run, name="mine"))
    leave(config, complete=True)
    assert run_state(config) == "finished"
    with pytest.raises(CheckpointError, match=r"mine was begun with eta = 0.5, not 0.25; a run goes on"):
        run_state(with_values(config, {"eta": "0.25"}))
    assert ran == []


def test_rounds_are_scaled_so_that_all_runs_take_as_many_steps(base: Config) -> None:
    vision = replace(find_preset("vision-quick"), run=base.run)
    over = {"local_steps": ["4", "8", "16"], "nc": ["1", "iid"]}
    rounds = same_steps(vision, over)
    # 6 rounds of 4 are 24 steps, and 16 divides 16 and 32: halves go up
    assert rounds == {steps: {"rounds": k, "eval_every": k} for steps, k in (("4", 8), ("8", 4), ("16", 2))}
    points = grid(vision, over=over, seeds=(1,), rounds=rounds)
    steps = {point.config.training.rounds * (point.config.images.local_steps or 0) for point in points}
    assert steps == {32}
    assert points[0].changes == {"local_steps": "4", "nc": "1"}, "rounds follow and are not swept"


def test_steps_that_fit_keep_the_rounds_of_the_settings(base: Config) -> None:
    vision = with_values(replace(find_preset("vision-fedavg"), run=base.run), {"rounds": "512"})
    rounds = same_steps(vision, {"local_steps": ["4", "8", "16"]})
    assert [own["rounds"] for own in rounds.values()] == [512, 256, 128]
    # evaluations lie as many steps apart: every 25 rounds of 4 steps, every 6 of 16
    assert [own["eval_every"] for own in rounds.values()] == [25, 12, 6]


def test_rounds_stay_where_they_are_swept_or_steps_are_not_and_no_steps_are_refused() -> None:
    vision = find_preset("vision-quick")
    with pytest.raises(ConfigError, match="--over sweeps local_steps to 0; allowed: at least 1"):
        same_steps(vision, {"local_steps": ["0"]})
    assert same_steps(vision, {"nc": ["1", "5"]}) == {}
    assert same_steps(vision, {"local_steps": ["4", "8"], "rounds": ["2", "3"]}) == {}


def test_comparisons_of_other_runs_have_other_names_and_the_same_ones_the_same() -> None:
    def name(over: dict[str, list[str]], *, preset: str = "quick", seeds: tuple[int, ...] = (42,), **base: str) -> str:
        config = with_values(find_preset(preset), {"strategy": "atlas_laplacian", **base})
        return comparison_name(grid(config, over=over, seeds=seeds), preset=preset)

    eta = {"eta": ["0", "0.5"]}
    assert re.fullmatch(r"comparison-quick-eta-[0-9a-f]{8}\.csv", name(eta))
    assert name(eta) == name(eta, runs_dir="elsewhere", name="mine") == name({"eta": ["0.5", "0"]})
    found = [name(eta), name(eta, preset="full"), name(eta, alpha="2"), name(eta, seeds=(42, 123))]
    found += [name({"eta": ["0", "1"]}), name({**eta, "alpha": ["1", "2"]})]
    assert len(set(found)) == len(found)
