"""What ATLAS must know of an architecture: where its blocks are, which token speaks for a sequence, what its head is.

The classes themselves are stock transformers; a family is data, and its names are the stock names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from atlas_fl.tree import HEAD
from atlas_fl.types import Params

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
}


@dataclass(frozen=True, kw_only=True)
class Dense:
    """One layer of a classification head, by its stock name."""

    name: str
    activation: Literal["identity", "tanh", "relu"] = "identity"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of transformers, e.g. `bert`."""

    model_type: str
    """transformers' own name of the architecture."""
    prefix: str
    """Name of the headless model inside the stock classifier."""
    blocks: str
    """Path of the list of blocks inside the headless model."""
    pool: Literal["first", "last"]
    """Which token of a sequence its features are read from."""
    head: tuple[Dense, ...]
    """The stock classification head; the last layer gives the logits."""
    pooler: str | None = None
    """A frozen layer of the backbone between the token and the head."""
    token_types: bool = False
    """Whether the two texts of a pair carry different types."""
    first_position: Callable[[int], int] = lambda pad: 0  # noqa: ARG005 - most architectures count from zero
    """Position id of the first token, from the padding token's id."""
    conv1d: bool = False
    """Whether its layers hold their weights as (d_in, d_out)."""
    stem: tuple[str, ...] = ("embeddings",)
    """What stands in front of the blocks: one module of embeddings, or the tables of tokens and positions."""
    norm: str | None = None
    """The norm behind the last block."""
    rotary: str | None = None
    """The module without weights that turns position ids into what every block's attention rotates by."""
    narrow: str | None = None
    """A module of the last block that takes (attended, residual): from there on only pooled tokens are computed."""
    images: bool = False
    """Whether its tokens are patches of images; what its head reads is then the stock classifier's to say."""

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it, so that the last speaks for all and the model can write text."""
        return self.pool == "last"


def head_shapes(family: Family, *, hidden: int, num_labels: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the head's tensors by name, `head.<stock name>`; none where text is written instead of labels."""
    if num_labels == 0:
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in family.head:
        width = num_labels if layer is family.head[-1] else hidden
        shapes[f"{HEAD}{layer.name}.weight"] = (width, hidden)
        if layer.bias:
            shapes[f"{HEAD}{layer.name}.bias"] = (width,)
    return shapes


def apply_head(family: Family, params: Params, features: Tensor) -> Tensor:
    """Logits (examples, labels) of features (examples, hidden)."""
    for layer in family.head:
        bias = params[f"{HEAD}{layer.name}.bias"] if layer.bias else None
        features = ACTIVATIONS[layer.activation](
            nn.functional.linear(features, params[f"{HEAD}{layer.name}.weight"], bias)
        )
    return features


def saved_modules(family: Family) -> list[str]:
    """The stock modules that hold the head, as PEFT's `modules_to_save` names them."""
    return sorted({layer.name.split(".")[0] for layer in family.head})


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="bert",
            prefix="bert",
            blocks="encoder.layer",
            pool="first",
            pooler="pooler",
            head=(Dense(name="classifier"),),
            token_types=True,
            narrow="attention.output",
        ),
        Family(
            model_type="roberta",
            prefix="roberta",
            blocks="encoder.layer",
            pool="first",
            head=(Dense(name="classifier.dense", activation="tanh"), Dense(name="classifier.out_proj")),
            # RoBERTa keeps the positions up to its padding id unused.
            first_position=lambda pad: pad + 1,
            narrow="attention.output",
        ),
        Family(
            model_type="distilbert",
            prefix="distilbert",
            blocks="transformer.layer",
            pool="first",
            head=(Dense(name="pre_classifier", activation="relu"), Dense(name="classifier")),
        ),
        Family(
            model_type="gpt2",
            prefix="transformer",
            blocks="h",
            pool="last",
            head=(Dense(name="score", bias=False),),
            conv1d=True,
            stem=("wte", "wpe"),
            norm="ln_f",
        ),
        *(
            Family(
                model_type=model_type,
                prefix="model",
                blocks="layers",
                pool="last",
                head=(Dense(name="score", bias=False),),
                stem=("embed_tokens",),
                norm="norm",
                rotary="rotary_emb",
            )
            for model_type in ("qwen2", "llama", "mistral")
        ),
    )
}

VISION_FAMILIES: Mapping[str, Family] = {
    model_type: Family(
        model_type=model_type,
        prefix=model_type,
        blocks=blocks,
        pool="first",
        head=(Dense(name="classifier"),),
        norm="layernorm",
        images=True,
    )
    for model_type, blocks in (
        ("vit", "layers"),
        ("deit", "layers"),
        ("dinov2", "encoder.layer"),
        ("dinov2_with_registers", "encoder.layer"),
    )
}
"""Architectures that see images and whose blocks are plain transformers, so that they take adapters in packs."""
