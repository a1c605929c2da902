"""The gate of two stacked adapters, by hand and against torch's own autograd."""

import math

import pytest
import torch
from torch import Tensor

from atlas_fl.models.lora import Segment, gate_weights, packed_linear

THREE = tuple(Segment(start=start, stop=stop) for start, stop in ((0, 2), (2, 5), (5, 9)))
SCALES = (2.0, 0.5, 1.5)


def test_a_token_by_hand() -> None:
    """softmax(ln 3, 0) = (3/4, 1/4); A and B make 4 and 8 of x = (1, 2); 3 + 2 (3/4 * 4 + 1/4 * 8) = 13."""
    out = packed_linear(
        torch.tensor([[1.0, 2.0]]),
        weight=torch.tensor([[1.0], [1.0]]),
        bias=None,
        segments=(Segment(start=0, stop=1),),
        scales=(2.0,),
        factors=(torch.tensor([[2.0, 1.0], [0.0, 4.0]]), torch.tensor([[1.0, 1.0]])),
        gates=(torch.tensor([[math.log(3.0), 0.0, 0.0], [0.0, 0.0, 0.0]]),),
    )
    assert out.tolist() == [[pytest.approx(13.0)]]


def test_the_last_column_is_a_weight_that_no_input_moves() -> None:
    gate = torch.tensor([[0.0, 0.0, math.log(0.2)], [0.0, 0.0, math.log(0.8)]])
    torch.testing.assert_close(gate_weights(torch.randn(5, 2), gate), torch.tensor([[0.2, 0.8]]).expand(5, 2))


def tensors() -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor | None]]:
    """x, weight, bias, A and B of three clients of ranks 2, 3 and 4, gates of the first and the last, dropout masks."""
    source = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    factors = [draw(*shape) for rank in (2, 3, 4) for shape in ((rank, 3), (4, rank))]
    return draw(9, 3), draw(3, 4), draw(4), factors, [draw(2, 4), draw(2, 4)], [None, None, 2.0 * (draw(4, 3) > 0)]


def layer(x: Tensor, *rest: Tensor) -> Tensor:
    _, weight, bias, _, _, masks = tensors()
    factors, (first, last) = rest[:6], rest[6:]
    layer = {"weight": weight, "bias": bias, "segments": THREE, "scales": SCALES, "dropout_masks": masks}
    return packed_linear(x, factors=factors, gates=(first, None, last), **layer)


def written_out(x: Tensor, *rest: Tensor) -> Tensor:
    """One client after the other, in plain PyTorch."""
    _, weight, bias, _, _, masks = tensors()
    factors, gates = rest[:6], (rest[6], None, rest[7])
    out = []
    for k, (segment, scale, gate, mask) in enumerate(zip(THREE, SCALES, gates, masks, strict=True)):
        rows, (a, b) = x[segment.start : segment.stop], factors[2 * k : 2 * k + 2]
        into = rows if mask is None else rows * mask
        if gate is None:
            update = into @ (b @ a).T
        else:
            half = len(a) // 2
            share = torch.nn.functional.linear(rows, gate[:, :-1], gate[:, -1]).softmax(-1)
            update = share[:, :1] * (into @ (b[:, :half] @ a[:half]).T)
            update = update + share[:, 1:] * (into @ (b[:, half:] @ a[half:]).T)
        out.append(torch.nn.functional.linear(rows, weight.T, bias) + scale * update)
    return torch.cat(out)


def leaves() -> list[Tensor]:
    x, _, _, factors, gates, _ = tensors()
    return [tensor.requires_grad_() for tensor in (x, *factors, *gates)]


def test_values_and_gradients_are_those_of_plain_torch() -> None:
    inputs, upper = leaves(), torch.arange(36, dtype=torch.float64).reshape(9, 4)
    ours, theirs = layer(*inputs), written_out(*inputs)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(out, inputs, upper) for out in (ours, theirs)))


def test_the_gradients_pass_gradcheck_in_float64() -> None:
    assert torch.autograd.gradcheck(layer, leaves())


def test_a_closed_gate_gives_nothing_to_the_second_adapter_and_gets_no_gradient() -> None:
    x, weight, bias, factors, _, _ = tensors()
    a, b = factors[4].requires_grad_(), factors[5].requires_grad_()
    gate = torch.tensor([[0.0, 0, 0, 0.0], [0.0, 0, 0, -math.inf]], dtype=torch.float64, requires_grad=True)
    whole = (Segment(start=0, stop=9),)
    common = {"weight": weight, "bias": bias, "segments": whole, "scales": (1.5,)}
    closed = packed_linear(x, factors=(a, b), gates=(gate,), **common)
    alone = packed_linear(x, factors=(a[:2], b[:, :2]), **common)
    torch.testing.assert_close(closed, alone)
    closed.square().sum().backward()
    assert not gate.grad.any()
    assert not a.grad[2:].any() and not b.grad[:, 2:].any()
    assert a.grad[:2].any()
