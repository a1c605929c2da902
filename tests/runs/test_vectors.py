"""Task vectors of finished runs, from Python and from the command line."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification

from atlas_fl.cli.main import main
from atlas_fl.config import to_toml, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.run import run_config
from atlas_fl.experiment.task_arithmetic import (
    TrainedRun,
    accuracy,
    base_weights,
    best_scale,
    load_trained_run,
    score_scales,
    task_vectors,
)
from atlas_fl.models.vision import image_logits, preprocess
from atlas_fl.sparse.task_vectors import apply_vector, merge_vectors
from atlas_fl.storage.jsonl import read_json, write_json
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.finished import Make

NAMES = ("seed 42", "seed 7")


@pytest.fixture(scope="module")
def make(tiny_vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Three clients of the digits for one round."""
    folder = tmp_path_factory.mktemp("vectors")
    base = with_values(
        find_preset("vision-quick"),
        {
            **{"model": str(tiny_vit), "image_size": 16, "tasks": "digits", "clients_per_task": 3, "samples": 60},
            **{"validation_samples": 30, "test_samples": 40, "participation": 1.0, "rounds": 1, "eval_every": 1},
            **{"lr": 0.05, "alone": "none", "runs_dir": str(folder / "runs")},
        },
    )
    return lambda **values: with_values(base, values)


@pytest.fixture(scope="module")
def folders(make: Make) -> list[Path]:
    return [run_config(make(name=f"run-{seed}", seed=seed)).folder for seed in (42, 7)]


@pytest.fixture(scope="module")
def runs(folders: list[Path]) -> dict[str, TrainedRun]:
    return {name: load_trained_run(RunFolder(folder)) for name, folder in zip(NAMES, folders, strict=True)}


@pytest.fixture
def atlas(folders: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["vectors", *words, "--runs-dir", str(folders[0].parent)])
        return code, *capsys.readouterr()

    return call


def test_scale_one_of_one_run_is_that_run_and_zero_is_its_base(runs: dict[str, TrainedRun]) -> None:
    one = {"a": runs["seed 42"]}
    base = base_weights(list(one.values()))
    (vector,) = task_vectors(one, base)
    zero, whole = score_scales(one, base, vector, scales=[0.0, 1.0])
    final = read_json(one["a"].folder / "summary.json")["overall"]["final"]
    assert whole.test["a"] == pytest.approx(final["test"]["accuracy"])
    assert whole.validation["a"] == pytest.approx(final["validation"]["accuracy"])
    assert zero.test["a"] == accuracy(one["a"], base, "test") != whole.test["a"]
    assert best_scale([zero, whole]) is max([zero, whole], key=lambda row: row.validation["a"])


def test_the_mean_of_two_is_the_model_between_them_on_both_tasks(runs: dict[str, TrainedRun]) -> None:
    base = base_weights(list(runs.values()))
    vector = merge_vectors(task_vectors(runs, base), method="mean")
    (row,) = score_scales(runs, base, vector, scales=[1.0])
    one, two = (own.body for own in runs.values())
    assert one.keys() == two.keys() == base.keys()
    middle = {key: (one[key].double() + two[key].double()).div(2).float() for key in one}
    for name, own in runs.items():
        assert row.test[name] == pytest.approx(accuracy(own, middle, "test"), abs=1 / 120)
    assert row.mean == pytest.approx(sum(row.test.values()) / 2)


def test_the_merged_model_is_one_that_stock_transformers_loads(runs, atlas, tmp_path) -> None:
    to = tmp_path / "merged"
    code, out, err = atlas("run-42", "run-7", "--merge", "ties", "--keep", "0.5", "--scales", "0.5", "--to", str(to))
    assert (code, err) == (0, "") and "wrote" in out
    assert sorted(path.name for path in to.iterdir()) == ["run-42", "run-7", "scales.csv", "scales.png"]
    base = base_weights(list(runs.values()))
    body = apply_vector(base, merge_vectors(task_vectors(runs, base), method="ties", keep=0.5), scale=0.5)
    for folder, own in zip(("run-42", "run-7"), runs.values(), strict=True):
        client = own.assembly.clients[0]
        pixels = preprocess(own.assembly.site.vision, client.test.pixels)
        wanted = image_logits(own.assembly.site.vision, {**body, **own.heads[client.name]}, pixels)
        stock = AutoModelForImageClassification.from_pretrained(to / folder).eval()
        with torch.no_grad():
            torch.testing.assert_close(stock(pixels).logits, wanted, rtol=1e-4, atol=1e-4)
        assert stock.config.id2label[7] == "7"
    with Image.open(to / "scales.png") as image:
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)


