"""What holds on every architecture: a packed row gives what the stock classifier gives, and nothing else moves."""

import dataclasses
from collections.abc import Callable
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from atlas_fl import params as tree
from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Job, Site
from atlas_fl.client.local_training import train
from atlas_fl.client.options import TrainOptions
from atlas_fl.errors import ModelError
from atlas_fl.models import attention
from atlas_fl.models.backbone import stock_attention, target_modules
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.peft_io import default_targets
from atlas_fl.models.registry import FAMILIES, head_shapes
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Params
from tests.architectures import ARCHITECTURES
from tests.conftest import Tiny
from tests.models.test_packing import varlen_in_turn

# PEFT still asks for it under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SCALE = {1: 1.5, 2: 1.0, 3: 0.5 + 1 / 3, 4: 0.75}


@pytest.fixture(params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tiny_of: Callable[[str], Tiny]) -> Tiny:
    """Every architecture in turn."""
    return tiny_of(request.param)


def alone(model: torch.nn.Module, data: EncodedExamples, *, types: bool) -> Tensor:
    """The stock classifier's logits of each sequence by itself."""
    found = []
    for start, stop in zip(data.offsets[:-1], data.offsets[1:], strict=True):
        extra = {"token_type_ids": torch.from_numpy(data.types[None, start:stop])} if types else {}
        found.append(model(input_ids=torch.from_numpy(data.ids[None, start:stop]), **extra).logits[0])
    return torch.stack(found)


def padded(model: torch.nn.Module, data: EncodedExamples, *, types: bool) -> Tensor:
    """The stock classifier's logits of one padded batch with its mask."""
    shape = len(data), int(data.lengths.max())
    inside = torch.from_numpy(np.arange(shape[1]) < data.lengths[:, None])
    ids = torch.full(shape, model.config.pad_token_id)
    ids[inside] = torch.from_numpy(data.ids)
    kinds = torch.zeros(shape, dtype=torch.int64)
    kinds[inside] = torch.from_numpy(data.types)
    extra = {"token_type_ids": kinds} if types else {}
    return model(input_ids=ids, attention_mask=inside.long(), **extra).logits


def packed(site: Site, jobs: list[Job]) -> list[Tensor]:
    """Our logits of all the clients' training examples in one row."""
    row = collate_packed([site.data[job.client].splits["train"] for job in jobs], device=torch.device("cpu"))
    with torch.no_grad(), forward(row, [job.params for job in jobs], site) as logits:
        return logits


def test_every_family_has_a_tiny_model(tiny_of: Callable, tiny) -> None:
    assert tiny_of(tiny.name).backbone.family is FAMILIES[tiny.name]
    assert set(FAMILIES) == set(ARCHITECTURES)


@pytest.mark.parametrize("targets", [None, ("all-linear",)], ids=["usual", "all-linear"])
def test_a_packed_row_equals_the_stock_classifier_on_each_sequence_and_on_a_padded_batch(
    tiny, site_of, spec_of, targets
) -> None:
    specs = [
        spec_of(name="a-0", labels=3, ranks=(1, 2, 4)),
        spec_of(name="b-0", labels=2, ranks=(4, 1, 3), examples=5, pairs=True),
        spec_of(name="c-0", labels=0, ranks=(2, 2, 2), examples=1),
    ]
    site = site_of(tiny, *specs, scale=SCALE.__getitem__, targets=targets or tiny.targets)
    leaves = None if targets is None else {name.rsplit(".", 1)[-1] for name in site.modules}
    jobs = [
        Job(client=spec.name, params=tiny.params(spec, leaves, seed=i), round=1, options=None)
        for i, spec in enumerate(specs)
    ]
    for job, ours in zip(jobs, packed(site, jobs), strict=True):
        data = site.data[job.client].splits["train"]
        assert len(set(data.lengths)) > 1 or len(data) == 1
        model = tiny.merged(job.params, SCALE.__getitem__)
        with torch.no_grad():
            for reference in (alone, padded):
                expected = reference(model, data, types=tiny.backbone.family.token_types)
                assert expected.abs().max() > 0.1
                torch.testing.assert_close(ours, expected, atol=3e-5, rtol=3e-5)


