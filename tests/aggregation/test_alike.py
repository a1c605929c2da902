"""What all the others hold alike is what a newcomer begins with, bit for bit and object for object."""

import torch

from atlas_fl.aggregation.mixing import reuse_equal_tensors
from atlas_fl.params import PRIVATE, Params
from tests.aggregation.federations import federation_of


def model(body: float, head: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((2,), body), "head.bias": torch.full((3,), head)}


def test_equal_tensors_are_taken_and_others_stay_as_they_were_mixed() -> None:
    held: dict[str, Params] = {"a": model(0.1, 1.0), "b": model(0.1, 2.0), "c": model(0.1, 3.0)}
    begun = {"new": model(0.1 + 1e-8, 2.5)}
    found = reuse_equal_tensors(begun, held, federation_of(("a", "b", "c", "new"), tasks="xyyy"))["new"]
    assert found["a.weight"] is held["b"]["a.weight"], "of its own task first"
    assert found["head.bias"] is begun["new"]["head.bias"], "two of its task have different heads"
    alone = reuse_equal_tensors(begun, held, federation_of(("a", "b", "c", "new"), tasks="xxxy"))["new"]
    assert alone["a.weight"] is held["a"]["a.weight"] and alone["head.bias"] is begun["new"]["head.bias"]
    fellow = reuse_equal_tensors(begun, held, federation_of(("a", "b", "c", "new"), tasks="xxyy"))["new"]
    assert fellow["head.bias"] is held["c"]["head.bias"]


def test_adapters_are_left_as_they_were_mixed() -> None:
    lora = {"a.lora_A": torch.ones(1, 2), "a.lora_B": torch.ones(2, 1), "head.bias": torch.ones(3)}
    held: dict[str, Params] = {"a": {key: own.clone() for key, own in lora.items()}}
    for own in (lora, {**lora, PRIVATE: torch.zeros(32, dtype=torch.uint8)}):
        found = reuse_equal_tensors({"new": own}, held, federation_of(("a", "new"), tasks="xx"))
        assert all(found["new"][key] is tensor for key, tensor in own.items())
