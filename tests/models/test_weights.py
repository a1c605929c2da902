"""Frozen weights in other types than float32: bytes that are held, what a backward pass keeps, and what is refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from atlas_fl.errors import ConfigError
from atlas_fl.models import weights
from atlas_fl.models.backbone import model_shape, target_modules
from atlas_fl.models.loading import first_block_tensors, load_backbone
from atlas_fl.models.weights import FLOAT_TYPES, QUANTISERS, hold_weights
from atlas_fl.params import digest, num_bytes, plain_tensors
from atlas_fl.ranks.cost_model import TrainingStep, device_memory
from atlas_fl.ranks.devices import DEVICES
from atlas_fl.split.model import load_client_part
from atlas_fl.storage import extras

HELD = [held for held in FLOAT_TYPES if held != "fp32"]
BYTES: Mapping[str, float] = {"bf16": 2, "fp16": 2, "int8": 1, "nf4": 0.5}


def needs_torchao(held: str) -> None:
    if held in QUANTISERS:
        pytest.importorskip("torchao", reason="without the extra quant nothing is held in 8 and 4 bits")


def llama() -> LlamaModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
        return LlamaModel(LlamaConfig(vocab_size=300, **sizes)).requires_grad_(False)


def stored_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """The memory under these tensors, each piece of it once."""
    storages = [tensor.untyped_storage() for tensor in plain_tensors(tensors).values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("held", HELD)
def test_the_matrices_take_their_share_of_memory(held: str) -> None:
    needs_torchao(held)
    model = llama()
    hold_weights(model, held)
    linear = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    embeddings = model.embed_tokens.weight
    values = sum(weight.numel() for weight in linear.values())
    assert stored_bytes(linear) == num_bytes(linear)
    assert values * BYTES[held] <= stored_bytes(linear) <= values * BYTES[held] * 1.05
    assert stored_bytes({"": embeddings}) == 2 * embeddings.numel()
    assert {module.weight.dtype for name, module in model.named_modules() if "norm" in name} == {torch.float32}


@pytest.mark.parametrize("held", ["fp32", *HELD])
def test_no_backward_pass_keeps_an_unpacked_matrix(held: str) -> None:
    needs_torchao(held)
    layer = nn.Linear(64, 128).requires_grad_(False)
    exact = layer.weight.clone()
    hold_weights(layer, held)
    kept: list[torch.Tensor] = []
    x = torch.randn(3, 64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = layer(x).sum()
    out.backward()
    assert not [tensor for tensor in kept if tensor.numel() == exact.numel()]
    plain = weights.dense(layer.weight, torch.float32)
    torch.testing.assert_close(x.grad, plain.sum(0).expand(3, -1))
    assert (plain - exact).norm() <= 0.1 * exact.norm()


@pytest.mark.parametrize("held", HELD)
def test_a_gradient_at_the_weights_themselves_is_that_of_the_plain_layer(held: str) -> None:
    """Fingerprints and importance set plain tensors in the place of the held ones."""
    needs_torchao(held)
    layer = nn.Linear(64, 16).requires_grad_(False)
    hold_weights(layer, held)
    leaf = weights.dense(layer.weight, torch.float32).requires_grad_()
    x = torch.ones(2, 64)
    torch.func.functional_call(layer, {"weight": leaf}, x).sum().backward()
    assert torch.equal(leaf.grad, torch.full((16, 64), 2.0))


def test_types_are_told_apart_and_read_twice_alike(writer_of: Callable[[str], Any]) -> None:
    path = str(writer_of("llama").path)
    kinds = ["fp32", "bf16", "fp16"]
    digests = [digest(load_backbone(path, held=held).frozen) for held in (*kinds, *kinds)]
    assert len({*digests}) == 3
    assert digests[:3] == digests[3:]


@pytest.mark.parametrize("held", HELD)
def test_a_clients_part_holds_what_the_whole_model_does(writer_of: Callable[[str], Any], held: str) -> None:
    needs_torchao(held)
    path = str(writer_of("llama").path)
    whole, part = load_backbone(path, writes=True, held=held), load_client_part(path, blocks=2, writes=True, held=held)
    own = plain_tensors(part.parameters)
    assert digest(own) == digest(first_block_tensors(whole, blocks=2))
    assert torch.equal(part.vocabulary, whole.vocabulary)


def test_a_device_holds_the_bytes_of_the_type_and_one_matrix_in_float32(writer_of: Callable[[str], Any]) -> None:
    needs_torchao("int8")
    path, device = str(writer_of("llama").path), DEVICES["cpu_2gb"]
    found = {}
    for held in ("fp32", "bf16", "int8"):
        backbone = load_backbone(path, held=held)
        shape = model_shape(backbone, target_modules(backbone, ("q_proj",)))
        memory = device_memory(shape, device, ranks=[2] * 3, step=TrainingStep(tokens=8))
        found[held] = memory.parts["frozen weights"], stored_bytes(backbone.frozen)
    largest = 4 * 32 * 48
    assert [planned - stored for planned, stored in found.values()] == [0, largest, largest]
    assert found["int8"][1] < found["bf16"][1] < 0.6 * found["fp32"][1]


def test_without_torchao_one_line_says_how_to_get_it(
    writer_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(extras, "import_module", missing)
    with pytest.raises(ConfigError) as caught:
        load_backbone(str(Path(writer_of("llama").path)), held="nf4")
    assert str(caught.value).startswith(
        "--base-weights int8 and nf4 need torchao, which is not installed; pip install "
    )
    assert str(caught.value).endswith(", or take --base-weights bf16")
    assert "\n" not in str(caught.value)
