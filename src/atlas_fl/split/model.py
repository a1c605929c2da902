"""The two parts of a cut model: embeddings and blocks [0, s) on the client, the rest on the server.

    h = blocks[s-1] ( ... blocks[0] (embed(tokens)))           client, (tokens, hidden)
    f = features (blocks[n-1] ( ... blocks[s] (h)))            server, (reads, hidden)

Both are calls of `models.backbone` on a backbone. In one process they can share a whole one; a client of its own loads
no more than its part (`load_client_part`).

Vepakomma et al. 2018, "Split learning for health".
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from atlas_fl.errors import ModelError
from atlas_fl.models.attention import Layout
from atlas_fl.models.backbone import Backbone, embed, features_of, layer_of, picked, through
from atlas_fl.models.loading import bottom_of, checkpoint_blocks, shard_file, stored_names, weight_files
from atlas_fl.params import HEAD, PRIVATE


def client_forward(backbone: Backbone, ids: Tensor, types: Tensor, layout: Layout, *, blocks: int) -> Tensor:
    """What leaves a client that holds `blocks` blocks: (tokens, hidden) of its row; ids and types (tokens,) int64."""
    return through(backbone, embed(backbone, ids, types, layout), layout, range(blocks))


def server_forward(
    backbone: Backbone, hidden: Tensor, layout: Layout, *, blocks: int, reads: Tensor | None = None
) -> Tensor:
    """What the head reads, (reads, hidden), of rows (tokens, hidden) that come out of the first `blocks` blocks.

    The rows may be those of many clients, one after another: the layout keeps their sequences apart.
    """
    pick, rest = picked(backbone.family, layout, reads), range(blocks, len(backbone.blocks))
    return features_of(backbone, through(backbone, hidden, layout, rest, pick=pick), pick)


def on_client(backbone: Backbone, names: Iterable[str], *, blocks: int, head: bool) -> frozenset[str]:
    """Which of a model's trainable tensors are on the client: adapters of its blocks, and the head if it keeps it."""
    return frozenset(
        name
        for name in names
        if name == PRIVATE or (head if name.startswith(HEAD) else layer_of(backbone, name) < blocks)
    )


def load_client_part(
    name: str, *, blocks: int, device: str = "cpu", gradient_checkpointing: bool = False, writes: bool = False
) -> Backbone:
    """The frozen backbone of a client that holds `blocks` blocks: its embeddings and these, and nothing else.

    With the output embedding if its head `writes` text. Only its own tensors are read from the files, one after
    another; names are the stock ones.
    Raises `ModelError` where the model is not to be had, has no safetensors, lacks a tensor or has fewer blocks.
    """
    part = bottom_of(name, blocks=blocks)
    wanted = part.model.state_dict()
    for key, tensor in _stored(part, wanted):
        if wanted[key].shape != tensor.shape:
            raise ModelError(
                f"model {name!r}: {key} is {tuple(tensor.shape)} in the file and {tuple(wanted[key].shape)} by its"
                " config.json; give files that belong together"
            )
        wanted[key].copy_(tensor)
    part.model.to(device)
    if gradient_checkpointing:
        checkpoint_blocks(part)
    return replace(part, vocabulary=_vocabulary(part)) if writes else part


def _vocabulary(part: Backbone) -> Tensor:
    """The output embedding, which many models tie to that of the input."""
    if part.model.config.tie_word_embeddings:
        tied: Tensor = part.model.get_input_embeddings().weight
        return tied
    return next(tensor for _, tensor in _stored(part, ("lm_head.weight",))).to(part.device, torch.float32)


def _stored(part: Backbone, keys: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """(name in the model, tensor) of every wanted tensor, read one at a time."""
    files = weight_files(part.name, part.source)
    with ExitStack() as stack:

        @cache
        def reader(shard: str | None) -> Any:
            path = files if isinstance(files, Path) else shard_file(part.name, part.source, str(shard))
            return stack.enter_context(safe_open(path, framework="pt"))

        known = dict.fromkeys(reader(None).keys()) if isinstance(files, Path) else files
        for key in keys:
            stored = next((own for own in stored_names(key, part.family.prefix) if own in known), None)
            if stored is None:
                raise ModelError(f"model {part.name!r} lacks {key}; give complete files")
            yield key, reader(known[stored]).get_tensor(stored)
