"""The lower part of a stock model without the rest, and the files that its weights lie in."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import cached_file

from atlas_fl.errors import ModelError
from atlas_fl.models.backbone import Backbone, layer_of
from atlas_fl.models.loading import find_family, how_read, is_local, one_at_a_time, prepare, readable
from atlas_fl.models.packing import PACKED, register_packed_attention
from atlas_fl.models.registry import Source

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""What the norms of early BERT checkpoints are called; transformers renames them on loading."""


def bottom_of(name: str, *, blocks: int | None) -> Backbone:
    """A backbone of this model's embeddings and first `blocks` blocks, with its tokenizer; the weights are not read.

    None is all blocks: an outline of the model, for whom names and sizes suffice.

    Nothing is built of what stands above, so `model.state_dict()` names what a file has to give.
    Raises `ModelError` where the model is not to be had, is a GGUF file, or has no more blocks than these.
    """
    register_packed_attention()
    source, family = find_family(name)
    if source.gguf_file:
        raise ModelError(f"model {name!r} is a GGUF file, which cannot be read in parts; give a directory or hub name")
    with readable(name, source), one_at_a_time():
        tokenizer = AutoTokenizer.from_pretrained(source.path, **how_read(source))
        config = AutoConfig.from_pretrained(source.path, **how_read(source))
        total = int(config.num_hidden_layers)
        if blocks is not None and not 0 <= blocks < total:
            raise ModelError(
                f"model {name!r} has {total} blocks and cannot be cut at {blocks}; choose 0 to {total - 1}"
            )
        config.num_hidden_layers = total if blocks is None else blocks
        model = AutoModel.from_config(config, attn_implementation=PACKED, dtype=torch.float32, trust_remote_code=False)
    prepare(model, tokenizer)
    held = {*family.stem, family.blocks.split(".")[0], family.rotary}
    for child in [child for child, _ in model.named_children() if child not in held]:
        delattr(model, child)
    return Backbone(
        name=name, source=source, model=model.requires_grad_(False).eval(), tokenizer=tokenizer, family=family
    )


def bottom_tensors(backbone: Backbone, *, blocks: int) -> dict[str, Tensor]:
    """The frozen tensors of a whole model that stand in its first `blocks` blocks or before them, by name."""
    family = backbone.family
    found: dict[str, Tensor] = {}
    for name, tensor in backbone.model.named_parameters():
        inside = name.startswith(family.blocks + ".")
        if layer_of(backbone, name) < blocks if inside else name.startswith(tuple(f"{own}." for own in family.stem)):
            found[name] = tensor
    return found


def weight_files(name: str, source: Source) -> dict[str, str] | Path:
    """The one file of all weights, or where they are sharded the shard of every tensor by its stored name.

    Raises `ModelError` where there is no safetensors file.
    """
    single = _file(source, WEIGHTS)
    if single is not None:
        return single
    index = _file(source, INDEX)
    if index is None:
        raise ModelError(
            f"model {name!r} ({source.path}) has no {WEIGHTS} or {INDEX}, the files that can be read in parts;"
            " save it again with save_pretrained"
        )
    shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return shards


def shard_file(name: str, source: Source, shard: str) -> Path:
    """Where a shard lies, fetched from the hub if need be; raises `ModelError` where it is not to be had."""
    found = _file(source, shard)
    if found is None:
        raise ModelError(f"model {name!r} ({source.path}) lacks {shard}, which its index names; give all files")
    return found


def _file(source: Source, file: str) -> Path | None:
    found = cached_file(
        source.path, file, _raise_exceptions_for_missing_entries=False, local_files_only=is_local(source)
    )
    return None if found is None else Path(found)


def stored_names(key: str, prefix: str) -> tuple[str, ...]:
    """The names that a tensor of the headless model may have in a file, likeliest first.

    >>> stored_names("wte.weight", "transformer")
    ('wte.weight', 'transformer.wte.weight')
    """
    old = [key.replace(new, own) for new, own in _OLD_NAMES.items() if key.endswith(new)]
    return tuple(f"{front}{name}" for name in (key, *old) for front in ("", f"{prefix}."))
