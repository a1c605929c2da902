"""What clients' models write after a prompt: greedy, as stock `generate` with `do_sample=False`."""

from collections.abc import Sequence

import torch

from atlas_fl.clients.base import Site
from atlas_fl.lora.packed import Adapters, Segment, attached
from atlas_fl.models.backbone import logits_of
from atlas_fl.models.stock import padded_in_front, read_next, stock_attention
from atlas_fl.models.tokens import Encoded
from atlas_fl.types import Params


@torch.inference_mode()
def write(prompts: Encoded, params: Params, site: Site, *, new_tokens: int) -> list[str]:
    """One client's texts after its prompts, at most `new_tokens` tokens each, up to the end-of-text token.

    Client after client and not in packs, whose attention keeps no keys and values: without a cache every token would
    cost a pass over its whole text.
    """
    placed = {key: tensor.to(site.backbone.device) for key, tensor in params.items()}
    rows = [prompts.ids[a:b].tolist() for a, b in zip(prompts.offsets[:-1], prompts.offsets[1:], strict=True)]
    size = max(1, site.max_tokens // (max(map(len, rows)) + new_tokens))
    written = [
        ids
        for start in range(0, len(rows), size)
        for ids in _greedy(rows[start : start + size], placed, site, new_tokens)
    ]
    tokenizer = site.backbone.tokenizer
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in written]


def _greedy(rows: list[list[int]], params: Params, site: Site, new_tokens: int) -> list[list[int]]:
    """The likeliest next token of every text, again and again, until all have ended or are long enough."""
    backbone, end = site.backbone, site.backbone.tokenizer.eos_token_id
    ids, mask = padded_in_front(rows, device=backbone.device)
    # The prompts go through first as a whole, and then a token of each text at a time.
    whole, single = Segment(start=0, stop=ids.numel()), Segment(start=0, stop=len(rows))
    adapters = Adapters(clients=[params], segments=[whole], pooled=[single], scale=site.scale)
    written: list[torch.Tensor] = []
    ended, cache = torch.zeros(len(rows), dtype=torch.bool, device=ids.device), None
    with attached(site.modules, adapters), stock_attention(backbone), site.autocast():
        while len(written) < new_tokens and not ended.all():
            read, cache = read_next(backbone, ids, mask, cache)
            token = logits_of(backbone, params, read).float().argmax(-1)  # (texts,)
            ended |= token == end
            written.append(token.masked_fill(ended, end))
            ids, mask = written[-1][:, None], torch.nn.functional.pad(mask, (0, 1), value=1)
    return [_until(end, row) for row in torch.stack(written, dim=1).tolist()]


def _until(end: int, row: Sequence[int]) -> list[int]:
    return list(row[: row.index(end)] if end in row else row)
