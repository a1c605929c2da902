"""What clients' models write after a prompt: greedy, as stock `generate` with `do_sample=False`."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from atlas_fl.clients.base import Site
from atlas_fl.clients.rows import chunks, forward, make_row
from atlas_fl.models.tokens import Encoded
from atlas_fl.types import Params


@torch.inference_mode()
def write(prompts: Sequence[Encoded], clients: Sequence[Params], site: Site, *, new_tokens: int) -> list[list[str]]:
    """Every client's texts after its own prompts, at most `new_tokens` tokens each, up to the end-of-text token.

    Many clients write in one row. It is computed anew for each token: keeping keys and values would need a second
    attention, and the few examples that are written are less work than an epoch.
    """
    answers: list[list[list[int]]] = [[] for _ in prompts]
    placed = [{key: t.to(site.backbone.device) for key, t in params.items()} for params in clients]
    for chunk in chunks([own.lengths + new_tokens for own in prompts], site.max_tokens):
        texts = [
            _Text(client=k, ids=prompts[k].ids[start:stop].tolist())
            for k, part in chunk
            for start, stop in zip(prompts[k].offsets[:-1][part], prompts[k].offsets[1:][part], strict=True)
        ]
        for _ in range(new_tokens):
            _write_one(texts, placed, site)
        for text in texts:
            answers[text.client].append(text.ids[text.given :])
    tokenizer = site.backbone.tokenizer
    return [[tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in own] for own in answers]


class _Text:
    """A text that grows."""

    def __init__(self, *, client: int, ids: list[int]) -> None:
        self.client, self.ids, self.given, self.ended = client, ids, len(ids), False


def _write_one(texts: Sequence[_Text], clients: Sequence[Params], site: Site) -> None:
    """Give every text that has not ended its likeliest next token."""
    end = site.backbone.tokenizer.eos_token_id
    groups = [(k, list(own)) for k, own in groupby((t for t in texts if not t.ended), key=lambda text: text.client)]
    if not groups:
        return
    row = make_row([_encoded(own) for _, own in groups], device=site.backbone.device)
    with forward(row, [clients[k] for k, _ in groups], site) as logits:
        for (_, own), found in zip(groups, logits, strict=True):
            for text, token in zip(own, found.argmax(-1).tolist(), strict=True):
                text.ended = token == end
                text.ids += [] if text.ended else [token]


def _encoded(texts: Sequence[_Text]) -> Encoded:
    """The texts so far; what is read of each is its last token."""
    ids = np.concatenate([np.asarray(text.ids, dtype=np.int64) for text in texts])
    offsets = np.concatenate([[0], np.cumsum([len(text.ids) for text in texts])]).astype(np.int64)
    return Encoded(ids=ids, types=np.zeros_like(ids), offsets=offsets, labels=np.zeros(len(texts), dtype=np.int64))
