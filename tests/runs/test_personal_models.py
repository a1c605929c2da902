"""Runs in which every client keeps a model of its own and is pulled to what the server mixes: MR-MTL."""

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.experiment.run import run_config
from tests.runs.finished import Make
from tests.runs.reading import audited, passing_audit, rows

pytestmark = pytest.mark.core

MR_MTL = {"strategy": "mr_mtl", "ranks": "4", "proximal_mu": 0.5}


@pytest.mark.parametrize("strategy", ["mr_mtl", "mr_mtl_cluster"])
def test_a_run_passes_its_audit_and_anchors_are_the_means(config: Make, strategy: str) -> None:
    result = run_config(config(**{**MR_MTL, "strategy": strategy}, tasks="movie"))
    passing_audit(result.folder, "own", "mixed", "loaded")
    trained, start, anchor = audited(result.folder, 2, "trained", "start", "anchor")
    for key in {key.split("/", 1)[1] for key in trained}:
        mean = torch.stack([trained[f"movie-{k}/{key}"] for k in range(2)]).double().mean(dim=0)
        for k in range(2):
            assert torch.equal(start[f"movie-{k}/{key}"], trained[f"movie-{k}/{key}"])
            if f"movie-{k}/{key}" in anchor:  # equal models are written once
                torch.testing.assert_close(anchor[f"movie-{k}/{key}"].double(), mean, atol=1e-6, rtol=1e-5)


def test_a_strong_pull_holds_clients_nearer_to_each_other(config: Make) -> None:
    def spread(mu: float) -> float:
        values = {**MR_MTL, "proximal_mu": mu, "tasks": "movie", "name": f"mu-{mu}", "clip": 0}
        tensors = load_file(run_config(config(**values)).folder / "audit/round-0002/trained.safetensors")
        keys = {key.split("/", 1)[1] for key in tensors}
        return sum(float((tensors[f"movie-0/{key}"] - tensors[f"movie-1/{key}"]).norm()) for key in keys)

    assert spread(50.0) < 0.8 * spread(0.001)


def test_bytes_are_those_of_fedavg(config: Make) -> None:
    folders = [
        run_config(config(strategy=name, ranks="4", space="factors", name=name)).folder for name in ("fedavg", "mr_mtl")
    ]
    sizes = [sum(int(str(row["bytes"])) for row in rows(folder, "ledger")) for folder in folders]
    assert sizes[0] == sizes[1]