def test_the_table_has_every_scale_and_task(atlas: Any, tmp_path: Path) -> None:
    code, out, err = atlas("run-42", "run-7", "--scales", "-1,0,0.5", "--to", str(tmp_path / "new"))
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()[:1] in ("-", "0")}
    assert rows.keys() >= {"-1", "0", "0.5"} and all(len(rows[scale]) == 4 for scale in ("-1", "0", "0.5"))
    assert "1: seed 42" in out and "2: seed 7" in out
    with (tmp_path / "new/scales.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["scale"] for row in found] == ["-1.0", "0.0", "0.5"]
    for row in found:
        mean = (float(row["test:seed 42"]) + float(row["test:seed 7"])) / 2
        assert f"{mean:.3f}" == rows[f"{float(row['scale']):g}"][1]


def test_a_run_can_be_the_base(runs: dict[str, TrainedRun], atlas: Any) -> None:
    """A run less itself is nothing: every scale is the run."""
    code, out, _ = atlas("run-42", "--base", "run-42", "--scales", "0,5")
    final = read_json(runs["seed 42"].folder / "summary.json")["overall"]["final"]["test"]["accuracy"]
    rows = [line.split() for line in out.splitlines() if line.strip()[:2] in ("0 ", "5 ")]
    assert code == 0 and [row[1] for row in rows] == [f"{final:.3f}"] * 2


def test_runs_that_have_no_task_vector_are_told_in_one_line(make: Make, folders: list[Path], atlas: Any) -> None:
    home = folders[0].parent
    run_config(make(name="apart", strategy="local"))
    (home / "texts").mkdir()
    (home / "texts/config.toml").write_text(to_toml(find_preset("quick")), encoding="utf-8")
    write_json(home / "texts/plan.json", {})
    shutil.copytree(folders[0], home / "begun")
    (home / "begun/summary.json").unlink()
    for name, message in {
        "apart": "ended with models of their own for digits-0 and digits-1; a task vector needs one",
        "texts": "trained adapters, or texts, and task vectors are of whole models",
        "begun": "is not complete; go on with: atlas resume",
        "nothing": "not a run folder: nothing",
    }.items():
        code, _, err = atlas(name)
        assert code == 2 and message in err and err.count("\n") == 1


def test_other_architectures_are_refused_by_name(runs: dict[str, TrainedRun]) -> None:
    base = dict(base_weights(list(runs.values())))
    base["embeddings.cls_token"] = torch.zeros(1, 1, 5)
    with pytest.raises(Exception, match=r"seed 42 and the base: task vectors of different models: 'embeddings.cls"):
        task_vectors(runs, base)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "missing: RUN ...; see `atlas vectors --help`"),
        (["run-42", "--scales", "0,half"], "--scales is '0,half'; allowed: numbers with commas between them"),
        (["run-42", "--scales", "nan"], "--scales is 'nan'"),
        (["run-42", "--keep", "0"], "keep is 0.0; it is the share of each task vector that TIES keeps"),
        (["run-42", "--base", "nowhere/at/all"], "nowhere/at/all"),
        (["run-42", "--base", "run-4"], "--base run-4 is no run, here or in "),
        (["run-42", "--base", "run-4"], "; as a model: unknown model 'run-4'"),
        (["run-42", "--to", "."], "there is something already; name a folder that is new or empty"),
    ],
)
def test_what_cannot_be_done_is_one_line(atlas: Any, words: list[str], message: str) -> None:
    code, _, err = atlas(*words)
    assert code == 2 and message in err and err.count("\n") == 1


def test_runs_of_different_models_need_a_base(runs: dict[str, TrainedRun]) -> None:
    other = runs["seed 7"]
    moved = TrainedRun(
        folder=other.folder,
        assembly=replace(other.assembly, config=with_values(other.assembly.config, {"model": "dinov2-vits14"})),
        body=other.body,
        heads=other.heads,
    )
    with pytest.raises(ConfigError, match=r"began with different models .*dinov2-vits14.; say with --base"):
        base_weights([runs["seed 42"], moved])
