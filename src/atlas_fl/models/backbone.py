"""The frozen backbone that every client of a site shares: embeddings, blocks, features, logits, greedy generation.

The modules and their names are those of stock transformers, split at the list of blocks.
`norm_and_pool(run_blocks(embed_tokens(...), all blocks))` computes what `backbone_features` does, bit for bit; a cut
model is the same three calls on two machines. Generation uses stock attention and a key-value cache, token by token.

Several processes see one copy of the weights, in shared memory. A tensor begins there at a multiple of 64 bytes, as in
torch's own memory: products of what lies otherwise may end in other last bits.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from atlas_fl.errors import ConfigError, ModelError
from atlas_fl.models.attention import PackedLayout
from atlas_fl.models.registry import Family, ModelShape, apply_layers
from atlas_fl.models.vision import Vision
from atlas_fl.models.weights import frozen_product
from atlas_fl.params import Params, head_keys, num_bytes
from atlas_fl.storage.tensors import DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """A frozen model with what prepares its input and what is known of its architecture."""

    name: str
    source: str
    """Directory or hub name of its files."""
    model: PreTrainedModel
    tokenizer: Any
    """transformers' tokenizer; None of a model that sees images."""
    family: Family
    vocabulary: Tensor | None = None
    """(tokens, hidden), the frozen output embedding of a model that writes text; not loaded where none is written."""
    vision: Vision | None = None
    """Its image side; None of a model that reads text."""
    head_start: Params = dataclasses.field(default_factory=dict)
    """Tensors that a head begins with in the place of drawn ones, by the names of `Family.parts`."""

    held: str = "fp32"
    """Type of its matrices in memory (`models.weights`)."""
    fast: bool = False
    """True where rows of a pack take the kernels of `--fast-kernels`."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.family.width or self.model.config.hidden_size)

    @property
    def width(self) -> int:
        """Width of the features that the head reads."""
        return self.hidden if self.vision is None else self.vision.hidden

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's list of blocks, or those of all its lists."""
        modules = [self.model.get_submodule(path.removesuffix(".")) for path in self.family.block_lists]
        return modules[0] if len(modules) == 1 else nn.ModuleList([block for part in modules for block in part])

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def num_parameters(self) -> int:
        """Frozen parameters."""
        return sum(tensor.numel() for tensor in self.frozen.values())

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter of the model by its stock name, as in its files."""
        return dict(self.model.named_parameters())

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Every frozen tensor by its stock name; an output embedding that is tied to the input's is there once."""
        named = self.parameters
        if self.vocabulary is None or any(self.vocabulary is tensor for tensor in named.values()):
            return named
        return {**named, "lm_head.weight": self.vocabulary}


def backbone_features(
    backbone: Backbone, ids: Tensor, types: Tensor, layout: PackedLayout, *, output_positions: Tensor | None = None
) -> Tensor:
    """The features of the row: (outputs, hidden), or (sequences, hidden) of every sequence's pooled token.

    `ids` and `types` are (tokens,) int64, `output_positions` (outputs,) int64 positions in the row.
    """
    positions = read_positions(backbone.family, layout, output_positions)
    with last_block_reads_only(backbone, positions):
        hidden = token_states(backbone, ids, types, layout)
    return pool_features(backbone, hidden, positions)


def token_states(backbone: Backbone, ids: Tensor, types: Tensor, layout: PackedLayout) -> Tensor:
    """The last hidden state of every token of a row, (tokens, hidden)."""
    states: Tensor = backbone.model(**token_inputs(backbone, ids, types, layout), layout=layout).last_hidden_state[0]
    return states


