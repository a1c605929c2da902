"""Runs in which a part of the model does not train in a round: RoLoRA sends the factor that moved alone."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from atlas_fl.experiment.run import run_config
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit, rows

pytestmark = pytest.mark.core

ROLORA = {"strategy": "rolora", "ranks": "4", "rounds": 4}


def adapter_bytes(folder: Path) -> Counter[tuple[object, ...]]:
    sums = Counter[tuple[object, ...]]()
    for row in rows(folder, "ledger"):
        if row["kind"] == "adapter":
            sums[row["round"], row["client"], row["direction"]] += int(str(row["bytes"]))
    return sums


def test_a_round_sends_the_factor_that_moved_alone(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**ROLORA)).folder
    passing_audit(folder)
    before = load_file(folder / "audit/round-0000/start.safetensors")
    for round in range(1, 5):
        after = load_file(folder / f"audit/round-000{round}/start.safetensors")
        factors = {key for key in after if key.startswith("movie-0/") and "lora_" in key}
        moved = {key for key in factors if not torch.equal(before[key], after[key])}
        assert moved == {key for key in factors if key.endswith("lora_A" if round % 2 == 0 else "lora_B")}
        size = len(save({key.removeprefix("movie-0/"): after[key] for key in moved}))
        sent = {key: value for key, value in adapter_bytes(folder).items() if key[0] == round}
        assert sent == {
            (round, f"{task}-{k}", way): size for task in ("movie", "trec") for k in (0, 1) for way in ("up", "down")
        }
        before = after


def test_bytes_of_adapters_are_about_half_of_fedavgs(config: Make) -> None:
    folders = [run_config(config(**{**ROLORA, "strategy": name}, name=name)).folder for name in ("rolora", "fedit")]
    half, whole = (sum(adapter_bytes(folder).values()) for folder in folders)
    assert 0.45 * whole < half < 0.55 * whole


def test_who_missed_a_round_is_sent_both_factors_first(config: Make) -> None:
    folder = run_config(config(**ROLORA, participation=0.5)).folder
    passing_audit(folder)
    took_part = {(row["round"], row["client"]) for row in rows(folder) if row.get("split") == "train"}
    sent, returned = adapter_bytes(folder), 0
    for round in range(2, 5):
        for client in {name for number, name in took_part if number == round}:
            up, down = sent[round, client, "up"], sent[round, client, "down"]
            missed = (round - 1, client) not in took_part
            returned += missed
            assert (down > 2 * up) == missed and (down == up) == (not missed)
    assert returned


@pytest.mark.parametrize(
    "values",
    [
        {"fingerprint": "delta"},
        {"arrive": ("movie-1=3",)},
        {"attack": "scale", "attackers": "1"},
        {"space": "factors", "strategy": "fedavg", "trained_parts": "without_head"},
        {"space": "factors", "strategy": "fedavg", "trained_parts": "B"},
    ],
)
def test_runs_that_train_a_part_pass_the_audit(config: Make, values: dict[str, object]) -> None:
    passing_audit(run_config(config(**{**ROLORA, **values})).folder)
