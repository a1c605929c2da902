"""What a server refuses of an update beside its model."""

import pytest
import torch

from atlas_fl.client.job import Update
from atlas_fl.experiment.rounds import check_updates

MODEL = {"q.lora_A": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    ("what", "kind"), [("kept", "gate"), ("kept", "momentum"), ("reported", "control"), ("reported", "halves")]
)
def test_what_comes_beside_a_model_and_is_no_number_refuses_the_update(what: str, kind: str) -> None:
    bad = {"q.lora_A": torch.tensor([1.0, float("nan"), float("inf")])}
    honest = Update(client="a", params=MODEL, examples=1, metrics={}, **{what: {kind: MODEL}})
    poisoned = Update(client="b", params=MODEL, examples=1, metrics={}, **{what: {kind: bad}})
    accepted, refused = check_updates({"a": MODEL, "b": MODEL}, [honest, poisoned], ("A", "B", "head"))
    assert set(accepted) == {"a"}
    assert refused["b"].startswith(f"{kind} q.lora_A holds 2 values that are NaN or infinite")