def token_inputs(backbone: Backbone, ids: Tensor, types: Tensor, layout: PackedLayout) -> dict[str, Tensor]:
    """Inputs of the stock model's embeddings for a row, (1, tokens) int64 each."""
    positions = layout.position_ids
    if backbone.family.counts_from_padding:
        padding = int(backbone.model.config.pad_token_id)
        # RoBERTa counts the positions of other tokens than padding from its id on; a text may spell the padding token,
        # which then has its own id as its position
        is_counted = (ids != padding).long()
        counts = is_counted.cumsum(0)
        starts = torch.arange(len(ids), device=ids.device) - layout.position_ids  # of every token's sequence
        before = (counts - is_counted)[starts]
        positions = (counts - before) * is_counted + padding
    inputs = {"input_ids": ids[None], "position_ids": positions[None]}
    if backbone.family.token_types:
        inputs["token_type_ids"] = types[None]
    return inputs


def read_positions(family: Family, layout: PackedLayout, output_positions: Tensor | None) -> Tensor:
    """The positions that the head reads, (outputs,) int64: the given ones, or every sequence's pooled token."""
    return (layout.starts if family.pool == "first" else layout.ends) if output_positions is None else output_positions


def pool_features(backbone: Backbone, hidden: Tensor, positions: Tensor) -> Tensor:
    """Features (outputs, hidden) of the last block's output."""
    family = backbone.family
    states = hidden if family.after_attention else hidden.index_select(0, positions)
    # a pooler reads the first token of each row
    return backbone.model.get_submodule(family.pooler)(states[:, None]) if family.pooler else states


