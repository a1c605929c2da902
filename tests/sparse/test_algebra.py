import pytest
import torch

from atlas_fl.errors import ModelError
from atlas_fl.sparse.masks import check_mask, density, density_by_layer, overlap

ONE = {"a": torch.tensor([True, True, False, False]), "b": torch.tensor([[True, False]])}
TWO = {"a": torch.tensor([False, True, True, False]), "b": torch.tensor([[True, False]])}
NONE = {"a": torch.zeros(4, dtype=torch.bool), "b": torch.zeros(1, 2, dtype=torch.bool)}


def test_two_masks_by_hand() -> None:
    assert overlap([ONE, TWO]).tolist() == [[1.0, 0.5], [0.5, 1.0]]  # two of four
    assert density(ONE) == {"a": 0.5, "b": 0.5}


def test_a_mask_of_another_model_is_refused() -> None:
    weights = {"a": torch.zeros(4), "b": torch.zeros(1, 2)}
    check_mask(ONE, weights)
    with pytest.raises(ModelError, match="the mask has none for 'b'"):
        check_mask({"a": ONE["a"]}, weights)
    with pytest.raises(ModelError, match="the mask has 'b', which the model lacks"):
        check_mask(ONE, {"a": weights["a"]})
    with pytest.raises(ModelError, match=r"mask of 'b' is bool \(1, 2\), the weights are float32 \(2, 1\)"):
        check_mask(ONE, {"a": weights["a"], "b": torch.zeros(2, 1)})
    with pytest.raises(ModelError, match="is int64"):
        check_mask({"a": ONE["a"].long(), "b": ONE["b"]}, weights)


def test_the_share_of_a_layer_is_that_of_all_its_tensors_by_hand() -> None:
    mask = {
        "layernorm.weight": torch.tensor([True]),
        "encoder.layer.10.query.weight": torch.tensor([False]),
        "encoder.layer.9.query.weight": torch.tensor([True, True, False]),
        "encoder.layer.9.query.bias": torch.tensor([False]),
        "embeddings.cls": torch.tensor([True, False]),
    }
    wanted = {"embeddings": 0.5, "encoder.layer.9": 0.5, "encoder.layer.10": 0.0, "layernorm": 1.0}
    assert list(density_by_layer(mask).items()) == list(wanted.items())
