"""Models whose outputs are no numbers."""

from collections.abc import Callable

import pytest
import torch

from atlas_fl.config import Config
from atlas_fl.events import Event, Note
from atlas_fl.experiment.run import run_config
from tests.runs.reading import rows

Make = Callable[..., Config]


def test_models_that_give_no_numbers_are_told_and_count_as_wrong(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.linear

    def breaks(features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = real(features, weight, bias)
        return output if torch.is_grad_enabled() else torch.full_like(output, float("nan"))

    monkeypatch.setattr("atlas_fl.models.registry.nn.functional.linear", breaks)
    events: list[Event] = []
    small = {"tasks": "movie", "samples": 8, "validation_samples": 4, "test_samples": 4, "rounds": 1}
    result = run_config(config(**small, strategy="local", clusters="oracle", audit=False), on_event=events.append)
    notes = [event.text for event in events if isinstance(event, Note) and "NaN or infinite" in event.text]
    assert notes[:2] == [
        f"round 1: the models of movie-0, movie-1 give outputs that are NaN or infinite for {split} examples, which"
        " count as wrong; lower the learning rate or clip"
        for split in ("validation", "test")
    ]
    scored = [row for row in rows(result.folder) if row.get("split") in ("validation", "test")]
    assert scored and all(row["accuracy"] == 0 and "loss" not in row for row in scored)
