import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from atlas_fl.models.lora import init_adapters, init_head, lora_scale


def test_a_lower_rank_starts_from_the_first_rows_of_a_higher_one() -> None:
    dims = {"m": (6, 3), "n": (6, 3)}
    low, high = (init_adapters(dims, {"m": rank, "n": rank}, seed=1) for rank in (2, 5))
    assert torch.equal(low["m.lora_A"], high["m.lora_A"][:2])
    assert not torch.equal(low["m.lora_A"], low["n.lora_A"])
    wanted = {f"{module}.lora_{factor}": shape for module in "mn" for factor, shape in (("A", (5, 6)), ("B", (3, 5)))}
    assert {key: tuple(value.shape) for key, value in high.items()} == wanted
    assert not high["m.lora_B"].any()


def test_a_start_is_a_function_of_the_seed_and_the_module_alone() -> None:
    first = init_adapters({"m": (6, 3), "n": (4, 4)}, {"m": 2, "n": 1}, seed=1)
    alone = init_adapters({"n": (4, 4)}, {"n": 1}, seed=1)
    other = init_adapters({"n": (4, 4)}, {"n": 1}, seed=2)
    assert torch.equal(first["n.lora_A"], alone["n.lora_A"])
    assert not torch.equal(first["n.lora_A"], other["n.lora_A"])


def test_a_is_drawn_as_peft_draws_it() -> None:
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(64, 8)), LoraConfig(r=200, target_modules=["0"]))
    theirs = next(value.detach() for name, value in model.named_parameters() if "lora_A" in name)
    ours = init_adapters({"m": (64, 8)}, {"m": 200}, seed=0)["m.lora_A"]
    assert ours.abs().max() <= 1 / 8
    assert float(ours.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=1e-3)
    assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.02)
    assert float(ours.mean()) == pytest.approx(0, abs=0.002)


def test_clients_of_one_group_share_a_head_and_groups_do_not() -> None:
    shapes = {"head.classifier.weight": (300, 40), "head.classifier.bias": (300,)}
    first, same, other = (init_head(shapes, seed=1, group=group) for group in ("movie", "movie", "trec"))
    assert torch.equal(first["head.classifier.weight"], same["head.classifier.weight"])
    assert not torch.equal(first["head.classifier.weight"], other["head.classifier.weight"])
    assert float(first["head.classifier.weight"].std()) == pytest.approx(0.02, rel=0.03)
    assert not first["head.classifier.bias"].any()


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "expected"),
    [(4, None, False, 2.0), (4, 16, False, 4.0), (4, 16, True, 8.0), (8, None, True, 2 * math.sqrt(8))],
)
def test_the_scale_by_hand(rank: int, alpha: float | None, rslora: bool, expected: float) -> None:
    assert lora_scale(rank, alpha=alpha, rslora=rslora) == pytest.approx(expected)
