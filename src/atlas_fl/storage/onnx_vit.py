"""A DINOv2 of transformers out of the ONNX graph that a package ships.

The graph is a saliency model: a DINOv2 ViT-S/14 with a decoder behind it, of which only the first is taken. Its
tensors carry the stock names behind `backbone.`, but for the matrices, which are known by the node that multiplies with
them and lie transposed, and for the table of positions, which was split in two when the graph was written.
"""

import json
from pathlib import Path
from typing import Any

import torch

from atlas_fl.errors import DataError
from atlas_fl.storage.tensors import write_tensors

_PREFIX = "backbone."
_POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")
"""Positions of the class token and of the patches."""
_SIDE, _PATCH, _WIDTH, _HEADS, _BLOCKS = 518, 14, 384, 6, 12

CONFIG: dict[str, Any] = {
    "architectures": ["Dinov2Model"],
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": _WIDTH,
    "image_size": _SIDE,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-06,
    "layerscale_value": 1.0,
    "mlp_ratio": 4,
    "model_type": "dinov2",
    "num_attention_heads": _HEADS,
    "num_channels": 3,
    "num_hidden_layers": _BLOCKS,
    "patch_size": _PATCH,
    "qkv_bias": True,
    "use_mask_token": False,
    "use_swiglu_ffn": False,
}
PROCESSOR: dict[str, Any] = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_processor_type": "ViTImageProcessor",
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 224, "width": 224},
}
"""Preprocessing of the package itself: ImageNet's mean and deviation, at 224 pixels."""


def convert(source: Path, target: Path) -> None:
    """Write `config.json`, `model.safetensors` and `preprocessor_config.json`, made of `vit_s_focus.onnx`.

    The bytes are always the same. A `DataError` names a tensor that the graph lacks.
    """
    tensors = read_backbone(source / "vit_s_focus.onnx")
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / "model.safetensors", tensors)
    for name, content in (("config.json", CONFIG), ("preprocessor_config.json", PROCESSOR)):
        (target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_backbone(path: Path) -> dict[str, torch.Tensor]:
    """The 222 tensors of the backbone by the names that the hub's DINOv2 files have, float32."""
    import onnx  # an extra, which no other command needs
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}

    def tensor(name: str) -> torch.Tensor:
        if name not in initializers:
            raise DataError(f"{path.name} has no tensor {name!r}; fetch the package again")
        return torch.from_numpy(numpy_helper.to_array(initializers[name]).copy())

    tensors = {name.removeprefix(_PREFIX): tensor(name) for name in initializers if name.startswith(_PREFIX)}
    for node in graph.node:
        module = node.name.removeprefix("/").removesuffix("/MatMul").replace("/", ".")
        if node.op_type == "MatMul" and module.startswith(_PREFIX) and node.input[1] in initializers:
            tensors[module.removeprefix(_PREFIX) + ".weight"] = tensor(node.input[1]).T.contiguous()
    tensors["embeddings.position_embeddings"] = torch.cat([tensor(name) for name in _POSITIONS], dim=1)
    return tensors
