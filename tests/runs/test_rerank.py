"""Ranks that change during a run: what a model computes stays, the audit sees it, and a resumed run does the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.experiment.run import run_config
from atlas_fl.params import unflatten_by_client
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit

# Scarce bytes make the ranks follow the importance, which at this rate is another after every round.
WORDS = {
    **{"rerank": True, "recluster_every": 1, "eta": "0.3", "adapter_bytes": 8_500, "lr": "0.05"},
    **{"candidates": (2, 4, 6, 8)},
}


def ranks_of(folder: Path, name: str) -> dict[str, list[int]]:
    return {client["name"]: client["ranks"] for client in json.loads((folder / name).read_text())["clients"]}


def models(folder: Path, round: int, name: str) -> dict[str, dict[str, torch.Tensor]]:
    found = unflatten_by_client(load_file(folder / f"audit/round-{round:04d}/{name}.safetensors"))
    return {client: dict(params) for client, params in found.items()}


def update(params: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    return 2 * params[f"{module}.lora_B"].double() @ params[f"{module}.lora_A"].double()


@pytest.mark.slow
def test_new_ranks_are_in_the_adapters_and_keep_what_they_can_hold(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(rounds=3, **WORDS)).folder
    changed = grown = 0
    for at in (2, 3):
        old = ranks_of(folder, "plan.json" if at == 2 else "plan-0002.json")
        new = ranks_of(folder, f"plan-{at:04d}.json")
        held, begun = models(folder, at - 1, "start"), models(folder, at, "begun")
        for client, params in begun.items():
            for module in (key.removesuffix(".lora_A") for key in params if key.endswith(".lora_A")):
                layer = int(module.split(".")[2])
                assert params[f"{module}.lora_A"].shape[0] == new[client][layer]
                changed += new[client][layer] != old[client][layer]
                if new[client][layer] >= old[client][layer]:
                    grown += new[client][layer] > old[client][layer]
                    whole = update(held[client], module)
                    torch.testing.assert_close(update(params, module), whole, atol=1e-5, rtol=1e-4)
    assert changed > grown > 0, "nothing was tested"
    report = passing_audit(folder)
    assert sum(row.check == "realigned" for row in report.rows) == 8


@pytest.mark.slow
def test_a_model_that_lost_more_than_its_ranks_ask_for_is_found(config: Make) -> None:
    folder = run_config(config(**WORDS)).folder
    file = folder / "audit/round-0002/begun.safetensors"
    flat = load_file(file)
    key = next(key for key in sorted(flat) if key.startswith("trec-0/") and key.endswith("lora_B"))
    save_file({**flat, key: flat[key] * 1.01}, file)
    assert ("trec-0", "realigned") in {(row.client, row.check) for row in audit_run(folder).failures}


def test_without_it_ranks_stay(config: Make) -> None:
    folder = run_config(config(**{**WORDS, "rerank": False})).folder
    assert ranks_of(folder, "plan.json") == ranks_of(folder, "plan-0002.json")
    assert not list(folder.glob("audit/*/begun.safetensors"))
