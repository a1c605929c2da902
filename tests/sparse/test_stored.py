"""Masks in files."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from atlas_fl.errors import CheckpointError, ConfigError, ModelError
from atlas_fl.sparse.masks import load_mask, merge_masks, read_mask
from atlas_fl.storage.tensors import write_tensors

A = {"w": torch.tensor([True, True, False, False]), "b": torch.tensor([False])}
B = {"w": torch.tensor([True, False, True, False]), "b": torch.tensor([False])}
LIKE = {"b": torch.zeros(1), "w": torch.zeros(4)}


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    write_tensors(path, tensors)
    return path


def test_a_mask_comes_back_without_heads_in_the_order_of_the_model(tmp_path: Path) -> None:
    file = written(tmp_path / "mask.safetensors", {**A, "head.weight": torch.zeros(3, 4, dtype=torch.bool)})
    found = load_mask(file, like=LIKE)
    assert list(found) == ["b", "w"] and torch.equal(found["w"], A["w"])


def test_union_and_intersection_by_hand() -> None:
    both = {"a": A, "b": B}
    assert merge_masks(both, method="union")["w"].tolist() == [True, True, True, False]
    assert merge_masks(both, method="intersection")["w"].tolist() == [True, False, False, False]


def test_what_does_not_fit_is_one_line_that_names_it(tmp_path: Path) -> None:
    file = written(tmp_path / "mask.safetensors", A)
    with pytest.raises(ModelError, match=r"--mask-file .*mask.safetensors fits another model: the mask of 'w' is bool"):
        load_mask(file, like={"b": torch.zeros(1), "w": torch.zeros(5)})
    with pytest.raises(ModelError, match=r"b and a are masks of different models: the mask has none for 'b'"):
        merge_masks({"a": A, "b": {"w": A["w"]}}, method="union")
    with pytest.raises(ModelError, match=r"is no mask: 'w' is float32, not bool"):
        read_mask(written(tmp_path / "weights.safetensors", {"w": torch.zeros(2)}))
    (tmp_path / "broken.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"damaged file .*broken"):
        read_mask(tmp_path / "broken.safetensors")


def test_a_mask_that_freezes_all_is_refused(tmp_path: Path) -> None:
    none = {name: torch.zeros_like(own) for name, own in A.items()}
    with pytest.raises(ConfigError, match="lets no weight move"):
        load_mask(written(tmp_path / "none.safetensors", none), like=LIKE)
    other = {"w": ~A["w"], "b": A["b"]}
    with pytest.raises(ConfigError, match="the intersection of these 2 masks lets no weight move; take the union"):
        merge_masks({"a": A, "b": other}, method="intersection")
