"""Layer importance against torch's autograd on the merged stock model."""

import dataclasses

import numpy as np
import pytest
import torch

from atlas_fl.client.importance import IMPORTANCE, half_rows
from atlas_fl.client.job import Job
from atlas_fl.client.options import ImportanceOptions, TrainOptions
from atlas_fl.client.registry import ACTIONS

TRAIN = TrainOptions(seed=2, batch_size=3)


def stock_importance(tiny, site, job: Job) -> np.ndarray:
    """(blocks,): mean squared gradient a weight, or |weight * gradient| smoothed with a decay of .9, written out."""
    prefix, blocks = tiny.backbone.family.prefix + ".", tiny.backbone.family.blocks + "."
    smoothed = None
    total = np.zeros(3)
    for row in half_rows(job, site, half=0, count=job.options.batches):
        model = tiny.merged(job.params, site.scale)
        bounds = zip(row.layout.starts, row.layout.ends, strict=True)
        logits = torch.cat([model(input_ids=row.ids[None, start : stop + 1]).logits for start, stop in bounds])
        torch.nn.CrossEntropyLoss()(logits, row.labels[0]).backward()
        sums, counts = np.zeros(3), np.zeros(3)
        for name in tiny.modules():
            parameter = model.get_parameter(f"{prefix}{name}.weight")
            weight, grad = parameter.detach(), parameter.grad
            layer = int(name.removeprefix(blocks).split(".")[0])
            value = grad.square() if job.options.kind == "gradient" else (weight * grad).abs()
            sums[layer] += float(value.double().sum())
            counts[layer] += weight.numel()
        total += sums / counts
        smoothed = sums / counts if smoothed is None else 0.9 * smoothed + 0.1 * sums / counts
    found = total if job.options.kind == "gradient" else smoothed
    return found / found.sum()


@pytest.mark.parametrize("tiny", ["bert", "gpt2", "qwen2"], indirect=True)
@pytest.mark.parametrize("kind", ["gradient", "rngwp"])
def test_importance_equals_autograd_on_the_merged_model_and_sums_to_one(tiny, client_of, kind: str) -> None:
    site, params = client_of(tiny.name, labels=3, examples=20)
    options = ImportanceOptions(kind=kind, train=TRAIN, batches=3)
    job = Job(client="a-0", params=params, round=0, options=options)
    (update,) = ACTIONS["importance"]([job], site)
    found = update.params[IMPORTANCE]
    assert (found.shape, found.dtype) == ((3,), torch.float64)
    assert float(found.sum()) == pytest.approx(1)
    np.testing.assert_allclose(found.numpy(), stock_importance(tiny, site, job), rtol=1e-3)
    assert np.ptp(found.numpy()) > 0.01


@pytest.mark.parametrize("kind", ["gradient", "rngwp"])
def test_a_block_without_adapters_has_no_importance_and_the_others_share_it(tiny_of, site_of, spec_of, kind) -> None:
    tiny, spec = tiny_of("bert"), spec_of(name="a-0", labels=3, examples=20)
    options = ImportanceOptions(kind=kind, train=TRAIN, batches=1)
    zero = {key: value * (0 if key.endswith("lora_B") else 1) for key, value in tiny.params(spec).items()}
    job = Job(client="a-0", params=zero, round=0, options=options)
    (every,), (upper,) = (ACTIONS["importance"]([job], site_of(tiny, spec, first_adapted=first)) for first in (0, 1))
    of_every = every.params[IMPORTANCE].numpy()
    expected = np.array([0.0, *of_every[1:] / of_every[1:].sum()])
    np.testing.assert_allclose(upper.params[IMPORTANCE].numpy(), expected, rtol=1e-4)


def test_the_clients_of_a_pack_are_measured_apart(tiny_of, site_of, spec_of) -> None:
    tiny, specs = tiny_of("gpt2"), [spec_of(name="a-0", labels=3), spec_of(name="b-0", labels=0)]
    site = site_of(tiny, *specs)
    options = ImportanceOptions(kind="gradient", train=TRAIN, batches=2)
    jobs = [Job(client=spec.name, params=tiny.params(spec), round=0, options=options) for spec in specs]
    together = ACTIONS["importance"](jobs, site)
    for job, update in zip(jobs, together, strict=True):
        assert torch.equal(ACTIONS["importance"]([job], site)[0].params[IMPORTANCE], update.params[IMPORTANCE])
    assert not torch.allclose(together[0].params[IMPORTANCE], together[1].params[IMPORTANCE])
    changed = dataclasses.replace(jobs[0], options=dataclasses.replace(options, kind="rngwp"))
    (other,) = ACTIONS["importance"]([changed], site)
    assert not torch.allclose(other.params[IMPORTANCE], together[0].params[IMPORTANCE])
