from pathlib import Path

import pytest

from atlas_fl.errors import ModelError
from atlas_fl.models.peft_io import SETTINGS, WEIGHTS, default_targets, export_adapter, import_adapter, peft_name
from tests.models.folders import change_json


@pytest.fixture
def folder(tiny_of, spec_of, tmp_path: Path) -> Path:
    tiny = tiny_of("roberta")
    params = tiny.params(spec_of(name="a-0", ranks=(2, 2, 2)))
    export_adapter(params, tmp_path, family=tiny.backbone.family, base="base", scale=lambda rank: 4 / rank)
    return tmp_path


def test_names_by_hand(tiny_of) -> None:
    family = tiny_of("roberta").backbone.family
    assert peft_name("head.classifier.dense.weight", family) == "base_model.model.classifier.dense.weight"
    assert peft_name("encoder.layer.0.attention.self.query.lora_A", family) == (
        "base_model.model.roberta.encoder.layer.0.attention.self.query.lora_A.weight"
    )


def test_a_damaged_folder_is_refused(tiny_of, folder: Path) -> None:
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(ModelError, match="no PEFT adapter in"):
        import_adapter(folder, family=tiny_of("roberta").backbone.family)


def test_another_kind_of_adapter_is_refused(tiny_of, folder: Path) -> None:
    change_json(folder / SETTINGS, peft_type="IA3")
    with pytest.raises(ModelError, match=r"has peft_type='IA3', which plain LoRA has not"):
        import_adapter(folder, family=tiny_of("roberta").backbone.family)


def test_two_scales_of_one_rank_become_one_by_what_b_is_multiplied_with(tiny_of, folder: Path) -> None:
    """By hand: alpha 4 and 6 of rank 2 are scales 2 and 3, and 3 B = 2 (1.5 B)."""
    family = tiny_of("roberta").backbone.family
    before, _ = import_adapter(folder, family=family)
    change_json(folder / SETTINGS, alpha_pattern={"query": 4, "value": 6})
    after, scale = import_adapter(folder, family=family)
    assert scale(2) == 2.0
    for key, tensor in before.items():
        factor = 1.5 if key.endswith("value.lora_B") else 1.0
        assert after[key].equal(factor * tensor), key


def test_an_architecture_without_known_targets_is_named() -> None:
    with pytest.raises(ModelError, match=r"PEFT knows no LoRA targets for 'nonesuch'; name them with --targets"):
        default_targets("nonesuch")
