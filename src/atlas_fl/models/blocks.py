"""A stock model taken apart at its list of blocks: what stands in front, any of the blocks, what stands behind.

The modules and their names are the stock ones. `features_of(through(embed(...), all blocks))` computes what
`models.backbone.features` does, number by number; a cut model is the same three calls on two machines.
"""

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from atlas_fl.models.backbone import Backbone, narrowed, pooled, token_inputs
from atlas_fl.models.packing import Layout


def embed(backbone: Backbone, ids: Tensor, types: Tensor, layout: Layout) -> Tensor:
    """What the first block is given of a row, (tokens, hidden); `ids` and `types` are (tokens,) int64."""
    model, stem = backbone.model, backbone.family.stem
    inputs = token_inputs(backbone, ids, types, layout)
    if stem == ("embeddings",):
        found: Tensor = model.get_submodule("embeddings")(**inputs)[0]
        return found
    # A table of tokens, and of positions where they are not rotated into attention.
    tables = zip(stem, (inputs["input_ids"], inputs["position_ids"]))
    tokens: Tensor
    tokens, *positions = (model.get_submodule(name)(places)[0] for name, places in tables)
    return tokens + positions[0] if positions else tokens


def through(backbone: Backbone, hidden: Tensor, layout: Layout, blocks: range, *, pick: Tensor | None = None) -> Tensor:
    """The output of these blocks, (tokens, hidden), of the input of the first of them, (tokens, hidden).

    With `pick`, (reads,) int64 places in the row, the last of them is the model's last, and a family that narrows
    gives (reads, hidden) of these tokens alone.
    """
    extra = _extra(backbone, hidden, layout)
    with nullcontext() if pick is None else narrowed(backbone, pick):
        states = hidden[None]
        for place in blocks:
            states = backbone.blocks[place](states, layout=layout, **extra)
    return states[0]


def features_of(backbone: Backbone, hidden: Tensor, pick: Tensor) -> Tensor:
    """What the head reads, (reads, hidden), of the last block's output as `through` gives it with `pick`."""
    norm = backbone.family.norm
    return pooled(backbone, backbone.model.get_submodule(norm)(hidden) if norm else hidden, pick)


def _extra(backbone: Backbone, hidden: Tensor, layout: Layout) -> dict[str, Any]:
    """What the blocks of a family want besides the tokens: rotations, which all blocks share."""
    if backbone.family.rotary is None:
        return {}
    rotary = backbone.model.get_submodule(backbone.family.rotary)
    return {"position_embeddings": rotary(hidden[None], layout.position_ids[None])}
