"""One set of adapters above the cuts of a cluster: what moves it, and that nobody has another."""

import dataclasses

import pytest
import torch

from atlas_fl.client.batching import packs
from atlas_fl.client.job import Job, Site
from atlas_fl.client.local_training import SharedAdapters, batches, shared_adapters_of, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.split.channel import Cut
from tests.laws.test_packs import HARD

PLAIN = TrainOptions(seed=3, batch_size=4, lr=1e-2, clip=0.0, max_steps=3)


def federation(tiny, site_of, spec_of, cuts, options, *, labels=(2, 5, 3), **changes) -> tuple[Site, list[Job]]:
    """Clients of one rank with the same adapters above block 1, as a plan leaves them."""
    specs = [
        spec_of(name=f"{name}-0", labels=classes, examples=examples, ranks=(1 + k, 3, 2))
        for k, (name, classes, examples) in enumerate(zip("cab", labels, (11, 6, 8)))
    ][: len(cuts)]
    site, jobs = site_of(tiny, *specs, **changes), []
    first = tiny.params(specs[0])
    for k, (spec, cut) in enumerate(zip(specs, cuts, strict=True)):
        own = tiny.params(spec, seed=k)
        own |= {key: value for key, value in first.items() if "layer.0." not in key and not key.startswith("head.")}
        jobs.append(Job(client=spec.name, params=own, round=1, options=options, cut=cut))
    return site, jobs


def upper(params, block: int) -> dict[str, torch.Tensor]:
    return {key: value for key, value in params.items() if any(f"layer.{k}." in key for k in range(block, 3))}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_all_that_share_a_tensor_hold_the_same_after_every_step(tiny_of, site_of, spec_of) -> None:
    """Cuts, labels and numbers of steps differ; so do the clusters."""
    cuts = [Cut(blocks=1, shared=0), Cut(blocks=2, shared=0), Cut(blocks=1, shared=0)]
    site, jobs = federation(tiny_of("bert"), site_of, spec_of, cuts, HARD)
    before, seen = [upper(job.params, 1) for job in jobs], []

    def watch(_, live):
        seen.append(sorted(live))
        assert all(equal(upper(live[k], 2), upper(live[min(live)], 2)) for k in live)
        if 0 in live and 2 in live:
            assert equal(upper(live[0], 1), upper(live[2], 1))
            assert not equal(upper(live[0], 0), upper(live[2], 0))
        if 0 in live and 1 in live:  # of block 1 the second client has its own, on its own side of the cut
            assert not equal(upper(live[0], 1), upper(live[1], 1))
        return ()

    updates = train(jobs, site, watch=watch)
    assert len({tuple(one) for one in seen}) > 1, "some must end before others"
    # who has ended goes on having what the others train
    assert equal(upper(updates[0].params, 1), upper(updates[2].params, 1))
    assert equal(upper(updates[0].params, 2), upper(updates[1].params, 2))
    assert not equal(upper(updates[0].params, 1), before[0])


@pytest.mark.parametrize("head", ["server", "client"])
def test_alone_in_its_cluster_a_client_trains_to_the_bits_of_its_own(tiny_of, site_of, spec_of, head) -> None:
    cuts = [Cut(blocks=1, head=head), Cut(blocks=2, head=head), None]
    site, jobs = federation(tiny_of("bert"), site_of, spec_of, cuts, HARD)
    clusters = [
        dataclasses.replace(job, cut=job.cut and dataclasses.replace(job.cut, shared=k)) for k, job in enumerate(jobs)
    ]
    for own, shared in zip(train(jobs, site), train(clusters, site), strict=True):
        assert equal(own.params, shared.params)
        assert {**own.metrics, "seconds": 0} == {**shared.metrics, "seconds": 0}
        assert own.crossed == shared.crossed


def test_three_steps_are_those_of_one_dense_model_on_all_examples(tiny_of, site_of, spec_of) -> None:
    """Against the stock model with whole weights W + s B A, padded batches, and one loss over all examples of a step.

    Each client's lower part and head move by its own mean loss, the part above by that of all examples together.
    """
    tiny, cut = tiny_of("bert"), Cut(blocks=1, shared=0)
    site, jobs = federation(tiny, site_of, spec_of, [cut, cut], PLAIN)
    stocks = [tiny.stock(classes) for classes in (2, 5)]
    own = [{key: value.clone().requires_grad_() for key, value in job.params.items()} for job in jobs]
    common = upper(own[0], 1)
    groups = [{key: value for key, value in params.items() if key not in common} for params in own]
    optimizers = [torch.optim.AdamW(list(group.values()), lr=1e-2, weight_decay=0.0) for group in groups]
    above = torch.optim.AdamW(list(common.values()), lr=1e-2, weight_decay=0.0)
    streams, steps = [batches(site.data[job.client].splits["train"], job, secret=None) for job in jobs], (3, 2)
    strong = {key: torch.ones_like(value, dtype=torch.bool) for key, value in common.items()}
    for step in range(3):
        present = [k for k in (0, 1) if step < steps[k]]
        losses, counts = {}, {}
        for k in present:
            batch = next(streams[k])
            losses[k] = dense_loss(stocks[k], groups[k] | common, batch, site.scale)
            counts[k] = len(batch)
            grads = torch.autograd.grad(losses[k], list(groups[k].values()), retain_graph=True)
            for leaf, grad in zip(groups[k].values(), grads, strict=True):
                leaf.grad = grad
        mean = sum(counts[k] * losses[k] for k in present) / sum(counts.values())
        for (key, leaf), grad in zip(common.items(), torch.autograd.grad(mean, list(common.values())), strict=True):
            leaf.grad = grad
            strong[key] &= grad.abs() > 0.02 * grad.abs().max()
        for k in present:
            optimizers[k].step()
        above.step()
    for update in train(jobs, site):
        assert sum(int(mask.sum()) for mask in strong.values()) > 100
        for key, wanted in common.items():
            # AdamW divides a gradient by its size: where it is nothing but rounding, so is its step
            torch.testing.assert_close(update.params[key][strong[key]], wanted.detach()[strong[key]], atol=1e-4, rtol=0)
            assert not torch.allclose(update.params[key], jobs[0].params[key], atol=1e-3)


