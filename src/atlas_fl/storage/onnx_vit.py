"""A DINOv2 of transformers out of the ONNX graph that a package ships.

The graph is a saliency model: a DINOv2 ViT-S/14 with a decoder behind it, of which only the first is taken. Its
tensors carry the stock names behind `backbone.`, but for the matrices, which are known by the node that multiplies with
them and lie transposed, and for the table of positions, which was split in two when the graph was written.
"""

from importlib import resources
from pathlib import Path

import torch

from atlas_fl.errors import DataError
from atlas_fl.storage.tensors import write_tensors

_PREFIX = "backbone."
_POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")
"""Positions of the class token and of the patches."""
CONFIG_FILES = ("config.json", "preprocessor_config.json")
"""Files of `dinov2/`. The second is the preprocessing of the package itself: ImageNet's mean and deviation."""


def convert(source: Path, target: Path) -> None:
    """Write `config.json`, `model.safetensors` and `preprocessor_config.json`, made of `vit_s_focus.onnx`.

    The bytes are always the same. A `DataError` names a tensor that the graph lacks.
    """
    tensors = read_backbone(source / "vit_s_focus.onnx")
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / "model.safetensors", tensors)
    for name in CONFIG_FILES:
        (target / name).write_bytes(resources.files(__package__).joinpath("dinov2", name).read_bytes())


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
