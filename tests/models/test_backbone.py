import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from atlas_fl.errors import AtlasError, ModelError
from atlas_fl.models import files
from atlas_fl.models.backbone import ALIGNMENT, block_index, model_shape, target_modules
from atlas_fl.models.loading import load_backbone
from tests.models.folders import change_json

REMEDIES = ("config.json", "hub's cache", "atlas fetch embedded")


def line_of(error: pytest.ExceptionInfo[AtlasError]) -> str:
    line = str(error.value)
    assert "\n" not in line
    return line


def test_every_weight_is_frozen_and_stock(tiny) -> None:
    model = tiny.backbone.model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    stock = getattr(tiny.stock(), tiny.backbone.family.prefix).state_dict()
    own = model.state_dict()
    assert set(stock) <= set(own)
    assert all(torch.equal(own[name], value) for name, value in stock.items())


def test_every_weight_is_aligned_as_shared_ones_are(tiny) -> None:
    """Products of unaligned tensors may end in other bits, and a run and its workers are to have the same."""
    assert not [name for name, tensor in tiny.backbone.frozen.items() if tensor.data_ptr() % ALIGNMENT]


def test_the_shape_counts_what_is_there(tiny) -> None:
    modules = target_modules(tiny.backbone, ("all-linear",))
    shape = model_shape(tiny.backbone, modules)
    assert (shape.hidden, shape.intermediate, shape.heads, shape.num_layers) == (32, 48, 4, 3)
    total = sum(4 * value.numel() for value in tiny.backbone.model.parameters())
    assert sum(shape.block_bytes) + shape.embedding_bytes == total
    assert shape.block_bytes == tuple(4 * count for count in shape.block_params)
    for block, layers in enumerate(shape.layers):
        own = [module for name, module in modules.items() if block_index(tiny.backbone, name) == block]
        assert len(own) == len(layers) >= 4
        for module, (d_in, d_out) in zip(own, layers, strict=True):
            assert module(torch.zeros(1, d_in)).shape == (1, d_out)


def test_all_linear_is_every_linear_layer_inside_the_blocks(tiny) -> None:
    names = set(target_modules(tiny.backbone, ("all-linear",)))
    linear = [name for name, module in tiny.backbone.blocks.named_modules() if isinstance(module, Linear | Conv1D)]
    assert names == {f"{tiny.backbone.family.blocks}.{name}" for name in linear}


def test_an_unknown_target_names_the_ones_there_are(tiny) -> None:
    message = r"target 'nonesuch' fits no layer of .*; choose among .*, or all-linear"
    with pytest.raises(ModelError, match=message) as error:
        target_modules(tiny.backbone, (tiny.targets[0], "nonesuch"))
    assert tiny.targets[0] in line_of(error)


def test_an_architecture_without_a_classifier_is_named(copy_of) -> None:
    folder = copy_of("bert")
    change_json(folder / "config.json", model_type="clip_text_model")
    message = r"no AutoModelForSequenceClassification or .* of the architecture 'clip_text_model'; choose"
    with pytest.raises(ModelError, match=message) as error:
        load_backbone(str(folder))
    line_of(error)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_directory_without_a_file_names_the_remedies(copy_of, missing: str) -> None:
    folder = copy_of("llama")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match="could not be loaded") as error:
        load_backbone(str(folder))
    assert all(remedy in line_of(error) for remedy in REMEDIES)


def test_a_damaged_weights_file_is_a_model_error(copy_of) -> None:
    folder = copy_of("bert")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="could not be loaded") as error:
        load_backbone(str(folder))
    line_of(error)


def test_a_hub_name_without_a_hub_fails_within_seconds_and_names_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "hub_fault", lambda: "no network")
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"model 'nobody/no-such-model' .* could not be loaded") as error:
        load_backbone("nobody/no-such-model")
    assert time.monotonic() - began < 10
    assert all(remedy in line_of(error) for remedy in REMEDIES)


def test_loading_a_model_whose_files_lack_a_pooler_moves_no_generator(copy_of) -> None:
    folder = copy_of("bert")
    weights = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if "pooler" not in k}, weights, metadata={"format": "pt"})
    before = torch.random.get_rng_state()
    assert load_backbone(str(folder)).model.pooler is None
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
def test_threads_that_load_at_once_leave_transformers_as_it_was(monkeypatch: pytest.MonkeyPatch, tiny_of) -> None:
    """It replaces the function that ties weights while it loads; of two at once one would put back the other's."""
    ties = PreTrainedModel.tie_weights
    monkeypatch.setattr(PreTrainedModel, "tie_weights", ties)  # put back where this test fails
    path = str(tiny_of("gpt2").path)
    with ThreadPoolExecutor(4) as threads:
        for backbone in threads.map(lambda _: load_backbone(path, writes=True), range(24)):
            assert backbone.vocabulary is backbone.model.get_input_embeddings().weight
    assert PreTrainedModel.tie_weights is ties
