"""Vision transformers with all their weights: preprocessing and augmenting images, features, logits.

What a client trains is `Params`: tensors of the stock backbone by their stock names, and a linear head. The module is a
stock image classifier without its classifier. It is loaded once and never written to: `image_logits` substitutes a
client's tensors for one call. `augment` makes random crops of padded images and horizontal flips.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad
from transformers import PreTrainedModel

from atlas_fl.params import HEAD, Params

Pixels: TypeAlias = Shaped[Tensor, "n height width channels"]
Images: TypeAlias = Float[Tensor, "n 3 height width"]
Tokens: TypeAlias = Float[Tensor, "n tokens hidden"]
Features: TypeAlias = Float[Tensor, "n features"]


def augment(pixels: Pixels, *, padding: int, flip: bool, generator: torch.Generator) -> Pixels:
    """New images of the same size: each cropped somewhere out of itself with a black border, and mirrored or not.

    `padding` is the border in pixels, 0 for no crop; with `flip` every second image on average is mirrored, left to
    right. All draws come from the generator, which is one of the CPU wherever the images lie: give it that of the
    client and the step (`client.draws`), and they are the same in every run.
    """
    count, height, width, _ = pixels.shape
    # both are drawn in any case, so that one setting does not change what the other does
    shift = torch.randint(0, 2 * padding + 1, (2, count, 1), generator=generator).to(pixels.device)
    mirrored = (torch.rand(count, 1, generator=generator) < 0.5).to(pixels.device) & flip
    across = torch.arange(width, device=pixels.device)
    rows = shift[0] + torch.arange(height, device=pixels.device)  # (n, height)
    columns = shift[1] + torch.where(mirrored, across.flip(0), across)  # (n, width)
    bordered = pad(pixels, (0, 0, padding, padding, padding, padding))
    image = torch.arange(count, device=pixels.device)[:, None, None]
    return bordered[image, rows[:, :, None], columns[:, None, :]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vision:
    """A frozen vision backbone and how its images are prepared."""

    name: str
    source: str
    model: PreTrainedModel
    """The stock classifier with nothing behind its features: its `logits` are what the stock head would read."""
    hidden: int
    """Width of the features."""
    image_size: int
    """Pixels of a side of the images that it sees."""
    mean: tuple[float, ...]
    """Mean of the channels, after scaling."""
    std: tuple[float, ...]
    rescale: float
    """Factor of pixels from 0 to 255."""
    resample: str
    """Filter that resizes images: bilinear or bicubic."""
    blocks: str
    """Path of the list of blocks inside the backbone."""

    @property
    def backbone(self) -> nn.Module:
        """The headless stock model, whose names are those of the parameters."""
        module: nn.Module = self.model.base_model
        return module

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.backbone.parameters()).device

    @cached_property
    def classifier_names(self) -> Mapping[str, str]:
        """The name inside the classifier of every parameter of the backbone."""
        prefix = "" if self.backbone is self.model else f"{self.model.base_model_prefix}."
        return {name: prefix + name for name, _ in self.backbone.named_parameters()}


def backbone_weights(vision: Vision) -> Params:
    """Every tensor of the backbone by its stock name, float32; these are the module's own, not copies."""
    return {name: tensor.detach().float() for name, tensor in vision.backbone.named_parameters()}


def image_features(vision: Vision, params: Params, pixels: Images) -> Features:
    """Features that the stock classifier would read, with `params` in the place of the backbone's tensors.

    Tensors that `params` lacks are the backbone's own; its head is not looked at.
    """
    tensors = {vision.classifier_names[key]: tensor for key, tensor in params.items() if not key.startswith(HEAD)}
    return functional_call(vision.model, tensors, (pixels,)).logits


def run_image_blocks(vision: Vision, pixels: Images, *, blocks: int) -> Tokens:
    """The output of the first `blocks` blocks of a plain vision transformer."""
    hidden: Tensor = vision.backbone.get_submodule("embeddings")(pixels)
    for block in _first_blocks(vision, blocks):
        hidden = block(hidden)
    return hidden


def image_features_above(vision: Vision, hidden: Tokens, *, blocks: int) -> Features:
    """Features that the stock classifier would read, from the output of its first `blocks` blocks.

    The stock model runs with what lies below left out: what stands behind the blocks differs between architectures.
    """
    below = {vision.backbone.get_submodule("embeddings"): lambda *_, **__: hidden}
    below |= dict.fromkeys(_first_blocks(vision, blocks), lambda hidden, *_, **__: hidden)
    for module, forward in below.items():
        module.forward = forward
    try:
        features: Tensor = vision.model(hidden.new_empty(0)).logits
    finally:
        for module in below:
            del module.forward
    return features


def _first_blocks(vision: Vision, count: int) -> list[nn.Module]:
    return list(vision.backbone.get_submodule(vision.blocks).children())[:count]


def image_logits(vision: Vision, params: Params, pixels: Images) -> Float[Tensor, "n labels"]:
    """Logits by a client's tensors and head."""
    return nn.functional.linear(image_features(vision, params, pixels), params[f"{HEAD}weight"], params[f"{HEAD}bias"])


def preprocess(
    vision: Vision, pixels: UInt8[np.ndarray, "n height width channels"] | UInt8[Tensor, "n height width channels"]
) -> Float[Tensor, "n 3 size size"]:
    """Input of the model for these images, float32 on its device: resized to its size, scaled and normalised.

    Grey images become three equal channels. The whole image is seen: a processor's centre crop is left out.
    """
    if isinstance(pixels, np.ndarray):
        # arrays that share a file's bytes cannot be written to, and PyTorch wants what can
        pixels = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
    images = pixels.to(vision.device).permute(0, 3, 1, 2).float()
    side = vision.image_size
    # Pillow goes along rows, then along columns; it rounds halves up, to whole numbers up to 255, beyond which bicubic
    # curves swing
    for size in ((images.shape[2], side), (side, side)):
        if images.shape[2:] != size:
            resized = nn.functional.interpolate(images, size=size, mode=vision.resample, antialias=True)
            images = resized.add_(0.5).floor_().clamp_(0, 255)
    mean, std = (
        torch.tensor(by_channel, dtype=torch.float32, device=images.device)[:, None, None]
        for by_channel in (vision.mean, vision.std)
    )
    return ((images * vision.rescale - mean) / std).expand(-1, len(vision.mean), -1, -1).contiguous()
