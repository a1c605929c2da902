"""Model aliases with their learning rates, architecture families, and where the files of a model are.

A `RegisteredModel` says where a model comes from and which learning rate suits it. A `Family` is what ATLAS must know
of an architecture: where its blocks are, which token stands for a sequence, what its head is. The model classes are
stock transformers; a family is data, and its names are the stock names. Both stand in `known.toml`. A `ModelShape` is
what a cost model must know of a transformer: sizes and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from atlas_fl.errors import ModelError, short_repr, unknown_name
from atlas_fl.frozen import Frozen
from atlas_fl.packaged import packaged_tables
from atlas_fl.params import HEAD, PARTS, Params
from atlas_fl.storage.assets import asset_dir, embedded_dir


class ModelShape(Frozen):
    """Sizes of a backbone with its adapted modules; bytes are of the frozen weights as they are held."""

    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width inside the feed-forward layers."""
    heads: int
    """Attention heads."""
    layers: tuple[tuple[tuple[int, int], ...], ...]
    """(d_in, d_out) of each adapted module, by block."""
    block_bytes: tuple[int, ...]
    """Frozen bytes of every block."""
    block_params: tuple[int, ...]
    """Frozen parameters of every block."""
    embedding_bytes: int
    """Frozen bytes of the embeddings and of what stands outside the blocks."""
    tail_bytes: int = 0
    """Part of these behind the last block: norm, pooler, an output embedding of its own."""
    vocabulary: int = 0
    """Tokens that are told apart where text is written; 0 where none is."""
    unpacked_bytes: int = 0
    """Bytes of the largest matrix in float32, where weights are held in another type and unpacked one at a time."""
    first_adapted: int = 0
    """The block where backward passes end: those below it are frozen and carry no adapters."""

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
}


class Dense(Frozen):
    """One layer of a classification head, by its stock name."""

    name: str
    """Empty for the one layer of a head that belongs to no stock classifier."""
    activation: Literal["identity", "tanh", "relu", "gelu"] = "identity"
    bias: bool = True

    @property
    def key(self) -> str:
        """Its name among a client's parameters, up to `weight` or `bias`."""
        return f"{HEAD}{self.name}." if self.name else HEAD


class Family(Frozen):
    """An architecture of transformers, e.g. `bert`."""

    model_type: str
    """transformers' own name of the architecture."""
    prefix: str
    """Name of the headless model inside the stock classifier."""
    blocks: str
    """Path of the list of blocks inside the headless model."""
    more_blocks: tuple[str, ...] = ()
    """Paths of further lists, whose blocks are counted on: those of a decoder behind an encoder."""
    pool: Literal["first", "last"]
    """The token of a sequence that its features are read from."""
    head: tuple[Dense, ...]
    """The stock classification head; the last layer gives the logits."""
    pooler: str | None = None
    """A frozen layer of the backbone between the token and the head; where files lack it, it is a part of the head."""
    token_types: bool = False
    """True if its embeddings take types of tokens, as a tokenizer may give them to the two texts of a pair."""
    counts_from_padding: bool = False
    """True if positions begin behind the id of the config's padding token, which is its own position, and not at 0."""
    conv1d: bool = False
    """True if its layers hold their weights as (d_in, d_out)."""
    stem: tuple[str, ...] = ("embeddings",)
    """Modules in front of the blocks: embeddings and what projects them, or the tables of tokens and positions."""
    norm: str | None = None
    """The norm behind the last block."""
    rotary: str | None = None
    """The module without weights that turns position ids into what every block's attention rotates by."""
    rotates_by_kind: bool = False
    """True if these rotations differ by the kind of block, as the config's `layer_types` name them."""
    after_attention: str | None = None
    """A module of the last block that takes (attended, residual): from there on only pooled tokens are computed."""
    images: bool = False
    """True if its tokens are patches of images; what its head reads is then the stock classifier's to say."""
    stock: bool = False
    """True if it has no packs: it runs as the whole stock model, padded, one client after another (`models.stock`)."""
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the head's tensors below its last layer, by stock name, where the stock model computes with them."""
    width: int = 0
    """Width of what the last layer of the head reads; 0 where it is the config's `hidden_size`."""
    seq2seq: bool = False
    """True if an encoder reads what is given and a decoder writes."""

    @property
    def causal(self) -> bool:
        """Return whether a token sees only those before it: the last one stands for all, and text can be written."""
        return self.pool == "last"

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Beginnings of the names of what lies in blocks."""
        return tuple(f"{path}." for path in (self.blocks, *self.more_blocks))

    def stock_name(self, module: str) -> str:
        """Name of a module of the headless model inside the stock classifier."""
        return f"{self.prefix}.{module}" if self.prefix else module


def head_shapes(family: Family, *, hidden: int, num_labels: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the head's tensors by name, `head.<stock name>`; none where text is written instead of labels."""
    if num_labels == 0:
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in family.head:
        width = num_labels if layer is family.head[-1] else hidden
        shapes[layer.key + "weight"] = (width, hidden)
        if layer.bias:
            shapes[layer.key + "bias"] = (width,)
    return shapes | {PARTS + name: shape for name, shape in family.parts.items()}


