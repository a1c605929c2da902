"""What the stock path knows of an architecture: its blocks, its head, its positions."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from atlas_fl.client.job import initial_params
from atlas_fl.data.task import Task
from atlas_fl.models.backbone import block_index
from atlas_fl.models.loading import build_first_blocks, find_family, load_backbone
from atlas_fl.models.stock import stock_outputs
from atlas_fl.params import PARTS, head_keys
from atlas_fl.setup.assembly import max_sequence_length
from tests.models.stock_folders import save_stock_folder

HEADS = {
    "deberta-v3": ({"pooler.dense.weight", "pooler.dense.bias"}, {"classifier.weight", "classifier.bias"}, 2),
    "modernbert": ({"head.dense.weight", "head.norm.weight"}, {"classifier.weight", "classifier.bias"}, 2),
    "t5": (
        {"classification_head.dense.weight", "classification_head.dense.bias"},
        {"classification_head.out_proj.weight", "classification_head.out_proj.bias"},
        4,
    ),
    "falcon": (set(), {"score.weight"}, 2),
    "albert": (set(), {"classifier.weight", "classifier.bias"}, 1),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_the_stock_head_and_the_blocks_are_all_lists(tmp_path: Path, name: str) -> None:
    parts, last, blocks = HEADS[name]
    backbone = load_backbone(str(save_stock_folder(tmp_path, name)))
    assert find_family(str(tmp_path))[1] == backbone.family
    assert set(backbone.family.parts) == parts
    assert len(backbone.blocks) == blocks
    layers = [key for key in backbone.frozen if key.startswith(backbone.family.block_lists)]
    assert {block_index(backbone, key) for key in layers} == set(range(blocks))
    task = Task(name="a", num_labels=5, metric="accuracy", load=lambda _: pytest.fail("nothing is read"))
    params = initial_params(backbone, {}, ranks={}, task=task, seed=1)
    assert set(head_keys(params)) == {PARTS + key for key in parts} | {f"head.{key}" for key in last}
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5).state_dict()
    for key in parts:
        drawn = params[PARTS + key]
        assert drawn.shape == stock[key].shape
        # norms and biases begin as transformers has them, matrices that files lack as ATLAS draws them
        assert torch.equal(drawn, stock[key]) if drawn.dim() == 1 else 0.01 < drawn.std() < 0.03


def test_parts_of_a_head_that_files_have_are_its_start(tmp_path: Path) -> None:
    folder = save_stock_folder(tmp_path / "base", "modernbert")
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).save_pretrained(tmp_path / "base")
    stock = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    backbone = load_backbone(str(folder))
    assert torch.equal(backbone.head_start["head.dense.weight"], stock["head.dense.weight"])
    assert not any(key.startswith("classifier") for key in backbone.frozen)


def test_a_model_whose_positions_begin_behind_padding_reads_fewer_tokens(tmp_path: Path) -> None:
    backbone = load_backbone(str(save_stock_folder(tmp_path, "camembert")))
    assert max_sequence_length(backbone) == 66 - backbone.model.config.pad_token_id - 1
    ids = torch.arange(max_sequence_length(backbone)) % 20 + 5
    stock_outputs(backbone, ids, torch.zeros_like(ids), [len(ids)])
    with pytest.raises(IndexError):
        stock_outputs(backbone, torch.cat([ids, ids[:1]]), torch.zeros(len(ids) + 1, dtype=torch.long), [len(ids) + 1])


def test_what_has_no_packs_is_not_cut(tmp_path: Path) -> None:
    from atlas_fl.errors import ModelError

    folder = save_stock_folder(tmp_path, "albert")
    with pytest.raises(ModelError, match=r"'albert', which runs through the stock path and cannot be cut; known"):
        build_first_blocks(str(folder), blocks=1)
