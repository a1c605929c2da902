"""Runs of HiLoRA: which level trains when, what is sent of it, and an audit that finds what was altered."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from atlas_fl.audit.check import audit_run
from atlas_fl.experiment.run import run_config
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import alter_tensors, audited, passing_audit, rows

HILORA: Mapping[str, Any] = {"strategy": "hilora", "ranks": "4", "rounds": 4, "personal_rounds": 1}
"""Two rounds of the root, one of clusters, one of the leaves."""


def of_client(flat: Mapping[str, torch.Tensor], client: str) -> dict[str, torch.Tensor]:
    return {key.partition("/")[2]: one for key, one in flat.items() if key.startswith(f"{client}/")}


def levels(state: Mapping[str, torch.Tensor], client: str) -> dict[str, torch.Tensor]:
    start = f"levels/{int(state[f'clusters/{client}'])}/"
    return {key.removeprefix(start): one for key, one in state.items() if key.startswith(start)}


@pytest.mark.core
def test_levels_train_one_after_the_other_and_go_down_when_they_end(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**HILORA)).folder
    passing_audit(folder, "server", "mixed", "loaded")
    sent = {
        (row["round"], row["client"]): row["bytes"] for row in rows(folder, "ledger") if row.get("kind") == "frozen"
    }
    clients = ("movie-0", "movie-1", "trec-0", "trec-1")
    (first,), (second,) = audited(folder, 2, "server"), audited(folder, 3, "server")
    # equal tensors are in a file once: the root is that of cluster 0
    root = {key: one for key, one in first.items() if key.startswith("levels/0/")}
    root = {key.removeprefix("levels/0/"): one for key, one in root.items()}
    for client in clients:
        assert sent.pop((2, client)) == len(save(root)) and sent.pop((3, client)) == len(save(levels(second, client)))
    assert not sent
    assert not any(row["round"] == 4 for row in rows(folder, "ledger")), "leaves stay where they are"
    for round in (2, 3):
        start = audited(folder, round, "start")[0]
        factors = [of_client(start, client) for client in clients]
        assert all(not one.any() for model in factors for key, one in model.items() if key.endswith("lora_B"))
        trained = [of_client(audited(folder, round + 1, "trained")[0], client) for client in clients]
        assert all(one.any() for model in trained for key, one in model.items() if key.endswith("lora_B"))


def overlap(folder: Any) -> float:
    """The mean square cosine of the leaves' B and the levels below them."""
    (state,), (trained,) = audited(folder, 3, "server"), audited(folder, 4, "trained")
    shares = []
    for client in ("movie-0", "trec-1"):
        model, below = of_client(trained, client), levels(state, client)
        for key in (key for key in model if key.endswith("lora_B") and model[key].numel()):
            inside = torch.linalg.qr(below[key])[0].T @ model[key]
            shares.append(float(inside.square().sum() / model[key].square().sum()))
    return sum(shares) / len(shares)


def test_the_pull_keeps_leaves_apart_from_the_levels_below(config: Make) -> None:
    near, far = (
        overlap(run_config(config(**HILORA, lr=0.02, orthogonality=weight, name=f"pull-{weight}")).folder)
        for weight in (1e-6, 100.0)
    )
    assert far < 0.8 * near


@pytest.mark.parametrize(
    ("round", "file", "entry", "checks"),
    [
        (1, "server", "bases/movie-0", {"server"}),
        (2, "server", "levels/0", {"server", "loaded"}),
        (2, "server", "clusters/trec-1", {"server"}),
        (3, "server", "levels/0", {"server", "loaded"}),
        (3, "start", "movie-0", {"mixed", "loaded"}),
    ],
)
def test_an_audit_finds_what_was_altered(
    config: Make, finished: FinishedRuns, round: int, file: str, entry: str, checks: set[str]
) -> None:
    folder = finished(config(**HILORA)).folder
    path = folder / f"audit/round-{round:04d}/{file}.safetensors"
    key = next(key for key in load_file(path) if key.startswith(entry) and (key.endswith("B") or "clusters" in entry))
    alter_tensors(path, lambda tensors: tensors[key].add_(1))
    assert checks <= {row.check for row in audit_run(folder).failures}


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"participation": 0.25, "rounds": 6}, id="clients that nobody has heard of"),
        pytest.param({"aggregate_every": 2, "rounds": 6, "lora_alpha": 16, "rslora": True}, id="rounds in between"),
        pytest.param({"tasks": "movie", "clients_per_task": 2}, id="two clients, which are one cluster"),
    ],
)
def test_a_run_passes_its_audit(config: Make, values: Mapping[str, Any]) -> None:
    passing_audit(run_config(config(**{**HILORA, **values})).folder, "server", "loaded")
