"""A model's digests: equal for the same model wherever it lies, and each moves with what it is of and nothing else."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch

from atlas_fl.models.identity import ModelIdentity, model_identity
from atlas_fl.models.loading import build_first_blocks, load_backbone
from atlas_fl.models.tokenization import TextEncoder
from tests.conftest import Tiny
from tests.models.folders import change_json

ARCHITECTURES = ("bert", "gpt2")


def changed_parts(first: ModelIdentity, second: ModelIdentity) -> set[str]:
    return {part for part, digest in asdict(first).items() if asdict(second)[part] != digest}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_model_elsewhere_has_the_same_digests(tiny_of, copy_of, architecture: str) -> None:
    """Also after it has cut texts, and with other notes of libraries in its config."""
    tiny, folder = tiny_of(architecture), copy_of(architecture)
    change_json(
        folder / "config.json",
        **{"transformers_version": "0.1", "_name_or_path": "elsewhere", "torch_dtype": "float16", "use_cache": False},
        **{"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}, "initializer_range": 0.5},
    )
    backbone = load_backbone(str(folder))
    TextEncoder(tokenizer=backbone.tokenizer, max_length=2).examples(["a few words"], None, torch.zeros(1).numpy())
    assert model_identity(backbone) == model_identity(tiny.backbone)


def test_a_part_of_a_model_has_the_whole_ones_architecture_and_tokenizer(tiny_of: Callable[[str], Tiny]) -> None:
    tiny = tiny_of("bert")
    with torch.device("meta"):
        part = build_first_blocks(str(tiny.path), blocks=0)
    whole = model_identity(tiny.backbone)
    assert model_identity(part, has_weights=False) == replace(whole, weights=None, vocabulary=None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_another_activation_is_another_architecture(tiny_of, copy_of, architecture: str) -> None:
    folder = copy_of(architecture)
    change_json(folder / "config.json", hidden_act="relu", activation_function="relu")
    other = model_identity(load_backbone(str(folder)))
    assert changed_parts(model_identity(tiny_of(architecture).backbone), other) == {"architecture"}


def test_another_vocabulary_of_as_many_tokens_is_another_tokenizer(tiny_of, copy_of) -> None:
    folder = copy_of("bert")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=lambda token: -vocabulary[token])[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    other = model_identity(load_backbone(str(folder)))
    assert changed_parts(model_identity(tiny_of("bert").backbone), other) == {"tokenizer"}


def test_one_weight_is_other_weights(tiny_of, copy_of) -> None:
    backbone = load_backbone(str(copy_of("bert")))
    next(backbone.model.parameters()).data[0] += 1
    assert changed_parts(model_identity(tiny_of("bert").backbone), model_identity(backbone)) == {"weights"}


def test_an_output_embedding_of_its_own_has_a_digest_of_its_own(writer_of: Callable[[str], Tiny]) -> None:
    """Who writes no text does not load it, and has the digests of who does in all else."""
    tiny = writer_of("gpt2").backbone
    assert tiny.vocabulary is not None
    own = replace(tiny, vocabulary=tiny.vocabulary + 1)
    assert model_identity(tiny).vocabulary is None, "it is the input's"
    assert changed_parts(model_identity(tiny), model_identity(own)) == {"vocabulary"}
