"""Folders of models as their authors publish them: the stock model's own logits and gradients, or a line that says why.

Names of tensors, what is missing and what is there beside them are those of the files on the hub: the heads of
pretraining, early names of norms, buffers that are no parameters any more, old files of torch, shards.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from atlas_fl.client.batching import PackedBatch, collate_packed, forward
from atlas_fl.client.job import Site, initial_params
from atlas_fl.data.task import Task
from atlas_fl.errors import ModelError
from atlas_fl.models.backbone import backbone_features, embed_tokens, head_logits, norm_and_pool, run_blocks
from atlas_fl.models.loading import load_backbone, save_classifier
from atlas_fl.models.peft_io import export_adapter
from atlas_fl.models.tokenization import EncodedExamples, TextEncoder
from atlas_fl.setup.assembly import max_sequence_length
from atlas_fl.split.model import load_client_part
from tests.architectures import ARCHITECTURES
from tests.models.folders import change_json

# PEFT still asks for it under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TEXTS = ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11", "w3", "w9 w2 w4 w9", "w7 w7 w1 w0 w5 w6 w2"]
PAIRS = ["w4 w5", "w6 w7 w8 w9", "w1", "w2 w3 w4"]


def texts_of(architecture: str) -> list[str]:
    """The texts, for Qwen2's tokenizer of bytes without letters and blanks."""
    return [text.replace("w", "").replace(" ", "") for text in TEXTS] if architecture == "qwen2" else TEXTS


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + key: tensor.clone() for key, tensor in tensors.items()}


def pretraining_head(words: Tensor, dense: str, norm: str, decoder: str, bias: str) -> dict[str, Tensor]:
    """The head that predicts words, by the names of its layers; what it holds plays no part."""
    weights = {dense + ".weight": torch.eye(32), norm + ".weight": torch.ones(32), decoder + ".weight": words.clone()}
    return weights | {dense + ".bias": torch.zeros(32), norm + ".bias": torch.zeros(32), bias: torch.zeros(len(words))}


def bert_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`bert-base-uncased`: BertForPreTraining, with the norms' first names."""
    place = "cls.predictions"
    words = tensors["embeddings.word_embeddings.weight"]
    names = f"{place}.transform.dense", f"{place}.transform.LayerNorm", f"{place}.decoder", f"{place}.bias"
    whole = below("bert.", tensors) | pretraining_head(words, *names)
    return with_first_names(whole) | {
        "bert.embeddings.position_ids": torch.arange(66)[None],
        "cls.seq_relationship.weight": torch.zeros(2, 32),
        "cls.seq_relationship.bias": torch.zeros(2),
    }


def with_first_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norms have gamma and beta, as in the first files of BERT."""
    new = re.compile(r"(?<=LayerNorm\.)(weight|bias)$")
    return {new.sub(lambda end: {"weight": "gamma", "bias": "beta"}[end[0]], key): own for key, own in tensors.items()}


def masked_bert_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A BertForMaskedLM: no pooler."""
    return {k: v for k, v in bert_as_published(tensors).items() if "pooler" not in k and "seq_relation" not in k}


def roberta_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`roberta-base`: RobertaForMaskedLM, no pooler, with the buffer of positions."""
    inside = below("roberta.", {key: tensor for key, tensor in tensors.items() if "pooler" not in key})
    names = "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"
    head = pretraining_head(tensors["embeddings.word_embeddings.weight"], *names)
    return inside | head | {"roberta.embeddings.position_ids": torch.arange(66)[None]}


def distilbert_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`distilbert-base-uncased`: DistilBertForMaskedLM."""
    names = "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"
    return below("distilbert.", tensors) | pretraining_head(tensors["embeddings.word_embeddings.weight"], *names)


def gpt2_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`gpt2`: names without a prefix, and the masks of attention as buffers."""
    masks = {f"h.{block}.attn.bias": torch.ones(64, 64).tril()[None, None] for block in range(3)}
    return below("", tensors) | masks


def llama_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An early Llama: `model.` before all names, its own output embedding, the frequencies of rotations as buffers."""
    buffers = {f"model.layers.{block}.self_attn.rotary_emb.inv_freq": torch.ones(4) for block in range(3)}
    head = {"lm_head.weight": torch.randn(43, 32, generator=torch.Generator().manual_seed(1))}
    return below("model.", tensors) | buffers | head


