"""Adapters on images in packs, against themselves alone and against stock transformers with PEFT."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageClassification

from atlas_fl.client.batching import collate_packed, forward, make_row
from atlas_fl.client.job import ClientTokens, Job, Site, Update
from atlas_fl.client.local_training import train
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions, ImportanceOptions, TrainOptions
from atlas_fl.client.registry import ACTIONS
from atlas_fl.data.task import Task
from atlas_fl.methods.second_model import initial_gate
from atlas_fl.models.backbone import Backbone, block_index, module_dims
from atlas_fl.models.lora import init_head
from atlas_fl.models.peft_io import default_targets, export_adapter, import_adapter
from atlas_fl.models.prefix_cache import PrefixCache
from atlas_fl.models.registry import VISION_FAMILIES, head_shapes
from atlas_fl.models.tokenization import EncodedExamples, encode_images
from atlas_fl.models.vision import preprocess
from atlas_fl.models.vision_loading import load_image_backbone, tokens_per_image
from tests.laws.test_packs import HARD as PACKED
from tests.models.tiny_vision import save_tiny
from tests.second_model import add_gated, combine

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's

SIDES = {"a-0": (8, 1), "b-0": (28, 3), "c-0": (16, 1)}
"""Side and channels of every client's images: tasks bring images of any size."""
LABELS = {"a-0": 3, "b-0": 5, "c-0": 3}
RANKS = {"a-0": (1, 4, 2), "b-0": (3, 3, 3), "c-0": (4, 1, 1)}
EXAMPLES = {"a-0": 9, "b-0": 6, "c-0": 7}
HARD = dataclasses.replace(PACKED, proximal_mu=0.0, label_smoothing=0.1, crop=2, flip=True)
Load = Callable[..., tuple[Path, Backbone]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """(directory, backbone) of a tiny model of an architecture, at an image size."""

    @cache
    def folder(model_type: str) -> Path:
        return save_tiny(tmp_path_factory.mktemp("tiny"), model_type)

    return cache(
        lambda model_type, size=16: (folder(model_type), load_image_backbone(str(folder(model_type)), image_size=size))
    )


def images(client: str, length: int) -> EncodedExamples:
    source, (side, channels) = np.random.default_rng(sum(map(ord, client))), SIDES[client]
    pixels = source.integers(256, size=(EXAMPLES[client], side, side, channels), dtype=np.uint8)
    return encode_images(pixels, source.integers(LABELS[client], size=EXAMPLES[client]), length=length)


def site_of(backbone: Backbone, targets: Sequence[str] = (), *, max_tokens: int = 4096) -> Site:
    assert backbone.vision is not None
    length = tokens_per_image(backbone.vision)
    data = {
        client: ClientTokens(
            task=Task(name=client[0], num_labels=LABELS[client], images=True, load=lambda _: pytest.fail("not read")),
            splits={split: images(client, length) for split in ("train", "validation", "test")},
        )
        for client in SIDES
    }
    return Site(
        backbone=backbone,
        data=data,
        targets=tuple(targets or default_targets(backbone.family.model_type)),
        scale=lambda r: 0.5 + 1 / r,
        max_tokens=max_tokens,
    )


def params_of(site: Site, client: str) -> dict[str, Tensor]:
    """A trained-looking model: random A and B and a head."""
    source = torch.Generator().manual_seed(len(client) + EXAMPLES[client])
    params = {}
    for name, module in site.modules.items():
        (d_in, d_out), rank = module_dims(module), RANKS[client][block_index(site.backbone, name)]
        params[f"{name}.lora_A"] = torch.empty(rank, d_in).normal_(0, 0.2, generator=source)
        params[f"{name}.lora_B"] = torch.empty(d_out, rank).normal_(0, 0.2, generator=source)
    shapes = head_shapes(site.backbone.family, hidden=site.backbone.width, num_labels=LABELS[client])
    return params | {key: 10 * value for key, value in init_head(shapes, seed=1, group=client).items()}


def jobs_of(site: Site, options: object, *, round: int = 1) -> list[Job]:
    return [Job(client=name, params=params_of(site, name), round=round, options=options) for name in site.data]


@pytest.mark.parametrize("model_type", sorted(VISION_FAMILIES))
def test_logits_and_gradients_are_those_of_stock_transformers_with_peft(load: Load, tmp_path, model_type: str) -> None:
    """With adapters on query, key, value, output and both layers of the feed-forward part."""
    path, backbone = load(model_type)
    site = site_of(backbone, ("all-linear",))
    assert len(site.modules) == 3 * 6
    clients = [{key: t.requires_grad_() for key, t in params_of(site, name).items()} for name in site.data]
    row = collate_packed([own.splits["test"] for own in site.data.values()], device=torch.device("cpu"))
    with forward(row, clients, site) as logits:
        torch.stack([cross_entropy(own, label) for own, label in zip(logits, row.labels)]).sum().backward()
    for name, params, own in zip(site.data, clients, logits):
        data, folder = site.data[name].splits["test"], tmp_path / name
        detached = {key: tensor.detach() for key, tensor in params.items()}
        export_adapter(detached, folder, family=backbone.family, base=str(path), scale=site.scale)
        stock = AutoModelForImageClassification.from_pretrained(
            path, num_labels=LABELS[name], ignore_mismatched_sizes=True
        )
        theirs = PeftModel.from_pretrained(stock, str(folder), is_trainable=True).eval()
        assert backbone.vision is not None
        found = theirs(preprocess(backbone.vision, data.pixels)).logits
        torch.testing.assert_close(own, found, atol=1e-5, rtol=1e-5)
        assert found.std() > 0.05
        cross_entropy(found, torch.from_numpy(data.labels)).backward()
        for parameter in theirs.parameters():  # PEFT writes parameters, and we want to compare gradients
            parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        theirs.save_pretrained(str(folder / "gradients"))
        gradients, _ = import_adapter(folder / "gradients", family=backbone.family)
        assert gradients.keys() == params.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(params[key].grad, gradient, atol=1e-5, rtol=1e-4, msg=key)
        assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 0.01


@pytest.mark.parametrize("model_type", ["vit", "dinov2"])
def test_at_another_image_size_peft_gives_the_same_logits_by_interpolating_positions(
    load: Load, tmp_path: Path, model_type: str
) -> None:
    path, backbone = load(model_type, 24)
    site = site_of(backbone)
    params, data = params_of(site, "b-0"), site.data["b-0"].splits["test"]
    export_adapter(params, tmp_path, family=backbone.family, base=str(path), scale=site.scale)
    stock = AutoModelForImageClassification.from_pretrained(path, num_labels=5, ignore_mismatched_sizes=True)
    theirs = PeftModel.from_pretrained(stock, str(tmp_path)).eval()
    how = {"interpolate_pos_encoding": True} if model_type == "vit" else {}
    row = collate_packed([data], device=torch.device("cpu"))
    assert backbone.vision is not None
    with torch.no_grad(), forward(row, [params], site) as logits:
        wanted = theirs(preprocess(backbone.vision, data.pixels), **how).logits
    torch.testing.assert_close(logits[0], wanted, atol=1e-5, rtol=1e-5)


def test_a_gate_on_images_is_that_of_the_stock_classifier(load: Load) -> None:
    path, backbone = load("vit")
    site = site_of(backbone, ("all-linear",))
    own = params_of(site, "b-0")
    rest = {key: -value if key.endswith("lora_A") else value for key, value in own.items()}
    rows = torch.tensor([[0.3], [-0.3]])
    gate = {key: rows + value for key, value in initial_gate(own).items()}
    params = combine(own, rest, "stacked", weight=0.6, scale=site.scale, gate=gate)
    stock = AutoModelForImageClassification.from_pretrained(path, num_labels=5, ignore_mismatched_sizes=True)
    theirs = add_gated(stock.eval(), params, family=backbone.family, scale=site.scale)
    data = site.data["b-0"].splits["test"]
    row = collate_packed([data], device=torch.device("cpu"))
    assert backbone.vision is not None
    with torch.no_grad(), forward(row, [params], site) as logits:
        wanted = theirs(preprocess(backbone.vision, data.pixels)).logits
    torch.testing.assert_close(logits[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["vit", "dinov2"])
def test_a_pack_trains_every_client_as_it_would_train_alone(load: Load, model_type: str) -> None:
    site = site_of(load(model_type)[1], ("q_proj", "v_proj", "fc1"))
    jobs = jobs_of(site, HARD)
    jobs[1] = dataclasses.replace(jobs[1], options=dataclasses.replace(HARD, epochs=1, flip=False, dropout=0.0))
    together = train(jobs, site)
    for job, update in zip(jobs, together, strict=True):
        (alone,) = train([job], site)
        assert update.metrics["loss"] == pytest.approx(alone.metrics["loss"], abs=1e-5)
        for key, value in alone.params.items():
            torch.testing.assert_close(update.params[key], value, atol=2e-4, rtol=1e-3, msg=key)
            assert (value - job.params[key]).abs().max() > 1e-3, f"{key} did not train"


def test_fingerprints_importance_and_scores_are_the_same_in_packs_and_alone(load: Load) -> None:
    site = site_of(load("dinov2")[1])
    warm = TrainOptions(seed=1, batch_size=3, lr=1e-2)
    asked = {
        "fingerprint": FingerprintOptions(kind="delta", train=warm, sketch_dim=64, batches=2, blocks=1, steps=4),
        "importance": ImportanceOptions(kind="gradient", train=warm, batches=2),
        "evaluate": EvaluateOptions(split="test"),
    }
    for action, options in asked.items():
        jobs = jobs_of(site, options)
        together = ACTIONS[action](jobs, site)
        for job, update in zip(jobs, together, strict=True):
            same_answer(update, ACTIONS[action]([job], site)[0])
    small = dataclasses.replace(site, max_tokens=1)
    scored = [ACTIONS["evaluate"](jobs_of(at, asked["evaluate"]), at) for at in (site, small)]
    for left, right in zip(*scored, strict=True):
        same_answer(left, right)


def same_answer(left: Update, right: Update) -> None:
    assert left.client == right.client and left.params.keys() == right.params.keys()
    for key, value in left.params.items():
        torch.testing.assert_close(value, right.params[key], atol=1e-4, rtol=1e-3, msg=key)
    for name in left.metrics.keys() - {"seconds"}:
        assert left.metrics[name] == pytest.approx(right.metrics[name], abs=1e-4), name


@pytest.mark.parametrize("kind", ["gradient", "fisher"])
def test_the_other_fingerprints_are_unit_sketches_that_tell_clients_apart(load: Load, kind: str) -> None:
    site = site_of(load("vit")[1])
    warm = TrainOptions(seed=1, batch_size=3)
    options = FingerprintOptions(kind=kind, train=warm, sketch_dim=64, batches=2, blocks=2, steps=4)
    found = ACTIONS["fingerprint"](jobs_of(site, options), site)
    sketches = [update.params["sketch.first"] for update in found]
    assert [float(own.norm()) for own in sketches] == pytest.approx([1.0] * 3, abs=1e-5)
    assert float((sketches[0] - sketches[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("how", ["checkpointing", "bf16"])
def test_blocks_computed_again_train_the_same_model_and_bf16_nearly(load: Load, how: str) -> None:
    path, backbone = load("vit")
    usual = site_of(backbone)
    again = load_image_backbone(str(path), gradient_checkpointing=True)
    other = site_of(again) if how == "checkpointing" else dataclasses.replace(usual, bf16=True)
    jobs = jobs_of(usual, dataclasses.replace(HARD, epochs=1))
    close = {"atol": 1e-5, "rtol": 1e-5} if how == "checkpointing" else {"atol": 0.05, "rtol": 0.1}
    for left, right in zip(train(jobs, usual), train(jobs, other), strict=True):
        assert left.metrics["loss"] == pytest.approx(
            right.metrics["loss"], rel=1e-5 if how == "checkpointing" else 0.05
        )
        for key in left.params:
            torch.testing.assert_close(left.params[key], right.params[key], msg=key, **close)
        assert how == "checkpointing" or any(
            not torch.equal(left.params[key], right.params[key]) for key in left.params
        )


@pytest.mark.parametrize("model_type", sorted(VISION_FAMILIES))
def test_logits_and_gradients_above_kept_states_are_those_of_the_whole_model(load: Load, model_type: str) -> None:
    site = dataclasses.replace(site_of(load(model_type)[1]), first_adapted=1)
    batches = [own.splits["test"].take(np.array([3, 0, 5])) for own in site.data.values()]
    found = []
    for row in (make_row(batches, site), collate_packed(batches, device=torch.device("cpu"))):
        clients = [{key: t.requires_grad_() for key, t in params_of(site, name).items()} for name in site.data]
        with forward(row, clients, site) as logits:
            torch.stack([cross_entropy(own, label) for own, label in zip(logits, row.labels)]).sum().backward()
        found.append([*logits, *(tensor.grad for params in clients for tensor in params.values())])
    assert min(float(tensor.detach().abs().max()) for tensor in found[0]) > 1e-4
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("model_type", ["vit", "dinov2"])
def test_kept_states_of_images_change_no_bit_and_those_of_augmented_ones_are_not_kept(
    load: Load, model_type: str, moved: bool
) -> None:
    plain = dataclasses.replace(site_of(load(model_type)[1]), first_adapted=2)
    options = HARD if moved else dataclasses.replace(HARD, crop=0, flip=False)
    ends, used = [], []
    for budget in (0, 10**9):
        site = dataclasses.replace(plain, prefix_cache=PrefixCache(budget_bytes=budget))
        trained = train(jobs_of(site, options), site)
        used.append(site.prefix_cache.used_bytes)
        scored = ACTIONS["evaluate"](jobs_of(site, EvaluateOptions(split="test")), site)
        ends.append([[update.params for update in trained], [update.metrics["loss"] for update in scored]])
    for models, losses in ends[1:]:
        assert losses == ends[0][1]
        for left, right in zip(ends[0][0], models, strict=True):
            assert all(torch.equal(tensor, right[key]) for key, tensor in left.items())
    tokens = sum(int(own.splits["train"].lengths.sum()) for own in plain.data.values())
    assert used == [0, 0 if moved else tokens * 32 * 4]
