"""Clients that write text: packed as alone, as stock causal models under PEFT, beside clients that classify."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.evaluation import evaluate, scored_outputs, write
from atlas_fl.client.fingerprint import FIRST
from atlas_fl.client.importance import IMPORTANCE
from atlas_fl.client.job import ClientTokens, Job, Prompts, Site
from atlas_fl.client.local_training import batches, example_loss, train
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions, ImportanceOptions, TrainOptions
from atlas_fl.client.registry import ACTIONS
from atlas_fl.data.task import Task
from atlas_fl.errors import ModelError
from atlas_fl.models import backbone
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.peft_io import export_adapter
from atlas_fl.models.registry import FAMILIES
from atlas_fl.models.tokenization import EncodedExamples, TextEncoder
from tests.laws.test_packs import assert_same

# PEFT still asks for it under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CPU = torch.device("cpu")
OPTIONS = TrainOptions(seed=5, epochs=2, batch_size=4, lr=1e-2, schedule="linear", weight_decay=0.1, dropout=0.25)


LIKE_LLAMA = ("mistral", "qwen2", "qwen3", "gemma2")
"""Families whose blocks are those of another: `make test-all` has them."""


def marks_of(family: str) -> tuple[pytest.MarkDecorator, ...]:
    if family in LIKE_LLAMA:
        return pytest.mark.slow, pytest.mark.product
    return () if family in ("gpt2", "llama") else (pytest.mark.slow,)


@pytest.fixture(params=[pytest.param(name, marks=marks_of(name)) for name, family in FAMILIES.items() if family.causal])
def writer(request: pytest.FixtureRequest, writer_of: Callable):
    return writer_of(request.param)


def texts(count: int, *, seed: int, words: tuple[int, int]) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in draw.integers(40, size=draw.integers(*words))) for _ in range(count)]


def tokens(writer, *, seed: int, prompts: bool, examples: int = 9) -> ClientTokens:
    tokenizer = writer.backbone.tokenizer

    def split(seed: int) -> EncodedExamples:
        target = texts(examples, seed=seed + 1, words=(1, 8)) if prompts else None
        return TextEncoder(tokenizer=tokenizer, max_length=24).targets(texts(examples, seed=seed, words=(1, 9)), target)

    task = Task(name="notes", num_labels=0, load=lambda _: pytest.fail("nobody reads it"))
    return ClientTokens(
        task=task, splits={"train": split(seed), "validation": split(seed + 9), "test": split(seed + 18)}
    )


def federation(writer, site_of, spec_of, **changes: object) -> tuple[Site, list[Job]]:
    """Text alone, a classifier between, and text after prompts; ranks and sizes differ."""
    specs = [
        spec_of(name="plain-0", ranks=(1, 4, 2)),
        spec_of(name="class-0", labels=3, ranks=(2, 2, 2), examples=7),
        spec_of(name="prompt-0", ranks=(3, 1, 4)),
    ]
    site = site_of(writer, *specs, **changes)
    own = {
        "plain-0": tokens(writer, seed=1, prompts=False),
        "class-0": site.data["class-0"],
        "prompt-0": tokens(writer, seed=3, prompts=True, examples=6),
    }
    site = dataclasses.replace(site, data=own)
    jobs = []
    for i, spec in enumerate(specs):
        params = writer.params(spec, seed=i)
        if own[spec.name].task.writes:
            params = {key: value for key, value in params.items() if not key.startswith("head.")}
        jobs.append(Job(client=spec.name, params=params, round=1, options=OPTIONS))
    return site, jobs


def with_options(jobs: list[Job], options: object) -> list[Job]:
    return [dataclasses.replace(job, options=options) for job in jobs]


def stock(writer):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(writer.path).eval()


def under_peft(writer, site: Site, params: Mapping[str, Tensor], folder: Path, **how: bool):
    """The stock causal model with the client's exported adapter, by PEFT."""
    from peft import PeftModel

    export_adapter(params, folder, family=writer.backbone.family, base=str(writer.path), scale=site.scale)
    return PeftModel.from_pretrained(stock(writer), str(folder), **how).eval()


