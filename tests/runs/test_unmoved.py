"""A round in which training moved no parameter of a client is told, whatever trains; one with outputs of NaN too."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from atlas_fl.client.job import Update
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config
from atlas_fl.events import Event, Note
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.experiment.untrained import unmoved_clients
from tests.runs.reading import rows

Make = Callable[..., Config]
TINY_RATE = 1e-30
SMALL: Mapping[str, Any] = {"tasks": "movie", "samples": 8, "validation_samples": 4, "test_samples": 4, "rounds": 2}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "adapters": {"strategy": "fedavg"},
    "adapters by SGD": {"strategy": "fedavg", "optimizer": "sgd"},
    "the head alone": {"strategy": "linear_probe"},
    "B alone": {"strategy": "ffa", "ranks": "4"},
    "all weights": {
        **{"strategy": "fedavg_cluster", "trainable": "full", "candidates": "4+8+16+32+64", "adapter_bytes": "none"},
        **{"fingerprint": "fisher", "fingerprint_steps": 60},
    },
    "cut models": {"strategy": "fedavg", "split": "1"},
}


def told(config: Config) -> tuple[RunResult, list[str]]:
    """A run, and the notes of it on what did not move or is no number."""
    events: list[Event] = []
    result = run_config(config, on_event=events.append)
    notes = [event.text for event in events if isinstance(event, Note)]
    return result, [note for note in notes if "moved beyond rounding" in note or "NaN or infinite" in note]


@pytest.mark.parametrize("kind", KINDS)
def test_who_does_not_move_is_named_in_every_round(config: Make, kind: str) -> None:
    result, notes = told(config(**SMALL, **KINDS[kind], lr=TINY_RATE, name="still"))
    assert notes == [
        f"round {number}: no parameter of movie-0, movie-1 moved beyond rounding: the learning rate of 1e-30 is too"
        " small, or its gradients are zero; see --lr"
        for number in (1, 2)
    ]
    events = [(row["round"], row["client"]) for row in rows(result.folder) if row.get("event") == "unmoved"]
    assert events == [(number, f"movie-{index}") for number in (1, 2) for index in (0, 1)]
    _, notes = told(config(**SMALL, **KINDS[kind], name="moves"))
    assert not notes


def test_a_whole_image_model_under_a_mask_that_does_not_move_is_told_of_the_mask(image_config: Make) -> None:
    settings = {"clients_per_task": 2, "participation": 1, "mask": "lowest_magnitude", "sparsity": 0.5, "rounds": 1}
    _, notes = told(image_config(**settings, lr=TINY_RATE, name="still"))
    assert notes == [
        "round 1: no parameter of digits-0, digits-1 moved beyond rounding: the learning rate of 1e-30 is too small, or"
        " its gradients are zero, or the mask freezes all that trains; see --lr"
    ]
    _, notes = told(image_config(**settings, name="moves"))
    assert not notes


def update_of(value: float, **metrics: float) -> Update:
    return Update(
        client="a", params={"q.lora_B": torch.tensor([value, 0.0])}, examples=1, metrics={"steps": 3.0, **metrics}
    )


@pytest.mark.parametrize(("value", "is_told"), [(1e-9, False), (1e-10, True), (0.0, True)])
def test_a_step_from_zero_counts_beside_values_of_a_thousandth(value: float, is_told: bool) -> None:
    """Eps of float32 is 1.19e-7, and 1.19e-10 of .001."""
    before = {"a": {"q.lora_B": torch.zeros(2)}}
    found = unmoved_clients(before, {"a": update_of(value)}, TrainOptions(seed=0, lr=1e-9), has_mask=False)
    assert found.keys() == ({"a"} if is_told else set())


def test_steps_that_all_overflowed_are_told() -> None:
    before = {"a": {"q.lora_B": torch.zeros(2)}}
    found = unmoved_clients(before, {"a": update_of(0.0, skipped=3.0)}, TrainOptions(seed=0), has_mask=False)
    assert found == {"a": "its gradients overflowed in fp16 in every step; take --precision bf16 or fp32"}


def test_models_that_give_no_numbers_are_told_and_count_as_wrong(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.linear

    def breaks(features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = real(features, weight, bias)
        return output if torch.is_grad_enabled() else torch.full_like(output, float("nan"))

    monkeypatch.setattr("atlas_fl.models.registry.nn.functional.linear", breaks)
    result, notes = told(config(**SMALL, strategy="local", clusters="oracle", audit=False))
    assert notes[:2] == [
        f"round 1: the models of movie-0, movie-1 give outputs that are NaN or infinite for {split} examples, which"
        " count as wrong; lower the learning rate or clip"
        for split in ("validation", "test")
    ]
    scored = [row for row in rows(result.folder) if row.get("split") in ("validation", "test")]
    assert scored and all(row["accuracy"] == 0 and "loss" not in row for row in scored)
