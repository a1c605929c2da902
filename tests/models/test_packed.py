"""Many clients' factors on one frozen layer, against torch's own autograd."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from atlas_fl.models import lora
from atlas_fl.models.lora import Adapters, Products, attach_adapters, merged_weight, packed_linear

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
@pytest.mark.parametrize("products", ["batched", "grouped"])
def test_a_product_for_all_clients_equals_products_in_turn(
    ranks: tuple[int, ...], *, drops: bool, products: Products
) -> None:
    """What a GPU computes at once; outputs and all gradients, in float32 where grouped products know no float64."""
    dtype, near = (torch.float64, 1e-12) if products == "batched" else (torch.float32, 1e-4)
    layer, factors = a_layer_of(ranks, dtype)
    masks = [None, torch.full((5, 8), 2.0, dtype=dtype), None] if drops else None
    found, expected = (outputs_and_gradients(layer, factors, masks, products=one) for one in (products, "in turn"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


@pytest.mark.parametrize("clients", [3, 9])
@pytest.mark.parametrize("products", ["in turn", "batched", "grouped"])
def test_a_layer_takes_as_many_products_for_any_number_of_clients_where_all_are_one(
    clients: int, products: Products
) -> None:
    """Each product is a kernel that a GPU launches: 8 of a layer, forward and backward, or 2 and 6 for each client."""
    layer, factors = a_layer_of((2,) * clients, torch.float32)
    segments = tuple(range(k, k + 1) for k in range(clients - 1))
    layer |= {"segments": (*segments, range(clients - 1, 9)), "scales": (1.0,) * clients}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        outputs_and_gradients(layer, factors, None, products=products)
    names = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")
    # a CPU computes a grouped product by one product for each group, a GPU by one kernel
    of_grouped = [event for event in profile.events() if event.cpu_parent and event.cpu_parent.name == names[-1]]
    launched = [event for event in profile.events() if event.name in names and event not in of_grouped]
    assert len(launched) == (2 + 4 * clients if products == "in turn" else 8)


def test_the_grouped_kernel_takes_aligned_rows_in_bf16_on_a_new_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def fits(*, columns: int = 32, width: int = 16, segments: Any = TWO, dtype: torch.dtype = torch.bfloat16) -> bool:
        return lora._fits_groups(torch.ones(5, columns, dtype=dtype), width, segments)

    assert fits()
    assert not fits(columns=12) and not fits(width=9), "rows are not multiples of 16 bytes"
    assert not fits(segments=(range(5), range(5, 5))), "a client without a token"
    assert not fits(dtype=torch.float32)
    capability = (7, 5)
    assert not fits()


@pytest.mark.parametrize(
    ("grouped", "cuda", "expected"),
    [(True, True, "grouped"), (False, True, "batched"), (True, False, "in turn")],
)
def test_products_are_grouped_on_a_gpu_where_the_adapters_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, *, grouped: bool, cuda: bool, expected: Products
) -> None:
    """With a layer on the CPU that says where it lies."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    asked = []
    monkeypatch.setattr(lora, "packed_linear", lambda x, *, products, **_: asked.append(products) or x)
    client = {"one.lora_A": torch.ones(2, 16), "one.lora_B": torch.ones(16, 2)}
    added = Adapters(
        clients=[client, client], segments=TWO, sequences=TWO, scale=lambda rank: 1.0 / rank, grouped=grouped
    )
    module = nn.Linear(16, 16, dtype=torch.bfloat16)
    with attach_adapters({"one": module}, added):
        module(torch.ones(5, 16, dtype=torch.bfloat16))
    assert asked == [expected]


@pytest.mark.parametrize("products", ["batched", "grouped"])
def test_a_client_whose_factors_are_not_finite_breaks_no_other_one(products: Products) -> None:
    layer, factors = a_layer_of((2, 2, 2), torch.float32)
    sound = outputs_and_gradients(layer, factors, None, products=products)
    broken = [torch.full_like(factors[0], torch.nan), torch.full_like(factors[1], torch.inf), *factors[2:]]
    found = outputs_and_gradients(layer, broken, None, products=products)
    others = slice(3, None)  # rows of the first client are the first three
    assert torch.equal(found[0][others], sound[0][others]) and not found[0][:3].isfinite().any()
    assert torch.equal(found[1][others], sound[1][others])
    assert all(torch.equal(one, other) for one, other in zip(found[4:], sound[4:], strict=True))


def a_layer_of(ranks: tuple[int, ...], dtype: torch.dtype) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A layer 8 -> 16 with three clients of 3, 5 and 1 tokens, and their factors."""
    stream = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64).to(dtype)

    segments = (range(0, 3), range(3, 8), range(8, 9))
    layer = {"x": draw(9, 8), "weight": draw(8, 16), "bias": draw(16), "segments": segments, "scales": (2.0, 0.5, 1.0)}
    return layer, [factor for rank in ranks for factor in (draw(rank, 8), draw(16, rank))]


def outputs_and_gradients(
    layer: dict[str, Any], factors: list[torch.Tensor], masks: list[torch.Tensor | None] | None, *, products: Products
) -> list[torch.Tensor]:
    """The output, and the gradients at x and the factors."""
    x = layer["x"].clone().requires_grad_()
    leaves = [factor.clone().requires_grad_() for factor in factors]
    out = packed_linear(**{**layer, "x": x}, factors=leaves, dropout_masks=masks, products=products)
    (out * torch.arange(144.0, dtype=x.dtype).view(9, 16)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in (x, *leaves) if leaf.grad is not None)]
