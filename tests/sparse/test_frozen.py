import torch

from atlas_fl.sparse.masked_sgd import restore_frozen

MASK = {"a": torch.tensor([True, False, False])}


def test_a_frozen_weight_is_what_it_was_and_a_kept_one_is_mixed() -> None:
    tenth = torch.tensor([0.1, 0.1, 0.7])
    mean = {"a": sum(torch.tensor(1 / 3) * tenth for _ in range(3)) + torch.tensor([1.0, 1e-7, -1e-7])}
    found = restore_frozen({"x": mean}, {"x": {"a": tenth}}, MASK)["x"]["a"]
    assert found.tolist() == [mean["a"][0].item(), *tenth[1:].tolist()]
    assert mean["a"][1] != tenth[1], "and the mean is left alone"


def test_models_go_on_sharing_the_tensors_that_they_share_and_one_that_was_not_mixed_keeps_its_own() -> None:
    mask = MASK | {"head": torch.ones(1, dtype=torch.bool)}
    held, body, own = {"a": torch.zeros(3), "head": torch.zeros(1)}, torch.ones(3), {"a": torch.full((3,), 2.0)}
    mixed = {name: {"a": body, "head": torch.ones(1)} for name in ("x", "y")}
    found = restore_frozen({**mixed, "z": own}, {"x": held, "y": held, "z": own}, mask)
    assert found["x"]["a"] is found["y"]["a"]
    assert found["x"]["a"].tolist() == [1.0, 0.0, 0.0]
    assert found["x"]["head"] is not found["y"]["head"]
    assert found["z"]["a"] is own["a"]
