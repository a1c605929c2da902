"""Padding-free packed attention: many sequences in one row of tokens, each attends only to itself.

Stock transformers run on the row unmodified: position ids restart at every sequence, and attention is
registered through the public `AttentionInterface` and `AttentionMaskInterface`. The layout of the row
travels to the attention function as a keyword argument of the model's own forward call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from transformers import AttentionInterface, AttentionMaskInterface

PACKED = "atlas_packed"

# Sequences attend together up to this ratio of their lengths: fewer, larger products for a little padding.
_BUCKET_RATIO = 1.25


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """`count` sequences that attend together, padded to `length` tokens, which lie at `start` of the sorted rows."""

    start: int
    count: int
    length: int
    bias: Tensor | None  # (count, 1, 1, length) float32, -inf on padding; None when all have the full length


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """Places of the sequences in the row, and indices that gather rows for attention."""

    position_ids: Tensor  # (tokens,) int64, restarting at every sequence
    starts: Tensor  # (sequences,) int64, first token of every sequence
    ends: Tensor  # (sequences,) int64, last token of every sequence
    gather: Tensor  # (slots,) int64, the token in every slot of the buckets; padding repeats a first token
    slot: Tensor  # (tokens,) int64, the slot of every token
    padding: Tensor  # (paddings,) int64, the slots that hold no token
    buckets: tuple[Bucket, ...]


def _group_by_length(sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of sequences, shortest first, in groups whose lengths are within the bucket ratio."""
    by_length = np.argsort(sizes, kind="stable")
    first = 0
    for i in range(1, len(by_length) + 1):
        if i == len(by_length) or sizes[by_length[i]] > _BUCKET_RATIO * sizes[by_length[first]]:
            yield by_length[first:i]
            first = i


