"""Whole runs with a hostile client: what is refused, what is kept, and that the audit sees the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.config import Config
from atlas_fl.deployment.server import check_served
from atlas_fl.deployment.service import ServerOptions
from atlas_fl.errors import ConfigError
from atlas_fl.events import Event, Note
from atlas_fl.experiment.run import run_config
from atlas_fl.params import Params
from atlas_fl.runtime.attacks import ATTACKS, Attack, AttackContext
from tests.runs.finished import Make
from tests.runs.reading import audited, passing_audit, rows

ATTACKED = {"strategy": "fedavg", "attack": "scale", "attack_scale": 1e6, "attackers": ("movie-1",), "rounds": 2}
HEAD = "head.classifier.weight"
ONE_TASK = {"tasks": ("movie",), "clients_per_task": 4, "ranks": 4, **ATTACKED}


def told(config: Config) -> tuple[Path, list[str]]:
    notes: list[Event] = []
    folder = run_config(config, on_event=notes.append).folder
    return folder, [str(event) for event in notes if isinstance(event, Note)]


def test_an_update_that_is_far_too_large_is_refused_with_its_sender_and_figures(config: Make) -> None:
    folder, notes = told(config(**ONE_TASK))
    refused = [row for row in rows(folder) if row.get("event") == "refused"]
    assert [(row["round"], row["client"]) for row in refused] == [(1, "movie-1"), (2, "movie-1")]
    assert "times the median" in refused[0]["reason"] and "(--max-norm-ratio)" in refused[0]["reason"]
    assert any(note.startswith("round 1: the update of movie-1 was refused: the change of its") for note in notes)
    (kept,) = audited(folder, 1, "out_of_bound")
    assert {key.partition("/")[0] for key in kept} == {"movie-1"}
    report = passing_audit(folder)
    assert sum(row.check == "bounded" for row in report.rows) == 8
    (start,) = audited(folder, 2, "start")
    assert max(float(tensor.abs().max()) for tensor in start.values()) < 10


@pytest.mark.slow
def test_who_is_refused_pulls_nobody_back_to_its_old_model(config: Make) -> None:
    settings = {**ONE_TASK, "strategy": "atlas_laplacian", "clusters": "oracle", "eta": 0.5}
    folder, _ = told(config(**settings))
    record = json.loads((folder / "audit" / "round-0002" / "record.json").read_text())
    assert record["without_edges"] == list(record["refused"]) == ["movie-1"]
    (begun,), (trained, ends) = audited(folder, 1, "start"), audited(folder, 2, "trained", "start")
    plan = json.loads((folder / "plan.json").read_text())
    names, edges = [client["name"] for client in plan["clients"]], torch.tensor(plan["adjacency"])
    honest = [k for k, name in enumerate(names) if name != "movie-1"]
    for k in honest:
        others = [other for other in honest if other != k]
        pulled = sum(edges[k, other] * trained[f"{names[other]}/{HEAD}"] for other in others)
        wanted = 0.5 * trained[f"{names[k]}/{HEAD}"] + 0.5 * pulled / edges[k, others].sum()
        torch.testing.assert_close(ends[f"{names[k]}/{HEAD}"], wanted)
    assert all(torch.equal(ends[key], begun[key]) for key in begun if key.startswith("movie-1/"))
    passing_audit(folder)


def test_who_takes_no_part_still_counts_as_a_neighbour(config: Make) -> None:
    words = {"tasks": ("movie",), "clients_per_task": 4, "ranks": 4, "rounds": 2, "clusters": "oracle", "eta": 0.5}
    folder, _ = told(config(**words, strategy="atlas_laplacian", participation=0.5))
    records = [json.loads((folder / f"audit/round-000{n}/record.json").read_text()) for n in (1, 2)]
    assert all("without_edges" not in record and len(record["participants"]) == 2 for record in records)
    trained, ends = audited(folder, 1, "trained", "start")
    (first, second) = records[0]["participants"]
    both = 0.5 * (trained[f"{first}/{HEAD}"] + trained[f"{second}/{HEAD}"])
    assert not torch.allclose(ends[f"{first}/{HEAD}"], both), "the models of before are neighbours too"
    passing_audit(folder)


def test_a_clipped_update_is_mixed_smaller_and_the_audit_agrees(config: Make) -> None:
    folder, notes = told(config(**ONE_TASK, norm_bound="clip"))
    clipped = [row for row in rows(folder) if row.get("event") == "clipped"]
    assert {row["client"] for row in clipped} == {"movie-1"}
    assert any(note.startswith("round 1: the update of movie-1 was scaled down: ") for note in notes)
    passing_audit(folder)
    record = json.loads((folder / "audit/round-0001/record.json").read_text())
    assert record["clipped"] == ["movie-1"] and not record["refused"]


def test_a_mixed_model_that_is_none_takes_nobodys_place_and_the_rounds_go_on(config: Make, monkeypatch) -> None:
    """Every value of the update just passes by itself, and those of the mixed product do not."""

    def full(_before: Params, after: Params, _turn: AttackContext) -> Params:
        return {key: torch.full_like(tensor, 9e17) for key, tensor in after.items()}

    monkeypatch.setitem(ATTACKS, "scale", Attack(alter=full, size=1.0))
    folder, notes = told(config(**ONE_TASK, norm_bound="off", eval_every=1))
    found = rows(folder)
    restored = [row for row in found if row.get("event") == "restored"]
    assert {(row["round"], row["client"]) for row in restored} == {(n, f"movie-{k}") for n in (1, 2) for k in range(4)}
    assert any("keeps the model that it began with: the mixed model holds values" in note for note in notes)
    assert {row["round"] for row in found if row.get("split") == "test"} == {1, 2}, "both rounds were evaluated"
    begun, ends = (load_file(folder / f"audit/round-000{n}/start.safetensors") for n in (0, 2))
    assert all(torch.equal(begun[key], ends[key]) for key in begun)
    passing_audit(folder)


def test_the_summary_tells_honest_clients_apart_from_attackers(config: Make) -> None:
    folder, notes = told(config(**ONE_TASK, audit=False))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["attackers"] == ["movie-1"]
    assert summary["honest"]["clients"] == 3
    scores = [summary["clients"][f"movie-{k}"]["final"]["test"]["primary"] for k in (0, 2, 3)]
    assert summary["honest"]["final"]["test"]["primary"] == pytest.approx(sum(scores) / 3)
    assert summary["honest"]["final"]["worst_client"]["primary"] == pytest.approx(min(scores))
    assert notes[-1].startswith("simulated attackers: movie-1; the others have a test score of 0.")


@pytest.mark.slow
def test_whole_models_of_images_are_bounded_and_aggregated_robustly_too(image_config: Make) -> None:
    settings = {"attack": "scale", "attack_scale": 1e4, "attackers": ("digits-0", "digits-1"), "participation": 1.0}
    settings |= {"rounds": 1, "eval_every": 1}
    trimmed = image_config(**settings, strategy="trimmed_mean", trim=0.25, mask="random", name="trimmed")
    folder = run_config(trimmed).folder
    refused = {row["client"] for row in rows(folder) if row.get("event") == "refused"}
    assert refused == {"digits-0", "digits-1"}
    for name, strategy in (("off", "median"), ("multi", "multi_krum"), ("geo", "geometric_median")):
        found = run_config(image_config(**settings, strategy=strategy, byzantine=2, norm_bound="off", name=name)).folder
        passing_audit(found)
        (start,) = audited(found, 1, "start")
        assert max(float(tensor.abs().max()) for tensor in start.values()) < 100, name
    passing_audit(folder)


def test_an_attack_is_refused_across_machines(config: Make) -> None:
    with pytest.raises(ConfigError, match="--attack scale simulates hostile clients, and across machines"):
        check_served(config(**ONE_TASK), ServerOptions(certs=Path("certs")))
