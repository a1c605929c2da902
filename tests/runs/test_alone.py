"""Clients that are trained alone beside a run: the same run, scored on the same examples, killed or not."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.cli.main import main
from atlas_fl.config import Config, to_toml, with_values
from atlas_fl.experiment import alone
from atlas_fl.experiment.alone import reference_assembly
from atlas_fl.experiment.run import RunResult, resume_run, run_config
from atlas_fl.report.finished_runs import find_finished_runs
from atlas_fl.setup.assembly import assemble
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state

FOUR = {"clients_per_task": 4, "participation": 0.5, "rounds": 3}
CASES: Mapping[str, Mapping[str, Any]] = {
    "clusters": {"strategy": "atlas_laplacian"},
    "measured sharing": {"strategy": "atlas", "rounds": 3},
    "full weights": {"strategy": "fedavg_cluster", "trainable": "full", "lr": "1e-3", "candidates": "4+8+16+32+64"},
    "some clients a round": {"strategy": "fedavg", **FOUR},
    "a sample, some clients a round": {"strategy": "fedavg", **FOUR, "alone": "sample"},
    "attackers": {"strategy": "median", "attack": "sign_flip", "attackers": "1", "clients_per_task": 3},
    "flipped labels": {"strategy": "median", "attack": "label_flip", "attackers": "movie-1", "clients_per_task": 3},
    "arrivals": {"strategy": "fedavg", "arrive": "movie-1=2"},
    "ranks chosen again": {"strategy": "fedavg_cluster", "rerank": True, "recluster_every": 1},
    "warmed-up models": {"strategy": "fedavg", "fingerprint": "delta"},
    "cuts": {"strategy": "fedavg_cluster", "split": "2", "ranks": "4"},
    "hosted cuts": {"strategy": "fedavg", "split": "cpu_2gb=1", "devices": "cpu_2gb+laptop_8gb", "topology": "paired"},
    "early stopping": {"strategy": "fedavg", "rounds": 6, "patience": 1, "min_delta": "0.9"},
    "second models": {"strategy": "apfl", "ranks": "4"},
    "personal rounds": {"strategy": "fedbabu", "ranks": "4", "rounds": 3, "personal_rounds": 1},
    "control variates": {"strategy": "scaffold", "ranks": "4"},
    "personal models": {"strategy": "mr_mtl", "ranks": "4"},
    "priors": {"strategy": "fedavg_prior", "ranks": "4", "partition": "dirichlet"},
    "several aggregations apart": {"strategy": "fedavg", "aggregate_every": 2, "rounds": 4},
    "workers": {"strategy": "fedavg", "workers": 2},
}


USUAL = ("a sample, some clients a round", "attackers", "arrivals", "cuts", "personal rounds")
"""Cases that show each part of the reference once."""


def check(result: RunResult, plain: RunResult) -> Mapping[str, Any]:
    """The entry of the summary: its scores are those of both runs, and the run is that of nobody alone."""
    found, reference = result.summary["alone"], read_json(RunFolder(result.folder).alone / "summary.json")
    for name, entry in found["clients"].items():
        for key, summary in (("together", result.summary), ("alone", reference)):
            assert entry[key] == pytest.approx(summary["clients"][name]["final"]["test"]["primary"], abs=1e-12)
        assert entry["gain"] == entry["together"] - entry["alone"]
        assert entry["interval"][0] <= entry["gain"] + 1e-9 and entry["gain"] - 1e-9 <= entry["interval"][1]
    assert reference["clients"].keys() == found["clients"].keys()
    assert reference["bytes"]["total"] == 0 or any(entry["cut"] for entry in result.summary["clients"].values())
    assert same_tensors(state(result.folder), state(plain.folder)) and rows(result.folder) == rows(plain.folder)
    assert {row.run for row in passing_audit(result.folder).rows} == {result.folder.name, "alone"}
    return found


def run_both(config: Any) -> Mapping[str, Any]:
    words = {"name": "plain", "alone": "none", "audit": False}
    return check(run_config(config), run_config(with_values(config, words)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in USUAL else pytest.mark.product) for case in CASES]
)
def test_a_run_says_what_its_clients_gain(config: Make, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "MOST_CLIENTS", 2)
    made = config(**{"alone": "all", **CASES[case]})
    found = run_both(made)
    count = {"a sample, some clients a round": 2, "arrivals": 3, "flipped labels": 5, "attackers": 5}
    every = len(made.data.tasks) * made.data.clients_per_task
    assert len(found["clients"]) == count.get(case, every) and found["of"] == every


@pytest.mark.slow
@pytest.mark.parametrize("words", [{}, {"tune": "lora"}, {"mask": "least_sensitive"}], ids=["whole", "lora", "mask"])
def test_images_are_compared_in_a_sample(image_config: Make, words: Mapping[str, Any]) -> None:
    found = run_both(image_config(alone="sample", **words))
    assert found["of"] == 8 and len(found["clients"]) == (8 if "tune" in words else alone.MOST_WHOLE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_text_that_is_written_is_compared(config: Make, tmp_path: Path, writer_of: Any) -> None:
    texts = [
        " ".join(f"w{(start + step * place) % 40}" for place in range(8)) for start in range(40) for step in (1, 3)
    ]
    (tmp_path / "notes.csv").write_text("\n".join(["text", *texts]))
    base = config(alone="all", strategy="fedavg", max_length=16, rouge_examples=2, new_tokens=3)
    data = replace(base.data, tasks=(), task=(f"notes={tmp_path / 'notes.csv'},target=text",), samples=16)
    model = replace(base.model, model=str(writer_of("gpt2").path))
    run_both(replace(base, data=replace(data, validation_samples=6, test_samples=6), model=model))


@pytest.mark.product
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_actors_score_examples_too(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run_both(config(alone="all", strategy="fedavg", engine="ray", workers=1))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["rounds alone", "summary"])
def test_a_run_that_ends_while_clients_train_alone_goes_on(
    config: Make, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_config(config(name="whole", alone="all", rounds=3))

    def stop(event: Any) -> None:
        if getattr(event, "phase", "") == "rounds alone" and event.done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if moment == "summary":
            patch.setattr("atlas_fl.experiment.run.summarise_gains", lambda *_, **__: stop_now())
        run_config(config(alone="all", rounds=3), on_event=stop if moment == "rounds alone" else lambda _: None)
    folder = RunFolder(Path(config().run.runs_dir) / "run")
    assert not folder.summary.exists() and RunFolder(folder.alone).is_run()
    resumed = resume_run(folder.path)
    entries = [result.summary["alone"] for result in (whole, resumed)]
    assert entries[0]["clients"] == entries[1]["clients"] and entries[0]["mean"] == entries[1]["mean"]
    passing_audit(folder.path)


def stop_now() -> None:
    raise KeyboardInterrupt


def test_who_is_left_out_is_told(config: Make, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for words, at_sites, line in (
        ({"alone": "all"}, True, ""),  # the data are at sites, as everybody knows
        ({"alone": "none"}, False, ""),
        ({"alone": "all", "strategy": "local"}, False, ""),
        (
            {"alone": "all", "strategy": "fedavg", "centralized": True},
            False,
            "no client is trained alone for comparison: --centralized has one client a task",
        ),
    ):
        assert reference_assembly(assemble(config(**words)), folder, at_sites=at_sites) == (None, line)
    reference, line = reference_assembly(assemble(config(alone="all")), folder, at_sites=False)
    assert line == "also trains 4 clients alone for comparison, up to +100% time; --alone none leaves it out"
    assert reference is not None and reference.names == ("movie-0", "movie-1", "trec-0", "trec-1")


def with_own_data(made: Config, folder: Path) -> Config:
    """The same with clients that are dealt rows of a csv file in the folder."""
    words = [("good", 1), ("bad", 0)]
    lines = [
        f"{word} film number {number} {'very ' * (number % 5)},{label}" for number in range(60) for word, label in words
    ]
    (folder / "notes.csv").write_text("\n".join(["text,label", *lines]))
    task = f"notes={folder / 'notes.csv'},text=text,label=label"
    return replace(made, data=replace(made.data, tasks=(), task=(task,)), run=replace(made.run, name=None))


@pytest.mark.parametrize("most", [1, 2])
def test_draws_of_test_examples_are_written_for_as_many_clients_as_have_a_folder(
    most: int, config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atlas_fl.experiment.run.MOST_EXPORTED", most)
    made = with_own_data(config(samples=20, test_samples=12, rounds=1, alone="all"), tmp_path)
    result = run_config(made)
    assert len(result.summary["clients"]) == len(result.summary["alone"]["clients"]) == 2
    assert RunFolder(result.folder).resampled.is_file() is (most == 2)


@pytest.mark.slow
def test_a_users_own_data_are_compared_over_draws_of_their_test_examples(
    config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = with_own_data(config(samples=20, test_samples=12, rounds=2, alone="all"), tmp_path)
    (tmp_path / "own.toml").write_text(to_toml(made))
    flags = ["--config", str(tmp_path / "own.toml"), "--strategies", "local", "fedavg", "--seeds", "2"]
    assert main(["compare", *flags]) == 0
    said = capsys.readouterr().out
    assert "of 2 clients, 95% " in said and "95%: over draws of the test examples" in " ".join(said.split())
    assert said.count("Against fedavg") == 1 and "Costs" not in said and "±0.000" not in said
    folders = [RunFolder(path.parent) for path in Path(made.run.runs_dir).glob("*/summary.json")]
    assert len(folders) == 4 and not any(folder.alone.exists() for folder in folders)
    assert main(["audit", str(folders[0].path)]) == 0
    folders[0].resampled.write_bytes(b"")
    assert main(["results", made.run.runs_dir]) == 2
    assert "resampled.safetensors" in capsys.readouterr().err


def test_the_run_of_clients_alone_is_no_run_of_the_user(
    config: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "MOST_CLIENTS", 2)
    result = run_config(config(alone="sample", strategy="fedavg", rounds=1))
    folder = RunFolder(result.folder)
    assert [run.method for run in find_finished_runs([folder.path.parent])] == ["fedavg"]
    assert RunFolder(folder.alone).is_reference() and not folder.is_reference()
    assert set(result.summary["alone"]["clients"]) < set(result.summary["clients"])
    assert main(["audit", str(folder.path)]) == 0
    assert "alone" in capsys.readouterr().out
    (folder.alone / "audit/round-0001/start.safetensors").unlink()
    assert {row.run for row in audit_run(folder.path).failures} == {"alone"}
