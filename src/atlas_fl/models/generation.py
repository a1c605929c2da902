"""Greedy generation with stock attention and a key-value cache, token by token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from atlas_fl.models.attention import PACKED
from atlas_fl.models.backbone import Backbone


@contextmanager
def stock_attention(backbone: Backbone) -> Iterator[None]:
    """While this holds, the model attends as transformers has it; afterwards it packs again."""
    config = backbone.model.config
    # A checkpointed block is in training mode and would throw the cache away.
    checkpointed = [block for block in backbone.blocks if block.training]
    config._attn_implementation = "sdpa"
    for block in checkpointed:
        block.training = False
    try:
        yield
    finally:
        config._attn_implementation = PACKED
        for block in checkpointed:
            block.training = True


def decode_step(backbone: Backbone, ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """(features (texts, hidden) of every text's last token, the cache with these tokens in it).

    `ids` (texts, new tokens) int64 follow what the cache holds; `mask` (texts, all tokens) int64 is 0 on the padding in
    front of a text.
    """
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    output = backbone.model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    )
    return output.last_hidden_state[:, -1], output.past_key_values


def pad_left(rows: list[list[int]], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, mask) of token lists as one batch, (texts, longest) int64 each, padding before every text."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
