import pytest
import torch
from torch import nn

from atlas_fl.sparse.masked_sgd import SparseSGDM, extract_momentum, load_momentum

SHAPES = {"w": (5, 7), "b": (5,), "scalar": (), "still": (3,)}
WORDS = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def descend(optimizer: torch.optim.Optimizer, leaves: dict[str, torch.Tensor], steps: range) -> None:
    for step in steps:
        for name, value in drawn(100 + step).items():
            leaves[name].grad = value
        optimizer.step()


@pytest.mark.parametrize("share", [None, 0.1, 0.6, 1.0])
def test_an_optimizer_that_goes_on_ends_in_the_bits_of_one_that_was_never_left(share: float | None) -> None:
    draw, masks = torch.Generator().manual_seed(2), None
    if share is not None:
        masks = {name: torch.rand(shape, generator=draw) < share for name, shape in SHAPES.items()}
        masks["still"][:] = False

    def optimizer(leaves: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(leaves.values(), **WORDS) if masks is None else SparseSGDM(leaves, masks=masks, **WORDS)

    whole, parts = ({name: value.requires_grad_() for name, value in drawn(0).items()} for _ in range(2))
    descend(optimizer(whole), whole, range(6))
    first = optimizer(parts)
    descend(first, parts, range(4))
    held = extract_momentum(first, parts, masks=masks)
    before = {name: values.clone() for name, values in held.items()}
    second = optimizer(parts)
    load_momentum(second, parts, held, masks=masks)
    descend(second, parts, range(4, 6))
    for name in SHAPES:
        assert torch.equal(whole[name], parts[name])
    assert all(torch.equal(held[name], values) for name, values in before.items()), "what is held is not written to"
    if masks is not None:
        assert {name: own.numel() for name, own in held.items()} == {
            name: int(own.sum()) for name, own in masks.items() if own.any()
        }


def test_there_is_no_momentum_of_what_has_not_moved() -> None:
    leaf = nn.Parameter(torch.ones(2))
    assert extract_momentum(torch.optim.SGD([leaf], lr=1.0, momentum=0.9), {"w": leaf}, masks=None) == {}