def test_rows_of_single_tokens_and_of_equal_lengths_equal_the_stock_classifier(tiny, site_of, spec_of) -> None:
    spec = spec_of(name="a-0", labels=2, words=(1, 1), examples=2)
    site = site_of(tiny, spec, scale=SCALE.__getitem__)
    job = Job(client="a-0", params=tiny.params(spec), round=1, options=None)
    data = site.data["a-0"].splits["train"]
    assert len(set(data.lengths)) == 1
    with torch.no_grad():
        expected = alone(tiny.merged(job.params, SCALE.__getitem__), data, types=tiny.backbone.family.token_types)
    torch.testing.assert_close(packed(site, [job])[0], expected, atol=3e-5, rtol=3e-5)


def test_a_sequence_does_not_see_its_neighbours(tiny, site_of, spec_of) -> None:
    specs = [spec_of(name="a-0"), spec_of(name="b-0")]
    site = site_of(tiny, *specs)
    jobs = [Job(client=s.name, params=tiny.params(s, seed=i), round=1, options=None) for i, s in enumerate(specs)]
    other = dataclasses.replace(jobs[1], params={key: 3 * value for key, value in jobs[1].params.items()})
    before, after = packed(site, jobs), packed(site, [jobs[0], other])
    torch.testing.assert_close(before[0], after[0], atol=1e-6, rtol=1e-6)
    assert (before[1] - after[1]).abs().max() > 1e-2


def test_the_head_has_the_stock_names_and_shapes(tiny) -> None:
    model = tiny.stock(5)
    inside = model.base_model_prefix + "."
    expected = {f"head.{n}": tuple(t.shape) for n, t in model.state_dict().items() if not n.startswith(inside)}
    assert head_shapes(tiny.backbone.family, hidden=32, num_labels=5) == expected
    assert model.base_model_prefix == tiny.backbone.family.prefix


def test_the_default_targets_are_the_layers_that_peft_adapts(tiny) -> None:
    from peft import LoraConfig, get_peft_model

    named = {"distilbert": ["q_lin", "v_lin"], "phi3": ["qkv_proj"]}.get(tiny.name)  # PEFT has no entries for these
    adapted = get_peft_model(
        tiny.stock(), LoraConfig(task_type="SEQ_CLS", target_modules=named, fan_in_fan_out=tiny.name == "gpt2")
    )
    expected = {
        name.removeprefix(f"base_model.model.{tiny.backbone.family.prefix}.").removesuffix(".lora_A.default.weight")
        for name, _ in adapted.named_parameters()
        if ".lora_A." in name
    }
    assert default_targets(tiny.name) == tiny.targets
    assert set(target_modules(tiny.backbone, tiny.targets)) == expected


def test_a_client_loads_what_the_server_sent_and_leaves_it_untouched(tiny, site_of, spec_of) -> None:
    spec = spec_of(name="a-0")
    site, params = site_of(tiny, spec), tiny.params(spec)
    copies = {key: value.clone() for key, value in params.items()}
    options = TrainOptions(seed=1, hash_loaded=True, lr=1e-2)
    job = Job(client="a-0", params=params, round=1, options=options)
    (update,) = train([job], site)
    assert update.loaded == tree.digest(params)
    assert update.keys == len(params)
    assert list(params) == list(copies)
    assert all(torch.equal(params[key], value) for key, value in copies.items())
    assert not any(value.requires_grad for value in [*params.values(), *update.params.values()])
    assert set(update.params) == set(params)
    for key, value in update.params.items():
        assert value.shape == params[key].shape
        assert not torch.equal(value, params[key]), f"{key} did not train"
    for key in params:
        changed = {**params, key: params[key] + 1e-6}
        still = dataclasses.replace(options, max_steps=0)
        (other,) = train([dataclasses.replace(job, params=changed, options=still)], site)
        assert other.loaded == tree.digest(changed) != update.loaded


