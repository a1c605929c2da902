"""All weights of a text model, held against plain PyTorch on the stock classifier: training, squares, the export."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

from atlas_fl.client.job import Job
from atlas_fl.client.local_training import batches, train
from atlas_fl.client.options import SensitivityOptions, TrainOptions
from atlas_fl.client.registry import ACTIONS
from atlas_fl.models.backbone import trainable_names
from atlas_fl.models.loading import save_classifier
from atlas_fl.rng import generator
from tests.laws.test_architectures import padded

ADAMW = TrainOptions(seed=3, batch_size=4, lr=2e-3, clip=0.5, max_steps=4, weight_decay=0.02)
SGD = dataclasses.replace(ADAMW, optimizer="sgd", lr=0.02, momentum=0.9, nesterov=True)


@pytest.fixture
def tiny(tiny_of):
    """One architecture, which has a pooler and token types."""
    return tiny_of("bert")


def full_params(tiny, *, labels: int) -> dict[str, torch.Tensor]:
    """The model of the files under the stock classifier's head, by the names that a client trains."""
    stock, names = tiny.stock(labels), dict(tiny.backbone.model.named_parameters())
    inside = stock.base_model_prefix + "."
    heads = {f"head.{key}": own for key, own in stock.state_dict().items() if not key.startswith(inside)}
    body = {key: names[key] for key in trainable_names(tiny.backbone)}
    return {key: own.detach().clone() for key, own in (body | heads).items()}


def stock_name(stock, key: str) -> str:
    return key.removeprefix("head.") if key.startswith("head.") else f"{stock.base_model_prefix}.{key}"


@pytest.mark.parametrize("mu", [0.0, 0.3], ids=["plain", "fedprox"])
@pytest.mark.parametrize("options", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_training_is_a_loop_of_torch_on_the_stock_classifier(tiny, site_of, spec_of, options, mu) -> None:
    """FedProx's term is in the reference's loss, behind the clipping of the data's gradient."""
    options = dataclasses.replace(options, proximal_mu=mu)
    spec = spec_of(name="a-0", labels=3)
    site = site_of(tiny, spec, trainable="full", targets=())
    job = Job(client="a-0", params=full_params(tiny, labels=3), round=1, options=options)
    (update,) = train([job], site)

    stock = tiny.stock(3)
    named = {key: stock.get_parameter(stock_name(stock, key)) for key in job.params}
    is_adam = options.optimizer == "adamw"
    made, more = (torch.optim.AdamW, {}) if is_adam else (torch.optim.SGD, {"momentum": 0.9, "nesterov": True})
    optimizer = made(named.values(), lr=options.lr, weight_decay=options.weight_decay, **more)
    for batch in batches(site.data["a-0"].splits["train"], job, secret=None):
        optimizer.zero_grad()
        cross_entropy(padded(stock, batch, types=True), torch.from_numpy(batch.labels)).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), options.clip)
        if mu:
            (mu / 2 * sum((named[key] - start).square().sum() for key, start in job.params.items())).backward()
        optimizer.step()
    assert set(update.params) == set(job.params)
    assert max(float((update.params[key] - own).abs().max()) for key, own in job.params.items()) > 1e-3
    for key, own in update.params.items():
        # a key's bias has no gradient but rounding, since a softmax does not see it; Adam takes that for a direction,
        # and does so to a lesser degree with any value whose gradient is as small
        if not (key.endswith("key.bias") and is_adam):
            torch.testing.assert_close(own, named[key].detach(), atol=3e-4 if is_adam else 3e-5, rtol=1e-3)


def test_sensitivities_are_the_squared_gradients_of_single_examples(tiny, site_of, spec_of) -> None:
    site = site_of(tiny, spec_of(name="a-0", labels=3), trainable="full", targets=())
    params = full_params(tiny, labels=3)
    names = tuple(key for key in params if not key.startswith("head."))
    options = SensitivityOptions(seed=5, examples=6, labels="true", names=names)
    (update,) = ACTIONS["sensitivity"]([Job(client="a-0", params=params, round=0, options=options)], site)

    data, stock = site.data["a-0"].splits["train"], tiny.stock(3)
    named = dict(stock.named_parameters())
    sums = {key: torch.zeros_like(params[key]) for key in names}
    for k in generator(5, "sensitivity", "a-0").permutation(len(data))[:6]:
        example = data.take([k])
        loss = cross_entropy(padded(stock, example, types=True), torch.from_numpy(example.labels))
        gradients = torch.autograd.grad(loss, [named[stock_name(stock, key)] for key in names])
        for key, gradient in zip(names, gradients, strict=True):
            sums[key] += gradient.square()
    assert update.examples == 6
    assert all(float(own.max()) > 0 for own in sums.values())
    for key, own in sums.items():
        torch.testing.assert_close(update.params[key], own, atol=1e-7, rtol=2e-3)


def test_an_exported_model_gives_the_stock_classifiers_logits(tiny, site_of, spec_of, tmp_path: Path) -> None:
    site = site_of(tiny, spec_of(name="a-0", labels=3))
    params = {key: own + 0.01 for key, own in full_params(tiny, labels=3).items()}
    save_classifier(tiny.backbone, params, tmp_path / "model", labels=["x", "y", "z"])
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert loaded.config.id2label == {0: "x", 1: "y", 2: "z"}

    stock, data = tiny.stock(3), site.data["a-0"].splits["test"]
    stock.load_state_dict({stock_name(stock, key): own for key, own in params.items()}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(padded(loaded, data, types=True), padded(stock, data, types=True))
