"""The chain of transforms in front of a client's optimizer, and the terms of its objective."""

import dataclasses

import pytest
import torch

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import batches, example_loss, train
from atlas_fl.client.optimizer import LossScale, client_terms, fedprox, gradient_chain, make_optimizer
from atlas_fl.client.options import TrainOptions
from atlas_fl.sparse.masked_sgd import SparseSGDM
from atlas_fl.split.channel import Cut

PLAIN = TrainOptions(seed=3, batch_size=4, lr=0.05, clip=0.0, max_steps=4)
SGD = {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def leaf(values: list[float], gradient: list[float]) -> torch.Tensor:
    own = torch.tensor(values, requires_grad=True)
    own.grad = torch.tensor(gradient)
    return own


def test_the_term_of_fedprox_by_hand() -> None:
    """0.5 (3 - 1, 2 - 2) = (1, 0), and behind clipping: (3, 4) has norm 5, clipped to 1 it is (0.6, 0.8)."""
    own = leaf([3.0, 2.0], [3.0, 4.0])
    options, anchor = dataclasses.replace(PLAIN, proximal_mu=0.5, clip=1.0), {"w": torch.tensor([1.0, 2.0])}
    term = fedprox(options, anchor)
    assert term is not None
    assert term("w", own.detach()).tolist() == [1.0, 0.0]
    assert gradient_chain({"w": own}, options, LossScale(enabled=False), anchor=anchor)({"w": own}, None)
    assert own.grad.tolist() == pytest.approx([1.6, 0.8], abs=1e-5)


def test_without_mu_there_is_no_term_and_the_chain_changes_no_gradient() -> None:
    own = leaf([3.0], [7.0])
    assert client_terms(PLAIN, {"w": own}) == []
    assert gradient_chain({"w": own}, PLAIN, LossScale(enabled=False))({"w": own}, None)
    assert own.grad is not None and own.grad.tolist() == [7.0]


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(("gradient", "norms"), [("inf", None), ("inf", ["inf", 1.0]), (1.0, [1.0, "nan"])])
def test_an_overflow_here_or_on_the_other_side_of_a_cut_ends_the_chain_and_halves_the_scale(
    gradient, norms, clip
) -> None:
    own, scale = leaf([1.0], [float(gradient)]), LossScale(enabled=True)
    before = scale.value
    applied = gradient_chain({"w": own}, dataclasses.replace(PLAIN, clip=clip), scale)
    assert not applied({"w": own}, None if norms is None else torch.tensor([float(norm) for norm in norms]))
    assert (scale.value, scale.skipped) == (before / 2, 1)


def test_norms_of_both_sides_are_unscaled_as_the_gradients_are() -> None:
    """(3, 4) here and 12 there have the norm 13, so that clipping at 6.5 halves."""
    scale = LossScale(enabled=True)
    own = leaf([1.0, 1.0], [3 * scale.value, 4 * scale.value])
    applied = gradient_chain({"w": own}, dataclasses.replace(PLAIN, clip=6.5), scale)
    assert applied({"w": own}, torch.tensor([5.0, 12.0]) * scale.value)
    assert own.grad.tolist() == pytest.approx([1.5, 2.0], rel=1e-5)


def test_the_start_is_what_the_leaves_are_when_the_round_begins() -> None:
    own = leaf([1.0], [0.0])
    (term,) = client_terms(dataclasses.replace(PLAIN, proximal_mu=2.0), {"w": own})
    with torch.no_grad():
        own.add_(3.0)
    assert term("w", own.detach()).tolist() == [6.0]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_a_mask_freezes_keeps_every_bit_under_either_optimizer(optimizer: str) -> None:
    """Even with a gradient that is NaN and with weight decay; what it lets move moves as without a mask."""
    options = dataclasses.replace(PLAIN, optimizer=optimizer, momentum=0.5 * (optimizer == "sgd"), weight_decay=0.1)
    masked, free = leaf([1.0, -0.0, 3.0], [0.0] * 3), leaf([1.0, -0.0, 3.0], [0.0] * 3)
    mask = {"w": torch.tensor([True, False, True])}
    pair = make_optimizer({"w": masked}, options, masks=mask), make_optimizer({"w": free}, options)
    assert isinstance(pair[0], SparseSGDM) == (optimizer == "sgd")
    for step in range(3):
        masked.grad, free.grad = torch.tensor([1.0, float("nan"), step]), torch.tensor([1.0, 0.0, step])
        for one in pair:
            one.step()
    assert torch.equal(masked[[0, 2]], free[[0, 2]])
    assert masked[1].item() == 0 and torch.signbit(masked[1])


@pytest.mark.parametrize("changes", [{}, SGD, {"clip": 0.01}], ids=["adamw", "sgd", "clipped"])
def test_a_pack_with_the_term_is_a_loop_of_torch_on_the_proximal_objective(tiny_of, site_of, spec_of, changes) -> None:
    """The reference has the term in its loss; where gradients are clipped it clips those of the data alone."""
    tiny, options = tiny_of("bert"), dataclasses.replace(PLAIN, proximal_mu=0.7, **changes)
    specs = [spec_of(name="a-0"), spec_of(name="b-0", labels=4, ranks=(1, 2, 3))]
    site = site_of(tiny, *specs)
    jobs = [Job(client=spec.name, params=tiny.params(spec), round=1, options=options) for spec in specs]
    for job, update in zip(jobs, train(jobs, site), strict=True):
        leaves = {key: own.clone().requires_grad_() for key, own in sorted(job.params.items())}
        is_adam = options.optimizer == "adamw"
        made, more = (torch.optim.AdamW, {}) if is_adam else (torch.optim.SGD, {"momentum": 0.9, "nesterov": True})
        optimizer = made(leaves.values(), lr=options.lr, weight_decay=options.weight_decay, **more)
        for batch in batches(site.data[job.client].splits["train"], job, secret=None):
            optimizer.zero_grad()
            row = collate_packed([batch], device=site.backbone.device)
            with forward(row, [leaves], site) as (logits,):
                example_loss(logits, row.labels[0]).backward()
            if options.clip:
                torch.nn.utils.clip_grad_norm_(leaves.values(), options.clip)
            squares = [(leaf - job.params[key]).square().sum() for key, leaf in leaves.items()]
            (options.proximal_mu / 2 * torch.stack(squares).sum()).backward()
            optimizer.step()
        torch.testing.assert_close(
            update.params, {key: own.detach() for key, own in leaves.items()}, atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("cut", [None, Cut(blocks=1), Cut(blocks=2, head="client")])
def test_the_larger_mu_the_nearer_a_client_stays_to_its_start(client_of, cut) -> None:
    """By SGD, whose rate times mu is the share of the way back that one step goes: at 1 it goes all the way."""
    site, params = client_of()
    moved = []
    for mu in (0.0, 50.0, 200.0):
        options = dataclasses.replace(PLAIN, optimizer="sgd", lr=0.005, proximal_mu=mu, max_steps=6, epochs=2)
        (update,) = train([Job(client="a-0", params=params, round=1, options=options, cut=cut)], site)
        moved.append(sum(float((update.params[key] - params[key]).square().sum()) for key in params) ** 0.5)
    assert 1.5 * moved[2] < moved[1] < 0.8 * moved[0]
    first = dataclasses.replace(PLAIN, max_steps=1)
    pair = first, dataclasses.replace(first, proximal_mu=20.0)
    jobs = [Job(client="a-0", params=params, round=1, options=one, cut=cut) for one in pair]
    alike = [train([job], site)[0].params for job in jobs]
    assert all(torch.equal(alike[0][key], alike[1][key]) for key in params), "at the start the term is zero"


def test_with_an_anchor_the_pull_is_to_it_by_hand() -> None:
    """mu (w - a) = 2 (3 - 1) = 4 for the tensor that has one; the other is pulled to where it is now."""
    leaves = {"w": leaf([3.0], [0.0]), "v": leaf([5.0], [0.0])}
    options = dataclasses.replace(PLAIN, proximal_mu=2.0)
    (term,) = client_terms(options, leaves, {"w": torch.tensor([1.0])})
    assert (term("w", leaves["w"].detach()).item(), term("v", leaves["v"].detach()).item()) == (4.0, 0.0)
