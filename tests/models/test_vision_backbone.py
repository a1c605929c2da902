"""A vision model as the backbone of packs: its tokens, its weights, and what it is not."""

from pathlib import Path

import pytest

from atlas_fl.errors import ModelError
from atlas_fl.models.backbone import model_shape, target_modules
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.lora import init_head
from atlas_fl.models.registry import VISION_FAMILIES, head_shapes
from atlas_fl.models.vision import backbone_weights
from atlas_fl.models.vision_loading import load_image_backbone, tokens_per_image
from tests.models.folders import change_json
from tests.models.tiny_vision import save_tiny

TOKENS = {"vit": 17, "deit": 18, "dinov2": 17, "dinov2_with_registers": 20}
"""Sixteen patches of 4 x 4 pixels with a class token; DeiT's token of distillation and three registers beside them."""


@pytest.mark.parametrize("model_type", sorted(VISION_FAMILIES))
def test_the_tokens_the_shape_and_the_head_are_those_of_the_architecture(model_type: str, tmp_path: Path) -> None:
    backbone = load_image_backbone(str(save_tiny(tmp_path, model_type)))
    assert backbone.vision is not None and tokens_per_image(backbone.vision) == TOKENS[model_type]
    shape = model_shape(backbone, target_modules(backbone, ("all-linear",)))
    inner = 64 if "dino" in model_type else 48
    assert (shape.hidden, shape.intermediate, shape.heads, shape.num_layers) == (32, inner, 4, 3)
    assert shape.layers[0] == ((32, 32),) * 4 + ((32, inner), (inner, 32))
    assert shape.embedding_bytes + sum(shape.block_bytes) == 4 * backbone.num_parameters
    head = init_head(head_shapes(backbone.family, hidden=backbone.width, num_labels=3), seed=0, group="x")
    wide = 64 if "dino" in model_type else 32  # the class token, and beside it the mean of the patches
    assert {key: tuple(own.shape) for key, own in head.items()} == {
        "head.classifier.weight": (3, wide),
        "head.classifier.bias": (3,),
    }


def test_given_weights_are_not_copied_and_blocks_may_be_computed_again(tmp_path: Path) -> None:
    path = str(save_tiny(tmp_path, "dinov2"))
    given = {key: tensor.clone() + 1 for key, tensor in backbone_weights(load_image_backbone(path).vision).items()}
    backbone = load_image_backbone(path, weights=given, gradient_checkpointing=True)
    assert all(tensor.data_ptr() == given[key].data_ptr() for key, tensor in backbone.frozen.items())
    assert [block.training for block in backbone.blocks] == [True, True, False]
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())


def test_a_model_of_images_reads_no_texts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"architecture 'vit'; known: bert, .*roberta") as caught:
        load_backbone(str(save_tiny(tmp_path, "vit")))
    assert "\n" not in str(caught.value) and "vit," not in str(caught.value).split("known:")[1]


def test_a_classifier_with_two_heads_takes_no_adapters(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "deit")
    change_json(path / "config.json", architectures=["DeiTForImageClassificationWithTeacher"])
    with pytest.raises(ModelError, match="with a single classifier"):
        load_image_backbone(str(path))
