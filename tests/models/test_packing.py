"""Attention inside each sequence of a row, against torch's own attention on each sequence alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AttentionInterface

from atlas_fl.models import attention
from atlas_fl.models.attention import (
    FLASH,
    PACKED,
    flash_attention,
    make_layout,
    packed_attention,
    register_packed_attention,
)

LENGTHS = (3, 1, 7, 4, 3, 8)


class Stand(torch.nn.Module):
    """A module as transformers hands it to the attention function."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.is_causal = causal


def rows(lengths: Sequence[int], *, heads: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, sum(lengths), 3, generator=source, dtype=dtype)


def varlen_in_turn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`, which runs on CUDA alone, as its documentation has it."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    lengths = [cu_seq.diff().tolist() for cu_seq in (cu_seq_q, cu_seq_k)]
    assert [max(one) for one in lengths] == [max_q, max_k]
    before, after = (torch.inf if side < 0 else side for side in window_size)
    parts = []
    for q, k, v in zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True):
        distance = torch.arange(len(k)) - torch.arange(len(q))[:, None]
        seen = (distance >= -before) & (distance <= after)
        states = (part.transpose(0, 1) for part in (q, k, v))
        one = F.scaled_dot_product_attention(*states, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        parts.append(one.transpose(0, 1))
    return torch.cat(parts)


Attention = Callable[..., tuple[Tensor, Any]]


@pytest.fixture(params=[packed_attention, flash_attention])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attention:
    """Each function, the second with an attention that runs here in the place of the kernel."""
    monkeypatch.setattr(attention, "varlen_attn", varlen_in_turn)
    return request.param


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_calls_the_kernel_as_its_signature_has_it(window: int | None, *, causal: bool) -> None:
    """Shapes and dtypes by the kernel's own rules, forward and backward, without computing anything."""
    layout = make_layout(LENGTHS, device="meta")
    states = [
        torch.empty(1, heads, sum(LENGTHS), 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (4, 2, 2)
    ]
    out, _ = flash_attention(Stand(causal=causal), *states, None, layout=layout, sliding_window=window)
    assert (out.shape, out.dtype) == ((1, sum(LENGTHS), 4, 16), torch.bfloat16)
    gradients = torch.autograd.grad(out, states, torch.empty_like(out))
    assert [gradient.shape for gradient in gradients] == [state.shape for state in states]


def test_the_layout_by_hand() -> None:
    layout = make_layout([2, 4, 1])
    assert layout.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 0]
    assert layout.starts.tolist() == [0, 2, 6]
    assert layout.ends.tolist() == [1, 5, 6]
    # shortest first, and no two lengths are near enough to share a bucket
    assert layout.gather.tolist() == [6, 0, 1, 2, 3, 4, 5]
    assert layout.slot.tolist() == [1, 2, 3, 4, 5, 6, 0]
    assert [(b.start, b.count, b.length, b.bias) for b in layout.buckets] == [
        (0, 1, 1, None),
        (1, 1, 2, None),
        (3, 1, 4, None),
    ]


def test_similar_lengths_share_a_bucket_padded_to_the_longest() -> None:
    layout = make_layout([5, 4])
    (bucket,) = layout.buckets
    assert (bucket.start, bucket.count, bucket.length) == (0, 2, 5)
    assert bucket.bias[:, 0, 0].tolist() == [[0, 0, 0, 0, -torch.inf], [0, 0, 0, 0, 0]]
    assert layout.padding.tolist() == [4]
    assert layout.gather.tolist() == [5, 6, 7, 8, 5, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_equals_torchs_on_each_sequence(
    attend: Attention, causal: bool, scaling: float | None, kv_heads: int
) -> None:
    key, value = (rows(LENGTHS, heads=kv_heads, seed=seed) for seed in (1, 2))
    query, layout = rows(LENGTHS, heads=4), make_layout(LENGTHS)
    ours, weights = attend(Stand(causal=causal), query, key, value, None, scaling=scaling, layout=layout)
    assert weights is None
    assert any(bucket.bias is not None for bucket in layout.buckets)
    theirs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=True)
        for q, k, v in zip(*(part.split(LENGTHS, dim=2) for part in (query, key, value)), strict=True)
    ]
    torch.testing.assert_close(ours, torch.cat(theirs, dim=2).transpose(1, 2))


@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_a_sliding_window_equals_torchs_attention_under_its_mask(attend: Attention, window: int) -> None:
    states = [rows(LENGTHS, heads=4, seed=seed).requires_grad_() for seed in range(3)]
    layout = make_layout(LENGTHS)
    ours, _ = attend(Stand(causal=True), *states, None, layout=layout, sliding_window=window)
    theirs = []
    for q, k, v in zip(*(part.split(LENGTHS, dim=2) for part in states), strict=True):
        behind = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        theirs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind < window)))
    expected = torch.cat(theirs, dim=2).transpose(1, 2)
    torch.testing.assert_close(ours, expected)
    above = rows(LENGTHS, heads=4, seed=9).transpose(1, 2)
    torch.testing.assert_close(*(torch.autograd.grad(out, states, above) for out in (ours, expected)))


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradients_pass_gradcheck_in_float64(causal: bool) -> None:
    lengths = (2, 1, 5, 4)
    layout = make_layout(lengths)
    assert [bucket.bias is None for bucket in layout.buckets] == [True, True, False]
    leaves = [rows(lengths, heads=2, seed=seed).requires_grad_() for seed in range(3)]
    module = Stand(causal=causal)
    assert torch.autograd.gradcheck(lambda *qkv: packed_attention(module, *qkv, None, layout=layout)[0], leaves)


def test_where_only_first_tokens_are_read_their_rows_and_all_gradients_are_those_of_full_attention() -> None:
    layout = make_layout([5, 3, 9, 8, 1, 30])
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 4, 56, 8, generator=draw, dtype=torch.float64).requires_grad_() for _ in "qkv"]
    above = torch.randn(6, 4, 8, generator=draw, dtype=torch.float64)
    module, rows, gradients = torch.nn.Module(), [], []
    for only_first in (False, True):
        out, _ = packed_attention(module, *leaves, None, layout=layout, only_first=only_first)
        rows.append(out[0, layout.starts])
        gradients.append(torch.autograd.grad((rows[-1] * above).sum(), leaves))
        others = torch.ones(56, dtype=torch.bool).index_fill_(0, layout.starts, value=False)
        assert bool((out[0, others] == 0).all()) == only_first
    torch.testing.assert_close(*rows)
    torch.testing.assert_close(*gradients)


def test_values_in_bfloat16_beside_float32_queries_give_bfloat16() -> None:
    """What rotary embeddings leave behind under autocast."""
    states = [rows(LENGTHS, heads=2, dtype=torch.float32, seed=seed) for seed in range(3)]
    layout = make_layout(LENGTHS)
    exact, _ = packed_attention(Stand(causal=True), *states, None, layout=layout)
    mixed = states[0], states[1], states[2].to(torch.bfloat16)
    half, _ = packed_attention(Stand(causal=True), *mixed, None, layout=layout)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, atol=0.05, rtol=0.05)


def test_registering_twice_changes_nothing() -> None:
    register_packed_attention()
    register_packed_attention()
    assert AttentionInterface()[PACKED] is packed_attention
    assert AttentionInterface()[FLASH] is flash_attention
