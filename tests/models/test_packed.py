"""Many clients' factors on one frozen layer, against torch's own autograd."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from atlas_fl.models.lora import Adapters, attach_adapters, merged_weight, packed_linear

TWO = (range(0, 2), range(2, 5))


def test_two_clients_by_hand() -> None:
    # x W = (1*1+2*0, 1*0+2*1) for W the identity; client 0: A = (1, 1), B = (1, 0)^T, s = 2 adds 2*(1+2) to the first.
    # Client 1: A = (0, 1), B = (0, 3)^T, s = 1 adds 3*4 to the second.
    factors = ([[1.0, 1.0]], [[1.0], [0.0]], [[0.0, 1.0]], [[0.0], [3.0]])
    out = packed_linear(
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        weight=torch.eye(2),
        bias=torch.tensor([10.0, 20.0]),
        segments=(range(0, 1), range(1, 2)),
        scales=(2.0, 1.0),
        factors=[torch.tensor(factor) for factor in factors],
    )
    assert out.tolist() == [[1 + 10 + 6, 2 + 20], [3 + 10, 4 + 20 + 12]]


def test_frozen_factors_get_no_gradient() -> None:
    factors = [torch.ones(1, 3), torch.ones(4, 1, requires_grad=True), torch.ones(2, 3), torch.ones(4, 2)]
    layer = {"weight": torch.ones(3, 4), "bias": None, "segments": TWO, "scales": (2.0, 0.5)}
    packed_linear(torch.ones(5, 3), factors=factors, **layer).sum().backward()
    assert factors[1].grad is not None
    assert [factor.grad for factor in (factors[0], factors[2], factors[3])] == [None, None, None]


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"linear": nn.Linear(3, 4), "plain": nn.Linear(3, 4, bias=False), "conv": Conv1D(4, 3)}


def adapters(modules: dict[str, nn.Module], *, rank: int = 2) -> Adapters:
    source = torch.Generator().manual_seed(1)
    client = {}
    for name in modules:
        client[f"{name}.lora_A"] = torch.randn(rank, 3, generator=source)
        client[f"{name}.lora_B"] = torch.randn(4, rank, generator=source)
    return Adapters(
        clients=[client],
        segments=[range(0, 6)],
        sequences=[range(0, 2)],
        scale=lambda rank: 3.0 / rank,
    )


@pytest.mark.parametrize("shape", [(1, 6, 3), (6, 3), (2, 3, 3), (1, 2, 3)], ids=str)
def test_an_attached_layer_is_the_merged_layer_and_afterwards_it_is_stock_again(shape: tuple[int, ...]) -> None:
    modules = layers()
    added = adapters(modules)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    stock = {name: module(x) for name, module in modules.items()}
    with attach_adapters(modules, added):
        found = {name: module(x) for name, module in modules.items()}
    for name, module in modules.items():
        assert "forward" not in vars(module)
        assert torch.equal(module(x), stock[name])
        a, b = added.clients[0][f"{name}.lora_A"], added.clients[0][f"{name}.lora_B"]
        torch.testing.assert_close(found[name], stock[name] + 1.5 * x @ a.T @ b.T)
        merged = merged_weight(module, name, added.clients[0], added.scale, module.weight)
        assert merged.shape == module.weight.shape
        product = x @ (merged if name == "conv" else merged.T)
        torch.testing.assert_close(found[name], product if module.bias is None else product + module.bias)


def test_layers_are_stock_again_after_an_error_inside() -> None:
    modules = layers()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), attach_adapters(modules, adapters(modules)):
        modules["linear"](torch.zeros(6, 5))
    assert not any("forward" in vars(module) for module in modules.values())


def test_layers_stay_stock_when_a_client_lacks_a_factor() -> None:
    modules = layers()
    incomplete = adapters({"linear": modules["linear"]})
    with pytest.raises(KeyError, match=r"plain\.lora_A"), attach_adapters(modules, incomplete):
        pytest.fail("attached without the factors")
    assert not any("forward" in vars(module) for module in modules.values())


def test_an_empty_update_changes_no_bit() -> None:
    modules = layers()
    x = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(2))
    zero = adapters(modules)
    for name in modules:
        zero.clients[0][f"{name}.lora_B"].zero_()
    with attach_adapters(modules, zero):
        for module in modules.values():
            torch.testing.assert_close(module(x), type(module).forward(module, x), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 4, 2)])
@pytest.mark.parametrize("drops", [False, True])
def test_a_batched_product_equals_products_in_turn(ranks: tuple[int, ...], *, drops: bool) -> None:
    """What a GPU computes in one product for all clients; outputs and all gradients, in float64."""
    layer, factors = a_layer_of(ranks)
    masks = [None, torch.full((5, 6), 2.0, dtype=torch.float64), None] if drops else None
    found, expected = (outputs_and_gradients(layer, factors, masks, batched=batched) for batched in (True, False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clients", [3, 9])
@pytest.mark.parametrize("batched", [True, False])
def test_a_batched_layer_takes_as_many_products_for_any_number_of_clients(clients: int, *, batched: bool) -> None:
    """Each product is a kernel that a GPU launches: 8 of a layer, forward and backward, or 2 and 4 for each client."""
    layer, factors = a_layer_of((2,) * clients)
    segments = tuple(range(k, k + 1) for k in range(clients - 1))
    layer |= {"segments": (*segments, range(clients - 1, 9)), "scales": (1.0,) * clients}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        outputs_and_gradients(layer, factors, None, batched=batched)
    products = [event for event in profile.events() if event.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert len(products) == (8 if batched else 2 + 4 * clients)


def test_a_client_whose_factors_are_not_finite_breaks_no_other_one() -> None:
    layer, factors = a_layer_of((2, 2, 2))
    sound = outputs_and_gradients(layer, factors, None, batched=True)
    broken = [torch.full_like(factors[0], torch.nan), torch.full_like(factors[1], torch.inf), *factors[2:]]
    found = outputs_and_gradients(layer, broken, None, batched=True)
    others = slice(3, None)  # rows of the first client are the first three
    assert torch.equal(found[0][others], sound[0][others]) and not found[0][:3].isfinite().any()
    assert torch.equal(found[1][others], sound[1][others])
    assert all(torch.equal(one, other) for one, other in zip(found[4:], sound[4:], strict=True))


def a_layer_of(ranks: tuple[int, ...]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A layer 6 -> 5 with three clients of 3, 5 and 1 tokens, and their factors, float64."""
    stream = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    segments = (range(0, 3), range(3, 8), range(8, 9))
    layer = {"x": draw(9, 6), "weight": draw(6, 5), "bias": draw(5), "segments": segments, "scales": (2.0, 0.5, 1.0)}
    return layer, [factor for rank in ranks for factor in (draw(rank, 6), draw(5, rank))]


def outputs_and_gradients(
    layer: dict[str, Any], factors: list[torch.Tensor], masks: list[torch.Tensor | None] | None, *, batched: bool
) -> list[torch.Tensor]:
    """The output, and the gradients at x and the factors."""
    x = layer["x"].clone().requires_grad_()
    leaves = [factor.clone().requires_grad_() for factor in factors]
    out = packed_linear(**{**layer, "x": x}, factors=leaves, dropout_masks=masks, batched=batched)
    (out * torch.arange(45.0, dtype=torch.float64).view(9, 5)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in (x, *leaves) if leaf.grad is not None)]