def make_layout(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedLayout:
    """The layout of sequences of these lengths that lie one after another."""
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    slots, padding, buckets, offset = [], [], [], 0
    for members in _group_by_length(sizes):
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
        buckets=tuple(buckets),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _HeadRows:
    """Places of the rows of every head: (tokens * heads) rows as a layer gives them, (slots * heads) as products need.

    Inside a bucket the slots are ordered (sequence, head, place), so that each product is one contiguous batch and
    the gathering is the only copy.
    """

    gather: Tensor  # (slots * heads,) int64, the row in every slot
    slot: Tensor  # (tokens * heads,) int64, the slot of every row
    padding: Tensor  # (paddings * heads,) int64, the slots that hold no row


@lru_cache(maxsize=4)
def _head_rows(layout: PackedLayout, heads: int) -> _HeadRows:
    """The rows of this layout for so many heads; every block of a model asks for the same."""
    head = torch.arange(heads, device=layout.gather.device)
    order = torch.cat(
        [
            (bucket.start + torch.arange(bucket.count * bucket.length, device=head.device))
            .view(bucket.count, 1, bucket.length)
            .expand(-1, heads, -1)
            .reshape(-1)
            for bucket in layout.buckets
        ]
    )
    head_of_slot = torch.cat([head.view(1, -1, 1).expand(b.count, -1, b.length).reshape(-1) for b in layout.buckets])
    slot_of_row = torch.empty_like(order)
    slot_of_row[order * heads + head_of_slot] = torch.arange(len(order), device=head.device)
    spread = [(slots[:, None] * heads + head).reshape(-1) for slots in (layout.slot, layout.padding)]
    return _HeadRows(
        gather=layout.gather[order] * heads + head_of_slot, slot=slot_of_row[spread[0]], padding=slot_of_row[spread[1]]
    )


class _PackedAttention(torch.autograd.Function):
    """softmax(q k^T scale) v inside every sequence; rows are (tokens, heads, dim).

    A causal token sees the last `window` tokens up to itself, or all of them where `window` is None.

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
    ) -> Tensor:
        rows = _head_rows(layout, q.shape[1])
        queries, keys, values = (states.flatten(0, 1).index_select(0, rows.gather) for states in (q, k, v))
        out = torch.empty_like(queries)
        weights = []
        for bucket in layout.buckets:
            scores = _scaled_product(
                _bucket_rows(queries, bucket, q), _bucket_rows(keys, bucket, q).transpose(1, 2), scale
            )
            if bucket.bias is not None:
                by_sequence = scores.view(bucket.count, -1, bucket.length, bucket.length)
                by_sequence += bucket.bias.to(scores.dtype)
            if causal:
                scores += _causal_bias(bucket.length, window, like=scores)
                # A window may hold nothing but padding, and a softmax of nothing is NaN: padding sees itself.
                scores.diagonal(dim1=1, dim2=2).clamp_(min=torch.finfo(scores.dtype).min)
            wide = torch.promote_types(scores.dtype, torch.float32)
            weight = scores.softmax(-1, dtype=wide).to(scores.dtype)  # (count * heads, length, length)
            torch.bmm(weight, _bucket_rows(values, bucket, q), out=_bucket_rows(out, bucket, q))
            weights.append(weight)
        ctx.save_for_backward(queries, keys, values, *weights)
        ctx.scale, ctx.layout, ctx.rows, ctx.shape = scale, layout, rows, q.shape  # type: ignore[attr-defined]
        return out.index_select(0, rows.slot).view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *weights = ctx.saved_tensors
        rows: _HeadRows = ctx.rows
        upper = grad.flatten(0, 1).index_select(0, rows.gather).index_fill_(0, rows.padding, 0.0)
        grads = [torch.empty_like(states) for states in (queries, keys, values)]
        for bucket, weight in zip(ctx.layout.buckets, weights, strict=True):
            above, dq, dk, dv, key, query, value = (
                _bucket_rows(states, bucket, grad) for states in (upper, *grads, keys, queries, values)
            )
            inner = torch.bmm(above, value.transpose(1, 2))
            # The softmax's Jacobian: P * (dP - sum(dP * P)).
            inner = inner.sub_((inner * weight).sum(-1, keepdim=True)).mul_(weight).mul_(ctx.scale)
            torch.bmm(inner, key, out=dq)
            torch.bmm(inner.transpose(1, 2), query, out=dk)
            torch.bmm(weight.transpose(1, 2), above, out=dv)
        return *(states.index_select(0, rows.slot).view(ctx.shape) for states in grads), None, None, None, None


class _FirstTokenAttention(torch.autograd.Function):
    """Attention of every sequence's first token, softmax(q k^T scale) v; the rows of all other tokens are zero."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, scale: float, layout: PackedLayout) -> Tensor:
        rows, first, heads = _head_rows(layout, q.shape[1]), _first_tokens(layout), q.shape[1]
        queries = q.index_select(0, first).flatten(0, 1)[:, None]  # (sequences * heads, 1, dim), in buckets' order
        keys, values = (states.flatten(0, 1).index_select(0, rows.gather) for states in (k, v))
        out = torch.empty_like(queries)
        weights = []
        for bucket, own in zip(layout.buckets, _rows_of_firsts(layout, heads), strict=True):
            scores = _scaled_product(queries[own], _bucket_rows(keys, bucket, q).transpose(1, 2), scale)
            if bucket.bias is not None:
                by_sequence = scores.view(bucket.count, -1, 1, bucket.length)
                by_sequence += bucket.bias.to(scores.dtype)
            wide = torch.promote_types(scores.dtype, torch.float32)
            weight = scores.softmax(-1, dtype=wide).to(scores.dtype)  # (count * heads, 1, length)
            torch.bmm(weight, _bucket_rows(values, bucket, q), out=out[own])
            weights.append(weight)
        ctx.save_for_backward(queries, keys, values, *weights)
        ctx.scale, ctx.layout, ctx.shape = scale, layout, q.shape  # type: ignore[attr-defined]
        return torch.zeros_like(q).index_copy_(0, first, out.view(-1, *q.shape[1:]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *weights = ctx.saved_tensors
        layout, heads = ctx.layout, ctx.shape[1]
        rows, first = _head_rows(layout, heads), _first_tokens(layout)
        upper = grad.index_select(0, first).flatten(0, 1)[:, None]
        dqueries, dkeys, dvalues = (torch.empty_like(states) for states in (queries, keys, values))
        for bucket, own, weight in zip(layout.buckets, _rows_of_firsts(layout, heads), weights, strict=True):
            key, value, dk, dv = (_bucket_rows(states, bucket, grad) for states in (keys, values, dkeys, dvalues))
            inner = torch.bmm(upper[own], value.transpose(1, 2))
            inner = inner.sub_((inner * weight).sum(-1, keepdim=True)).mul_(weight).mul_(ctx.scale)
            torch.bmm(inner, key, out=dqueries[own])
            torch.bmm(inner.transpose(1, 2), queries[own], out=dk)
            torch.bmm(weight.transpose(1, 2), upper[own], out=dv)
        dq = grad.new_zeros(ctx.shape).index_copy_(0, first, dqueries.view(-1, *ctx.shape[1:]))
        return dq, *(states.index_select(0, rows.slot).view(ctx.shape) for states in (dkeys, dvalues)), None, None


@lru_cache(maxsize=4)
def _first_tokens(layout: PackedLayout) -> Tensor:
    """(sequences,) the first token of every sequence, in the order of the buckets."""
    starts = [torch.arange(b.count, device=layout.gather.device) * b.length + b.start for b in layout.buckets]
    return layout.gather[torch.cat(starts)]


def _rows_of_firsts(layout: PackedLayout, heads: int) -> Iterator[slice]:
    """Slices of each bucket's sequences among `_first_tokens`, a row a head."""
    start = 0
    for bucket in layout.buckets:
        yield slice(start * heads, (start + bucket.count) * heads)
        start += bucket.count


def _bucket_rows(rows: Tensor, bucket: Bucket, like: Tensor) -> Tensor:
    """The rows of a bucket as (count * heads, length, dim), a view; `like` is (tokens, heads, dim)."""
    heads = like.shape[1]
    inside = rows[bucket.start * heads : (bucket.start + bucket.count * bucket.length) * heads]
    return inside.view(bucket.count * heads, bucket.length, rows.shape[-1])


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """`scale * left @ right` of two batches in one product."""
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _causal_bias(length: int, window: int | None, *, like: Tensor) -> Tensor:
    """(length, length), -inf for the tokens behind each one and for those before its window."""
    unseen = torch.full((length, length), -torch.inf, dtype=like.dtype, device=like.device)
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
    layout: PackedLayout,
    only_first: bool = False,
    **kwargs: object,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """Attention of every token to the tokens of its own sequence.

    `query` is (1, heads, tokens, dim), `key` and `value` may have fewer heads (grouped queries);
    the result is (1, tokens, heads, dim). Causal where the module says so, and then inside the block's own
    `sliding_window`, as Mistral's and some of Qwen2's blocks have it. With `only_first` nothing reads other rows
    than those of the sequences' first tokens, and these are zero.
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
        out: Tensor
        if only_first and not causal:
            out = _FirstTokenAttention.apply(*rows, scale, layout)  # type: ignore[no-untyped-call]
        else:
            out = _PackedAttention.apply(*rows, scale, causal, sliding_window, layout)  # type: ignore[no-untyped-call]
    return out[None], None


def _no_mask(*args: object, **kwargs: object) -> None:
    """The layout says which tokens see each other, so no mask is ever built."""


def register_packed_attention() -> None:
    """Make `attn_implementation="atlas_packed"` known to transformers; doing it twice changes nothing."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)