def padded(data: EncodedExamples) -> dict[str, Tensor]:
    """A padded batch with the labels of transformers' causal models: -100 where nothing is to be predicted."""
    shape = len(data), int(data.lengths.max())
    inside = torch.from_numpy(np.arange(shape[1]) < data.lengths[:, None])
    ids, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)
    ids[inside] = torch.from_numpy(data.ids)
    labels[inside] = torch.from_numpy(np.where(data.target_mask, data.ids, -100))
    return {"input_ids": ids, "attention_mask": inside.long(), "labels": labels}


def test_logits_and_loss_are_those_of_peft_on_the_stock_causal_model(writer, site_of, spec_of, tmp_path: Path) -> None:
    site, jobs = federation(writer, site_of, spec_of)
    data = [site.data[job.client].splits["train"] for job in jobs]
    with torch.no_grad(), forward(collate_packed(data, device=CPU), [job.params for job in jobs], site) as logits:
        pass
    labels = collate_packed(data, device=CPU).labels
    for k in (0, 2):
        theirs = under_peft(writer, site, jobs[k].params, tmp_path / str(k))
        batch = padded(data[k])
        with torch.no_grad():
            found, without = theirs(**batch), stock(writer)(**batch)
        wanted = (batch["labels"] != -100)[:, 1:]
        torch.testing.assert_close(logits[k], found.logits[:, :-1][wanted], atol=1e-5, rtol=1e-5)
        assert float(example_loss(logits[k], labels[k])) == pytest.approx(float(found.loss), rel=1e-5)
        assert (found.logits - without.logits).abs().max() > 0.05, "the adapter does nothing"
    assert logits[1].shape == (7, 3), "the classifier beside them keeps its own head"


def test_training_in_a_mixed_pack_equals_training_alone(writer, site_of, spec_of) -> None:
    site, jobs = federation(writer, site_of, spec_of)
    for job, together in zip(jobs, train(jobs, site), strict=True):
        (alone,) = train([job], site)
        assert together.params.keys() == job.params.keys()
        assert together.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)
        for key, value in alone.params.items():
            torch.testing.assert_close(together.params[key], value, atol=1e-5, rtol=1e-5, msg=key)
            assert (value - job.params[key]).abs().max() > 1e-3, f"{key} did not train"


@pytest.mark.parametrize("place", [0, 2], ids=["text alone", "after prompts"])
def test_training_equals_a_plain_peft_loop(writer, site_of, spec_of, tmp_path: Path, place: int) -> None:
    site, jobs = federation(writer, site_of, spec_of)
    options = TrainOptions(seed=1, batch_size=3, lr=5e-3, clip=0.3)
    job = dataclasses.replace(jobs[place], options=options)
    (update,) = train([job], site)
    model = under_peft(writer, site, job.params, tmp_path / "before", is_trainable=True)
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=5e-3, weight_decay=0.0)
    losses = []
    for batch in batches(site.data[job.client].splits["train"], job, secret=None):
        loss = model(**padded(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 0.3)
        optimizer.step()
        losses.append(loss.item())
    from atlas_fl.models.peft_io import import_adapter

    model.save_pretrained(str(tmp_path / "after"))
    expected, _ = import_adapter(tmp_path / "after", family=writer.backbone.family)
    assert update.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert expected.keys() == job.params.keys()
    for key, value in expected.items():
        # AdamW makes a step of its whole size of a gradient that is nearly 0, whose sign is of rounding
        moved = (value - job.params[key]).norm()
        assert (update.params[key] - value).norm() < 5e-3 * moved, key


@pytest.mark.parametrize("max_tokens", [1, 40, 4096])
def test_perplexity_is_over_all_tokens_of_the_split(writer, site_of, spec_of, tmp_path: Path, max_tokens: int) -> None:
    site, jobs = federation(writer, site_of, spec_of, max_tokens=max_tokens)
    scored = evaluate(with_options(jobs, EvaluateOptions(split="test")), site)
    for k in (0, 2):
        data, total, hits = site.data[jobs[k].client].splits["test"], 0.0, 0
        model = under_peft(writer, site, jobs[k].params, tmp_path / str(k))
        for i in range(len(data)):
            batch = padded(data.take(np.array([i])))
            with torch.no_grad():
                out = model(**batch)
            total += float(out.loss) * int(data.num_targets[i])
            wanted = batch["labels"][:, 1:] != -100
            hits += int((out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:])[wanted].sum())
        count = int(data.target_mask.sum())
        assert len(set(data.num_targets)) > 1, "else a mean of batches would do"
        assert scored[k].metrics["loss"] == pytest.approx(total / count, rel=1e-5)
        assert scored[k].metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
        assert scored[k].metrics["accuracy"] == scored[k].metrics["primary"] == pytest.approx(hits / count)
    assert "perplexity" not in scored[1].metrics


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(writer, site_of, spec_of) -> None:
    even = torch.zeros_like(writer.backbone.vocabulary)
    site, jobs = federation(writer, site_of, spec_of, backbone=dataclasses.replace(writer.backbone, vocabulary=even))
    scored = evaluate(with_options(jobs, EvaluateOptions(split="test")), site)
    for k in (0, 2):
        assert scored[k].metrics["perplexity"] == pytest.approx(len(even), rel=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 60, 4096])
