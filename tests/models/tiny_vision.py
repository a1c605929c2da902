"""Tiny random vision models of several architectures, saved as the hub has them."""

import json
from pathlib import Path
from typing import Any

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
USUAL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    # wide draws, so that attention is far from uniform and a mistake in it shows
    "initializer_range": 0.25,
}
SIZES: dict[str, dict[str, Any]] = {
    "vit": USUAL,
    "deit": USUAL,
    "dinov2": {**USUAL, "mlp_ratio": 2},
    "dinov2_with_registers": {**USUAL, "mlp_ratio": 2, "num_register_tokens": 3},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic", "image_size": 32},
    "convnext": {"hidden_sizes": [8, 8, 12, 16], "depths": [1, 1, 1, 1], "image_size": 32},
    "swin": {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "image_size": 16,
        "patch_size": 4,
        "window_size": 2,
    },
}


def processor(**changes: Any) -> dict[str, Any]:
    usual = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": MEAN,
        "image_std": STD,
        "image_processor_type": "ViTImageProcessor",
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": 16, "width": 16},
    }
    return {**usual, **changes}


def save_tiny(folder: Path, model_type: str = "vit", *, headless: bool = True, **changes: Any) -> Path:
    """A model directory: the headless model as DINO publishes it, or a whole classifier of seven classes."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    config = AutoConfig.for_model(model_type, **{**SIZES[model_type], **changes}, num_labels=7)
    config.architectures = [{"deit": "DeiTForImageClassification"}.get(model_type, "")]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = (AutoModel if headless else AutoModelForImageClassification).from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at first, which would hide a bias that is forgotten
                parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor()))
    return folder
