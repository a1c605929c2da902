"""A stock image classifier as the frozen backbone of a pack: the patches of every image are tokens of its client.

All images of a pack have one size and so as many tokens each. They go through the stock model as one batch, whose rows
the adapted layers see one after another; neither padding nor attention of our own is needed.
"""

import torch

from atlas_fl.errors import ModelError
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.family import VISION_FAMILIES
from atlas_fl.models.loading import checkpoint_blocks
from atlas_fl.models.vision import Vision
from atlas_fl.models.vision_loading import load_vision
from atlas_fl.types import Params


def load_image_backbone(
    name: str,
    *,
    image_size: int | None = None,
    device: str = "cpu",
    gradient_checkpointing: bool = False,
    weights: Params | None = None,
) -> Backbone:
    """The frozen backbone of this alias, hub name or directory, which sees images of this size.

    `weights` are those of `Backbone.frozen`: on the CPU the backbone's are then these very tensors.
    Raises `ModelError` as `load_vision` does, and where the architecture is no plain vision transformer.
    """
    backbone = as_backbone(load_vision(name, image_size=image_size, device=device, weights=weights))
    if gradient_checkpointing:
        checkpoint_blocks(backbone)
    return backbone


def as_backbone(vision: Vision) -> Backbone:
    """The same frozen model for packs; raises `ModelError` where the architecture is no plain vision transformer."""
    model_type = vision.model.config.model_type
    if model_type not in VISION_FAMILIES or not hasattr(vision.model, "classifier"):
        raise ModelError(
            f"model {vision.name!r} has the architecture {model_type!r}, and adapters on images need one of"
            f" {', '.join(sorted(VISION_FAMILIES))} with a single classifier; choose such a model, or --tune whole"
        )
    return Backbone(
        name=vision.name,
        source=vision.source,
        model=vision.model.base_model,
        tokenizer=None,
        family=VISION_FAMILIES[model_type],
        vision=vision,
    )


def tokens_of(vision: Vision) -> int:
    """Tokens of one image: its patches and those that the model sets beside them."""
    side, channels = vision.image_size, len(vision.mean)
    with torch.no_grad():
        found: torch.Tensor = vision.model.base_model.embeddings(
            torch.zeros(1, channels, side, side, device=vision.device)
        )
    return found.shape[1]