def test_what_is_written_is_what_stock_generate_writes(writer, site_of, spec_of, tmp_path: Path, max_tokens) -> None:
    site, jobs = federation(writer, site_of, spec_of, max_tokens=max_tokens)
    tokenizer, chosen = writer.backbone.tokenizer, [jobs[0], jobs[2]]
    asked = [texts(count, seed=20 + count, words=(1, 9)) for count in (3, 4)]
    prompts = [TextEncoder(tokenizer=tokenizer, max_length=20).prompts(own) for own in asked]
    found = [write(own, job.params, site, new_tokens=12) for own, job in zip(prompts, chosen, strict=True)]
    written = []
    for k, job in enumerate(chosen):
        model = under_peft(writer, site, job.params, tmp_path / str(k))
        for i, text in enumerate(found[k]):
            ids = torch.from_numpy(prompts[k].take(np.array([i])).ids)[None]
            how = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": tokenizer.eos_token_id}
            with torch.no_grad():
                out = model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=tokenizer.pad_token_id, **how
                )
            new = out[0, ids.shape[1] :]
            assert text == tokenizer.decode(new, skip_special_tokens=True).strip()
            written.append(text)
    assert len(set(written)) > 2


def test_a_text_ends_at_the_end_of_text(writer_of, site_of, spec_of) -> None:
    """With the likeliest next token as the end of text, nothing is written."""
    writer = writer_of("gpt2")
    site, jobs = federation(writer, site_of, spec_of)
    prompt = TextEncoder(tokenizer=writer.backbone.tokenizer, max_length=9).prompts(["w1 w2"])
    with torch.no_grad(), forward(collate_packed([prompt], device=CPU), [jobs[0].params], site) as logits:
        likeliest = int(logits[0].argmax())
    tokenizer = writer.backbone.tokenizer
    before = tokenizer.eos_token
    try:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(likeliest)
        assert write(prompt, jobs[0].params, site, new_tokens=5) == [""]
    finally:
        tokenizer.eos_token = before
    assert write(prompt, jobs[0].params, site, new_tokens=5) != [""]


