"""The pull of features to class means: by hand, against plain PyTorch, in a pack as alone, and off to the bit."""

import dataclasses

import pytest
import torch
from torch import Tensor

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Job, Site
from atlas_fl.client.local_training import batches, example_loss, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.methods.fedpac import alignment_loss
from atlas_fl.params import Params

OPTIONS = TrainOptions(seed=3, rounds=6, batch_size=4, lr=1e-2, clip=0.0, epochs=2, feature_alignment=0.7)


def centroids_of(site: Site, client: str) -> Params:
    """Means of all classes but the last, drawn at random."""
    labels = site.data[client].task.num_labels
    means = torch.randn(labels, site.backbone.width, generator=torch.Generator().manual_seed(5))
    seen = torch.ones(labels, dtype=torch.bool)
    seen[-1] = False
    return {"means": means * seen[:, None], "seen": seen}


def test_the_term_by_hand() -> None:
    """Of class 0 (1, 2) is 1 and 2 from (0, 0): 5 / 2; class 1 has no mean: 0; of class 2 nothing is off."""
    features = torch.tensor([[1.0, 2.0], [9.0, 9.0], [3.0, 4.0]], requires_grad=True)
    centroids = {"means": torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]]), "seen": torch.tensor([True, False, True])}
    loss = alignment_loss(features, torch.tensor([0, 1, 2]), centroids)
    assert float(loss.detach()) == pytest.approx(2.5 / 3)
    (gradient,) = torch.autograd.grad(loss, features)
    torch.testing.assert_close(gradient, torch.tensor([[1 / 3, 2 / 3], [0.0, 0.0], [0.0, 0.0]]))


LAST = "last_layer_then_rest"


@pytest.mark.parametrize(
    ("family", "parts"),
    [("bert", "all"), ("bert", "head_then_rest"), ("bert", LAST), ("roberta", LAST), ("distilbert", LAST)],
)
def test_a_round_equals_plain_torch_with_the_term_written_out(client_of, family: str, parts: str) -> None:
    site, params = client_of(family, examples=10)
    sent = {"centroids": centroids_of(site, "a-0")}
    options = dataclasses.replace(OPTIONS, trained_parts=parts)
    job = Job(client="a-0", params=params, round=2, options=options, sent=sent)
    (update,) = train([job], site)

    model = {key: tensor.detach().clone().requires_grad_() for key, tensor in params.items()}
    each = {key: torch.optim.AdamW([tensor], lr=OPTIONS.lr, weight_decay=0.0) for key, tensor in model.items()}
    width, last = site.backbone.width, site.backbone.family.head[-1].key
    identity = {last + "weight": torch.eye(width), last + "bias": torch.zeros(width)}
    steps = list(batches(site.data["a-0"].splits["train"], job, secret=None))
    for done, batch in enumerate(steps):
        row = collate_packed([batch], device=site.backbone.device)
        with forward(row, [{**model, **identity}], site) as (features,):
            pulls: list[Tensor] = [
                (own - job.sent["centroids"]["means"][label]).square().sum() / width
                for own, label in zip(features, row.labels[0].tolist(), strict=True)
                if job.sent["centroids"]["seen"][label]
            ]
            logits = features @ model[last + "weight"].T + model[last + "bias"]
            loss = example_loss(logits, row.labels[0]) + 0.7 * sum(pulls) / len(features)
            gradients = torch.autograd.grad(loss, list(model.values()))
        for (key, tensor), gradient in zip(model.items(), gradients, strict=True):
            is_first = key.startswith(last if parts == LAST else "head.")
            if parts == "all" or is_first == (2 * done < len(steps)):
                tensor.grad = gradient
                each[key].step()
    torch.testing.assert_close(update.params, model, atol=2e-5, rtol=1e-4)


def test_without_weight_or_without_means_training_is_the_same_to_the_bit(client_of) -> None:
    site, params = client_of(examples=10)
    centroids = {"centroids": centroids_of(site, "a-0")}
    without = dataclasses.replace(OPTIONS, feature_alignment=0.0)
    plain, no_weight, no_means, pulled = (
        train([Job(client="a-0", params=params, round=1, options=options, sent=sent)], site)[0].params
        for options, sent in ((without, {}), (without, centroids), (OPTIONS, {}), (OPTIONS, centroids))
    )
    for other in (no_weight, no_means):
        assert all(torch.equal(plain[key], tensor) for key, tensor in other.items())
    assert not all(torch.equal(plain[key], tensor) for key, tensor in pulled.items())


def test_it_pulls_in_a_pack_as_alone(tiny_of, site_of, spec_of) -> None:
    tiny, spec, other = tiny_of("bert"), spec_of(name="a-0", examples=10), spec_of(name="b-0", examples=7)
    site = site_of(tiny, spec, other)
    sent = {"centroids": centroids_of(site, "a-0")}
    jobs = [
        Job(client=one.name, params=tiny.params(one), round=1, options=OPTIONS, sent=sent if one is spec else {})
        for one in (spec, other)
    ]
    for job, together in zip(jobs, train(jobs, site), strict=True):
        (alone,) = train([job], site)
        torch.testing.assert_close(together.params, alone.params, atol=2e-5, rtol=1e-4)
