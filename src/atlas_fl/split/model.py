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
from atlas_fl.models.attention import PackedLayout
from atlas_fl.models.backbone import Backbone, block_index, embed_tokens, norm_and_pool, read_positions, run_blocks
from atlas_fl.models.files import checkpoint_names, shard_file, weight_files
from atlas_fl.models.loading import build_first_blocks, check_shape, checkpoint_blocks
from atlas_fl.models.weights import hold_weights
from atlas_fl.params import HEAD, PRIVATE


def client_forward(backbone: Backbone, ids: Tensor, types: Tensor, layout: PackedLayout, *, blocks: int) -> Tensor:
    """Rows that leave a client with `blocks` blocks: (tokens, hidden) of its row; ids and types (tokens,) int64."""
    return run_blocks(backbone, embed_tokens(backbone, ids, types, layout), layout, range(blocks))


def server_forward(
    backbone: Backbone, hidden: Tensor, layout: PackedLayout, *, blocks: int, output_positions: Tensor | None = None
) -> Tensor:
    """Features that the head reads, (reads, hidden), of rows (tokens, hidden) out of the first `blocks` blocks.

    The rows may be those of many clients, one after another: the layout keeps their sequences apart.
    """
    positions, rest = read_positions(backbone.family, layout, output_positions), range(blocks, len(backbone.blocks))
    return norm_and_pool(backbone, run_blocks(backbone, hidden, layout, rest, positions=positions), positions)


def select_client_side(backbone: Backbone, names: Iterable[str], *, blocks: int, head: bool) -> frozenset[str]:
    """Names of a model's trainable tensors on the client: adapters of its blocks, and the head if it keeps it."""
    return frozenset(
        name
        for name in names
        if name == PRIVATE or (head if name.startswith(HEAD) else block_index(backbone, name) < blocks)
    )


def load_client_part(
    name: str,
    *,
    blocks: int,
    device: str = "cpu",
    gradient_checkpointing: bool = False,
    writes: bool = False,
    held: str = "fp32",
) -> Backbone:
    """The frozen backbone of a client that holds `blocks` blocks: its embeddings and these, and nothing else.

    With the output embedding if its head `writes` text. Only its own tensors are read from the files, one after
    another; names are the stock ones. They are held in the type `held` (`models.weights`).
    Raises `ModelError` where the model is not to be had, has no safetensors, lacks a tensor or has fewer blocks.
    """
    with torch.device("meta"):
        outline = build_first_blocks(name, blocks=blocks)
    expected = outline.model.state_dict()
    for key, file, stored in _find_tensors(outline, expected):
        check_shape(name, key, file.get_slice(stored).get_shape(), expected[key].shape)
    part = build_first_blocks(name, blocks=blocks)  # as large as the files, and no larger
    state = part.model.state_dict()
    for key, file, stored in _find_tensors(part, state):
        state[key].copy_(file.get_tensor(stored))
    if held != "fp32":
        hold_weights(part.model, held)
        part = replace(part, held=held)
    part.model.to(device)
    if gradient_checkpointing:
        checkpoint_blocks(part)
    return replace(part, vocabulary=_output_embedding(part)) if writes else part


def _output_embedding(part: Backbone) -> Tensor:
    """The output embedding, which many models tie to that of the input."""
    table: Tensor = part.model.get_input_embeddings().weight
    if part.model.config.tie_word_embeddings:
        return table
    for key, file, stored in _find_tensors(part, ("lm_head.weight",)):
        check_shape(part.name, key, file.get_slice(stored).get_shape(), table.shape)
        table = file.get_tensor(stored)
    dtype = part.model.get_input_embeddings().weight.dtype
    return table.to(part.device, dtype, copy=True)  # aligned, which what lies in a file need not be


def _find_tensors(part: Backbone, keys: Collection[str]) -> Iterator[tuple[str, Any, str]]:
    """(name in the model, open file, name in the file) of every wanted tensor."""
    files = weight_files(part.name, part.source)
    with ExitStack() as stack:

        @cache
        def reader(shard: str | None) -> Any:
            path = files if isinstance(files, Path) else shard_file(part.name, part.source, str(shard))
            return stack.enter_context(safe_open(path, framework="pt"))

        available = dict.fromkeys(reader(None).keys()) if isinstance(files, Path) else files
        for key in keys:
            name = next(
                (candidate for candidate in checkpoint_names(key, part.family.prefix) if candidate in available), None
            )
            if name is None:
                raise ModelError(f"model {part.name!r} lacks {key}; give complete files")
            yield key, reader(available[name]), name