def test_without_the_audit_nothing_is_hashed(tiny, site_of, spec_of) -> None:
    spec = spec_of(name="a-0")
    job = Job(client="a-0", params=tiny.params(spec), round=1, options=TrainOptions(seed=1, max_steps=1))
    (update,) = train([job], site_of(tiny, spec))
    assert update.loaded is None


@pytest.mark.parametrize("targets", [None, ("all-linear",)], ids=["usual", "all-linear"])
def test_gradient_checkpointing_trains_the_same_model(tiny, site_of, spec_of, targets) -> None:
    specs = [spec_of(name="a-0"), spec_of(name="b-0", ranks=(4, 1, 2), labels=3)]
    plain = site_of(tiny, *specs, targets=targets or tiny.targets)
    leaves = {name.rsplit(".", 1)[-1] for name in plain.modules}
    checkpointed = dataclasses.replace(plain, backbone=load_backbone(str(tiny.path), gradient_checkpointing=True))
    runs: list[int] = []
    first = checkpointed.modules[next(iter(checkpointed.modules))]
    options = TrainOptions(seed=3, dropout=0.3, lr=1e-2, max_steps=3, batch_size=4)
    jobs = [Job(client=s.name, params=tiny.params(s, leaves), round=1, options=options) for s in specs]
    expected = train(jobs, plain)
    handle = first.register_forward_hook(lambda *_: runs.append(1))
    found = train(jobs, checkpointed)
    handle.remove()
    assert len(runs) == 2 * options.max_steps, "the blocks are not run again in the backward pass"
    assert "forward" not in vars(first)
    for ours, theirs in zip(found, expected, strict=True):
        for key, value in theirs.params.items():
            torch.testing.assert_close(ours.params[key], value, atol=1e-6, rtol=1e-6, msg=key)