def apply_layers(layers: Sequence[Dense], params: Params, features: Tensor) -> Tensor:
    """Output of these layers of a head, (examples, width), of features (examples, hidden)."""
    for layer in layers:
        bias = params[layer.key + "bias"] if layer.bias else None
        features = ACTIVATIONS[layer.activation](nn.functional.linear(features, params[layer.key + "weight"], bias))
    return features


def modules_to_save(family: Family) -> list[str]:
    """The stock modules that hold the head, as PEFT's `modules_to_save` names them."""
    names = [*(layer.name for layer in family.head), *family.parts]
    return sorted({name.removeprefix(f"{family.prefix}.").split(".")[0] for name in names})


def with_trained_pooler(family: Family) -> Family:
    """The family of a model whose files lack the pooler that its stock classifier reads: the head's first layer.

    The stock classifier draws such a pooler and trains it with the head.
    """
    layer = Dense(name=f"{family.prefix}.{family.pooler}.dense", activation="tanh")
    return replace(family, pooler=None, head=(layer, *family.head))


KNOWN: Mapping[str, Any] = packaged_tables(__package__, "known.toml")
"""Known models by their aliases, and architectures by transformers' names."""


def _family(model_type: str, row: Mapping[str, Any]) -> Family:
    """The family of a row of `known.toml`; TOML has lists where it has tuples."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    values["head"] = tuple(Dense(**layer) for layer in row["head"])
    return Family(**{"prefix": model_type, **values}, model_type=model_type)


_FAMILIES = {model_type: _family(model_type, row) for row in KNOWN["families"] for model_type in row.pop("model_types")}
FAMILIES: dict[str, Family] = {name: family for name, family in _FAMILIES.items() if not family.images}
VISION_FAMILIES: dict[str, Family] = {name: family for name, family in _FAMILIES.items() if family.images}
"""Architectures that see images and whose blocks are plain transformers, so that they take adapters in packs."""


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model."""

    alias: str
    path: str
    """Hub name, or `embedded` for one that `atlas fetch` brings as an asset of this name."""
    parameters: str
    """Size as its authors give it."""
    lr: float
    """Peak learning rate that suits LoRA on it, or SGD on all of it where it sees images."""
    images: bool = False
    """True if it sees images and reads no text."""
    note: str = ""


MODELS: dict[str, RegisteredModel] = {alias: RegisteredModel(alias, **row) for alias, row in KNOWN["models"].items()}


def locate_model(name: str) -> str:
    """Directory or hub name of the files of this alias, hub name or directory.

    Raises `ConfigError` for a name that is none of these, `ModelError` for a path where nothing is or that cannot be
    looked at, and `DataError` for an embedded model not fetched yet.
    """
    if name in MODELS:
        registered = MODELS[name].path
        return registered if registered != "embedded" else str(asset_dir(embedded_dir(), name))
    known = f"a hub name such as owner/model, or one of {', '.join(sorted(MODELS))}"
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return str(path)
    except (OSError, RuntimeError, ValueError) as error:  # a long name, another's folder, no such user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(
            f"model {short_repr(name)} cannot be looked for ({reason}); give the path of a directory, {known}"
        ) from None
    if name.startswith((".", "/", "~")):
        raise ModelError(f"model {name!r} is no directory; give the path of one, {known}")
    if "/" in name or any(name == model.path for model in MODELS.values()):
        return name
    raise unknown_name("model", name, MODELS)


def suggested_lr(name: str) -> float:
    """The registered learning rate of a model, and that of BERT for one that is not registered."""
    return MODELS[name].lr if name in MODELS else MODELS["bert"].lr
