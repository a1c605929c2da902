"""Runs with a router over the experts of all clusters: what is sent, what trains, and that it has an effect."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save

from atlas_fl.experiment.run import run_config
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import audited, passing_audit, rows

ROUTED: Mapping[str, Any] = {"strategy": "fedlease_router", "ranks": "4"}
"""Two clusters of two, which are the tasks."""


def of_client(flat: Mapping[str, torch.Tensor], client: str) -> dict[str, torch.Tensor]:
    return {key.partition("/")[2]: one for key, one in flat.items() if key.startswith(f"{client}/")}


def adapters(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: one for key, one in params.items() if key.endswith(("lora_A", "lora_B"))}


@pytest.mark.core
def test_router_and_own_expert_are_sent_both_ways_and_the_others_down(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**ROUTED)).folder
    passing_audit(folder, "server", "mixed", "loaded")
    ledger = rows(folder, "ledger")
    for round in (1, 2):
        trained, start = audited(folder, round, "trained", "start")
        for client, other in (("movie-0", "trec-1"), ("trec-0", "movie-1")):
            sizes = {
                (row["direction"], row["kind"]): row["bytes"]
                for row in ledger
                if row["client"] == client and row["round"] == round
            }
            for direction, models in (("up", trained), ("down", start)):
                adapter = {key: one for key, one in of_client(models, client).items() if ".lora_" in key}
                assert sizes[direction, "adapter"] == len(save(adapter))
            assert sizes["down", "frozen"] == len(save(adapters(of_client(start, other))))


@pytest.mark.core
def test_a_router_trains_and_is_averaged_inside_its_cluster(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**ROUTED)).folder
    (drawn,), (trained, start) = audited(folder, 0, "start"), audited(folder, 2, "trained", "start")
    gates = [key for key in of_client(drawn, "movie-0") if key.endswith("lora_gate")]
    assert gates
    for key in gates:
        first, second, other = (start[f"{client}/{key}"] for client in ("movie-0", "movie-1", "trec-0"))
        assert drawn[f"movie-0/{key}"].equal(drawn[f"trec-0/{key}"]) and first.equal(second)
        assert not first.equal(other) and not first.equal(drawn[f"movie-0/{key}"])
        assert not trained[f"movie-0/{key}"].equal(trained[f"movie-1/{key}"])


def test_scores_are_other_ones_than_those_of_clusters_alone(config: Make, finished: FinishedRuns) -> None:
    ends = []
    for strategy in ("fedlease", "fedlease_router"):
        folder = finished(config(strategy=strategy, ranks="4", space="factors", lr=0.05, name=strategy)).folder
        ends.append([row["loss"] for row in rows(folder) if row.get("split") == "test" and row.get("round") == 2])
    assert len(ends[0]) == 4 and all(abs(float(one) - float(other)) > 1e-4 for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"participation": 0.25, "rounds": 4, "personal_rounds": 1}, id="clusters that rest"),
        pytest.param({"aggregate_every": 2, "rounds": 4, "lora_alpha": 16}, id="rounds between two aggregations"),
        pytest.param({"clients_per_task": 1, "rslora": True}, id="clusters of one client"),
    ],
)
def test_a_run_passes_its_audit(config: Make, values: Mapping[str, Any]) -> None:
    passing_audit(run_config(config(**{**ROUTED, **values})).folder, "server", "loaded")


def test_of_one_cluster_it_is_an_average_of_everybody(config: Make) -> None:
    one = config(**{**ROUTED, "tasks": "movie"})
    folder = run_config(one).folder
    passing_audit(folder, "mixed", "loaded")
    assert not any(key.endswith("lora_gate") for key in audited(folder, 2, "start")[0])
    assert (folder / "adapters/movie-0/adapter_model.safetensors").is_file()
