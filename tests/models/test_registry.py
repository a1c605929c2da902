from pathlib import Path

import pytest

from atlas_fl.errors import ConfigError, DataError, ModelError
from atlas_fl.models.registry import FAMILIES, MODELS, VISION_FAMILIES, Family, head_shapes, locate_model, suggested_lr
from atlas_fl.params import is_last_layer


def test_aliases_lead_to_the_hub_and_are_what_they_say() -> None:
    assert locate_model("bert") == "bert-base-uncased"
    assert locate_model("roberta") == "roberta-base"
    assert all(alias == model.alias and model.lr > 0 for alias, model in MODELS.items())


@pytest.mark.parametrize("family", [*FAMILIES.values(), *VISION_FAMILIES.values()], ids=lambda one: one.model_type)
def test_the_last_layer_of_every_head_is_known_by_its_name(family: Family) -> None:
    names = head_shapes(family, hidden=4, num_labels=3)
    shapes = {tuple(shape) for name, shape in names.items() if is_last_layer(name)}
    assert shapes == ({(3, 4), (3,)} if family.head[-1].bias else {(3, 4)})
    assert all(shape[0] == 4 for name, shape in names.items() if not is_last_layer(name))


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown model 'distilbrt'; did you mean 'distilbert'"):
        locate_model("distilbrt")


@pytest.mark.parametrize("name", ["./nothing-here", "/nothing/here", "~/nothing-here-at-all"])
def test_a_path_where_nothing_is_says_what_to_give(name: str) -> None:
    with pytest.raises(ModelError, match="is no directory; give the path of one, a hub name"):
        locate_model(name)


def test_the_embedded_model_says_how_to_fetch_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"minilm.* is missing; run `atlas fetch embedded`"):
        locate_model("minilm")


def test_the_learning_rate_of_a_model_that_is_not_registered_is_berts() -> None:
    assert suggested_lr("minilm") == 1e-3
    assert suggested_lr("owner/model") == suggested_lr("bert") == 3e-4


@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 5000, "./" + "y" * 300])
def test_a_name_that_no_file_system_looks_for_is_one_short_line(name: str) -> None:
    with pytest.raises(ModelError, match=r"^model '.* cannot be looked for \(.*\); give the path of a") as caught:
        locate_model(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
