"""The gate of two stacked adapters, by hand and against torch's own autograd."""

import math

import pytest
import torch
from torch import Tensor

from atlas_fl.models.lora import gate_weights, packed_linear

THREE = tuple(range(start, stop) for start, stop in ((0, 2), (2, 5), (5, 9)))
SCALES = (2.0, 0.5, 1.5)


def test_a_token_by_hand() -> None:
    """softmax(ln 3, 0) = (3/4, 1/4); A and B make 4 and 8 of x = (1, 2); 3 + 2 (3/4 * 4 + 1/4 * 8) = 13."""
    out = packed_linear(
        torch.tensor([[1.0, 2.0]]),
        weight=torch.tensor([[1.0], [1.0]]),
        bias=None,
        segments=(range(0, 1),),
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


def test_a_token_of_a_router_by_hand() -> None:
    """Logits ln 4, ln 1, ln 2, ln 3, ln .5: the three largest are .44, .33 and .22, of the own expert and two others.

    The experts make 9, 18 and 27 of x, and 1 + 2 (4/9 * 9 + 2/9 * 18 + 3/9 * 27) = 35. Of ln 5, ln 4, ln .5, ln 2 and
    ln 3 the own expert has 5/12 + 4/12, and 1 + 2 (9/12 * 12 + 3/12 * 36) = 37.
    """

    def output(logits: list[float], b: list[float]) -> Tensor:
        gate = torch.tensor([[math.log(one), 0.0] for one in logits])
        one = range(0, 1)
        layer = {"weight": torch.ones(1, 1), "bias": None, "segments": (one,), "scales": (2.0,)}
        return packed_linear(torch.ones(1, 1), factors=(torch.ones(3, 1), torch.tensor([b])), gates=(gate,), **layer)

    assert output([4, 1, 0.5, 2, 3], [9, 18, 27]).item() == pytest.approx(35.0)
    assert output([5, 4, 0.5, 2, 3], [12, 24, 36]).item() == pytest.approx(37.0)
    assert output([5, 4, 6, 2, 3], [12, 24, 36]).item() == pytest.approx(25.0), "the own expert alone"


def routed() -> tuple[list[Tensor], list[Tensor | None]]:
    """x, A and B of four clients of ranks 6, 2, 4 and 6, gates of 5, 3, 2 and 11 outputs; dropout masks."""
    source = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    factors = [draw(*shape) for rank in (6, 2, 4, 6) for shape in ((rank, 3), (4, rank))]
    gates = [draw(outputs, 4) for outputs in (5, 3, 2, 11)]
    return [draw(12, 3), *factors, *gates], [None, 2.0 * (draw(3, 3) > 0), None, None]


FOUR = tuple(range(start, start + 3) for start in range(0, 12, 3))
LEADS_TO = {5: (0, 0, 0, 1, 2), 3: (0, 0, 1), 2: (0, 1), 11: (0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5)}
"""By the outputs of a gate the expert of each."""


def routed_layer(x: Tensor, *rest: Tensor) -> Tensor:
    _, weight, bias, *_ = tensors()
    layer = {"weight": weight, "bias": bias, "segments": FOUR, "scales": (2.0, 0.5, 1.5, 1.0)}
    return packed_linear(x, factors=rest[:8], gates=rest[8:], dropout_masks=routed()[1], **layer)


def routed_written_out(x: Tensor, *rest: Tensor) -> Tensor:
    """One client and one output after the other, as the authors' program has it: softmax, the largest, by their sum."""
    _, weight, bias, *_ = tensors()
    out = []
    for k, (segment, scale, mask) in enumerate(zip(FOUR, (2.0, 0.5, 1.5, 1.0), routed()[1], strict=True)):
        rows, (a, b), gate = x[segment.start : segment.stop], rest[2 * k : 2 * k + 2], rest[8 + k]
        into, experts = rows if mask is None else rows * mask, LEADS_TO[len(gate)]
        count, share = experts[-1] + 1, torch.nn.functional.linear(rows, gate[:, :-1], gate[:, -1]).softmax(-1)
        largest, places = share.topk(count)
        largest = largest / largest.sum(-1, keepdim=True)
        update = torch.zeros(len(rows), 4, dtype=x.dtype)
        for token, place in ((token, place) for token in range(len(rows)) for place in range(count)):
            expert = experts[int(places[token, place])]
            a_one, b_one = a.chunk(count)[expert], b.chunk(count, dim=1)[expert]
            update[token] = update[token] + largest[token, place] * (b_one @ (a_one @ into[token]))
        out.append(torch.nn.functional.linear(rows, weight.T, bias) + scale * update)
    return torch.cat(out)


def test_values_and_gradients_of_routers_are_those_of_plain_torch() -> None:
    inputs = [tensor.requires_grad_() for tensor in routed()[0]]
    upper = torch.arange(48, dtype=torch.float64).reshape(12, 4)
    ours, theirs = routed_layer(*inputs), routed_written_out(*inputs)
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (torch.autograd.grad(out, inputs, upper) for out in (ours, theirs))
    torch.testing.assert_close(ours, theirs)
    assert all(gate.any() for gate in ours[9:]), "every router trains"


def test_gradients_of_routers_pass_gradcheck_in_float64() -> None:
    assert torch.autograd.gradcheck(routed_layer, [tensor.requires_grad_() for tensor in routed()[0]])


def test_outputs_that_are_not_among_the_largest_neither_count_nor_train() -> None:
    gate = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    weights = gate_weights(torch.ones(1, 1), gate.requires_grad_())
    assert weights[0, 0] == 0 and weights.sum().item() == pytest.approx(1.0)
    (found,) = torch.autograd.grad(weights[0, 2], gate)
    assert not found[0].any() and found[1:].all()


def test_a_closed_gate_gives_nothing_to_the_second_adapter_and_gets_no_gradient() -> None:
    x, weight, bias, factors, _, _ = tensors()
    a, b = factors[4].requires_grad_(), factors[5].requires_grad_()
    gate = torch.tensor([[0.0, 0, 0, 0.0], [0.0, 0, 0, -math.inf]], dtype=torch.float64, requires_grad=True)
    whole = (range(0, 9),)
    common = {"weight": weight, "bias": bias, "segments": whole, "scales": (1.5,)}
    closed = packed_linear(x, factors=(a, b), gates=(gate,), **common)
    alone = packed_linear(x, factors=(a[:2], b[:, :2]), **common)
    torch.testing.assert_close(closed, alone)
    closed.square().sum().backward()
    assert not gate.grad.any()
    assert not a.grad[2:].any() and not b.grad[:, 2:].any()
    assert a.grad[:2].any()