def test_a_model_that_gives_no_numbers_writes_nothing_and_finds_no_token(
    writer_of, site_of, spec_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of("gpt2")
    site, jobs = federation(writer, site_of, spec_of)
    prompts = TextEncoder(tokenizer=writer.backbone.tokenizer, max_length=9).prompts(["w1 w2", "w3 w4 w5"])
    real = backbone.frozen_product
    monkeypatch.setattr(backbone, "frozen_product", lambda *args: real(*args) * float("nan"))
    assert write(prompts, jobs[2].params, site, new_tokens=4) == ["", ""]
    nothing, labels = torch.full((3, 5), float("nan")), torch.tensor([0, 1, 2])
    judged = scored_outputs(nothing, labels, site.data[jobs[2].client].task)
    assert judged[:, 1].tolist() == [0.0, 0.0, 0.0] and np.isnan(judged[:, 0]).all()


def test_writing_leaves_packs_and_checkpoints_as_they_were(writer, site_of, spec_of) -> None:
    site, jobs = federation(writer, site_of, spec_of)
    lean = load_backbone(str(writer.path), gradient_checkpointing=True, writes=True)
    lean_site = dataclasses.replace(site, backbone=lean)
    before = [block.training for block in lean.blocks]
    assert any(before)
    prompts = TextEncoder(tokenizer=writer.backbone.tokenizer, max_length=20).prompts(["w1 w2", "w3 w4 w5"])
    (expected,) = train([jobs[2]], site)
    said = [write(prompts, jobs[2].params, own, new_tokens=8) for own in (site, lean_site)]
    assert said[0] == said[1]
    assert [block.training for block in lean.blocks] == before
    for own in (site, lean_site):
        (found,) = train([jobs[2]], own)
        assert_same(found.params, expected.params, atol=1e-6)


def test_rouge_is_of_what_is_written(writer_of, site_of, spec_of) -> None:
    writer = writer_of("gpt2")
    site, jobs = federation(writer, site_of, spec_of)
    prompts = TextEncoder(tokenizer=writer.backbone.tokenizer, max_length=20).prompts(["w1 w2", "w3"])
    said = write(prompts, jobs[2].params, site, new_tokens=6)
    assert all(said), "the model ends at once"
    for references, rouge in ((said, 1.0), (["nothing", "alike"], 0.0)):
        held = Prompts(encoded=prompts, references=tuple(references))
        own = dataclasses.replace(site.data["prompt-0"], prompts={"test": held})
        asked = dataclasses.replace(site, data={**site.data, "prompt-0": own})
        options = EvaluateOptions(split="test", new_tokens=6)
        plain, _, prompted = evaluate(with_options(jobs, options), asked)
        assert prompted.metrics["rougeL"] == prompted.metrics["rouge1"] == pytest.approx(rouge)
        assert "rougeL" not in plain.metrics
        quiet = evaluate(with_options(jobs, EvaluateOptions(split="test")), asked)[2]
        assert "rougeL" not in quiet.metrics


@pytest.mark.parametrize("kind", ["delta", "gradient", "fisher"])
def test_fingerprints_need_no_head(writer, site_of, spec_of, kind: str) -> None:
    site, jobs = federation(writer, site_of, spec_of)
    training = TrainOptions(seed=2, batch_size=2, lr=1e-2)
    options = FingerprintOptions(kind=kind, sketch_dim=32, train=training, batches=2, steps=3)
    together = ACTIONS["fingerprint"](with_options(jobs, options), site)
    for job, update in zip(with_options(jobs, options), together, strict=True):
        (alone,) = ACTIONS["fingerprint"]([job], site)
        assert float(update.params[FIRST].norm()) == pytest.approx(1, rel=1e-5)
        torch.testing.assert_close(update.params[FIRST], alone.params[FIRST], atol=1e-4, rtol=1e-4)
    assert abs(float(together[0].params[FIRST] @ together[2].params[FIRST])) < 0.99


@pytest.mark.parametrize("kind", ["gradient", "rngwp"])
def test_importance_needs_no_head(writer, site_of, spec_of, kind: str) -> None:
    site, jobs = federation(writer, site_of, spec_of)
    options = ImportanceOptions(kind=kind, train=TrainOptions(seed=2, batch_size=2), batches=2)
    for update in ACTIONS["importance"](with_options(jobs, options), site):
        shares = update.params[IMPORTANCE]
        assert float(shares.sum()) == pytest.approx(1)
        assert float(shares.min()) > 0


def test_checkpointing_and_bf16_train_text_too(writer, site_of, spec_of) -> None:
    site, jobs = federation(writer, site_of, spec_of)
    lean = load_backbone(str(writer.path), gradient_checkpointing=True, writes=True)
    lean_site = dataclasses.replace(site, backbone=lean)
    for found, expected in zip(train(jobs, lean_site), train(jobs, site), strict=True):
        assert_same(found.params, expected.params, atol=1e-6)
    half = train(jobs, dataclasses.replace(site, bf16=True))
    for found, expected in zip(half, train(jobs, site), strict=True):
        assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=0.1)
        assert all(bool(torch.isfinite(value).all()) for value in found.params.values())


def test_an_encoder_is_refused_and_the_models_that_can_are_named(tiny_of) -> None:
    path = str(tiny_of("bert").path)
    with pytest.raises(ModelError, match=r"architecture 'bert', which cannot write .* of gemma2, .*gpt2, .*qwen2"):
        load_backbone(path, writes=True)


def test_files_without_their_output_embedding_are_refused(tiny_of) -> None:
    """Tiny Llama's directory holds the headless model, and nothing ties its output embedding to the input's."""
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load_backbone(str(tiny_of("llama").path), writes=True)


def test_a_headless_directory_with_tied_embeddings_can_write(tiny_of) -> None:
    backbone = load_backbone(str(tiny_of("gpt2").path), writes=True)
    assert backbone.vocabulary is backbone.model.get_input_embeddings().weight