def test_flash_attention_trains_the_same_model(tiny, site_of, spec_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a function that computes on a CPU what the kernel computes on a GPU."""
    monkeypatch.setattr(attention, "varlen_attn", varlen_in_turn)
    specs = [spec_of(name="a-0"), spec_of(name="b-0", ranks=(4, 1, 2), labels=3)]
    plain = site_of(tiny, *specs)
    if tiny.name == "gemma2":
        with pytest.raises(ModelError, match="caps its attention scores, and --fast-kernels do not; leave them out"):
            load_backbone(str(tiny.path), fast=True)
        return
    fast = dataclasses.replace(plain, backbone=load_backbone(str(tiny.path), fast=True))
    options = TrainOptions(seed=3, lr=1e-2, max_steps=3, batch_size=4)
    jobs = [Job(client=s.name, params=tiny.params(s), round=1, options=options) for s in specs]
    for ours, theirs in zip(train(jobs, fast), train(jobs, plain), strict=True):
        for key, value in theirs.params.items():
            torch.testing.assert_close(ours.params[key], value, atol=1e-5, rtol=1e-5, msg=key)
    with stock_attention(fast.backbone):
        pass
    monkeypatch.setattr(attention, "varlen_attn", lambda *_, **__: pytest.fail("asked for, and again after stock"))
    with pytest.raises(pytest.fail.Exception, match="after stock"):
        train(jobs, fast)


def norm(params: Params) -> float:
    """The root of the sum of squares of all tensors."""
    return float(sum(tensor.double().square().sum() for tensor in params.values()) ** 0.5)


def half_jobs(tiny, spec_of, *, steps: int, **words: float):
    specs = [spec_of(name="a-0"), spec_of(name="b-0", ranks=(4, 1, 2), labels=0)]
    options = TrainOptions(**{"seed": 3, "lr": 1e-3, "max_steps": steps, "epochs": steps, "batch_size": 4, **words})
    return specs, [Job(client=s.name, params=tiny.params(s), round=1, options=options) for s in specs]


def test_fp16_stays_near_float32(tiny, site_of, spec_of) -> None:
    specs, jobs = half_jobs(tiny, spec_of, steps=4)
    exact = train(jobs, site_of(tiny, *specs))
    for half, full, job in zip(train(jobs, site_of(tiny, *specs, fp16=True)), exact, jobs, strict=True):
        assert {value.dtype for value in half.params.values()} == {torch.float32}
        assert half.metrics["loss"] == pytest.approx(full.metrics["loss"], rel=0.02, abs=0.005)
        assert half.metrics["loss"] != full.metrics["loss"]
        moved = norm(tree.add(full.params, job.params, scale=-1.0))
        apart = norm(tree.add(half.params, full.params, scale=-1.0))
        assert apart < 0.3 * moved


def test_scaling_the_loss_by_a_power_of_two_changes_no_bit(tiny_of, site_of, spec_of, monkeypatch) -> None:
    tiny = tiny_of("bert")
    specs, jobs = half_jobs(tiny, spec_of, steps=4)
    plain = train(jobs, site_of(tiny, *specs))
    monkeypatch.setattr(Site, "autocast", lambda _: torch.autocast("cpu", enabled=False))
    for one, other in zip(plain, train(jobs, site_of(tiny, *specs, fp16=True)), strict=True):
        assert all(torch.equal(one.params[key], other.params[key]) for key in one.params)


def test_a_scaled_gradient_that_overflows_halves_the_scale_and_moves_nothing(
    tiny_of, site_of, spec_of, monkeypatch
) -> None:
    tiny = tiny_of("bert")
    monkeypatch.setattr(import_module("atlas_fl.client.optimizer"), "LOSS_SCALE", 2.0**30)
    specs, jobs = half_jobs(tiny, spec_of, steps=2)
    for update, job in zip(train(jobs, site_of(tiny, *specs, fp16=True)), jobs, strict=True):
        assert all(torch.equal(update.params[key], job.params[key]) for key in job.params)
    specs, jobs = half_jobs(tiny, spec_of, steps=24)
    for update, job in zip(train(jobs, site_of(tiny, *specs, fp16=True)), jobs, strict=True):
        assert all(torch.isfinite(value).all() for value in update.params.values())
        assert any(not torch.equal(update.params[key], job.params[key]) for key in job.params)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_bf16_stays_near_float32(tiny, site_of, spec_of, dropout) -> None:
    specs, jobs = half_jobs(tiny, spec_of, steps=4, dropout=dropout, epochs=1)
    exact = train(jobs, site_of(tiny, *specs))
    for half, full, job in zip(train(jobs, site_of(tiny, *specs, bf16=True)), exact, jobs, strict=True):
        assert all(torch.isfinite(value).all() for value in half.params.values())
        assert {value.dtype for value in half.params.values()} == {torch.float32}
        assert half.metrics["loss"] == pytest.approx(full.metrics["loss"], rel=0.1, abs=0.02)
        assert half.metrics["loss"] != full.metrics["loss"]
        moved = norm(tree.add(full.params, job.params, scale=-1.0))
        apart = norm(tree.add(half.params, full.params, scale=-1.0))
        assert apart < 0.6 * moved  # Adam divides by the gradient's size, so small gradients' noise is not small


def test_frozen_layers_in_bf16_give_the_bits_of_autocast(tiny, site_of, spec_of) -> None:
    specs, jobs = half_jobs(tiny, spec_of, steps=2, epochs=1)
    rounded = dataclasses.replace(tiny, backbone=load_backbone(str(tiny.path)))
    linear = [module for module in rounded.backbone.model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    for parameter in (parameter for module in linear for parameter in module.parameters(recurse=False)):
        parameter.data = parameter.data.to(torch.bfloat16)
    expected, found = (train(jobs, site_of(one, *specs, bf16=True)) for one in (tiny, rounded))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one.params[key], other.params[key]) for key in one.params)
