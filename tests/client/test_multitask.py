"""One set of adapters for several tasks, with a head for each (`--multitask`)."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from atlas_fl.client.batching import packs
from atlas_fl.client.job import Job, Site
from atlas_fl.client.local_training import LocalTrainer, SharedAdapters, batches, num_steps, step_all, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.params import head_keys
from tests.laws.test_packs import HARD

PLAIN = TrainOptions(seed=3, batch_size=4, lr=0.05, clip=0.0, optimizer="sgd", epochs=2, multitask=True)
SIZES = (11, 6, 3)


def tasks(tiny, site_of, spec_of, options: TrainOptions, *, sizes=SIZES, **changes: Any) -> tuple[Site, list[Job]]:
    """Tasks of 2, 5 and 3 classes that begin with the same adapters."""
    kinds = zip("cab", (2, 5, 3), sizes)
    specs = [spec_of(name=f"{name}-all", labels=labels, examples=examples) for name, labels, examples in kinds]
    jobs = []
    for spec in specs:
        params = {**tiny.params(spec), **adapters(tiny.params(specs[0]))}
        jobs.append(Job(client=spec.name, params=params, round=1, options=options))
    return site_of(tiny, *specs, **changes), jobs


def adapters(params) -> dict[str, torch.Tensor]:
    return {key: value for key, value in params.items() if not key.startswith("head.")}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def dense_loss(model, params, batch, scale) -> torch.Tensor:
    ids = pad_sequence([torch.from_numpy(text) for text in np.split(batch.ids, batch.offsets[1:-1])], batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None]).long()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    for key, a in params.items():
        if key.endswith(".lora_A"):
            module = key.removesuffix(".lora_A")
            update = scale(len(a)) * params[module + ".lora_B"] @ a
            weights[f"bert.{module}.weight"] = weights[f"bert.{module}.weight"] + update
        elif key.startswith("head."):
            weights[key.removeprefix("head.")] = a
    out = torch.func.functional_call(model, weights, (ids,), {"attention_mask": mask})
    return torch.nn.functional.cross_entropy(out.logits, torch.from_numpy(batch.labels))


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
    step_all(members, 0, SharedAdapters(members))
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
        torch.testing.assert_close(parted.params, whole.params, atol=2e-5, rtol=1e-4)
    assert equal(*(adapters(update.params) for update in train(jobs[:2], small)))


class Stub:
    """A task while it trains, as far as the shared adapters see it."""

    def __init__(self, name: str, *, grad: float, steps: int = 1) -> None:
        self.options, self.steps = TrainOptions(seed=0, lr=0.5, schedule="linear"), steps
        self.job = Job(client=name, params={}, round=1, options=self.options)
        self.params = {"w": torch.ones(2, requires_grad=True)}
        self.params["w"].grad = torch.full((2,), grad)


def test_a_step_by_hand_goes_on_with_the_tasks_that_have_one_left() -> None:
    """-1 and .5 are -.25; AdamW's first step is the rate in the other direction: 1 + 0.5 = 1.5.

    One of two steps is then done. Of the second only one task has a part: the rate has fallen to half, 0.25.
    """
    one, other = Stub("a", grad=-1.0), Stub("b", grad=0.5, steps=2)
    shared = SharedAdapters([other, one])
    shared.step(0, [one, other])
    assert torch.equal(shared._leaves["w"].grad, torch.tensor([-0.25, -0.25]))
    torch.testing.assert_close(one.params["w"].detach(), torch.tensor([1.5, 1.5]))
    other.params["w"].grad = torch.full((2,), -0.25)
    shared.step(1, [other])
    torch.testing.assert_close(one.params["w"].detach(), torch.tensor([1.75, 1.75]))
    assert torch.equal(one.params["w"], other.params["w"])


@pytest.mark.parametrize(
    "gradients",
    [(1.0, 1e8, -1e8), (0.1, 0.7, float("nan")), (float("nan"),) * 3],
    ids=["in the order of the names", "a broken one is left out", "all are broken, which is seen"],
)
def test_the_order_of_the_tasks_changes_no_bit(gradients) -> None:
    found = []
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        members = [Stub(name, grad=grad) for name, grad in zip("abc", gradients)]
        shared = SharedAdapters([members[k] for k in order])
        shared.step(0, members)
        found.append(shared._leaves["w"].grad)
    assert all(torch.equal(found[0].nan_to_num(7.0), other.nan_to_num(7.0)) for other in found)
    sound = [gradient for gradient in gradients if gradient == gradient]
    assert bool(found[0].isnan().all()) is not bool(sound)
    if len(sound) == 2:
        torch.testing.assert_close(found[0], torch.full((2,), sum(sound) / 2))


def test_tasks_begin_with_one_adapter() -> None:
    members = [Stub(name, grad=0.0) for name in "ab"]
    members[1].params["w"] = torch.zeros(2, requires_grad=True)
    with pytest.raises(AssertionError, match="begin with the same one"):
        SharedAdapters(members)
