"""Padding-free packed attention: many sequences in one row of tokens, each attends only to itself.

Stock transformers run on the row unmodified: position ids restart at every sequence, and attention is
registered through the public `AttentionInterface` and `AttentionMaskInterface`. The layout of the row
travels to the attention function as a keyword argument of the model's own forward call.

Two functions compute the same: `packed_attention` in products of its own on any device, to the same bits each time, and
`flash_attention` by PyTorch's kernel for CUDA (Dao 2023, "FlashAttention-2", arXiv:2307.08691), which holds no scores
in memory and adds gradients in no fixed order.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from atlas_fl.frozen import Frozen

PACKED, FLASH = "atlas_packed", "atlas_packed_flash"

# Sequences attend together up to this ratio of their lengths: fewer, larger products for a little padding. A GPU pays
# for the launch of each product more than for padding.
_CPU_BUCKET_RATIO, _GPU_BUCKET_RATIO = 1.25, 2.0


class Bucket(Frozen):
    """`count` sequences that attend together, padded to `length` tokens, which lie at `start` of the sorted rows."""

    start: int
    count: int
    length: int
    bias: Tensor | None  # (count, 1, 1, length) float32, -inf on padding; None when all have the full length


class PackedLayout(Frozen, eq=False):
    """Places of the sequences in the row, and indices that gather rows for attention."""

    position_ids: Tensor  # (tokens,) int64, restarting at every sequence
    starts: Tensor  # (sequences,) int64, first token of every sequence
    ends: Tensor  # (sequences,) int64, last token of every sequence
    gather: Tensor  # (slots,) int64, the token in every slot of the buckets; padding repeats a first token
    slot: Tensor  # (tokens,) int64, the slot of every token
    padding: Tensor  # (paddings,) int64, the slots that hold no token
    offsets: Tensor  # (sequences + 1,) int32, the first token of every sequence, and behind the last
    buckets: tuple[Bucket, ...]  # shortest first


def _group_by_length(sizes: np.ndarray, ratio: float) -> Iterator[np.ndarray]:
    """Indices of sequences, shortest first, in groups whose lengths are within this ratio."""
    by_length = np.argsort(sizes, kind="stable")
    first = 0
    for i in range(1, len(by_length) + 1):
        if i == len(by_length) or sizes[by_length[i]] > ratio * sizes[by_length[first]]:
            yield by_length[first:i]
            first = i


def make_layout(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedLayout:
    """The layout of sequences of these lengths that lie one after another."""
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    slots, padding, buckets, offset = [], [], [], 0
    ratio = _GPU_BUCKET_RATIO if torch.device(device).type == "cuda" else _CPU_BUCKET_RATIO
    for members in _group_by_length(sizes, ratio):
        length = int(sizes[members].max())
        inside = np.arange(length) < sizes[members, None]  # (count, length)
        slots.append(np.where(inside, starts[members, None] + np.arange(length), starts[members, None]).ravel())
        padding.append(np.flatnonzero(~inside) + offset)
        bias = torch.from_numpy(np.where(inside, 0.0, -np.inf).astype(np.float32))[:, None, None].to(device)
        full = bool(inside.all())
        buckets.append(Bucket(start=offset, count=len(members), length=length, bias=None if full else bias))
        offset += inside.size
    gather, padding_slots = np.concatenate(slots), np.concatenate(padding)
    slot = np.empty(sizes.sum(), dtype=np.int64)
    real = np.setdiff1d(np.arange(offset), padding_slots, assume_unique=True)
    slot[gather[real]] = real

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return PackedLayout(
        position_ids=tensor(np.arange(sizes.sum()) - np.repeat(starts, sizes)),
        starts=tensor(starts),
        ends=tensor(starts + sizes - 1),
        gather=tensor(gather),
        slot=tensor(slot),
        padding=tensor(padding_slots),
        offsets=tensor(np.append(starts, sizes.sum()).astype(np.int32)),
        buckets=tuple(buckets),
    )


class _HeadRows(Frozen, eq=False):
    """Places of the rows of every head: (tokens * heads) rows as a layer gives them, (slots * heads) as products need.

    Inside a bucket the slots are ordered (sequence, head, place), so that each product is one contiguous batch and
    the gathering is the only copy.
    """

    gather: Tensor  # (slots * heads,) int64, the row in every slot
    slot: Tensor | None  # (tokens * heads,) int64, the slot of every row; None where only first tokens have slots
    padding: Tensor  # (paddings * heads,) int64, the slots that hold no row
    shapes: tuple[tuple[int, int], ...]  # (sequences * heads, places) of every bucket

    def pack(self, states: Tensor) -> Tensor:
        """The rows (tokens, heads, dim) by their slots, (slots * heads, dim)."""
        return states.flatten(0, 1).index_select(0, self.gather)

    def buckets(self, rows: Tensor) -> list[Tensor]:
        """Views of the packed rows, (sequences * heads, places, dim) of every bucket."""
        parts = torch.split(rows, [batch * places for batch, places in self.shapes])
        return [part.view(*shape, -1) for part, shape in zip(parts, self.shapes, strict=True)]

    def unpack(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The packed rows as a layer takes them, of this shape (tokens, heads, dim); zero where there is no slot."""
        if self.slot is not None:
            return rows.index_select(0, self.slot).view(shape)
        return rows.new_zeros(shape).flatten(0, 1).index_copy_(0, self.gather, rows).view(shape)


