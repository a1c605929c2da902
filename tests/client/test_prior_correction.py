"""A client's own class frequencies in its logits: by hand, against plain torch, and that nothing else changes."""

import dataclasses
import math

import pytest
import torch

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.job import Job, log_prior
from atlas_fl.client.local_training import batches, train
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.methods.prior_correction import correct_logits

OPTIONS = TrainOptions(seed=3, batch_size=4, lr=1e-2, clip=0.0, max_steps=3, prior_correction=True)


@pytest.fixture
def client(client_of):
    """A client with seven examples of class 0 and one of class 1."""
    site, params = client_of(examples=8)
    splits = site.data["a-0"].splits
    for examples in splits.values():
        examples.labels[:] = 0
    splits["train"].labels[3] = 1
    return site, params


def test_the_prior_by_hand(client) -> None:
    """Seven and one examples of two classes: (8, 2) / 10."""
    site, params = client
    assert site.data["a-0"].task.num_labels == 2
    prior = log_prior(Job(client="a-0", params=params, round=1, options=OPTIONS), site)
    assert prior.tolist() == pytest.approx([math.log(0.8), math.log(0.2)])
    plain = dataclasses.replace(OPTIONS, prior_correction=False)
    assert log_prior(Job(client="a-0", params=params, round=1, options=plain), site) is None
    logits = torch.zeros(1, 2)
    assert correct_logits(logits, None) is logits
    assert correct_logits(logits, prior).softmax(-1).tolist()[0] == pytest.approx([0.8, 0.2])


def test_a_round_equals_plain_torch_with_the_prior_in_the_loss(client) -> None:
    site, params = client
    job = Job(client="a-0", params=params, round=1, options=OPTIONS)
    (update,) = train([job], site)
    model = {key: tensor.detach().clone().requires_grad_() for key, tensor in params.items()}
    optimizer = torch.optim.AdamW(model.values(), lr=OPTIONS.lr, weight_decay=0.0)
    prior = torch.tensor([math.log(0.8), math.log(0.2)])
    for batch in batches(site.data["a-0"].splits["train"], job, secret=None):
        optimizer.zero_grad()
        row = collate_packed([batch], device=site.backbone.device)
        with forward(row, [model], site) as (logits,):
            torch.nn.functional.nll_loss((logits + prior).log_softmax(-1), row.labels[0]).backward()
        optimizer.step()
    torch.testing.assert_close(update.params, model, atol=2e-5, rtol=1e-4)


def test_scores_are_of_corrected_logits(client) -> None:
    """With a head of zeros the prior alone speaks: class 0, with the loss -log .8."""
    site, params = client
    flat = {key: torch.zeros_like(tensor) if key.startswith("head.") else tensor for key, tensor in params.items()}
    losses = {}
    for corrected in (False, True):
        options = EvaluateOptions(split="test", prior_correction=corrected)
        (scored,) = evaluate([Job(client="a-0", params=flat, round=1, options=options)], site)
        losses[corrected] = scored.metrics["loss"]
    assert losses[False] == pytest.approx(math.log(2), rel=1e-4)
    assert losses[True] == pytest.approx(-math.log(0.8), rel=1e-4)
