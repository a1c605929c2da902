"""Temperature scaling: by hand, and that it moves the last layer of a head and no prediction."""

import math

import pytest
import torch

from atlas_fl.methods.temperature import LEAST, MOST, TEMPERATURE, fit_temperatures, with_temperatures


def outcomes(hits: int, *, logit: float = 2.0) -> dict[str, torch.Tensor]:
    """Four examples with logits 4 apart, of which so many are right."""
    return {
        "outputs": torch.tensor([[logit, -2.0]]).repeat(4, 1),
        "labels": torch.tensor([0] * hits + [1] * (4 - hits)),
    }


@pytest.mark.parametrize(
    ("hits", "expected"),
    [((3,), 4 / math.log(3)), ((4, 2), 4 / math.log(3)), ((2,), MOST), ((4,), LEAST)],
    ids=["over-confident", "two clients of a task", "chance", "all right"],
)
def test_the_temperature_by_hand(hits: tuple[int, ...], expected: float) -> None:
    """softmax(4 / T) is the share of hits over the task, within the bounds; another task has its own."""
    clients = {str(index): outcomes(one) for index, one in enumerate(hits)}
    tasks = {**dict.fromkeys(clients, "movie"), "other": "trec"}
    found = fit_temperatures({**clients, "other": outcomes(2)}, tasks)
    assert [float(found[name][TEMPERATURE]) for name in clients] == pytest.approx([expected] * len(hits), rel=1e-3)
    assert float(found["other"][TEMPERATURE]) == pytest.approx(MOST, rel=1e-3)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_rows_that_are_no_numbers_count_for_nothing(broken: float) -> None:
    tasks = {"a": "movie", "b": "movie"}
    found = fit_temperatures({"a": outcomes(3), "b": outcomes(0, logit=broken)}, tasks)
    assert float(found["a"][TEMPERATURE]) == pytest.approx(4 / math.log(3), rel=1e-3)
    assert fit_temperatures({"b": outcomes(0, logit=broken)}, tasks)["b"][TEMPERATURE] == 1


def test_the_last_layer_of_the_head_is_divided_and_all_else_is_the_same() -> None:
    first = "head.classifier.dense.weight"
    model = {"q.lora_B": torch.ones(2), first: torch.ones(2), "head.classifier.out_proj.bias": torch.ones(2)}
    done = with_temperatures({"a": model, "b": model}, {"a": {TEMPERATURE: torch.tensor(4.0, dtype=torch.float64)}})
    assert done["b"] is model and all(done["a"][key] is model[key] for key in ("q.lora_B", first))
    assert done["a"]["head.classifier.out_proj.bias"].tolist() == [0.25, 0.25]
    assert model["head.classifier.out_proj.bias"].sum() == 2