@lru_cache(maxsize=8)
def _head_rows(layout: PackedLayout, heads: int, *, only_first: bool = False) -> _HeadRows:
    """The rows of this layout, or of its first tokens, for so many heads; every block of a model asks for the same."""
    head = torch.arange(heads, device=layout.gather.device)
    order, head_of_slot = [], []
    for bucket in layout.buckets:
        slots = bucket.start + torch.arange(bucket.count * bucket.length, device=head.device)
        by_sequence = slots.view(bucket.count, 1, -1)[:, :, : 1 if only_first else bucket.length]
        by_sequence = by_sequence.expand(-1, heads, -1)
        order.append(by_sequence.reshape(-1))
        head_of_slot.append(head.view(1, -1, 1).expand_as(by_sequence).reshape(-1))
    slots, heads_of_slots = torch.cat(order), torch.cat(head_of_slot)
    gather = layout.gather[slots] * heads + heads_of_slots
    if only_first:
        firsts = tuple((bucket.count * heads, 1) for bucket in layout.buckets)
        return _HeadRows(gather=gather, slot=None, padding=gather.new_empty(0), shapes=firsts)
    slot_of_row = torch.empty_like(slots)
    slot_of_row[slots * heads + heads_of_slots] = torch.arange(len(slots), device=head.device)
    slot, padding = (slot_of_row[(own[:, None] * heads + head).reshape(-1)] for own in (layout.slot, layout.padding))
    shapes = tuple((bucket.count * heads, bucket.length) for bucket in layout.buckets)
    return _HeadRows(gather=gather, slot=slot, padding=padding, shapes=shapes)


class _PackedAttention(torch.autograd.Function):
    """softmax(q k^T scale) v inside every sequence; rows are (tokens, heads, dim).

    A causal token sees the last `window` tokens up to itself, or all of them where `window` is None. With `only_first`
    the first token of every sequence attends, and the rows of all others are zero. With `cap` the scores x that enter
    the softmax are cap tanh(x / cap).

    Written with its own backward pass because gathering rows forwards means gathering rows backwards too,
    where autograd would scatter with `index_put`, which costs more than the products themselves.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        causal: bool,
        window: int | None,
        layout: PackedLayout,
        only_first: bool,
        cap: float | None,
    ) -> Tensor:
        rows = _head_rows(layout, q.shape[1])
        asking = _head_rows(layout, q.shape[1], only_first=True) if only_first else rows
        queries, keys, values = asking.pack(q), rows.pack(k), rows.pack(v)
        out = torch.empty_like(queries)
        weights = []
        asked = map(asking.buckets, (queries, out))
        seen = map(rows.buckets, (keys, values))
        for bucket, query, result, key, value in zip(layout.buckets, *asked, *seen, strict=True):
            scores = _capped(_scaled_product(query, key.transpose(1, 2), scale), cap)
            if bucket.bias is not None:
                by_sequence = scores.view(bucket.count, -1, query.shape[1], bucket.length)
                by_sequence += bucket.bias.to(scores.dtype)
            if causal:
                scores += _causal_bias(bucket.length, window, scores.dtype, scores.device)
                if window is not None:
                    # A window may hold nothing but padding, and a softmax of nothing is NaN: padding sees itself.
                    scores.diagonal(dim1=1, dim2=2).clamp_(min=torch.finfo(scores.dtype).min)
            wide = torch.promote_types(scores.dtype, torch.float32)
            weight = scores.softmax(-1, dtype=wide).to(scores.dtype)  # (count * heads, queries, length)
            torch.bmm(weight, value, out=result)
            weights.append(weight)
        ctx.save_for_backward(queries, keys, values, *weights)
        ctx.scale, ctx.rows, ctx.asking, ctx.cap = scale, rows, asking, cap  # type: ignore[attr-defined]
        return asking.unpack(out, q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *weights = ctx.saved_tensors
        rows: _HeadRows = ctx.rows
        asking: _HeadRows = ctx.asking
        upper = asking.pack(grad).index_fill_(0, asking.padding, 0.0)
        dqueries, dkeys, dvalues = (torch.empty_like(states) for states in (queries, keys, values))
        asked = map(asking.buckets, (upper, queries, dqueries))
        seen = map(rows.buckets, (keys, values, dkeys, dvalues))
        for weight, above, query, dq, key, value, dk, dv in zip(weights, *asked, *seen, strict=True):
            inner = torch.bmm(above, value.transpose(1, 2))
            # The softmax's Jacobian: P * (dP - sum(dP * P)).
            inner = inner.sub_((inner * weight).sum(-1, keepdim=True)).mul_(weight).mul_(ctx.scale)
            if ctx.cap is not None:
                capped = _capped(_scaled_product(query, key.transpose(1, 2), ctx.scale), ctx.cap)
                inner = inner.mul_(1 - (capped / ctx.cap).square_())
            torch.bmm(inner, key, out=dq)
            torch.bmm(inner.transpose(1, 2), query, out=dk)
            torch.bmm(weight.transpose(1, 2), above, out=dv)
        dq = asking.unpack(dqueries, grad.shape)
        return dq, rows.unpack(dkeys, grad.shape), rows.unpack(dvalues, grad.shape), *[None] * 6


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """`scale * left @ right` of two batches in one product."""
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    """The scores in place, kept between `cap` and its negative where there is one."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


