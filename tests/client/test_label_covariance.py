"""The covariance of labels and features: by hand, against the gradient of a head, and from the stock model."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from atlas_fl.client.fingerprint import FIRST, SECOND, fingerprint
from atlas_fl.client.job import Job
from atlas_fl.client.label_covariance import LABELS, label_covariance, label_sketch
from atlas_fl.client.local_training import positions
from atlas_fl.client.options import FingerprintOptions, TrainOptions
from atlas_fl.clustering.sketch import sketch
from atlas_fl.split.channel import Cut

TRAIN = TrainOptions(seed=2, batch_size=3)
OPTIONS = FingerprintOptions(kind="fisher", sketch_dim=64, train=TRAIN, batches=2, steps=6, labels=True)


def test_by_hand() -> None:
    # Two examples of class 1 at (2, 0) and (4, 2), two of class 0 at (0, 0) and (2, 2); the mean is (2, 1). The first
    # pair lies (1, 0) from it on average, the other (-1, 0), and a half of the examples is of each class.
    features = torch.tensor([[2.0, 0.0], [4.0, 2.0], [0.0, 0.0], [2.0, 2.0]])
    covariance = label_covariance(features, torch.tensor([1, 1, 0, 0]), num_labels=2)
    assert covariance.tolist() == [[-0.5, 0.0], [0.5, 0.0]]
    several = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert label_covariance(features, several, num_labels=2).equal(covariance)
    numbers = label_covariance(features, torch.tensor([1.0, 1.0, 0.0, 0.0]), num_labels=1)
    assert numbers.tolist() == [[0.5, 0.0]]


def test_it_is_the_gradient_of_a_head_that_answers_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, 5, generator=generator) + 3
    labels = torch.randint(3, (20,), generator=generator)
    frequencies = one_hot(labels, 3).float().mean(0)
    weight = torch.zeros(3, 5, requires_grad=True)
    answers = (features - features.mean(0)) @ weight.T + frequencies
    loss = (answers - one_hot(labels, 3)).square().sum(1).mean() / 2
    (gradient,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(label_covariance(features, labels, num_labels=3), -gradient)


def test_what_all_texts_of_a_client_have_in_common_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(12, 4, generator=generator), torch.arange(12) % 2
    moved = label_covariance(features + torch.tensor([5.0, -2.0, 0.0, 1.0]), labels, num_labels=2)
    torch.testing.assert_close(moved, label_covariance(features, labels, num_labels=2), atol=1e-6, rtol=1e-5)
    turned = label_covariance(features, 1 - labels, num_labels=2)
    torch.testing.assert_close(turned.flip(0), label_covariance(features, labels, num_labels=2))


@pytest.mark.parametrize("tiny", ["bert", "gpt2", "qwen2"], indirect=True)
@pytest.mark.parametrize("samples", [None, 7])
def test_it_is_that_of_the_stock_models_states(tiny, client_of, samples: int | None) -> None:
    site, params = client_of(tiny.name, labels=3, examples=11, pairs=True)
    options = dataclasses.replace(OPTIONS, samples=samples)
    job = Job(client="a-0", params=params, round=0, options=options)
    data = site.data["a-0"].splits["train"]
    halves = [
        positions(len(data), "a-0", dataclasses.replace(TRAIN, half=half, most=options.most(half)), secret=None)
        for half in (0, 1)
    ]
    index = np.sort(np.concatenate(halves))
    assert len(index) == (samples or 11)
    stock = tiny.stock(3).base_model
    rows = []
    for start, stop in zip(data.offsets[index], data.offsets[index + 1], strict=True):
        types = {"token_type_ids": torch.from_numpy(data.types[None, start:stop]).long()}
        inputs = {"input_ids": torch.from_numpy(data.ids[None, start:stop]).long()}
        family = tiny.backbone.family
        with torch.no_grad():
            rows.append(stock(**inputs, **(types if family.token_types else {})).last_hidden_state[0].mean(0))
    expected = label_covariance(torch.stack(rows), torch.from_numpy(data.labels[index]), num_labels=3)
    wanted = sketch({LABELS: expected}, dim=64, seed=TRAIN.seed)
    np.testing.assert_allclose(label_sketch(job, site).numpy(), wanted, atol=2e-4)
    # in parts as well: with room for one text at a time
    narrow = dataclasses.replace(site, max_tokens=1)
    torch.testing.assert_close(label_sketch(job, narrow), label_sketch(job, site), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_it_comes_with_a_fingerprint_where_it_is_asked_for(tiny, site_of, spec_of) -> None:
    specs = [spec_of(name="a-0", labels=3, examples=8), spec_of(name="b-0", labels=0, examples=8)]
    site = site_of(tiny, *specs)
    params = [{k: v * 0 if k.endswith("lora_B") else v for k, v in tiny.params(spec).items()} for spec in specs]
    jobs = [Job(client=s.name, params=p, round=0, options=OPTIONS) for s, p in zip(specs, params, strict=True)]
    without = [dataclasses.replace(job, options=dataclasses.replace(OPTIONS, labels=False)) for job in jobs]
    for update, usual, job in zip(fingerprint(jobs, site), fingerprint(without, site), jobs, strict=True):
        assert set(update.params) - set(usual.params) == {LABELS}
        for half in (FIRST, SECOND):
            assert torch.equal(update.params[half], usual.params[half])
        assert torch.equal(update.params[LABELS], label_sketch(job, site))
        assert float(update.params[LABELS].norm()) == pytest.approx(1, abs=1e-5)


def test_one_class_says_nothing_and_a_cut_client_is_not_asked(client_of) -> None:
    site, params = client_of(examples=6)
    tokens = site.data["a-0"]
    one_class = dataclasses.replace(tokens.splits["train"], labels=np.zeros(6, dtype=np.int64))
    only = dataclasses.replace(tokens, splits={**tokens.splits, "train": one_class})
    of_one = dataclasses.replace(site, data={"a-0": only})
    job = Job(client="a-0", params=params, round=0, options=OPTIONS)
    assert not label_sketch(job, of_one).any() and label_sketch(job, site).any()
    (cut,) = fingerprint([dataclasses.replace(job, cut=Cut(blocks=1))], site)
    assert LABELS not in cut.params and FIRST in cut.params
