"""A frozen stock transformer, loaded once and shared by every client of a site."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as hf_logging

from atlas_fl.errors import ModelError
from atlas_fl.models.family import FAMILIES, Family
from atlas_fl.models.packing import PACKED, Layout, register_packed_attention
from atlas_fl.models.registry import Source, hub_answers, locate
from atlas_fl.models.shape import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """A frozen model with its tokenizer and what is known of its architecture."""

    name: str
    source: Source
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    family: Family

    @property
    def hidden(self) -> int:
        """Width of the features."""
        return int(self.model.config.hidden_size)

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's list of blocks."""
        found = self.model.get_submodule(self.family.blocks)
        assert isinstance(found, nn.ModuleList)
        return found

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def num_parameters(self) -> int:
        """Frozen parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def load_backbone(name: str, *, device: str = "cpu", gradient_checkpointing: bool = False) -> Backbone:
    """The frozen backbone of this alias, hub name or directory.

    Raises `ModelError` when the files are not to be had or the architecture is not known.
    """
    register_packed_attention()
    source, family = find_family(name)
    with _readable(name, source), _no_bars(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a pooler that the files lack is drawn, and has to be the same in every process
        tokenizer = AutoTokenizer.from_pretrained(source.path, **_how(source))
        model = AutoModel.from_pretrained(source.path, attn_implementation=PACKED, dtype=torch.float32, **_how(source))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False
    model = model.to(device).requires_grad_(False).eval()
    backbone = Backbone(name=name, source=source, model=model, tokenizer=tokenizer, family=family)
    if gradient_checkpointing:
        _checkpoint_blocks(backbone)
    return backbone


def _checkpoint_blocks(backbone: Backbone) -> None:
    """Keep only the inputs of every block but the last, whose inside is needed again at once anyway.

    The last one could not be run again in the backward pass either: by then it no longer is narrowed.
    """
    model = backbone.model
    # transformers 5 renames it and warns about the old name as soon as it knows the new one
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for block in list(backbone.blocks)[:-1]:
        # Checkpointing acts in training mode only. What is inside stays in evaluation mode, without any dropout.
        block.training = True


def find_family(name: str) -> tuple[Source, Family]:
    """Where a model's files are and what architecture it has, without loading its weights."""
    source = locate(name)
    with _readable(name, source):
        config = AutoConfig.from_pretrained(source.path, **_how(source))
    return source, _family(name, config.model_type)


def _how(source: Source) -> dict[str, Any]:
    """The arguments with which the files of a source are read."""
    local = is_directory(source.path) or not hub_answers()
    return {"local_files_only": local} | ({"gguf_file": source.gguf_file} if source.gguf_file else {})


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the screen, which shows the run's own."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


@contextmanager
def _readable(name: str, source: Source) -> Iterator[None]:
    """Turn what can go wrong in reading a model's files into `ModelError`."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ModelError(_not_found(name, source, error)) from error


def _family(name: str, model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise ModelError(
            f"model {name!r} has the architecture {model_type!r}; known: {', '.join(sorted(FAMILIES))};"
            " choose one of these or add a Family in models/family.py"
        )
    return FAMILIES[model_type]


def _not_found(name: str, source: Source, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return (
        f"model {name!r} ({source.path}) could not be loaded: {reason}; give a directory that holds config.json,"
        " model.safetensors and tokenizer.json, fill the hub's cache on a machine with a network and copy it,"
        " or use the embedded one: `atlas fetch embedded` and --model minilm"
    )


def features(backbone: Backbone, ids: Tensor, types: Tensor, layout: Layout) -> Tensor:
    """What the head reads of every sequence in the row: (sequences, hidden).

    `ids` and `types` are (tokens,) int64.
    """
    family, model = backbone.family, backbone.model
    pick = layout.starts if family.pool == "first" else layout.ends
    first = family.first_position(int(model.config.pad_token_id))
    inputs = {"input_ids": ids[None], "position_ids": layout.position_ids[None] + first}
    if family.token_types:
        inputs["token_type_ids"] = types[None]
    elif family.model_type == "roberta":
        inputs["token_type_ids"] = torch.zeros_like(ids)[None]
    with _narrowed(backbone, pick):
        hidden = model(**inputs, layout=layout).last_hidden_state[0]
    pooled = hidden if family.narrow else hidden.index_select(0, pick)
    if family.pooler:
        pooled = model.get_submodule(family.pooler)(pooled[:, None])  # it reads the first token of each row
    out: Tensor = pooled
    return out


@contextmanager
def _narrowed(backbone: Backbone, pick: Tensor) -> Iterator[None]:
    """While this holds, the last block computes only the picked tokens behind its attention.

    Nothing else of the last block reaches the head, and it is three quarters of the block's work.
    """
    if backbone.family.narrow is None:
        yield
        return
    module = backbone.blocks[-1].get_submodule(backbone.family.narrow)

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(states.index_select(1, pick) for states in args)

    handle = module.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def layer_of(backbone: Backbone, module: str) -> int:
    """The number of the block that a module lies in."""
    return int(module.removeprefix(backbone.family.blocks + ".").split(".")[0])


def target_modules(backbone: Backbone, targets: Sequence[str]) -> dict[str, nn.Module]:
    """The layers inside the blocks that get LoRA, by name, in the model's order.

    `targets` are last parts of module names, or `("all-linear",)`. Raises `ModelError` for a name that fits nothing.
    """
    linear: Mapping[str, nn.Module] = {
        name: module
        for name, module in backbone.model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name.startswith(backbone.family.blocks + ".")
    }
    if tuple(targets) == ("all-linear",):
        return dict(linear)
    for target in targets:
        if not any(name.endswith("." + target) for name in linear):
            leaves = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ModelError(
                f"target {target!r} fits no layer of {backbone.name}; choose among {', '.join(leaves)}, or all-linear"
            )
    return {name: module for name, module in linear.items() if name.endswith(tuple("." + t for t in targets))}


def module_dims(module: nn.Module) -> tuple[int, int]:
    """(d_in, d_out) of an `nn.Linear` or a GPT-2 `Conv1D`."""
    rows, columns = module.get_parameter("weight").shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)


def model_shape(backbone: Backbone, modules: Mapping[str, nn.Module]) -> ModelShape:
    """The sizes that cost models need, for these adapted modules."""
    config, blocks = backbone.model.config, backbone.blocks
    layers: list[list[tuple[int, int]]] = [[] for _ in blocks]
    for name, module in modules.items():
        layers[layer_of(backbone, name)].append(module_dims(module))
    block_bytes = tuple(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks)
    total = sum(p.numel() * p.element_size() for p in backbone.model.parameters())
    inner = next(
        (width for key in ("intermediate_size", "hidden_dim", "n_inner") if (width := getattr(config, key, None))),
        4 * backbone.hidden,
    )
    return ModelShape(
        hidden=backbone.hidden,
        intermediate=int(inner),
        heads=int(config.num_attention_heads),
        layers=tuple(tuple(layer) for layer in layers),
        block_bytes=block_bytes,
        block_params=tuple(sum(p.numel() for p in block.parameters()) for block in blocks),
        embedding_bytes=total - sum(block_bytes),
    )


def is_directory(name: str) -> bool:
    """Whether a model's name is a directory on this machine."""
    return Path(name).expanduser().is_dir()
