"""Runs whose clients hold a frozen part beside their adapters: FLoRA, FedEx-LoRA and Fed-PLoRA."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from atlas_fl.experiment.run import run_config
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows

pytestmark = pytest.mark.core

METHODS = {"flora": {"strategy": "flora", "ranks": "4"}, "fedex": {"strategy": "fedex", "ranks": "4"}}


def server_part(folder: Path, round: int, part: str) -> dict[str, Tensor]:
    """The tensors of one part of the server state after a round, by parameter."""
    flat = load_file(folder / f"audit/round-{round:04d}/server.safetensors")
    with safe_open(folder / f"audit/round-{round:04d}/server.safetensors", "pt") as file:
        assert not (file.metadata() or {}).get("same"), "each tensor stands for itself"
    return {path.removeprefix(f"{part}/"): tensor for path, tensor in flat.items() if path.startswith(f"{part}/")}


def product(params: dict[str, Tensor], module: str) -> Tensor:
    """s B A with s = 2, float64."""
    return 2 * params[f"{module}.lora_B"].double() @ params[f"{module}.lora_A"].double()


@pytest.mark.parametrize("method", METHODS)
def test_a_run_passes_its_audit_and_what_is_sent_is_in_the_ledger(config, finished, method: str) -> None:
    folder = finished(config(**METHODS[method])).folder
    passing_audit(folder, "server", "mixed", "loaded")
    ledger = rows(folder, "ledger")
    for round in (1, 2):
        newest = server_part(folder, round, "newest")
        sent = [row for row in ledger if row["kind"] == "frozen" and row["round"] == round]
        assert {row["direction"] for row in sent} == {"down"} and len({row["client"] for row in sent}) == len(sent)
        assert {row["bytes"] for row in sent} == {len(save(newest))}
    down = [row for row in ledger if row["kind"] == "adapter" and row["direction"] == "down"]
    assert bool(down) == (method == "fedex"), "FLoRA's adapters are drawn alike by everyone, and never sent down"
    assert any(row["kind"] == "adapter" and row["direction"] == "up" for row in ledger)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_client_ends_with_and_exports_is_the_frozen_part_and_its_adapter(config, finished, method: str) -> None:
    folder = finished(config(**METHODS[method])).folder
    own, frozen = load_file(folder / "audit/round-0002/start.safetensors"), server_part(folder, 2, "residual")
    client = next(key for key in own if key.endswith("lora_A")).partition("/")[0]
    params = {key.removeprefix(f"{client}/"): tensor for key, tensor in own.items() if key.startswith(f"{client}/")}
    exported = load_file(folder / f"adapters/{client}/adapter_model.safetensors")
    for module in (key.removesuffix(".lora_A") for key in params if key.endswith(".lora_A")):
        wanted = product(params, module) + product(frozen, module)
        own = {key[-len("A.weight")]: tensor for key, tensor in exported.items() if f"{module}.lora_" in key}
        torch.testing.assert_close(2 * own["B"].double() @ own["A"].double(), wanted, rtol=1e-4, atol=1e-6)
        assert wanted.norm() > 0
        if method == "flora":
            assert not product(params, module).any(), "its own adapter has begun again"


def test_who_missed_rounds_is_sent_the_whole_frozen_part(config: Make) -> None:
    folder = run_config(config(**METHODS["fedex"], rounds=3, participation=0.5)).folder
    sizes = {
        (round, part): len(save(server_part(folder, round, part)))
        for round in (1, 2, 3)
        for part in ("residual", "newest")
    }
    sent = [row for row in rows(folder, "ledger") if row["kind"] == "frozen"]
    for row in sent:
        allowed = {sizes[row["round"], "newest"], sizes[row["round"], "residual"]}
        assert row["bytes"] in allowed | {sizes.get((row["round"] - 1, "residual"), 0)}
    whole = [row for row in sent if row["round"] == 3 and row["bytes"] != sizes[3, "newest"]]
    assert whole, "somebody had missed a round"
    reached = {row["client"] for row in sent}
    assert len(reached) == len({row["client"] for row in rows(folder, "ledger") if row["direction"] == "up"} | reached)


def test_modules_of_rank_one_go_to_clients_of_several_ranks_and_all_are_in_the_ledger(config, finished) -> None:
    numbers = "memory_gb=2,gflops=20,up_mbps=2,down_mbps=10,latency_ms=60"
    devices = tuple(f"{name}={numbers},max_rank={rank}" for name, rank in (("low", 2), ("high", 8)))
    folder = finished(config(strategy="fedplora", devices=("low", "high"), device=devices)).folder
    passing_audit(folder, "server", "mixed", "loaded")
    ledger = rows(folder, "ledger")
    assert {("adapter", "up"), ("adapter", "down"), ("frozen", "down")} <= {(r["kind"], r["direction"]) for r in ledger}
    client = ledger[-1]["client"]
    ends = [load_file(folder / f"adapters/{name}/adapter_model.safetensors") for name in (client, ledger[0]["client"])]
    shapes = [{key: tensor.shape for key, tensor in end.items() if "lora_A" in key} for end in ends]
    assert shapes[0] == shapes[1], "everyone ends with all modules, whatever its rank"


@pytest.mark.parametrize("method", ["fedsb", "ravan"])
def test_blocks_alone_are_sent_once_there_are_factors_and_gradients_once(config, finished, method: str) -> None:
    words = {"ravan_heads": 2} if method == "ravan" else {}
    folder = finished(config(strategy=method, ranks="4", **words)).folder
    passing_audit(folder, "mixed", "loaded")
    ledger, start = rows(folder, "ledger"), load_file(folder / "audit/round-0002/start.safetensors")
    client = next(iter(start)).partition("/")[0]
    own = {key.removeprefix(f"{client}/"): tensor for key, tensor in start.items() if key.startswith(f"{client}/")}
    blocks = {key: tensor for key, tensor in own.items() if key.endswith((".lora_core", ".lora_scale"))}
    sent = {row["bytes"] for row in ledger if row["round"] == 2 and row["kind"] == "adapter"}
    assert sent == {len(save(blocks))} and any(tensor.any() for tensor in blocks.values())
    reported = [row["round"] for row in ledger if row["kind"] == "report"]
    assert reported == ([1] * 4 if method == "fedsb" else [])


def test_the_weight_of_everybody_outside_moves_in_its_range_and_stays_at_its_client(config, finished) -> None:
    folder = finished(config(strategy="fedtreelora_outside", ranks="4", rounds=3, tree_threshold=0)).folder
    passing_audit(folder, "server", "mixed", "loaded")
    ledger = rows(folder, "ledger")
    assert {row["round"] for row in ledger if row["kind"] == "frozen"} == {1, 2, 3}
    weights = load_file(folder / "audit/round-0003/gate.safetensors")
    assert weights and all(0 <= float(one) <= 1 for one in weights.values())
    assert any(float(one) != 0.5 for one in weights.values())
