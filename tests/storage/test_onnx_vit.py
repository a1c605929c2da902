"""The conversion from a graph in miniature, without the package onnx: its reader is stood in for by plain objects."""

import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from atlas_fl.errors import DataError
from atlas_fl.storage import onnx_vit
from atlas_fl.storage.assets import assets
from atlas_fl.storage.onnx_vit import convert, read_backbone
from atlas_fl.storage.tensors import read_tensors

Q = "backbone.encoder.layer.0.attention.attention.query"


def graph(**changes: Any) -> Any:
    """What onnx gives of a file: tensors with names, and nodes with what goes in."""
    draw = np.random.default_rng(0)
    tensors = {
        "backbone.embeddings.cls_token": (1, 1, 4),
        f"{Q}.bias": (4,),
        "onnx::MatMul_1": (3, 4),
        "onnx::MatMul_2": (4, 4),
        "onnx::Concat_1957": (1, 1, 4),
        "onnx::Reshape_1962": (1, 9, 4),
        "decoder.bn1.weight": (4,),
    }
    held = {name: draw.normal(size=shape).astype(np.float32) for name, shape in tensors.items()}
    for name in changes.get("without", ()):
        del held[name]
    nodes = [
        SimpleNamespace(op_type="MatMul", name=f"/{Q.replace('.', '/', 2)}/MatMul", input=["x", "onnx::MatMul_1"]),
        SimpleNamespace(op_type="MatMul", name=f"/{Q.rpartition('.')[0]}/MatMul", input=["a", "b"]),
        SimpleNamespace(op_type="MatMul", name="/decoder/MatMul", input=["x", "onnx::MatMul_2"]),
        SimpleNamespace(op_type="Add", name=f"/{Q}/Add", input=["x", "onnx::MatMul_2"]),
    ]
    return SimpleNamespace(
        graph=SimpleNamespace(
            initializer=[SimpleNamespace(name=name, values=values) for name, values in held.items()], node=nodes
        )
    )


@pytest.fixture
def onnx(monkeypatch) -> ModuleType:
    module: Any = ModuleType("onnx")
    module.load = lambda _: graph()
    module.numpy_helper = SimpleNamespace(to_array=lambda tensor: tensor.values)
    monkeypatch.setitem(sys.modules, "onnx", module)
    return module


def test_names_matrices_and_positions_by_hand(onnx) -> None:
    found = read_backbone(Path("x.onnx"))
    held = {tensor.name: tensor.values for tensor in onnx.load(None).graph.initializer}
    inner = Q.removeprefix("backbone.")
    assert set(found) == {"embeddings.cls_token", "embeddings.position_embeddings", f"{inner}.bias", f"{inner}.weight"}
    assert found[f"{inner}.weight"].equal(torch.from_numpy(held["onnx::MatMul_1"].T.copy()))
    positions = found["embeddings.position_embeddings"]
    assert positions.shape == (1, 10, 4)
    assert positions[0, 0].equal(torch.from_numpy(held["onnx::Concat_1957"][0, 0]))
    assert positions[0, 1:].equal(torch.from_numpy(held["onnx::Reshape_1962"][0]))


@pytest.mark.usefixtures("onnx")
def test_the_files_are_those_of_a_model_folder_and_the_same_every_time(tmp_path) -> None:
    for name in "ab":
        convert(tmp_path, tmp_path / name)
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    for name in ("config.json", "preprocessor_config.json"):
        written = sha256((tmp_path / "a" / name).read_bytes()).hexdigest()
        assert written == assets()["dinov2-vits14"].files[name]
    assert len(read_tensors(tmp_path / "a" / "model.safetensors")) == 4


def test_a_tensor_that_is_lacking_is_named(onnx) -> None:
    onnx.load = lambda _: graph(without=["onnx::Reshape_1962"])
    with pytest.raises(DataError, match=r"x\.onnx has no tensor 'onnx::Reshape_1962'; fetch the package again"):
        read_backbone(Path("x.onnx"))


def test_the_configuration_has_the_tensors_of_a_dinov2() -> None:
    from transformers import AutoModel, Dinov2Config

    with torch.device("meta"):
        model = AutoModel.from_config(Dinov2Config.from_pretrained(Path(onnx_vit.__file__).parent / "dinov2"))
    assert type(model).__name__ == "Dinov2Model"
    sizes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert len(sizes) == 222
    assert sum(tensor.numel() for tensor in model.parameters()) == 22_056_192
    assert sizes["embeddings.position_embeddings"] == (1, 1 + 37**2, 384)