def dense_loss(model, params, batch, scale) -> torch.Tensor:
    ids = torch.zeros(len(batch), int(batch.lengths.max()), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (start, stop) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:])):
        ids[row, : stop - start], mask[row, : stop - start] = torch.from_numpy(batch.ids[start:stop]), 1
    weights = {name: value.detach() for name, value in model.named_parameters()}
    for key, a in params.items():
        if key.endswith(".lora_A"):
            module = key.removesuffix(".lora_A")
            weights[f"bert.{module}.weight"] = (
                weights[f"bert.{module}.weight"] + scale(len(a)) * params[module + ".lora_B"] @ a
            )
        elif key.startswith("head."):
            weights[key.removeprefix("head.")] = a
    out = torch.func.functional_call(model, weights, (ids,), {"attention_mask": mask})
    return torch.nn.functional.cross_entropy(out.logits, torch.from_numpy(batch.labels))


class Stub:
    """A client while it trains, as far as its set sees it."""

    def __init__(self, name: str, *, grad: float, steps: int = 1) -> None:
        self.options, self.steps = TrainOptions(seed=0, lr=0.5, schedule="linear"), steps
        self.job = Job(client=name, params={}, round=1, options=self.options)
        self.params = {"w": torch.ones(2, requires_grad=True)}
        self.params["w"].grad = torch.full((2,), grad)


def test_a_step_by_hand() -> None:
    """3 examples at -1 and 1 at 2 are -0.25; AdamW's first step is the rate in the other direction: 1 + 0.5 = 1.5.

    One of two steps is then done. Of the second only one client has a part: the rate has fallen to half, 0.25.
    """
    one, other = Stub("a", grad=-1.0), Stub("b", grad=2.0, steps=2)
    shared = SharedAdapters([other, one], ["w"])
    shared.step(0, {one: 3, other: 1})
    assert torch.equal(shared._leaves["w"].grad, torch.tensor([-0.25, -0.25]))
    torch.testing.assert_close(one.params["w"].detach(), torch.tensor([1.5, 1.5]))
    other.params["w"].grad = torch.full((2,), -0.25)
    shared.step(1, {other: 1})
    torch.testing.assert_close(one.params["w"].detach(), torch.tensor([1.75, 1.75]))
    assert torch.equal(one.params["w"], other.params["w"])


def test_the_order_of_the_clients_changes_no_bit_and_a_broken_gradient_is_left_out() -> None:
    """In float32 (1 + 1e8) - 1e8 is 0, and (1e8 - 1e8) + 1 is not."""
    found = []
    for order in ((0, 1, 2, 3), (1, 3, 2, 0), (2, 0, 1, 3)):
        members = [Stub(name, grad=grad) for name, grad in zip("abcd", (1.0, 1e8, -1e8, float("nan")))]
        shared = SharedAdapters([members[k] for k in order], ["w"])
        shared.step(0, dict.fromkeys(members, 4))
        found.append(shared._leaves["w"].grad)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert found[0].isfinite().all()


def test_where_every_gradient_is_broken_the_set_is_seen_to_be() -> None:
    """Standing still would hide it; NaN is refused and recorded."""
    members = [Stub(name, grad=float("nan")) for name in "ab"]
    SharedAdapters(members, ["w"]).step(0, dict.fromkeys(members, 4))
    assert all(bool(member.params["w"].isnan().all()) for member in members)


def test_clusters_have_sets_of_their_own_and_a_set_begins_as_one() -> None:
    members = [Stub(name, grad=0.0) for name in "abcd"]
    for member, cluster in zip(members, (0, 1, 0, 1)):
        member.cluster, member.shared = cluster, ("w",)
    assert [[own.job.client for own in found.owners] for found in shared_adapters_of(members)] == [
        ["a", "c"],
        ["b", "d"],
    ]
    members[2].params["w"] = torch.zeros(2, requires_grad=True)
    with pytest.raises(AssertionError, match="begin with the same one"):
        shared_adapters_of(members)


def test_a_cluster_is_in_one_pack_and_rows_keep_its_memory(tiny_of, site_of, spec_of) -> None:
    cuts = [Cut(blocks=1, shared=0), None, Cut(blocks=1, shared=0)]
    site, jobs = federation(tiny_of("bert"), site_of, spec_of, cuts, HARD, labels=(2, 5, 2))
    whole = LocalEngine(site=site).run("train", jobs)
    small = dataclasses.replace(site, max_tokens=1)
    assert [[job.client for job in pack] for pack in packs(jobs, small)] == [["c-0", "b-0"], ["a-0"]]
    parts = LocalEngine(site=small).run("train", jobs)
    assert [update.client for update in parts] == [job.client for job in jobs]
    for one, other in zip(whole, parts, strict=True):
        for key, value in one.params.items():
            torch.testing.assert_close(other.params[key], value, atol=1e-4, rtol=1e-4)
    assert equal(upper(parts[0].params, 1), upper(parts[2].params, 1))
