"""Folders of models as their authors publish them: the stock model's own logits and gradients, or a line that says why.

Names of tensors, what is missing and what is there beside them are those of the files on the hub: the heads of
pretraining, early names of norms, buffers that are no parameters any more, old files of torch, shards.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Site, initial_params
from atlas_fl.data.task import Task
from atlas_fl.errors import ModelError
from atlas_fl.models.backbone import backbone_features, embed_tokens, head_logits, norm_and_pool, run_blocks
from atlas_fl.models.loading import load_backbone, save_classifier
from atlas_fl.models.peft_io import export_adapter
from atlas_fl.models.registry import FAMILIES
from atlas_fl.models.tokenization import encode_examples, encode_targets
from atlas_fl.setup.assembly import max_sequence_length
from atlas_fl.split.model import load_client_part
from tests.architectures import ARCHITECTURES

# PEFT still asks for it under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TEXTS = ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11", "w3", "w9 w2 w4 w9", "w7 w7 w1 w0 w5 w6 w2"]
PAIRS = ["w4 w5", "w6 w7 w8 w9", "w1", "w2 w3 w4"]
PREFIXES = {name: family.prefix for name, family in FAMILIES.items()}


def qwen_words(texts: list[str]) -> list[str]:
    """The texts for the tokenizer of bytes."""
    return [text.replace("w", "").replace(" ", "") for text in texts]


def texts_of(architecture: str, texts: list[str] = TEXTS) -> list[str]:
    return qwen_words(texts) if architecture == "qwen2" else texts


def rename(tensors: Mapping[str, Tensor], rule: Callable[[str], str]) -> dict[str, Tensor]:
    return {rule(key): tensor.clone() for key, tensor in tensors.items()}


def bert_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`bert-base-uncased`: BertForPreTraining, with the norms' first names."""
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}

    def rule(key: str) -> str:
        ending = next((new for new in old if key.endswith(new)), None)
        return "bert." + (key if ending is None else key.replace(ending, old[ending]))

    words = tensors["embeddings.word_embeddings.weight"]
    return rename(tensors, rule) | {
        "bert.embeddings.position_ids": torch.arange(66)[None],
        "cls.predictions.bias": torch.zeros(len(words)),
        "cls.predictions.transform.dense.weight": torch.eye(32),
        "cls.predictions.transform.dense.bias": torch.zeros(32),
        "cls.predictions.transform.LayerNorm.gamma": torch.ones(32),
        "cls.predictions.transform.LayerNorm.beta": torch.zeros(32),
        "cls.predictions.decoder.weight": words.clone(),
        "cls.seq_relationship.weight": torch.zeros(2, 32),
        "cls.seq_relationship.bias": torch.zeros(2),
    }


def masked_bert_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A BertForMaskedLM: no pooler."""
    return {k: v for k, v in bert_as_published(tensors).items() if "pooler" not in k and "seq_relation" not in k}


def roberta_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`roberta-base`: RobertaForMaskedLM, no pooler, with the buffer of positions."""
    inside = {f"roberta.{key}": tensor.clone() for key, tensor in tensors.items() if "pooler" not in key}
    return inside | {
        "roberta.embeddings.position_ids": torch.arange(66)[None],
        "lm_head.bias": torch.zeros(45),
        "lm_head.dense.weight": torch.eye(32),
        "lm_head.dense.bias": torch.zeros(32),
        "lm_head.layer_norm.weight": torch.ones(32),
        "lm_head.layer_norm.bias": torch.zeros(32),
        "lm_head.decoder.weight": tensors["embeddings.word_embeddings.weight"].clone(),
    }


def distilbert_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`distilbert-base-uncased`: DistilBertForMaskedLM."""
    return {f"distilbert.{key}": tensor.clone() for key, tensor in tensors.items()} | {
        "vocab_transform.weight": torch.eye(32),
        "vocab_transform.bias": torch.zeros(32),
        "vocab_layer_norm.weight": torch.ones(32),
        "vocab_layer_norm.bias": torch.zeros(32),
        "vocab_projector.weight": tensors["embeddings.word_embeddings.weight"].clone(),
        "vocab_projector.bias": torch.zeros(45),
    }


def gpt2_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`gpt2`: names without a prefix, and the masks of attention as buffers."""
    masks = {f"h.{block}.attn.bias": torch.ones(64, 64).tril()[None, None] for block in range(3)}
    return rename(tensors, lambda key: key) | masks


def llama_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An early Llama: `model.` before all names, its own output embedding, the frequencies of rotations as buffers."""
    buffers = {f"model.layers.{block}.self_attn.rotary_emb.inv_freq": torch.ones(4) for block in range(3)}
    head = {"lm_head.weight": torch.randn(43, 32, generator=torch.Generator().manual_seed(1))}
    return {f"model.{key}": tensor.clone() for key, tensor in tensors.items()} | buffers | head


def tied_as_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`Qwen2.5-0.5B`: `model.` before all names, the output embedding tied."""
    return {f"model.{key}": tensor.clone() for key, tensor in tensors.items()}


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
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture
def copy_of(tiny_of, tmp_path: Path) -> Callable[[str], Path]:
    """A folder of an architecture's tiny model, to change."""

    def get(architecture: str) -> Path:
        return Path(
            shutil.copytree(tiny_of(architecture).path, tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}")
        )

    return get


def task_of(labels: int = 3) -> Task:
    return Task(name="t", num_labels=labels, metric="accuracy", load=lambda _: pytest.fail("reads no data"))