def head_logits(backbone: Backbone, params: Params, features: Tensor) -> Tensor:
    """Logits (outputs, labels) by the client's own head, or (outputs, vocabulary) by the model's where it has none."""
    if head_keys(params):
        return apply_layers(backbone.family.head, params, features)
    if backbone.family.stock:
        return features
    assert backbone.vocabulary is not None, "a model that writes is loaded with its output embedding"
    logits = frozen_product(features, backbone.vocabulary)
    cap = getattr(backbone.model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@contextmanager
def last_block_reads_only(backbone: Backbone, positions: Tensor) -> Iterator[None]:
    """Inside this context the last block computes only the tokens at `positions` behind its attention.

    Nothing else of the last block reaches the head, and it is three quarters of the block's work. Where these are the
    sequences' first tokens, only they attend.
    """
    if backbone.family.after_attention is None:
        yield
        return
    block = backbone.blocks[-1]

    def select_positions(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(states.index_select(1, positions) for states in args)

    def say_who_attends(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        layout = kwargs.get("layout")
        return args, {**kwargs, "only_first": layout is not None and positions is layout.starts}

    handles = [
        block.get_submodule(backbone.family.after_attention).register_forward_pre_hook(select_positions),
        block.register_forward_pre_hook(say_who_attends, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def block_index(backbone: Backbone, module: str) -> int:
    """The number of the block that a module lies in."""
    first = 0
    for path in backbone.family.block_lists:
        if module.startswith(path):
            return first + int(module.removeprefix(path).split(".")[0])
        first += len(backbone.model.get_submodule(path.removesuffix(".")))
    raise AssertionError(f"{module} lies in a block")


def target_modules(backbone: Backbone, targets: Sequence[str], *, first_block: int = 0) -> dict[str, nn.Module]:
    """The layers inside the blocks from `first_block` up that get LoRA, by name, in the model's order.

    `targets` are last parts of module names, or `("all-linear",)`. Raises `ModelError` for a name that fits nothing.
    """
    linear: Mapping[str, nn.Module] = {
        name: module
        for name, module in backbone.model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and name.startswith(backbone.family.block_lists)
        and block_index(backbone, name) >= first_block
    }
    # The part of a cut model may hold no block, and then nothing is adapted there.
    if tuple(targets) == ("all-linear",) or not len(backbone.blocks):
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


def trainable_names(backbone: Backbone, *, frozen_blocks: int = 0) -> tuple[str, ...]:
    """The tensors that train where all weights do, in stock order, but for the embeddings and the first blocks.

    With all blocks frozen the head alone trains. What no head reads is left out, since it would have no gradient: a
    pooler, or the mask of pre-training on images. Raises `ConfigError` for more blocks than there are.
    """
    family, count = backbone.family, len(backbone.blocks)
    if not 0 <= frozen_blocks <= count:
        raise ConfigError(f"{backbone.name} has {count} blocks and {frozen_blocks} cannot be frozen; give 0 to {count}")
    if frozen_blocks == count:
        return ()
    unread = ("mask_token",) if family.images else () if family.pooler else ("pooler",)
    names = [name for name, _ in backbone.model.named_parameters() if not set(name.split(".")) & set(unread)]
    start = f"{family.blocks}.{frozen_blocks}."
    first = next(index for index, name in enumerate(names) if name.startswith(start)) if frozen_blocks else 0
    return tuple(names[first:])


def model_shape(backbone: Backbone, modules: Mapping[str, nn.Module] | None, *, first_adapted: int = 0) -> ModelShape:
    """The sizes that cost models need, for these adapted modules in the blocks from `first_adapted` up.

    None for the modules is for a model of any architecture whose weights all train: the sizes that all have.
    """
    config, blocks = backbone.model.config.get_text_config(), backbone.blocks
    block_bytes = tuple(num_bytes(dict(block.named_parameters())) for block in blocks)
    total = num_bytes(backbone.frozen)
    common: dict[str, Any] = {
        "block_bytes": block_bytes,
        "block_params": tuple(sum(p.numel() for p in block.parameters()) for block in blocks),
        "embedding_bytes": total - sum(block_bytes),
    }
    if modules is None:
        width = backbone.width
        return ModelShape(hidden=width, intermediate=4 * width, heads=1, layers=((),) * len(blocks), **common)
    layers: list[list[tuple[int, int]]] = [[] for _ in blocks]
    for name, module in modules.items():
        layers[block_index(backbone, name)].append(module_dims(module))
    widths = (getattr(config, key, None) for key in ("intermediate_size", "hidden_dim", "n_inner"))
    inner = next((width for width in widths if width), 4 * backbone.hidden)
    ratio = getattr(config, "mlp_ratio", None)  # what DINOv2 has in the place of a width
    stem = [module for name, module in backbone.model.named_children() if name in backbone.family.stem]
    stem_bytes = sum(num_bytes(dict(module.named_parameters())) for module in stem)
    return ModelShape(
        hidden=backbone.hidden,
        intermediate=int(inner if ratio is None else ratio * backbone.hidden),
        heads=int(np.max(getattr(config, "num_attention_heads", 1))),
        layers=tuple(tuple(layer) for layer in layers),
        tail_bytes=total - sum(block_bytes) - stem_bytes,
        unpacked_bytes=_unpacked_bytes(backbone),
        vocabulary=0 if backbone.vocabulary is None else backbone.vocabulary.shape[0],
        first_adapted=first_adapted,
        **common,
    )


def _unpacked_bytes(backbone: Backbone) -> int:
    """Bytes of the largest matrix that a product unpacks to float32; 0 where the weights are held so."""
    if backbone.held == "fp32":
        return 0
    layers = (module for module in backbone.model.modules() if isinstance(module, (nn.Linear, Conv1D)))
    matrices = [module.get_parameter("weight") for module in layers]
    sizes = [matrix.numel() for matrix in (*matrices, backbone.vocabulary) if matrix is not None]
    return torch.float32.itemsize * max(sizes, default=0)


def embed_tokens(backbone: Backbone, ids: Tensor, types: Tensor, layout: PackedLayout) -> Tensor:
    """The input of the first block, (tokens, hidden); `ids` and `types` are (tokens,) int64."""
    model, stem = backbone.model, backbone.family.stem
    inputs = token_inputs(backbone, ids, types, layout)
    if stem[0] == "embeddings":
        embeddings: Tensor = model.get_submodule("embeddings")(**inputs)[0]
        # ELECTRA has a projection where its embeddings are narrower than its blocks
        return model.get_submodule(stem[1])(embeddings) if hasattr(model, stem[-1]) and stem[1:] else embeddings
    # A table of tokens, and of positions where they are not rotated into attention.
    tables = zip(stem, (inputs["input_ids"], inputs["position_ids"]))
    tokens: Tensor
    tokens, *positions = (model.get_submodule(name)(index)[0] for name, index in tables)
    return tokens + positions[0] if positions else tokens


def run_blocks(
    backbone: Backbone, hidden: Tensor, layout: PackedLayout, blocks: range, *, positions: Tensor | None = None
) -> Tensor:
    """The output of these blocks, (tokens, hidden), of the input of the first of them, (tokens, hidden).

    With `positions`, (outputs,) int64 in the row, the last of them is the model's last block, and a family with
    `after_attention` gives (outputs, hidden) of these tokens alone.
    """
    rotations = _rotations(backbone, hidden, layout, blocks)
    with nullcontext() if positions is None else last_block_reads_only(backbone, positions):
        states = hidden[None]
        for index, extra in zip(blocks, rotations, strict=True):
            states = backbone.blocks[index](states, layout=layout, **extra)
    return states[0]


def norm_and_pool(backbone: Backbone, hidden: Tensor, positions: Tensor) -> Tensor:
    """The features (outputs, hidden) of the last block's output as `run_blocks` returns it with `positions`."""
    norm = backbone.family.norm
    return pool_features(backbone, backbone.model.get_submodule(norm)(hidden) if norm else hidden, positions)


def _rotations(backbone: Backbone, hidden: Tensor, layout: PackedLayout, blocks: range) -> list[dict[str, Any]]:
    """Inputs of each of these blocks besides the tokens: rotations, which all blocks of a kind share."""
    if backbone.family.rotary is None:
        return [{}] * len(blocks)
    rotary = backbone.model.get_submodule(backbone.family.rotary)
    by_kind = backbone.family.rotates_by_kind
    kinds = [(backbone.model.config.layer_types[index],) if by_kind else () for index in blocks]
    shared = {
        kind: {"position_embeddings": rotary(hidden[None], layout.position_ids[None], *kind)} for kind in set(kinds)
    }
    return [shared[kind] for kind in kinds]


@contextmanager
def stock_attention(backbone: Backbone) -> Iterator[None]:
    """While this holds, the model attends as transformers has it; afterwards it packs again."""
    config = backbone.model.config
    own = config._attn_implementation
    # A checkpointed block is in training mode and would throw the cache away.
    checkpointed = [block for block in backbone.blocks if block.training]
    config._attn_implementation = "sdpa" if backbone.model._supports_sdpa else "eager"  # Gemma 2 caps its scores
    for block in checkpointed:
        block.training = False
    try:
        yield
    finally:
        config._attn_implementation = own
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
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)


ALIGNMENT = 64

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def buffer_entries(weights: Params) -> tuple[list[dict[str, Any]], int]:
    """(place of each tensor in a buffer, as plain data; bytes of all)."""
    entries, end = [], 0
    for name, tensor in weights.items():
        entries.append({"name": name, "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "offset": end})
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return entries, max(end, ALIGNMENT)


def tensor_views(memory: Any, entries: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors that lie at these places of a buffer, without a copy; nobody may write to what is shared."""
    tensors = {}
    for entry in entries:
        dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nor is it written
            flat = torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=entry["offset"])
        tensors[entry["name"]] = flat.reshape(shape)
    return tensors


def write_weights(weights: Params, memory: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    """Put the weights at their places of a writable buffer."""
    whole = np.frombuffer(memory, dtype=np.uint8)
    for entry in entries:
        values = weights[entry["name"]].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        whole[entry["offset"] : entry["offset"] + values.size] = values
