"""Loading stock image classifiers as frozen vision backbones, and exporting a client's whole model.

`load_vision` goes from an alias, a hub name or a directory to a model at the given image size. `load_image_backbone`
makes it the backbone of a pack: the patches of every image are tokens of its client. All images of a pack have one size
and so the same number of tokens. They go through the stock model as one batch, whose rows the adapted layers process
one after another, with neither padding nor packed attention. `save_vision` writes a client's whole model as a folder
that stock transformers load.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel

from atlas_fl.errors import ConfigError, ModelError
from atlas_fl.models import loading, registry
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.stock import block_lists, head_of, stock_family
from atlas_fl.models.vision import Vision, backbone_weights
from atlas_fl.params import HEAD, Params, head_keys

RESAMPLE = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of the filters that PyTorch has too."""
_TABLE = "embeddings.position_embeddings"
MOST_PIXELS = 4096
"""Most pixels of an image's side that a model's own processor may name; those of published ones are 1,024 at most."""


def load_vision(
    name: str, *, image_size: int | None = None, device: str = "cpu", weights: Params | None = None
) -> Vision:
    """The frozen backbone of this alias, hub name or directory, in evaluation mode and float32.

    `image_size` is its processor's own by default; for another the table of positions is interpolated once. `weights`
    are those of all its parameters by name: on the CPU the backbone's are then these very tensors.

    Raises:
        ModelError: the files are not to be had, are no image classifier's, or cannot see images of this size.
    """
    source = registry.locate_model(name)
    with loading.as_model_error(name, source, images=True), loading.loading_lock():
        config = loading.read_config(name, source)
        config.num_labels = 0  # stock for features without a classifier
        processor = AutoImageProcessor.from_pretrained(source, **loading.loading_options(source))
        model, missing = loading.load_stock(name, source, AutoModelForImageClassification, config)
        loading.check_complete(name, missing)
        size = _processor_size(name, processor) if image_size is None else image_size
        normalisation = _normalisation(name, processor)
    _resize(name, model, size)
    if weights is not None:
        for key, parameter in model.base_model.named_parameters():
            parameter.data = weights[key]
    model = model.to(device).requires_grad_(False).eval()
    return Vision(
        name=name,
        source=source,
        model=model,
        hidden=_feature_width(name, model, size),
        image_size=size,
        **normalisation,
        blocks=block_lists(name, model.base_model)[0],
    )