def tied_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`Qwen2.5-0.5B`: `model.` before all names, the output embedding tied."""
    return below("model.", tensors)


PUBLISHED: dict[str, tuple[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]], dict[str, Any]]] = {
    "bert-base-uncased": ("bert", bert_as_published, {"architectures": ["BertForPreTraining"]}),
    "bert masked": ("bert", masked_bert_as_published, {"architectures": ["BertForMaskedLM"]}),
    "roberta-base": ("roberta", roberta_as_published, {"architectures": ["RobertaForMaskedLM"]}),
    "distilbert-base-uncased": ("distilbert", distilbert_as_published, {"architectures": ["DistilBertForMaskedLM"]}),
    "gpt2": ("gpt2", gpt2_as_published, {"architectures": ["GPT2LMHeadModel"], "pad_token_id": None}),
    "llama": ("llama", llama_as_published, {"tie_word_embeddings": False, "pad_token_id": None}),
    "qwen2.5": ("qwen2", tied_as_published, {"tie_word_embeddings": True, "pad_token_id": None}),
    "mistral": ("mistral", tied_as_published, {"tie_word_embeddings": True, "pad_token_id": None}),
}
FILES = ("safetensors", "torch", "shards", "torch shards")


def write_weights(folder: Path, tensors: dict[str, Tensor], files: str) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    if files == "safetensors":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif "shards" not in files:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        names = sorted(tensors)
        stem, ending = ("pytorch_model", "bin") if "torch" in files else ("model", "safetensors")
        shards = {name: f"{stem}-0000{1 + index % 2}-of-00002.{ending}" for index, name in enumerate(names)}
        for shard in set(shards.values()):
            part = {name: tensors[name] for name in names if shards[name] == shard}
            torch.save(part, folder / shard) if ending == "bin" else save_file(part, folder / shard, {"format": "pt"})
        index = {"metadata": {"total_size": 1}, "weight_map": shards}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))


def settings(folder: Path, **changes: Any) -> None:
    change_json(folder / "config.json", **changes)


@pytest.fixture
def published_as(copy_of) -> Callable[..., tuple[str, Path]]:
    """The architecture of a published model, and its folder."""

    def get(model: str, files: str = "safetensors") -> tuple[str, Path]:
        architecture, published, changes = PUBLISHED[model]
        folder = copy_of(architecture)
        write_weights(folder, published(load_file(folder / "model.safetensors")), files)
        settings(folder, **changes)
        return architecture, folder

    return get


TASK = Task(name="t", num_labels=3, metric="accuracy", load=lambda _: pytest.fail("reads no data"))


def encoded(texts: list[str], pair: list[str] | None, tokenizer: Any, max_length: int) -> EncodedExamples:
    labels = torch.zeros(len(texts), dtype=torch.int64).numpy()
    return TextEncoder(tokenizer=tokenizer, max_length=max_length).examples(texts, pair, labels)


def row_of(examples: EncodedExamples) -> PackedBatch:
    return collate_packed([examples], device=torch.device("cpu"))


def ours(folder: Path, texts: list[str], pair: list[str] | None = None) -> tuple[Any, dict[str, Tensor], Tensor]:
    """(backbone, head, logits with a gradient) of the texts as one packed row."""
    backbone = load_backbone(str(folder))
    head = initial_params(backbone, {}, ranks={}, task=TASK, seed=3)
    head = {key: (10 * value if value.dim() > 1 else value + 0.3).requires_grad_() for key, value in head.items()}
    row = row_of(encoded(texts, pair, backbone.tokenizer, max_sequence_length(backbone)))
    features = backbone_features(backbone, row.ids, row.types, row.layout)
    return backbone, head, head_logits(backbone, head, features)


def stock(folder: Path, head: Mapping[str, Tensor]) -> Any:
    """The stock classifier of the folder with this head."""
    with torch.random.fork_rng():
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    for key, value in head.items():
        model.get_parameter(key.removeprefix("head.")).data.copy_(value.detach())
    return model


def stock_logits(folder: Path, head: Mapping[str, Tensor], texts: list[str], pair: list[str] | None = None) -> Tensor:
    """What the stock classifier makes of what the stock tokenizer makes of each text by itself."""
    model, tokenizer = stock(folder, head), AutoTokenizer.from_pretrained(folder)
    inputs = [tokenizer(text, other, return_tensors="pt") for text, other in zip(texts, pair or [None] * len(texts))]
    with torch.no_grad():
        return torch.cat([model(**one).logits for one in inputs])


def assert_stock(folder: Path, texts: list[str], pair: list[str] | None = None) -> Any:
    backbone, head, logits = ours(folder, texts, pair)
    expected = stock_logits(folder, head, texts, pair)
    assert expected.std() > 0.05
    torch.testing.assert_close(logits.detach(), expected, atol=1e-5, rtol=1e-5)
    return backbone


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("model", PUBLISHED)
def test_a_folder_as_its_authors_publish_it_gives_the_stock_classifiers_logits(published_as, model, files) -> None:
    architecture, folder = published_as(model, files)
    backbone = assert_stock(folder, texts_of(architecture))
    assert not any(parameter.is_meta for parameter in backbone.model.parameters())
    if files in ("safetensors", "shards"):
        part = load_client_part(str(folder), blocks=1)
        whole = dict(backbone.model.named_parameters())
        assert all(torch.equal(tensor, whole[name]) for name, tensor in part.model.named_parameters())


@pytest.mark.parametrize("model", ["gpt2", "llama", "qwen2.5", "mistral"])
def test_a_published_folder_writes_with_the_stock_models_output_embedding(published_as, model: str) -> None:
    architecture, folder = published_as(model)
    backbone = load_backbone(str(folder), writes=True)
    causal = AutoModelForCausalLM.from_pretrained(folder).eval()
    examples = TextEncoder(tokenizer=backbone.tokenizer, max_length=32).targets(texts_of(architecture), None)
    row = row_of(examples)
    texts = [torch.from_numpy(ids)[None] for ids in np.split(examples.ids, examples.offsets[1:-1])]
    with torch.no_grad():
        features = backbone_features(backbone, row.ids, row.types, row.layout, output_positions=row.output_positions)
        found = head_logits(backbone, {}, features)
        expected = [causal(input_ids=ids).logits[0, :-1] for ids in texts]
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_pooler_that_the_files_lack_is_a_part_of_the_head_and_so_trains_and_is_exported(
    published_as, tmp_path
) -> None:
    """The stock classifier reads the pooler, draws it and trains it; PEFT alone would freeze what it has drawn."""
    _, folder = published_as("bert masked")
    backbone, head, logits = ours(folder, TEXTS)
    layers = "head.bert.pooler.dense", "head.classifier"
    assert list(head) == [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]
    assert backbone.model.pooler is None
    logits.square().sum().backward()
    assert all(value.grad.abs().max() > 0 for value in head.values())
    module = "encoder.layer.0.attention.self.query"
    draw = torch.Generator().manual_seed(0)
    factors = {
        f"{module}.lora_A": torch.randn(2, 32, generator=draw),
        f"{module}.lora_B": torch.randn(32, 2, generator=draw) / 9,
    }
    params = {key: value.detach() for key, value in {**factors, **head}.items()}
    export_adapter(params, tmp_path / "adapter", family=backbone.family, base=str(folder), scale=lambda rank: 1 / rank)
    with torch.random.fork_rng():
        base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    site = Site(backbone=backbone, data={}, targets=("query",), scale=lambda rank: 1 / rank, max_tokens=4096)
    site.__dict__["modules"] = {module: backbone.model.get_submodule(module)}
    row = row_of(encoded(TEXTS, None, backbone.tokenizer, 32))
    with torch.no_grad(), forward(row, [params], site) as (found,):
        expected = torch.cat([loaded(**backbone.tokenizer(text, return_tensors="pt")).logits for text in TEXTS])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert stored["modules_to_save"] == ["classifier", "pooler"]
    trained = {key: value.detach() for key, value in head.items()}
    save_classifier(backbone, trained, tmp_path / "whole", labels=("a", "b", "c"))
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
    with torch.no_grad():
        again = torch.cat([whole(**backbone.tokenizer(text, return_tensors="pt")).logits for text in TEXTS])
    torch.testing.assert_close(logits.detach(), again, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lost", ["pooler.dense.bias", "encoder.layer.1.output.dense.bias"])
def test_half_a_pooler_or_another_tensor_that_lacks_is_refused_by_name(copy_of, lost: str) -> None:
    folder = copy_of("bert")
    tensors = load_file(folder / "model.safetensors")
    write_weights(folder, {key: tensor for key, tensor in tensors.items() if key != lost}, "safetensors")
    with pytest.raises(ModelError, match=rf"lacks {lost} and 0 more tensors; give complete files"):
        load_backbone(str(folder))


@pytest.mark.parametrize("also", [False, True], ids=["tokens", "tokens and settings"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_without_a_tokenizers_files_is_refused(copy_of, architecture: str, also: bool) -> None:
    folder = copy_of(architecture)
    (folder / "tokenizer.json").unlink()
    if also:
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"knows no word: .* has no file of its tokens; copy|could not be l") as error:
        load_backbone(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(copy_of, architecture: str) -> None:
    folder = copy_of(architecture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(folder)
    message = rf"gives 'more' the id {rows}, and the model has embeddings for ids below {rows}"
    with pytest.raises(ModelError, match=message):
        load_backbone(str(folder))


def test_robertas_positions_begin_behind_its_configs_padding_and_padding_in_a_text_is_not_counted(copy_of) -> None:
    folder = copy_of("roberta")
    texts = [*TEXTS, "w1 <pad> w2 <pad> w3", "<pad> w4"]
    assert_stock(folder, texts)
    settings(folder, pad_token_id=7)  # which the tokenizer gives a word
    backbone = assert_stock(folder, texts)
    assert max_sequence_length(backbone) == 66 - 8
    settings(folder, pad_token_id=None)
    with pytest.raises(ModelError, match="has pad_token_id None, and roberta counts positions from it"):
        load_backbone(str(folder))


@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
def test_padding_that_differs_changes_nothing_where_positions_do_not_follow_from_it(copy_of, architecture) -> None:
    folder = copy_of(architecture)
    settings(folder, pad_token_id=3)
    assert_stock(folder, TEXTS)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2", "llama", "mistral"])
def test_padding_that_differs_is_refused_where_the_stock_classifier_looks_for_it(copy_of, architecture) -> None:
    folder = copy_of(architecture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    settings(folder, pad_token_id=tokenizer.eos_token_id + 2)
    with pytest.raises(ModelError, match=r"has pad_token_id \d+ and its tokenizer pads with \d+"):
        load_backbone(str(folder))


@pytest.mark.parametrize("given", [True, False], ids=["types", "no types"])
@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_types_of_a_pair_are_those_that_the_tokenizer_gives_its_stock_model(copy_of, architecture, given) -> None:
    folder = copy_of(architecture)
    names = ["input_ids", *(["token_type_ids"] if given else []), "attention_mask"]
    change_json(folder / "tokenizer_config.json", model_input_names=names)
    backbone = assert_stock(folder, TEXTS, PAIRS)
    types = encoded(TEXTS, PAIRS, backbone.tokenizer, 32).types
    assert bool(types.any()) == (given and architecture == "bert")


def test_token_types_that_gpt2_would_add_as_words_are_refused(copy_of) -> None:
    folder = copy_of("gpt2")
    names = ["input_ids", "token_type_ids", "attention_mask"]
    change_json(folder / "tokenizer_config.json", model_input_names=names)
    with pytest.raises(ModelError, match="gives token types, which gpt2 would add as words"):
        load_backbone(str(folder))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_config_says_of_outputs_and_attention_changes_no_logit(copy_of, architecture: str) -> None:
    folder = copy_of(architecture)
    _, _, expected = ours(folder, texts_of(architecture))
    flags = {"return_dict": False, "output_hidden_states": True, "use_cache": True, "torchscript": True}
    settings(folder, **flags, _attn_implementation="eager")
    _, _, found = ours(folder, texts_of(architecture))
    assert torch.equal(found, expected)


def test_settings_that_would_let_texts_of_a_row_change_each_other_are_refused(copy_of) -> None:
    folder = copy_of("bert")
    settings(folder, chunk_size_feed_forward=4)
    with pytest.raises(ModelError, match="has chunk_size_feed_forward 4, which splits rows and changes no result"):
        load_backbone(str(folder))


def test_a_gemma_that_sees_both_ways_takes_the_stock_path(copy_of) -> None:
    folder = copy_of("gemma3_text")
    assert not load_backbone(str(folder)).family.stock
    settings(folder, use_bidirectional_attention=True)
    assert load_backbone(str(folder)).family.stock


SLIDING = {"use_sliding_window": True, "sliding_window": 3}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 4}),
    "mistral of one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", SLIDING | {"layer_types": ["sliding_attention"] * 3}),
    "qwen2 upper blocks": ("qwen2", SLIDING | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
    "gemma2": ("gemma2", {"sliding_window": 3}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 3}),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_texts_longer_than_a_sliding_window_give_the_stock_models_logits_and_gradients(copy_of, window: str) -> None:
    architecture, changes = WINDOWS[window]
    folder = copy_of(architecture)
    settings(folder, **changes)
    texts = texts_of(architecture)
    backbone, head, logits = ours(folder, texts)
    assert max_sequence_length(backbone) == 66
    model, tokenizer = stock(folder, head), AutoTokenizer.from_pretrained(folder)
    expected = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    whole = dataclasses.replace(backbone, model=backbone.model.requires_grad_(True))
    row = row_of(encoded(texts, None, tokenizer, 66))
    again = head_logits(whole, head, backbone_features(whole, row.ids, row.types, row.layout))
    above = torch.randn(again.shape, generator=torch.Generator().manual_seed(0))
    (again * above).sum().backward()
    (expected * above).sum().backward()
    gradients = dict(model.base_model.named_parameters())
    assert any(parameter.grad.abs().max() > 1e-3 for parameter in gradients.values())
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, atol=1e-4, rtol=1e-3, msg=name)
    in_parts = embed_tokens(backbone, row.ids, row.types, row.layout)
    for block in range(3):
        in_parts = run_blocks(backbone, in_parts, row.layout, range(block, block + 1))
    apart = head_logits(backbone, head, norm_and_pool(backbone, in_parts, row.layout.ends))
    torch.testing.assert_close(apart, logits, atol=1e-6, rtol=1e-6)
    settings(folder, sliding_window=66)
    wide = ours(folder, texts)[2]
    assert (wide - logits).abs().max() > 1e-2