def ours(folder: Path, texts: list[str], pair: list[str] | None = None) -> tuple[Any, dict[str, Tensor], Tensor]:
    """(backbone, head, logits with a gradient) of the texts as one packed row."""
    backbone = load_backbone(str(folder))
    head = initial_params(backbone, {}, ranks={}, task=task_of(), seed=3)
    head = {key: (10 * value if value.dim() > 1 else value + 0.3).requires_grad_() for key, value in head.items()}
    labels = torch.zeros(len(texts), dtype=torch.int64).numpy()
    examples = encode_examples(
        texts, pair, labels, tokenizer=backbone.tokenizer, max_length=max_sequence_length(backbone)
    )
    row = collate_packed([examples], device=torch.device("cpu"))
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
def test_a_folder_as_its_authors_publish_it_gives_the_stock_classifiers_logits(copy_of, model: str, files: str) -> None:
    architecture, published, changes = PUBLISHED[model]
    folder = copy_of(architecture)
    tensors = published(load_file(folder / "model.safetensors"))
    write_weights(folder, tensors, files)
    settings(folder, **changes)
    backbone = assert_stock(folder, texts_of(architecture))
    assert not any(parameter.is_meta for parameter in backbone.model.parameters())
    if files in ("safetensors", "shards"):
        part = load_client_part(str(folder), blocks=1)
        whole = dict(backbone.model.named_parameters())
        assert all(torch.equal(tensor, whole[name]) for name, tensor in part.model.named_parameters())


@pytest.mark.parametrize("model", ["gpt2", "llama", "qwen2.5", "mistral"])
def test_a_published_folder_writes_with_the_stock_models_output_embedding(copy_of, model: str) -> None:
    architecture, published, changes = PUBLISHED[model]
    folder = copy_of(architecture)
    write_weights(folder, published(load_file(folder / "model.safetensors")), "safetensors")
    settings(folder, **changes)
    backbone = load_backbone(str(folder), writes=True)
    causal = AutoModelForCausalLM.from_pretrained(folder).eval()
    examples = encode_targets(texts_of(architecture), None, tokenizer=backbone.tokenizer, max_length=32)
    row = collate_packed([examples], device=torch.device("cpu"))
    with torch.no_grad():
        features = backbone_features(backbone, row.ids, row.types, row.layout, output_positions=row.output_positions)
        found = head_logits(backbone, {}, features)
        expected = []
        for start, stop in zip(examples.offsets[:-1], examples.offsets[1:]):
            expected.append(causal(input_ids=torch.from_numpy(examples.ids[None, start:stop])).logits[0, :-1])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_pooler_that_the_files_lack_is_a_part_of_the_head_and_so_trains_and_is_exported(copy_of, tmp_path) -> None:
    """The stock classifier reads the pooler, draws it and trains it; PEFT alone would freeze what it has drawn."""
    from peft import PeftModel

    folder = copy_of("bert")
    write_weights(folder, masked_bert_as_published(load_file(folder / "model.safetensors")), "safetensors")
    backbone, head, logits = ours(folder, TEXTS)
    assert list(head) == [
        "head.bert.pooler.dense.weight",
        "head.bert.pooler.dense.bias",
        "head.classifier.weight",
        "head.classifier.bias",
    ]
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
    site = Site(
        backbone=backbone, data={}, targets=(module.rsplit(".", 1)[-1],), scale=lambda rank: 1 / rank, max_tokens=4096
    )
    site.__dict__["modules"] = {module: backbone.model.get_submodule(module)}
    labels = torch.zeros(len(TEXTS), dtype=torch.int64).numpy()
    examples = encode_examples(TEXTS, None, labels, tokenizer=backbone.tokenizer, max_length=32)
    with torch.no_grad(), forward(collate_packed([examples], device=torch.device("cpu")), [params], site) as (found,):
        expected = torch.cat([loaded(**backbone.tokenizer(text, return_tensors="pt")).logits for text in TEXTS])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == [
        "classifier",
        "pooler",
    ]
    save_classifier(
        backbone, {key: value.detach() for key, value in head.items()}, tmp_path / "whole", labels=("a", "b", "c")
    )
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
    with pytest.raises(
        ModelError, match=r"knows no word: .* has no file of its tokens; copy|could not be loaded: "
    ) as error:
        load_backbone(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(copy_of, architecture: str) -> None:
    folder = copy_of(architecture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        ModelError, match=rf"gives 'more' the id {rows}, and the model has embeddings for ids below {rows}"
    ):
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
    path = folder / "tokenizer_config.json"
    names = ["input_ids", *(["token_type_ids"] if given else []), "attention_mask"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": names}))
    backbone = assert_stock(folder, TEXTS, PAIRS)
    labels = torch.zeros(len(TEXTS)).numpy()
    types = encode_examples(TEXTS, PAIRS, labels, tokenizer=backbone.tokenizer, max_length=32).types
    assert bool(types.any()) == (given and architecture == "bert")


def test_token_types_that_gpt2_would_add_as_words_are_refused(copy_of) -> None:
    folder = copy_of("gpt2")
    path = folder / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
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
    folder = copy_of("llama")
    factors = {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4, "original_max_position_embeddings": 6}
    settings(folder, rope_parameters={"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4, **factors})
    with pytest.raises(ModelError, match="has rope_type longrope, whose rotations follow from the longest text"):
        load_backbone(str(folder))
    folder = copy_of("bert")
    settings(folder, chunk_size_feed_forward=4)
    with pytest.raises(ModelError, match="has chunk_size_feed_forward 4, which splits rows and changes no result"):
        load_backbone(str(folder))


WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 4}),
    "mistral of one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention"] * 3}),
    "qwen2 upper blocks": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
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
    examples = encode_examples(texts, None, torch.zeros(4).numpy(), tokenizer=tokenizer, max_length=66)
    row = collate_packed([examples], device=torch.device("cpu"))
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
