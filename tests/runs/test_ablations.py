"""Ablations of single phases, federations of other sizes, and reference runs that other descriptions compare with."""

from pathlib import Path
from typing import Any

import pytest

import atlas_fl
from atlas_fl.experiment.run import run_config
from atlas_fl.experiment.sweep import grid, parse_over, run_all
from atlas_fl.planning.plan import Plan
from atlas_fl.planning.planner import make_plan
from atlas_fl.storage.jsonl import read_json
from tests.runs.finished import Make
from tests.runs.reading import rows, same_tensors, state

SMALL = {"samples": 16, "rounds": 1, "audit": False, "eta": 0.4}


def phases(plan: Plan) -> dict[str, Any]:
    """What each phase of a plan decided."""
    return {
        "clusters": [client.cluster for client in plan.clients],
        "ranks": [client.ranks for client in plan.clients],
        "cuts": [client.cut for client in plan.clients],
    }


@pytest.mark.slow
def test_clusters_ranks_and_cuts_are_switched_off_one_by_one(config: Make) -> None:
    words = {**SMALL, "devices": ("cpu_2gb", "laptop_8gb"), "adapter_bytes": 8000, "split": "1"}
    whole = phases(make_plan(config(**words)))
    assert len(set(whole["clusters"])) == 2 and len({rank for ranks in whole["ranks"] for rank in ranks}) > 1
    no_clusters = phases(make_plan(config(**{**words, "clusters": "1"})))
    no_ranks = phases(make_plan(config(**{**words, "ranks": "4"})))
    no_cuts = phases(make_plan(config(**{**words, "split": "none"})))
    assert set(no_clusters["clusters"]) == {0} and no_clusters["cuts"] == whole["cuts"]
    assert {rank for ranks in no_ranks["ranks"] for rank in ranks} == {4}
    assert (no_ranks["clusters"], no_ranks["cuts"]) == (whole["clusters"], whole["cuts"])
    assert no_cuts["cuts"] != whole["cuts"] and no_cuts["clusters"] == whole["clusters"]


@pytest.mark.slow
def test_without_the_laplacian_clusters_and_ranks_stay_and_models_are_averages(config: Make) -> None:
    strategies = ("atlas_laplacian", "atlas_no_laplacian")
    whole, without = (run_config(config(**SMALL, strategy=name, name=name)) for name in strategies)
    plans = [read_json(run.folder / "plan.json")["clients"] for run in (whole, without)]
    assert [(one["cluster"], one["ranks"]) for one in plans[0]] == [(one["cluster"], one["ranks"]) for one in plans[1]]
    assert [has_one_head(run.folder) for run in (whole, without)] == [False, True]


def has_one_head(folder: Path) -> bool:
    """Whether both clients of the task hold one head, which a checkpoint then has once."""
    names = {name.split("/")[1] for name in state(folder, round=1) if "/head." in name}
    assert "movie-0" in names
    return "movie-1" not in names


@pytest.mark.slow
def test_a_sweep_over_clients_and_tasks_runs_federations_of_these_sizes(config: Make) -> None:
    over = parse_over(["clients_per_task=1,2", "tasks=movie,movie+trec"])
    points = grid(config(**SMALL, strategy="fedavg", name="none"), over=over, seeds=(1,))
    sizes = [
        len({row["client"] for row in rows(folder) if "client" in row})
        for folder in run_all(points, on_run=lambda *_: None, on_event=lambda _: None)
    ]
    assert sizes == [1, 2, 2, 4]


def test_split_learning_that_knows_no_tasks_is_fedavg_of_models_that_are_cut(config: Make) -> None:
    words = {**SMALL, "strategy": "fedavg", "ranks": "4", "pack_tokens": 1}  # who is cut is in no pack
    whole, cut = (run_config(config(**words, split=split, name=f"cut-{split}")) for split in ("none", "1"))
    assert same_tensors(state(whole.folder, round=1), state(cut.folder, round=1))
    kinds = [{row["kind"] for row in rows(run.folder, "ledger")} for run in (whole, cut)]
    assert kinds[1] - kinds[0] >= {"activation", "gradient", "label"}
    adapters = {key.partition("/")[2]: tensor for key, tensor in state(cut.folder, round=1).items() if "lora" in key}
    one, other = (
        {key.partition("/")[2]: tensor for key, tensor in adapters.items() if key.startswith(client)}
        for client in ("movie-0", "trec-0")
    )
    assert one and same_tensors(one, other), "clients of both tasks hold one adapter"


def test_full_model_federated_learning_gives_all_clients_of_a_task_one_model(config: Make) -> None:
    base = atlas_fl.with_values(
        config(**{**SMALL, "audit": True}, strategy="fedavg", tasks="movie", trainable="full"),
        {"candidates": "4+8+16+32+64", "ranks": "budget", "clusters": "auto", "sketch_dim": 1024},
    )
    values = {"fingerprint_steps": 60, "fingerprint_batches": 12, "lr": 1e-3}
    run = run_config(atlas_fl.with_values(base, values))
    kept = state(run.folder, round=1)
    assert not any("lora" in key for key in kept) and any("encoder.layer.0" in key for key in kept)
    assert {key.split("/")[1] for key in kept} == {"movie-0"}, "a checkpoint has what clients share once"
    assert atlas_fl.audit_run(run.folder).ok


def test_the_public_api_trains_and_gives_back_rounds_and_scores(config: Make) -> None:
    result = atlas_fl.run_config(config(**{**SMALL, "rounds": 2}, strategy="fedavg"))
    assert isinstance(result, atlas_fl.RunResult) and (result.complete, result.rounds) == (True, 2)
    assert {row.get("round") for row in rows(result.folder)} >= {1, 2}
    tested = [row for row in rows(result.folder) if row.get("round") == 2 and row.get("split") == "test"]
    scores = [float(str(row["primary"])) for row in tested]
    assert len(scores) == 4
    assert result.summary["overall"]["final"]["test"]["primary"] == pytest.approx(sum(scores) / 4)
