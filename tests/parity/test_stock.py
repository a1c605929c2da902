"""Every architecture that ATLAS names, against a plain loop of PEFT and PyTorch on the same folder and batches.

Those with packs are there too. The loop pads, takes the stock model's own loss, and PEFT has loaded the start from what
ATLAS exports; afterwards ATLAS reads what PEFT has saved.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from atlas_fl.client.evaluation import evaluate, write
from atlas_fl.client.job import ClientTokens, Job, Site, initial_params
from atlas_fl.client.local_training import batches, train
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.data.task import Task
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.peft_io import default_targets, export_adapter, import_adapter
from atlas_fl.models.tokenization import (
    EncodedExamples,
    TextEncoder,
    encode_images,
)
from atlas_fl.models.vision import preprocess
from atlas_fl.models.vision_loading import load_image_backbone, tokens_per_image
from tests.conftest import WORDS, Tiny
from tests.models.stock_folders import IMAGES, save_stock_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's
]

PACKED = ("xlm-roberta", "electra", "qwen3", "phi3", "gemma2", "gemma3_text")
CLASSIFIERS = ("modernbert", "deberta-v2", "deberta-v3", "albert", "falcon", "t5")
TABLE = [
    *((name, "classes") for name in (*PACKED, *CLASSIFIERS, *IMAGES)),
    *((name, "writes") for name in ("falcon", "t5")),
    ("deberta-v3", "numbers"),
]


def scale(rank: int) -> float:
    return 3.0 / rank


def examples_of(backbone: Backbone, kind: str) -> EncodedExamples:
    source = np.random.default_rng(5)
    texts, answers = ([" ".join(source.choice(WORDS, size=size)) for size in source.integers(1, 12, 12)] for _ in "ab")
    labels = source.normal(size=12).astype(np.float32) if kind == "numbers" else source.integers(3, size=12)
    if backbone.vision is not None:
        pixels = source.integers(256, size=(12, 16, 16, 3)).astype(np.uint8)
        return encode_images(pixels, labels, length=tokens_per_image(backbone.vision))
    if kind == "writes":
        return TextEncoder(tokenizer=backbone.tokenizer, max_length=40).targets(texts, answers)
    return TextEncoder(tokenizer=backbone.tokenizer, max_length=40).examples(texts, None, labels)


def site_with(backbone: Backbone, kind: str, targets: tuple[str, ...] | None = None) -> tuple[Site, dict[str, Any]]:
    """A site of one client, and its parameters with B that are not zero."""
    data = examples_of(backbone, kind)
    num_labels = {"classes": 3, "numbers": 1, "writes": 0}[kind]
    metric = {"classes": "accuracy", "numbers": "pearson", "writes": "token_accuracy"}[kind]
    task = Task(name="a", num_labels=num_labels, metric=metric, load=lambda _: pytest.fail("nothing is read"))
    tokens = {"a-0": ClientTokens(task=task, splits=dict.fromkeys(("train", "validation", "test"), data))}
    targets = targets or default_targets(backbone.family.model_type)
    site = Site(backbone=backbone, data=tokens, targets=targets, scale=scale, max_tokens=4096, seed=0)
    ranks = {name: 2 + index % 3 for index, name in enumerate(site.modules)}
    drawn = initial_params(backbone, site.modules, ranks=ranks, task=task, seed=1)
    source = torch.Generator().manual_seed(3)
    return site, {
        key: torch.empty_like(value).normal_(0, 0.2, generator=source) if value.dim() == 2 else value
        for key, value in drawn.items()
    }


def stock_batch(backbone: Backbone, batch: EncodedExamples, kind: str) -> dict[str, torch.Tensor]:
    """The batch as the stock model takes it, with labels."""
    labels = torch.from_numpy(batch.labels)
    if batch.pixels is not None:
        assert backbone.vision is not None
        return {"pixel_values": preprocess(backbone.vision, batch.pixels), "labels": labels}

    def padded(values: np.ndarray, fill: int) -> torch.Tensor:
        rows = [torch.from_numpy(values[a:b]) for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
        return pad_sequence(rows, batch_first=True, padding_value=fill)

    tokenizer = backbone.tokenizer
    if kind == "writes" and backbone.model.config.is_encoder_decoder:
        spans = list(zip(batch.offsets[:-1], batch.offsets[1:], strict=True))
        read = [torch.from_numpy(batch.ids[a:b][~batch.target_mask[a:b]]) for a, b in spans]
        told = [torch.from_numpy(batch.ids[a:b][batch.target_mask[a:b]]) for a, b in spans]
        ids = pad_sequence(read, batch_first=True, padding_value=tokenizer.pad_token_id)
        mask = pad_sequence([torch.ones_like(one) for one in read], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": pad_sequence(told, True, -100)}
    inputs = {
        "input_ids": padded(batch.ids, tokenizer.pad_token_id),
        "attention_mask": padded(np.ones_like(batch.ids), 0),
        "labels": padded(np.where(batch.target_mask, batch.ids, -100), -100) if kind == "writes" else labels,
    }
    if "token_type_ids" in tokenizer.model_input_names:
        inputs["token_type_ids"] = padded(batch.types, 0)
    return inputs


def stock_model(folder: Path, backbone: Backbone, kind: str) -> torch.nn.Module:
    """The stock model, as a tutorial loads it."""
    if kind == "writes":
        auto = AutoModelForSeq2SeqLM if backbone.model.config.is_encoder_decoder else AutoModelForCausalLM
        return auto.from_pretrained(folder)
    auto = AutoModelForSequenceClassification if backbone.vision is None else AutoModelForImageClassification
    problem = {"problem_type": "regression"} if kind == "numbers" else {}
    torch.manual_seed(0)
    model = auto.from_pretrained(folder, num_labels=1 if kind == "numbers" else 3, **problem)
    if backbone.vision is None:
        model.config.pad_token_id = backbone.tokenizer.pad_token_id
    return model


@pytest.fixture(scope="session")
def load(tiny_of: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory):
    def get(name: str, kind: str) -> tuple[Path, Backbone]:
        if name in PACKED:
            return tiny_of(name).path, tiny_of(name).backbone
        folder = save_stock_folder(tmp_path_factory.mktemp(name), name, writes=kind == "writes")
        if name in IMAGES:
            return folder, load_image_backbone(str(folder), image_size={"convnext": 32, "swin": 16}[name])
        return folder, load_backbone(str(folder), writes=kind == "writes")

    return get


@pytest.mark.parametrize(("name", "kind"), TABLE)
def test_training_and_scores_are_those_of_a_plain_loop_of_peft(load, tmp_path: Path, name: str, kind: str) -> None:
    folder, backbone = load(name, kind)
    assert backbone.family.stock == (name not in PACKED)
    site, params = site_with(backbone, kind)
    options = TrainOptions(seed=3, lr=5e-3, batch_size=4, epochs=2, clip=0.3, weight_decay=0.1)
    job = Job(client="a-0", params=params, round=1, options=options)
    (update,) = train([job], site)

    export_adapter(params, tmp_path / "start", family=backbone.family, base=str(folder), scale=scale)
    model = PeftModel.from_pretrained(stock_model(folder, backbone, kind), str(tmp_path / "start"), is_trainable=True)
    model.eval()
    if kind == "writes":
        assert_written_alike(model, site, params)
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(leaf.numel() for leaf in leaves) == sum(tensor.numel() for tensor in params.values())
    optimizer, losses = torch.optim.AdamW(leaves, lr=5e-3, weight_decay=0.1), []
    for batch in batches(site.data["a-0"].splits["train"], job, secret=None):
        loss = model(**stock_batch(backbone, batch, kind)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 0.3)
        optimizer.step()
        losses.append(loss.item())
    model.save_pretrained(str(tmp_path / "after"))
    expected, _ = import_adapter(tmp_path / "after", family=backbone.family)

    assert len(losses) == 6
    assert update.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert set(expected) == set(params)
    for key, value in expected.items():
        torch.testing.assert_close(update.params[key], value, atol=2e-4, rtol=2e-4, msg=key)
    assert_scored_alike(model, site, update.params, kind)


def assert_written_alike(model: torch.nn.Module, site: Site, params: Mapping[str, torch.Tensor]) -> None:
    """Answers of a padded batch are those of PEFT to each prompt alone."""
    tokenizer = site.backbone.tokenizer
    prompts = TextEncoder(tokenizer=tokenizer, max_length=20).prompts(["w1", "w2 w3 w4 w5", "w9 w8"])
    expected = []
    for start, stop in zip(prompts.offsets[:-1], prompts.offsets[1:], strict=True):
        ids = torch.from_numpy(prompts.ids[None, start:stop])
        told = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )[0, 1 if site.backbone.family.seq2seq else ids.shape[1] :]
        expected.append(tokenizer.decode(told, skip_special_tokens=True).strip())
    assert any(expected)
    assert write(prompts, params, site, new_tokens=6) == expected


def assert_scored_alike(model: torch.nn.Module, site: Site, params: Mapping[str, torch.Tensor], kind: str) -> None:
    job = Job(client="a-0", params=params, round=1, options=EvaluateOptions(split="test"))
    (scored,) = evaluate([job], site)
    with torch.no_grad():
        loss = model(**stock_batch(site.backbone, site.data["a-0"].splits["test"], kind)).loss.item()
    assert scored.metrics["loss"] == pytest.approx(loss, rel=1e-3)
