"""One set of adapters for several tasks, with a head for each (`--multitask`)."""

import dataclasses
from typing import Any

import pytest
import torch

from atlas_fl.client.batching import packs
from atlas_fl.client.job import Job, Site
from atlas_fl.client.local_training import LocalTrainer, batches, num_steps, shared_adapters_of, step_all, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.params import head_keys
from tests.client.test_shared import dense_loss, equal
from tests.laws.test_packs import HARD

PLAIN = TrainOptions(seed=3, batch_size=4, lr=0.05, clip=0.0, optimizer="sgd", epochs=2, multitask=True)
SIZES = (11, 6, 3)


def tasks(tiny, site_of, spec_of, options: TrainOptions, *, sizes=SIZES, **changes: Any) -> tuple[Site, list[Job]]:
    """Tasks of 2, 5 and 3 classes that begin with the same adapters."""
    specs = [
        spec_of(name=f"{name}-all", labels=labels, examples=examples)
        for name, labels, examples in zip("cab", (2, 5, 3), sizes)
    ]
    jobs = []
    for spec in specs:
        params = {**tiny.params(spec), **adapters(tiny.params(specs[0]))}
        jobs.append(Job(client=spec.name, params=params, round=1, options=options))
    return site_of(tiny, *specs, **changes), jobs


def adapters(params) -> dict[str, torch.Tensor]:
    return {key: value for key, value in params.items() if not key.startswith("head.")}


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps_are_those_of_plain_torch_on_the_mean_gradient_of_the_tasks(tiny_of, site_of, spec_of, clip) -> None:
    """Against the stock model with whole weights W + s B A, one task at a time; tasks have 6, 4 and 2 steps."""
    tiny = tiny_of("bert")
    site, jobs = tasks(tiny, site_of, spec_of, dataclasses.replace(PLAIN, clip=clip))
    stocks = [tiny.stock(labels) for labels in (2, 5, 3)]
    shared = {key: value.clone().requires_grad_() for key, value in adapters(jobs[0].params).items()}
    heads = [{key: job.params[key].clone().requires_grad_() for key in head_keys(job.params)} for job in jobs]
    streams = [batches(site.data[job.client].splits["train"], job, secret=None) for job in jobs]
    for done in range(6):
        present = [k for k in range(3) if done < num_steps(SIZES[k], PLAIN)]
        sums = {key: torch.zeros_like(value) for key, value in shared.items()}
        for k in present:
            leaves = {**shared, **heads[k]}
            loss = dense_loss(stocks[k], leaves, next(streams[k]), site.scale)
            gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
            factor = min(1.0, clip / (float(norm) + 1e-6)) if clip else 1.0
            for key, gradient in gradients.items():
                if key in shared:
                    sums[key] += factor * gradient / len(present)
                else:
                    with torch.no_grad():
                        heads[k][key] -= PLAIN.lr * factor * gradient
        with torch.no_grad():
            for key, leaf in shared.items():
                leaf -= PLAIN.lr * sums[key]
    for update, head, job in zip(train(jobs, site), heads, jobs, strict=True):
        for key, expected in {**shared, **head}.items():
            torch.testing.assert_close(update.params[key], expected.detach(), atol=2e-5, rtol=1e-4)
            assert not torch.equal(update.params[key], job.params[key])


def test_the_mean_is_over_tasks_and_not_over_examples_by_hand(tiny_of, site_of, spec_of) -> None:
    """Gradients 1 and 4 of batches with 4 and 2 examples: 2.5, and at a rate of .05 a step of -.125."""
    site, jobs = tasks(tiny_of("bert"), site_of, spec_of, PLAIN, sizes=(11, 6))
    members = [LocalTrainer(job, site) for job in jobs]
    for member, value in zip(members, (1.0, 4.0), strict=True):
        for leaf in member.leaves.values():
            leaf.grad = torch.full_like(leaf, value)
    step_all(dict(zip(members, (4, 2), strict=True)), 0, shared_adapters_of(members))
    for member, job, own in zip(members, jobs, (-0.05, -0.2), strict=True):
        for key, leaf in member.leaves.items():
            expected = job.params[key] + (own if key.startswith("head.") else -0.125)
            torch.testing.assert_close(leaf.detach(), expected, atol=1e-6, rtol=0)


def test_one_task_trains_to_the_bits_of_a_client_alone(tiny_of, site_of, spec_of) -> None:
    site, jobs = tasks(tiny_of("bert"), site_of, spec_of, dataclasses.replace(HARD, multitask=True), sizes=(11,))
    alone = [dataclasses.replace(job, options=dataclasses.replace(job.options, multitask=False)) for job in jobs]
    (own,), (shared,) = train(alone, site), train(jobs, site)
    assert equal(own.params, shared.params)
    assert not equal(own.params, jobs[0].params)


def test_all_tasks_are_one_pack_whose_rows_bound_the_tokens(tiny_of, site_of, spec_of) -> None:
    site, jobs = tasks(tiny_of("bert"), site_of, spec_of, PLAIN)
    small = dataclasses.replace(site, max_tokens=1)
    assert list(packs(jobs, small)) == [jobs]
    for whole, parted in zip(train(jobs, site), train(jobs, small), strict=True):
        for key, value in whole.params.items():
            torch.testing.assert_close(parted.params[key], value, atol=2e-5, rtol=1e-4)
    assert equal(*(adapters(update.params) for update in train(jobs[:2], small)))
