"""Means and variances of what the head reads by class, against a head that hands its input on."""

import dataclasses

import numpy as np
import pytest
import torch

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Job
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.reports import PackReport, train_and_report
from atlas_fl.methods.fedpac import ClassifierCollaboration, summarize

OPTIONS = TrainOptions(seed=3, batch_size=4, lr=1e-2)


def test_means_and_variances_by_hand() -> None:
    """Class 0 has (0, 0) and (2, 4): mean (1, 2), mean squared distance 1 + 4; class 1 nothing; class 2 one example."""
    features = torch.tensor([[0.0, 0.0], [7.0, 8.0], [2.0, 4.0]])
    report = summarize(features, np.array([0, 2, 0]), num_labels=3)
    assert report["counts"].tolist() == [2, 0, 1]
    assert report["means"].tolist() == [[1.0, 2.0], [0.0, 0.0], [7.0, 8.0]]
    assert report["variances"].tolist() == [5.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("family", "max_tokens"), [("bert", 4096), ("bert", 24), ("roberta", 4096), ("distilbert", 24)]
)
def test_features_are_what_enters_the_last_layer_of_the_head(client_of, family: str, max_tokens: int) -> None:
    site, params = client_of(family, examples=10, max_tokens=max_tokens)
    trained = {key: tensor + 0.05 if key.endswith("lora_B") else tensor for key, tensor in params.items()}
    job = Job(client="a-0", params=trained, round=1, options=OPTIONS)
    report = ClassifierCollaboration.measure(PackReport(jobs=[job], site=site))["a-0"]
    data, width = site.data["a-0"].splits["train"], site.backbone.width
    last = site.backbone.family.head[-1].key
    identity = {last + "weight": torch.eye(width), last + "bias": torch.zeros(width)}
    assert identity.keys() <= trained.keys(), "the last layer of the head is linear"
    row = collate_packed([data], device=site.backbone.device)
    with torch.no_grad(), forward(row, [trained | identity], site) as (features,):
        for label in range(site.data["a-0"].task.num_labels):
            own = features[torch.from_numpy(data.labels) == label].double()
            assert int(report["counts"][label]) == len(own)
            if len(own):
                torch.testing.assert_close(report["means"][label].double(), own.mean(dim=0), atol=1e-5, rtol=1e-4)
                variance = (own - own.mean(dim=0)).square().sum(dim=1).mean()
                torch.testing.assert_close(report["variances"][label].double(), variance, atol=1e-5, rtol=1e-4)


def test_they_are_of_the_model_before_training_and_change_nothing_in_it(tiny_of, site_of, spec_of) -> None:
    tiny, spec, other = tiny_of("bert"), spec_of(name="a-0", examples=10), spec_of(name="b-0", examples=7)
    site = site_of(tiny, spec, other)
    asked = dataclasses.replace(OPTIONS, report="class_features")
    jobs = [
        [Job(client=one.name, params=tiny.params(one), round=1, options=options) for one in (spec, other)]
        for options in (OPTIONS, asked)
    ]
    plain, reporting = (train_and_report(one, site) for one in jobs)
    for without, update, job in zip(plain, reporting, jobs[1], strict=True):
        assert without.reported == {}
        assert all(torch.equal(without.params[key], tensor) for key, tensor in update.params.items())
        alone = ClassifierCollaboration.measure(PackReport(jobs=[job], site=site))[job.client]
        assert all(torch.equal(alone[key], tensor) for key, tensor in update.reported["class_features"].items())
        assert int(update.reported["class_features"]["counts"].sum()) == update.examples