@lru_cache(maxsize=16)
def _causal_bias(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(length, length), -inf for the tokens behind each one and for those before its window; never changed."""
    unseen = torch.full((length, length), -torch.inf, dtype=dtype, device=device)
    if window is None or window >= length:
        return unseen.triu_(1)
    return unseen.triu(1) + unseen.tril(-window)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the interface's signature; the layout says what a mask would
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: PackedLayout,
    only_first: bool = False,
    **kwargs: object,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """Attention of every token to the tokens of its own sequence.

    `query` is (1, heads, tokens, dim), `key` and `value` may have fewer heads (grouped queries);
    the result is (1, tokens, heads, dim). Causal where the module says so, and then inside the block's own
    `sliding_window`, as Mistral's and some of Qwen2's blocks have it. Scores are capped by
    `softcap`, as Gemma 2 has it. With `only_first` nothing reads other rows than those of the sequences' first tokens,
    and these are zero.
    """
    if key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # Under autocast rotary embeddings leave queries and keys in float32 beside values in bfloat16.
    rows = (states.transpose(1, 2)[0].to(value.dtype) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", False))
    # Inside autocast the softmax would hand float32 weights to a backward pass in bfloat16.
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = _PackedAttention.apply(  # type: ignore[no-untyped-call]
            *rows, scale, causal, sliding_window, layout, only_first and not causal, softcap
        )
    return out[None], None


def flash_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - as above
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: PackedLayout,
    **kwargs: object,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """`packed_attention` without `softcap`, of all tokens, by PyTorch's flash kernel: on CUDA in bf16 or fp16."""
    queries, keys, values = (states.transpose(1, 2)[0].to(value.dtype) for states in (query, key, value))
    causal = bool(getattr(module, "is_causal", False))
    longest = layout.buckets[-1].length
    # the kernel counts the tokens before each one, a model's window that token too
    before = -1 if not causal or sliding_window is None or sliding_window >= longest else sliding_window - 1
    window = (before, 0 if causal else -1)
    rows = (layout.offsets, layout.offsets, longest, longest)  # of queries and of keys
    grouped = key.shape[1] != query.shape[1]
    out: Any = varlen_attn(queries, keys, values, *rows, scale=scaling, window_size=window, enable_gqa=grouped)
    return out[None], None


def register_packed_attention() -> None:
    """Make both functions known to transformers by their names; doing it twice changes nothing."""
    for name, function in ((PACKED, packed_attention), (FLASH, flash_attention)):
        AttentionInterface.register(name, function)
        # the layout says which tokens see each other, so no mask is ever built
        AttentionMaskInterface.register(name, lambda *_, **__: None)