def _resize(name: str, model: PreTrainedModel, size: int) -> None:
    """Make the model see images of this size; its table of positions and what it knows of its size are changed.

    The table is interpolated by the stock function of the architecture, which would else do it in every step.
    """
    before, patch = (_side(getattr(model.config, key, None)) for key in ("image_size", "patch_size"))
    table = dict(model.base_model.named_parameters()).get(_TABLE)
    if table is None or before is None or patch is None:
        return  # convolutions and relative positions fit any size, which `_width` tries
    if size < patch or size % patch:
        near = max(1, size // patch) * patch
        raise ConfigError(
            f"image size {size} is no multiple of {name}'s patches of {patch}; give {near} or {near + patch}"
        )
    embeddings = model.base_model.embeddings
    if size != before:
        # the stock function asks nothing of the tokens but how many they are
        others, num_patches = table.shape[1] - (before // patch) ** 2, (size // patch) ** 2
        tokens = table.new_zeros(1, others + num_patches, table.shape[2])
        resized = embeddings.interpolate_pos_encoding(tokens, size, size)
        embeddings.position_embeddings = torch.nn.Parameter(resized.detach().clone())
    for module in (embeddings, embeddings.patch_embeddings):
        if hasattr(module, "image_size"):
            module.image_size = (size, size)
        if hasattr(module, "num_patches"):
            module.num_patches = (size // patch) ** 2
    model.config.image_size = size


def _side(value: Any) -> int | None:
    if isinstance(value, list | tuple):
        return int(value[0]) if value and value[0] == value[-1] else None
    return None if value is None else int(value)


def _feature_width(name: str, model: PreTrainedModel, size: int) -> int:
    """Width of the features, from one black image."""
    try:
        with torch.no_grad():
            features: torch.Tensor = model(torch.zeros(1, 3, size, size, device=model.device)).logits
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ModelError(f"model {name!r} cannot see images of {size} pixels ({reason}); give another size") from error
    if features.dim() != 2 or not features.shape[1]:
        raise ModelError(f"model {name!r} has no features in front of its classifier; choose a ViT, DeiT or DINOv2")
    return features.shape[1]


def _processor_size(name: str, processor: Any) -> int:
    crop_size = getattr(processor, "crop_size", None) if getattr(processor, "do_center_crop", False) else None
    sizes = dict(crop_size or processor.size)
    size = int(sizes.get("height") or sizes.get("shortest_edge") or 0)
    if not 1 <= size <= MOST_PIXELS:
        raise ModelError(
            f"the processor of model {name!r} names no image size between 1 and {MOST_PIXELS:,}; give one with"
            " --image-size"
        )
    return size


def _normalisation(name: str, processor: Any) -> dict[str, Any]:
    """Mean, deviation, scale and filter of the model's own processor."""
    resample = int(processor.resample)
    if resample not in RESAMPLE:
        raise ModelError(f"model {name!r} resizes by Pillow's filter {resample}; known: {RESAMPLE}")
    normalises = processor.do_normalize
    return {
        "mean": tuple(map(float, processor.image_mean)) if normalises else (0.0, 0.0, 0.0),
        "std": tuple(map(float, processor.image_std)) if normalises else (1.0, 1.0, 1.0),
        "rescale": float(processor.rescale_factor) if processor.do_rescale else 1.0,
        "resample": RESAMPLE[resample],
    }


def load_image_backbone(
    name: str,
    *,
    image_size: int | None = None,
    device: str = "cpu",
    gradient_checkpointing: bool = False,
    weights: Params | None = None,
    adapted: bool = True,
) -> Backbone:
    """The frozen backbone of this alias, hub name or directory, which sees images of this size.

    With `adapted` its layers take adapters; without, it may be of any architecture, and clients train all of it.

    `weights` are those of `Backbone.frozen`: on the CPU the backbone's are then these very tensors.
    Raises `ModelError` as `load_vision` does, and where no layers are found that adapters could stand on.
    """
    vision = load_vision(name, image_size=image_size, device=device, weights=weights)
    backbone = _backbone(vision, _adapted_family(vision)) if adapted else as_whole(vision)
    if gradient_checkpointing:
        loading.checkpoint_blocks(backbone)
    return backbone


def _adapted_family(vision: Vision) -> registry.Family:
    """The family of a plain vision transformer, or that of the stock path."""
    model_type = vision.model.config.model_type
    if model_type in registry.VISION_FAMILIES and hasattr(vision.model, "classifier"):
        return registry.VISION_FAMILIES[model_type]
    config = copy.deepcopy(vision.model.config)
    config.num_labels = 2  # without classes there is no last layer to name
    return stock_family(vision.name, config)


def as_whole(vision: Vision) -> Backbone:
    """The same model for clients that train all its weights, with a linear head of their own."""
    family = registry.Family(
        model_type=str(vision.model.config.model_type),
        prefix=vision.model.base_model_prefix,
        blocks=vision.blocks,
        pool="first",
        head=(registry.Dense(name=""),),
        images=True,
    )
    return _backbone(vision, family)


def _backbone(vision: Vision, family: registry.Family) -> Backbone:
    model = vision.model.base_model
    return Backbone(name=vision.name, source=vision.source, model=model, tokenizer=None, family=family, vision=vision)


def tokens_per_image(vision: Vision) -> int:
    """Tokens of one image: its patches and those that the model sets beside them.

    Of other architectures than plain vision transformers, those of patches of `patch_size`, or of 4 pixels.
    """
    side, channels = vision.image_size, len(vision.mean)
    if vision.model.config.model_type not in registry.VISION_FAMILIES:
        return max(1, side // (_side(getattr(vision.model.config, "patch_size", None)) or 4)) ** 2
    with torch.no_grad():
        embeddings: torch.Tensor = vision.model.base_model.embeddings(
            torch.zeros(1, channels, side, side, device=vision.device)
        )
    return embeddings.shape[1]


def save_vision(vision: Vision, params: Params, folder: Path, *, labels: Sequence[str]) -> None:
    """Write config, weights and processor; stock `AutoModelForImageClassification` loads the folder to the same logits.

    Tensors that `params` lacks are the backbone's own. `labels` name the classes in order. The folder is there in full,
    or not at all (`storage.files.atomic_folder`).
    """
    config = copy.deepcopy(vision.model.config)
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: index for index, name in enumerate(labels)}
    with torch.device("meta"):
        last, _ = head_of(vision.name, AutoModelForImageClassification.from_config(config, trust_remote_code=False))
    named = {**backbone_weights(vision), **params}
    tensors = {vision.classifier_names[key]: named[key] for key in vision.classifier_names}
    tensors |= dict(vision.model.named_buffers())  # such as the means of batches
    tensors |= {f"{last}.{key.removeprefix(HEAD)}": params[key] for key in head_keys(params)}
    processor = AutoImageProcessor.from_pretrained(vision.source, trust_remote_code=False)
    loading.save_stock(AutoModelForImageClassification, config, tensors, processor, folder)
