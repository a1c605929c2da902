"""Scores against the stock model and scikit-learn, example by example."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, log_loss

from atlas_fl.client import evaluation
from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions
from tests.architectures import ARCHITECTURES


@pytest.mark.parametrize(
    ("tiny", "max_tokens"), [("bert", 1), ("bert", 10_000), *((name, 25) for name in ARCHITECTURES)], indirect=["tiny"]
)
def test_scores_are_those_of_the_stock_model_on_each_example(tiny, site_of, spec_of, max_tokens: int) -> None:
    specs = [spec_of(name="a-0", labels=3, ranks=(1, 4, 2)), spec_of(name="b-0", labels=0, examples=9)]
    site = site_of(tiny, *specs, max_tokens=max_tokens)
    options = EvaluateOptions(split="validation")
    jobs = [Job(client=spec.name, params=tiny.params(spec), round=1, options=options) for spec in specs]
    classes, values = evaluate(jobs, site)
    logits = {}
    for job in jobs:
        data, model = site.data[job.client].splits["validation"], tiny.merged(job.params, site.scale)
        texts = [torch.from_numpy(ids)[None] for ids in np.split(data.ids, data.offsets[1:-1])]
        with torch.no_grad():
            logits[job.client] = np.concatenate([model(input_ids=ids).logits.numpy() for ids in texts])
    labels = site.data["a-0"].splits["validation"].labels
    shares = torch.from_numpy(logits["a-0"]).double().softmax(-1).numpy()
    assert classes.metrics["loss"] == pytest.approx(log_loss(labels, shares, labels=[0, 1, 2]), rel=1e-4)
    assert classes.metrics["accuracy"] == accuracy_score(labels, shares.argmax(-1))
    assert classes.examples == 12
    labels = site.data["b-0"].splits["validation"].labels
    assert values.metrics["loss"] == pytest.approx(float(np.mean((logits["b-0"][:, 0] - labels) ** 2)), rel=1e-4)
    assert values.metrics["pearson"] == pytest.approx(pearsonr(labels, logits["b-0"][:, 0])[0], abs=1e-4)
    assert values.examples == 9


def test_each_split_is_its_own(client_of) -> None:
    site, params = client_of()
    options = [EvaluateOptions(split=split) for split in ("train", "validation", "test")]
    jobs = [Job(client="a-0", params=params, round=1, options=each) for each in options]
    assert len({evaluate([job], site)[0].metrics["loss"] for job in jobs}) == 3


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_no_more_models_are_copied_at_once_than_one_pass_takes(tiny, site_of, spec_of, monkeypatch) -> None:
    specs = [spec_of(name=f"{letter}-0", labels=3) for letter in "abcdefgh"]
    copies, most, copy = list[weakref.ref[Any]](), [0], evaluation.on_device

    def counted(*args: Any) -> Any:
        params = copy(*args)
        copies.append(weakref.ref(next(iter(params.values()))))
        most[0] = max(most[0], sum(one() is not None for one in copies))
        return params

    monkeypatch.setattr(evaluation, "on_device", counted)
    jobs = [Job(client=s.name, params=tiny.params(s), round=1, options=EvaluateOptions(split="test")) for s in specs]
    evaluate(jobs, site_of(tiny, *specs, max_tokens=1))
    assert most[0] <= 2, "one at work, and one that is copied meanwhile"
