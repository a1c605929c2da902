"""LoRA adapters of many clients on one frozen layer, and their initialisation.

A row of tokens consists of one segment per client, and each token is multiplied by the factors of its own client. The
frozen product runs once over the whole row. On a CPU the low-rank products run segment by segment, straight into the
same output, so that no second activation of full width is made. On a GPU, where each product of a small client costs
its launch, all clients' products are one batched product, whose segments are padded to the longest and whose ranks to
the highest; with `--fast-kernels` in bf16 a grouped one, without padded tokens. Clients may differ in rank; what one
computes never depends on another.

All clients start from the same adapters and heads, whatever their ranks.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", equation 3: `y = W x + s B A x`.

A client's factors may be n adapters of equal rank, stacked, which a gate weighs for every token by itself (a mixture
of experts; two in Bian et al. 2025, "FedALT", arXiv:2503.11880):

    (w_1, w_2) = softmax(G x + c)        y = W x + s (w_1 B_1 A_1 x + w_2 B_2 A_2 x)

The gate is one tensor (2, d_in + 1), G with c as its last column; it reads x without dropout. One of 2 n - 1 rows is a
router (Wang et al. 2025, "FedLEASE", arXiv:2509.15087): of its outputs the n largest count, the others have weight 0,
and the first n all lead to the first adapter, each other one to an adapter of its own:

    p = softmax(top_n(G x + c))          w_1 = p_1 + ... + p_n        w_i = p_{n+i-1}, i = 2 ... n

Where blocks H_i stand between the factors, split into heads, A is what they make of it (`with_core`):

    y = W x + s sum_i s_i B_i H_i A_i x
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, pad
from torch.nn.utils.rnn import pad_sequence

from atlas_fl.frozen import Frozen
from atlas_fl.models.weights import Matrix, arithmetic_of, dense, matrix_of, matrix_product, read_matrix
from atlas_fl.params import HEAD, LORA_A, LORA_B, LORA_CORE, LORA_GATE, LORA_SCALE, PRIVATE, Params
from atlas_fl.rng import torch_generator

Products: TypeAlias = Literal["in turn", "batched", "grouped"]
"""How a layer multiplies the tokens of many clients by their factors."""

_GROUPED_WIDTH = 8  # rows of a grouped product are multiples of 16 bytes


def gate_weights(x: Tensor, gate: Tensor) -> Tensor:
    """The weights of the gate's outputs for every token, (..., outputs) in the gate's dtype; they sum to 1.

    `x` is (..., d_in); `gate` (outputs, d_in + 1), whose last column is added to the logits.
    """
    logits = x @ gate[:, :-1].to(x.dtype).T
    largest, places = (logits.to(gate.dtype) + gate[:, -1]).topk(len(gate) // 2 + 1)  # of two outputs both
    kept = torch.full_like(logits, -math.inf, dtype=gate.dtype).scatter(-1, places, largest)
    return torch.softmax(kept, dim=-1)


def _spread(weights: Tensor, low: Tensor) -> Tensor:
    """The weights (tokens, outputs) as those of the adapters at every column of `low` (tokens, rank)."""
    own = (weights.shape[1] + 1) // 2  # outputs that lead to the first adapter
    by_adapter = torch.cat([weights[:, :own].sum(dim=1, keepdim=True), weights[:, own:]], dim=1)
    return by_adapter.to(low.dtype).repeat_interleave(low.shape[1] // by_adapter.shape[1], dim=1)


def _logit_gradients(weights: Tensor, low: Tensor, lower: Tensor) -> Tensor:
    """The gradient at the gate's logits, (tokens, outputs), from that at the weighed `low`, (tokens, rank)."""
    own = (weights.shape[1] + 1) // 2
    parts = (lower * low).chunk(weights.shape[1] // 2 + 1, dim=1)
    first, *others = (part.sum(dim=1) for part in parts)
    upper = torch.stack([first] * own + others, dim=1).to(weights.dtype)
    return weights * (upper - (weights * upper).sum(dim=1, keepdim=True))


class _PackedLinear(torch.autograd.Function):
    """`x W^T + b + s_k (x A_k^T) B_k^T` for the tokens x of every client k; gated where the client has a gate.

    `weight` is (d_in, d_out); it and `bias` are frozen and get no gradient. The `tensors` are A, B and gate or None of
    client after client.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropout_masks: Sequence[Tensor | None],
        weight: Matrix,
        bias: Tensor | None,
        segments: Sequence[range],
        scales: Sequence[float],
        *tensors: Tensor | None,
    ) -> Tensor:
        matrix = read_matrix(weight)
        out = x @ matrix if bias is None else torch.addmm(bias, x, matrix)
        hidden: list[Tensor | None] = []
        parts = zip(*(tensors[start::3] for start in range(3)), strict=True)
        for segment, scale, mask, (a, b, gate) in zip(segments, scales, dropout_masks, parts, strict=True):
            assert a is not None and b is not None, "every client has both factors"
            rows = x[segment.start : segment.stop]
            low = (rows if mask is None else rows * mask) @ a.T  # (tokens of k, rank)
            weights = None if gate is None else gate_weights(rows, gate)
            weighed = low if weights is None else low * _spread(weights, low)
            out[segment.start : segment.stop].addmm_(weighed, b.T, alpha=scale)
            hidden += [low, weights]
        ctx.save_for_backward(x, *tensors, *hidden)
        ctx.weight, ctx.segments, ctx.scales, ctx.dropped = weight, segments, scales, dropout_masks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        count = 3 * len(ctx.segments)
        tensors, hidden = saved[:count], saved[count:]
        grad_x = grad @ read_matrix(ctx.weight).T if ctx.needs_input_grad[0] else None
        grads: list[Tensor | None] = []
        for k, (segment, scale, mask) in enumerate(zip(ctx.segments, ctx.scales, ctx.dropped, strict=True)):
            (a, b, gate), (low, weights) = tensors[3 * k : 3 * k + 3], hidden[2 * k : 2 * k + 2]
            rows, upper = x[segment.start : segment.stop], grad[segment.start : segment.stop]
            lower = (upper @ b).mul_(scale)  # (tokens of k, rank)
            needs_a, needs_b, needs_gate = ctx.needs_input_grad[6 + 3 * k : 9 + 3 * k]
            if gate is not None:
                logits = _logit_gradients(weights, low, lower)
                spread = _spread(weights, low)
                lower, low = lower * spread, low * spread
            grads.append(lower.T @ (rows if mask is None else rows * mask) if needs_a else None)
            grads.append((upper.T @ low).mul_(scale) if needs_b else None)
            grads.append(
                torch.cat([logits.T @ rows.to(logits.dtype), logits.sum(0)[:, None]], 1) if needs_gate else None
            )
            if grad_x is not None:
                if mask is None:
                    grad_x[segment.start : segment.stop].addmm_(lower, a)
                else:
                    grad_x[segment.start : segment.stop].addcmul_(lower @ a, mask)
                if gate is not None:
                    grad_x[segment.start : segment.stop].addmm_(logits.to(x.dtype), gate[:, :-1].to(x.dtype))
        return grad_x, None, None, None, None, None, *grads


class _ClientBatch(Frozen, eq=False):
    """Places of the tokens of a row in a batch (clients, longest) of its segments."""

    gather: Tensor  # (clients * longest,) int64, the token in every place; padding repeats a client's first
    place: Tensor  # (tokens,) int64, the place of every token
    padding: Tensor  # (paddings,) int64, the places that hold no token
    scale: Tensor  # (clients, 1, 1)

    def rows(self, states: Tensor) -> Tensor:
        """The tokens (tokens, width) by client, (clients, longest, width)."""
        return states.index_select(0, self.gather).view(len(self.scale), -1, states.shape[1])

    def tokens(self, rows: Tensor) -> Tensor:
        """The rows of a batch as tokens, (tokens, width)."""
        return rows.flatten(0, 1).index_select(0, self.place)


@lru_cache(maxsize=8)
def _client_batch(
    segments: tuple[range, ...], scales: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> _ClientBatch:
    """The batch of these segments, which lie one after another; every layer of a model asks for the same."""
    starts = np.array([segment.start for segment in segments])
    sizes = np.array([segment.stop for segment in segments]) - starts
    inside = np.arange(sizes.max()) < sizes[:, None]  # (clients, longest)
    # of a client without a token any token will do
    gather = np.where(inside, starts[:, None] + np.arange(sizes.max()), np.minimum(starts, sizes.sum() - 1)[:, None])
    arrays = (gather.ravel(), np.flatnonzero(inside), np.flatnonzero(~inside))
    gathered, place, padding = (torch.from_numpy(array).to(device) for array in arrays)
    scale = torch.tensor(scales, dtype=dtype, device=device)[:, None, None]
    return _ClientBatch(gather=gathered, place=place, padding=padding, scale=scale)


def _stack(factors: Sequence[Tensor], dtype: torch.dtype, *, multiple: int = 1) -> Tensor:
    """The factors (rank, width) of all clients, (clients, highest rank, width); lower ranks end with zeros.

    The highest rank is rounded up to a `multiple`.
    """
    same = len({factor.shape[0] for factor in factors}) == 1
    stacked = (torch.stack(list(factors)) if same else pad_sequence(list(factors), batch_first=True)).to(dtype)
    return stacked if stacked.shape[1] % multiple == 0 else pad(stacked, (0, 0, 0, -stacked.shape[1] % multiple))


class _BatchedLinear(torch.autograd.Function):
    """`_PackedLinear` without gates, with one product for all clients.

    `mask` is the inverted-dropout mask of the row (tokens, d_in), or None. The `tensors` are A and B of client after
    client, of their own dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor | None,
        weight: Matrix,
        bias: Tensor | None,
        batch: _ClientBatch,
        *tensors: Tensor,
    ) -> Tensor:
        matrix = read_matrix(weight)
        out = x @ matrix if bias is None else torch.addmm(bias, x, matrix)
        a = _stack(tensors[::2], x.dtype)
        b = _stack([factor.T for factor in tensors[1::2]], x.dtype)  # (clients, rank, d_out)
        low = torch.bmm(batch.rows(x if mask is None else x * mask), a.mT).mul_(batch.scale)
        out += batch.tokens(torch.bmm(low, b))
        ctx.save_for_backward(x, mask, a, b, low)
        ctx.weight = weight
        ctx.batch, ctx.ranks, ctx.dtype = batch, [factor.shape[0] for factor in tensors[::2]], tensors[0].dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mask, a, b, low = ctx.saved_tensors
        batch: _ClientBatch = ctx.batch
        upper = batch.rows(grad)
        upper.flatten(0, 1).index_fill_(0, batch.padding, 0.0)
        lower = torch.bmm(upper, b.mT).mul_(batch.scale)  # (clients, longest, rank)
        grad_a = torch.bmm(lower.mT, batch.rows(x if mask is None else x * mask)).to(ctx.dtype)
        grad_b = torch.bmm(upper.mT, low).to(ctx.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x, inner = grad @ read_matrix(ctx.weight).T, batch.tokens(torch.bmm(lower, a))
            grad_x = grad_x.add_(inner) if mask is None else grad_x.addcmul_(inner, mask)
        pairs = zip(grad_a, grad_b, ctx.ranks, strict=True)
        grads = [one for own_a, own_b, rank in pairs for one in (own_a[:rank], own_b[:, :rank])]
        kept = [one if needs else None for one, needs in zip(grads, ctx.needs_input_grad[5:], strict=True)]
        return grad_x, None, None, None, None, *kept


@lru_cache(maxsize=8)
def _groups(
    segments: tuple[range, ...], scales: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The ends of these segments, (clients,) int32, and the scale of every token, (tokens, 1)."""
    ends = torch.tensor([segment.stop for segment in segments], dtype=torch.int32, device=device)
    sizes = torch.tensor([len(segment) for segment in segments], device=device)
    return ends, torch.tensor(scales, dtype=dtype, device=device).repeat_interleave(sizes)[:, None]


def _grouped_linear(
    x: Tensor,
    mask: Tensor | None,
    weight: Matrix,
    bias: Tensor | None,
    segments: Sequence[range],
    scales: Sequence[float],
    factors: Sequence[Tensor],
) -> Tensor:
    """`_BatchedLinear` by grouped products, which need no padding of tokens; the kernel wants ranks in eights."""
    ends, scale = _groups(tuple(segments), tuple(scales), x.dtype, x.device)
    a = _stack(factors[::2], x.dtype, multiple=_GROUPED_WIDTH)
    b = _stack([factor.T for factor in factors[1::2]], x.dtype, multiple=_GROUPED_WIDTH)
    low = grouped_mm(x if mask is None else x * mask, a.mT, offs=ends) * scale
    return matrix_product(x, weight, bias) + grouped_mm(low, b, offs=ends)


def _fits_groups(x: Tensor, width: int, segments: Sequence[range]) -> bool:
    """True where the grouped kernel takes these rows of a layer with outputs of this width."""
    aligned = width % _GROUPED_WIDTH == x.shape[-1] % _GROUPED_WIDTH == 0 and all(segments)
    return aligned and arithmetic_of(x) == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)


def packed_linear(
    x: Tensor,
    *,
    weight: Matrix,
    bias: Tensor | None,
    segments: Sequence[range],
    scales: Sequence[float],
    factors: Sequence[Tensor],
    dropout_masks: Sequence[Tensor | None] | None = None,
    gates: Sequence[Tensor | None] | None = None,
    products: Products = "in turn",
) -> Tensor:
    """The adapted layer's output, (tokens, d_out).

    `x` is (tokens, d_in); `weight` (d_in, d_out); `factors` alternates A (rank, d_in) and B (d_out, rank) of the
    clients in the order of their `segments`, which cover all tokens; `dropout_masks` are inverted-dropout masks on x.
    `gates` (outputs, d_in + 1) weigh equal parts of a client's rank against each other; None for a client without one.
    Where there is no gate, all clients can be one product, `batched` or `grouped`.
    """
    none = [None] * len(segments)
    masks = dropout_masks or none
    out: Tensor
    if products != "in turn":
        mask = None
        if any(mask is not None for mask in masks):
            ones = [x.new_ones(segment.stop - segment.start, x.shape[1]) for segment in segments]
            mask = torch.cat([one if mask is None else mask for one, mask in zip(ones, masks, strict=True)])
        if products == "grouped":
            return _grouped_linear(x, mask, weight, bias, segments, scales, factors)
        batch = _client_batch(tuple(segments), tuple(scales), x.dtype, x.device)
        out = _BatchedLinear.apply(x, mask, weight, bias, batch, *factors)  # type: ignore[no-untyped-call]
        return out
    cast = [factor.to(x.dtype) for factor in factors]
    tensors = [tensor for client in zip(cast[::2], cast[1::2], gates or none, strict=True) for tensor in client]
    out = _PackedLinear.apply(x, masks, weight, bias, segments, scales, *tensors)  # type: ignore[no-untyped-call]
    return out


DropoutMaskFn: TypeAlias = Callable[[int, str, tuple[int, int]], Tensor | None]
"""(client's place in the pack, module, (rows, width)) -> inverted-dropout mask, or None for no dropout."""


class Adapters(Frozen):
    """Adapters of the clients of a pack: the clients' params, their segments, their scale and dropout."""

    clients: Sequence[Params]
    segments: Sequence[range]
    """Rows of the tokens of every client."""
    sequences: Sequence[range]
    """Sequences of every client: the rows of layers that see one token of each sequence."""
    scale: Callable[[int], float]
    dropout_mask: DropoutMaskFn | None = None
    grouped: bool = False
    """On a GPU, products that are grouped where their kernel takes these rows."""


def with_core(params: Params, module: str) -> Tensor:
    """A of a module (rank, d_in), each head's rows multiplied by its block and its factor where there are any."""
    a = params[module + LORA_A]
    if module + LORA_CORE not in params:
        return a
    core = params[module + LORA_CORE]
    if module + LORA_SCALE in params:
        core = params[module + LORA_SCALE][:, None, None] * core
    return (core @ a.reshape(len(core), -1, a.shape[1])).reshape(a.shape)


def _forward(module: nn.Module, name: str, adapters: Adapters) -> Callable[[Tensor], Tensor]:
    """The forward function of one frozen layer that adds every client's low-rank product."""
    factors = [one for client in adapters.clients for one in (with_core(client, name), client[name + LORA_B])]
    gates = [client.get(name + LORA_GATE) for client in adapters.clients]
    scales = [adapters.scale(a.shape[0]) for a in factors[::2]]
    weight = module.get_parameter("weight")
    bias = None if module.bias is None else module.get_parameter("bias")

    def forward(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        dtype = arithmetic_of(x)
        segments = adapters.segments if len(rows) == adapters.segments[-1].stop else adapters.sequences
        if len(adapters.clients) == 1:  # whatever the rows of the layer are, padding or a table too
            segments = (range(0, len(rows)),)
        masks: list[Tensor | None] = []
        if adapters.dropout_mask is not None:
            shapes = [(segment.stop - segment.start, rows.shape[-1]) for segment in segments]
            masks = [adapters.dropout_mask(k, name, shape) for k, shape in enumerate(shapes)]
        products: Products = "in turn"
        if x.is_cuda and len(segments) > 1 and not any(gate is not None for gate in gates):
            products = "grouped" if adapters.grouped and _fits_groups(x, factors[1].shape[0], segments) else "batched"
        out = packed_linear(
            rows.to(dtype),
            weight=matrix_of(weight, dtype, transposed=isinstance(module, nn.Linear)),
            bias=None if bias is None else bias.to(dtype),
            segments=segments,
            scales=scales,
            factors=factors,
            dropout_masks=[None if mask is None else mask.to(dtype) for mask in masks],
            gates=gates,
            products=products,
        )
        return out.view(*x.shape[:-1], -1)

    return forward


@contextmanager
def attach_adapters(modules: Mapping[str, nn.Module], adapters: Adapters) -> Iterator[None]:
    """While this holds, the named frozen layers add the clients' updates; afterwards they are stock again.

    The layers keep their names and their place in the model, so no key is ever renamed. With gradient checkpointing
    the backward pass must lie inside as well, because it runs the layers again.
    """
    forwards = {name: _forward(module, name, adapters) for name, module in modules.items()}
    stock = {name: vars(module)["forward"] for name, module in modules.items() if "forward" in vars(module)}
    for name, module in modules.items():
        module.forward = forwards[name]
    try:
        yield
    finally:
        for name, module in modules.items():
            del module.forward
            if name in stock:
                module.forward = stock[name]


def merged_weight(
    module: nn.Module, name: str, params: Params, scale: Callable[[int], float], weight: Tensor
) -> Tensor:
    """The layer's weight with one client's update added, in the layer's own orientation; a new tensor.

    `weight` is as in the model's files.
    """
    device = module.get_parameter("weight").device
    # Copied, because what came in a message lies at any address, and on that a product's last bits depend.
    a, b = (params[name + part].to(device, copy=True) for part in (LORA_A, LORA_B))
    update = scale(a.shape[0]) * (b @ a)  # (d_out, d_in)
    stored = dense(weight.detach(), torch.float32).to(device)
    return stored + (update if isinstance(module, nn.Linear) else update.T)


def frozen_weight(modules: Mapping[str, nn.Module], name: str) -> Tensor:
    """The weight of one of these layers, (d_out, d_in) float32 on the CPU."""
    stored = dense(modules[name].get_parameter("weight").detach(), torch.float32).cpu()
    return stored if isinstance(modules[name], nn.Linear) else stored.T


def init_adapters(dims: Mapping[str, tuple[int, int]], ranks: Mapping[str, int], *, seed: int) -> dict[str, Tensor]:
    """Fresh factors of every module: A uniform as in PEFT, B zero.

    `dims` are (d_in, d_out) by module. The rows of A are drawn one after another from one stream per module,
    so that a client of rank 4 starts from the first four rows of a client of rank 16.
    """
    params: dict[str, Tensor] = {}
    for module, rank in ranks.items():
        d_in, d_out = dims[module]
        bound = 1 / math.sqrt(d_in)  # Kaiming's uniform bound with a = sqrt(5), PEFT's choice
        draw = torch.empty(rank, d_in).uniform_(-bound, bound, generator=torch_generator(seed, "lora_A", module))
        params[module + LORA_A] = draw
        params[module + LORA_B] = torch.zeros(d_out, rank)
    return params


def init_head(shapes: Mapping[str, tuple[int, ...]], *, seed: int, group: str) -> dict[str, Tensor]:
    """A fresh head, the same for all clients of one group: weights normal(0, 0.02), biases zero."""
    return {
        name: torch.empty(shape).normal_(0, 0.02, generator=torch_generator(seed, "head", group, name))
        if len(shape) > 1
        else torch.zeros(shape)
        for name, shape in shapes.items()
    }


def expand_rank(fresh: Params, warm: Params, scale: Callable[[int], float]) -> dict[str, Tensor]:
    """The warm-up's function at higher ranks: the shared A has more rows, and the new columns of B are zero.

    Exact, because the rows of A are drawn one after another: a larger A begins with the smaller one. What `warm` does
    not have is fresh.
    """
    new = {**fresh, **{key: warm[key] for key in warm if key.startswith(HEAD) or key == PRIVATE}}
    for key in (key for key in warm if key.endswith(LORA_B)):
        low, high = warm[key].shape[1], fresh[key].shape[1]
        assert high >= low, "the warm-up's rank is the smallest"
        new[key] = torch.nn.functional.pad(warm[key] * (scale(low) / scale(high)), (0, high - low))
    return new


def lora_scale(rank: int, *, alpha: float | None, rslora: bool) -> float:
    """The factor s of `s B A`: alpha / rank, or alpha / sqrt(rank); alpha is twice the rank when not given.

    >>> lora_scale(8, alpha=None, rslora=False), lora_scale(8, alpha=16, rslora=False)
    (2.0, 2.0)
    """
    alpha = 2.0 * rank if alpha is None else alpha
    return alpha / math.sqrt(rank) if rslora else alpha / rank
