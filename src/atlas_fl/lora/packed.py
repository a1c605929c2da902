"""Many clients' LoRA factors on one frozen layer: each token of the row meets the factors of its own client.

A row of tokens is made of one segment per client. The frozen product runs once over the whole row;
the low-rank products run segment by segment, straight into the same output, so that no second
activation of full width is ever made. Clients may differ in rank.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", equation 3: `y = W x + s B A x`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from atlas_fl.tree import LORA_A, LORA_B
from atlas_fl.types import Params


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens `start:stop` of the row belong to one client."""

    start: int
    stop: int


class _PackedLinear(torch.autograd.Function):
    """`x W^T + b + s_k (x A_k^T) B_k^T` for the tokens x of every client k.

    `weight` is (d_in, d_out); it and `bias` are frozen and get no gradient.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dropped: Sequence[Tensor | None], weight: Tensor, bias: Tensor | None, segments: Sequence[Segment], scales: Sequence[float], *factors: Tensor) -> Tensor:  # fmt: skip  # noqa: PLR0913 - autograd calls it by position
        out = x @ weight if bias is None else torch.addmm(bias, x, weight)
        hidden = []
        for segment, scale, mask, a, b in zip(segments, scales, dropped, factors[::2], factors[1::2], strict=True):
            rows = x[segment.start : segment.stop]
            low = (rows if mask is None else rows * mask) @ a.T  # (tokens of k, rank)
            out[segment.start : segment.stop].addmm_(low, b.T, alpha=scale)
            hidden.append(low)
        ctx.save_for_backward(x, weight, *factors, *hidden)
        ctx.segments, ctx.scales, ctx.dropped = segments, scales, dropped  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, *saved = ctx.saved_tensors
        count = len(ctx.segments)
        factors, hidden = saved[: 2 * count], saved[2 * count :]
        grad_x = grad @ weight.T if ctx.needs_input_grad[0] else None
        grads: list[Tensor | None] = []
        for k, (segment, scale, mask) in enumerate(zip(ctx.segments, ctx.scales, ctx.dropped, strict=True)):
            a, b = factors[2 * k], factors[2 * k + 1]
            rows, upper = x[segment.start : segment.stop], grad[segment.start : segment.stop]
            lower = (upper @ b).mul_(scale)  # (tokens of k, rank)
            needs_a, needs_b = ctx.needs_input_grad[6 + 2 * k : 8 + 2 * k]
            grads.append(lower.T @ (rows if mask is None else rows * mask) if needs_a else None)
            grads.append((upper.T @ hidden[k]).mul_(scale) if needs_b else None)
            if grad_x is not None:
                if mask is None:
                    grad_x[segment.start : segment.stop].addmm_(lower, a)
                else:
                    grad_x[segment.start : segment.stop].addcmul_(lower @ a, mask)
        return grad_x, None, None, None, None, None, *grads


def packed_linear(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    segments: Sequence[Segment],
    scales: Sequence[float],
    factors: Sequence[Tensor],
    dropped: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """The adapted layer's output, (tokens, d_out).

    `x` is (tokens, d_in); `weight` (d_in, d_out); `factors` alternates A (rank, d_in) and B (d_out, rank) of the
    clients in the order of their `segments`, which cover all tokens; `dropped` are inverted-dropout masks on x.
    """
    masks = dropped if dropped is not None else [None] * len(segments)
    out: Tensor = _PackedLinear.apply(x, masks, weight, bias, segments, scales, *factors)  # type: ignore[no-untyped-call]
    return out


MaskOf = Callable[[int, str, tuple[int, int]], Tensor | None]
"""(client's place in the pack, module, (tokens, width)) -> inverted-dropout mask, or None for no dropout."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """What the tokens of a pack meet: the clients' params, their segments, their scale and dropout."""

    clients: Sequence[Params]
    segments: Sequence[Segment]
    scale: Callable[[int], float]
    mask: MaskOf | None = None


def _forward(module: nn.Module, name: str, adapters: Adapters) -> Callable[[Tensor], Tensor]:
    """The forward function of one frozen layer that adds every client's low-rank product."""
    factors = [client[name + part] for client in adapters.clients for part in (LORA_A, LORA_B)]
    scales = [adapters.scale(a.shape[0]) for a in factors[::2]]
    # nn.Linear holds (d_out, d_in), GPT-2's Conv1D its transpose.
    transposed = isinstance(module, nn.Linear)

    def forward(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        dropped = None
        if adapters.mask is not None:
            dropped = [
                adapters.mask(k, name, (segment.stop - segment.start, rows.shape[-1]))
                for k, segment in enumerate(adapters.segments)
            ]
        weight, bias, moved = module.weight, module.bias, list(factors)
        if torch.is_autocast_enabled(x.device.type):
            half = torch.get_autocast_dtype(x.device.type)
            rows, weight, moved = rows.to(half), weight.to(half), [factor.to(half) for factor in factors]
            bias = None if bias is None else bias.to(half)
        out = packed_linear(
            rows,
            weight=weight.T if transposed else weight,
            bias=bias,
            segments=adapters.segments,
            scales=scales,
            factors=moved,
            dropped=dropped,
        )
        return out.unflatten(0, x.shape[:-1])

    return forward


@contextmanager
def attached(modules: Mapping[str, nn.Module], adapters: Adapters) -> Iterator[None]:
    """While this holds, the named frozen layers add the clients' updates; afterwards they are stock again.

    The layers keep their names and their place in the model, so no key is ever renamed.
    """
    for name, module in modules.items():
        module.forward = _forward(module, name, adapters)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


def merged_weight(module: nn.Module, name: str, params: Params, scale: Callable[[int], float]) -> Tensor:
    """The layer's weight with one client's update added, in the layer's own orientation; a new tensor."""
    weight = module.weight.detach()  # type: ignore[operator, union-attr]
    a, b = params[name + LORA_A].to(weight.device), params[name + LORA_B].to(weight.device)
    update = scale(a.shape[0]) * (b @ a)  # (d_out, d_in)
    merged: Tensor = weight + (update if isinstance(module, nn.Linear) else update.T)
    return merged
