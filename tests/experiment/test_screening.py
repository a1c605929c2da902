"""What a server refuses of an update beside its model."""

import pytest
import torch

from atlas_fl.client.job import Update
from atlas_fl.experiment.rounds import check_updates, select_models

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


@pytest.mark.parametrize(
    ("own", "mixed", "keeps"),
    [(0.1, 0.2, True), (0.2, 0.2, False), (0.2, float("nan"), True), (0.2, float("inf"), True),
     (float("nan"), 0.2, False), (float("nan"), float("nan"), False)],
)  # fmt: skip
def test_a_model_with_a_loss_is_better_than_one_without(own: float, mixed: float, *, keeps: bool) -> None:
    ours, theirs = ({"a": Update(client="a", params={}, examples=1, metrics={"loss": loss})} for loss in (own, mixed))
    trained = {"a": {"q.lora_A": torch.ones(2, 3)}}
    models, kept = select_models({"a": MODEL}, trained, ours, theirs)
    assert kept == (("a",) if keeps else ())
    assert models["a"] is (trained["a"] if keeps else MODEL)
