import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atlas_fl.errors import ModelError
from atlas_fl.sparse.masked_sgd import SparseSGDM, extract_momentum, load_momentum
from tests.examples import examples

SHAPES = {"w": (5, 7), "b": (5,), "scalar": ()}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def masked(seed: int, share: float) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=draw) < share for name, shape in SHAPES.items()}


def descend(optimizer, leaves, steps: int, gradient=drawn) -> None:
    for step in range(steps):
        for name, value in gradient(100 + step).items():
            leaves[name].grad = value
        optimizer.step()


def leaves_of(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: value.requires_grad_() for name, value in drawn(seed).items()}


HYPER = {
    "momentum": st.sampled_from([0.0, 0.9, 0.5]),
    "dampening": st.sampled_from([0.0, 0.3, 1.0, 1.5]),
    "nesterov": st.booleans(),
    "weight_decay": st.sampled_from([0.0, 1e-4, 0.1]),
    "lr": st.sampled_from([0.0, 1e-3, 0.5]),
}


def legal(words):
    if words["nesterov"]:
        words |= {"dampening": 0.0, "momentum": words["momentum"] or 0.9}
    return words


@given(words=st.fixed_dictionaries(HYPER).map(legal), seed=st.integers(0, 1000))
@examples(60)
def test_a_mask_of_ones_is_torchs_sgd_to_the_last_bit(words, seed: int) -> None:
    own, theirs = leaves_of(seed), leaves_of(seed)
    ones = {name: torch.ones(shape, dtype=torch.bool) for name, shape in SHAPES.items()}
    descend(SparseSGDM(own, masks=ones, **words), own, 5)
    descend(torch.optim.SGD(list(theirs.values()), **words), theirs, 5)
    assert all(torch.equal(own[name], theirs[name]) for name in SHAPES)


@given(
    words=st.fixed_dictionaries(HYPER).map(legal),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]),
)
@examples(60)
def test_frozen_weights_keep_every_bit_and_kept_ones_move_as_in_sgd(words, seed: int, share: float) -> None:
    """Kept weights never see the frozen ones, so they move as they do where everything moves."""
    own, dense, mask = leaves_of(seed), leaves_of(seed), masked(seed, share)
    before = {name: value.detach().clone() for name, value in own.items()}
    descend(SparseSGDM(own, masks=mask, **words), own, 5)
    descend(torch.optim.SGD(list(dense.values()), **words), dense, 5)
    for name, kept in mask.items():
        bits = [value.detach().view(torch.int32) for value in (own[name], before[name])]
        assert torch.equal(bits[0][~kept], bits[1][~kept])
        torch.testing.assert_close(own[name][kept], dense[name][kept], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("share", [0.1, 0.6])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_frozen_weight_survives_any_gradient_and_keeps_its_sign_of_zero(share: float, bad: float) -> None:
    own, mask = leaves_of(), masked(3, share)
    with torch.no_grad():
        own["w"][~mask["w"]] = -0.0

    def gradient(seed):
        return {name: value.masked_fill(~mask[name], bad) for name, value in drawn(seed).items()}

    descend(SparseSGDM(own, masks=mask, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), own, 4, gradient)
    frozen = own["w"].detach()[~mask["w"]]
    assert torch.equal(frozen.view(torch.int32), torch.full_like(frozen, -0.0).view(torch.int32))
    assert own["w"].isfinite().all()


def test_gradients_are_read_and_not_written() -> None:
    for share in (0.1, 0.6, 1.1):
        leaves = leaves_of()
        optimizer = SparseSGDM(leaves, masks=masked(1, share), lr=0.1, momentum=0.9)
        gradients = drawn(5)
        for name, value in gradients.items():
            leaves[name].grad = value
        optimizer.step()
        optimizer.step()
        assert all(torch.equal(gradients[name], value) for name, value in drawn(5).items())


def test_frozen_weights_keep_every_bit_under_amp_and_its_skipped_steps() -> None:
    """bf16 autocast and a gradient scaler whose first scale overflows; the scheduler is torch's own."""
    draw = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    named = dict(module.named_parameters())
    with torch.no_grad():
        for value in named.values():
            value.normal_(generator=draw)
    mask = {name: torch.rand(value.shape, generator=draw) < 0.3 for name, value in named.items()}
    before = {name: value.detach().clone() for name, value in named.items()}
    optimizer = SparseSGDM(named, masks=mask, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(module(torch.randn(4, 6, generator=draw)), torch.arange(4) % 3)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert scaler.get_scale() < 2.0**127, "the first step should have been skipped"
    for name, kept in mask.items():
        assert torch.equal(named[name].detach()[~kept], before[name][~kept])
        assert (named[name].detach()[kept] != before[name][kept]).any()


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_training_goes_on_from_a_state_dict_in_the_same_bits(share: float) -> None:
    words = {"masks": masked(2, share), "lr": 0.1, "momentum": 0.9}
    whole, half = leaves_of(), leaves_of()
    descend(SparseSGDM(whole, **words), whole, 4)
    first = SparseSGDM(half, **words)
    descend(first, half, 2)
    second = SparseSGDM(half, **words)
    second.load_state_dict(first.state_dict())
    descend(second, half, 2, gradient=lambda seed: drawn(seed + 2))
    assert all(torch.equal(whole[name], half[name]) for name in SHAPES)


@pytest.mark.parametrize("share", [0.15, 0.6, 1.0])
def test_it_steps_where_torch_may_take_only_what_is_deterministic(share: float) -> None:
    before, leaves = drawn(0), leaves_of()
    optimizer = SparseSGDM(leaves, masks=masked(2, share), lr=0.1, momentum=0.9)
    torch.use_deterministic_algorithms(True)
    try:
        descend(optimizer, leaves, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(leaves["w"] != before["w"], masked(2, share)["w"])


def test_a_parameter_without_a_mask_is_an_error() -> None:
    leaves, mask = leaves_of(), masked(0, 0.5)
    with pytest.raises(ModelError, match="the mask has none for 'b'"):
        SparseSGDM(leaves, masks={name: mask[name] for name in ("w", "scalar")}, lr=0.1)


@pytest.mark.parametrize("share", [0.1, 0.6, 1.1])
@pytest.mark.parametrize("turned", ["parameter", "gradient", "both"])
def test_what_is_not_contiguous_moves_as_what_is(share: float, turned: str) -> None:
    draw = torch.Generator().manual_seed(0)
    start, gradient, chance = (torch.randn(4, 6, generator=draw) for _ in range(3))
    mask = {"w": chance.sigmoid() < share}

    def moved(turn_parameter: bool, turn_gradient: bool) -> torch.Tensor:
        leaf, own = (
            value.mT.contiguous().mT if turn else value.clone()
            for value, turn in ((start, turn_parameter), (gradient, turn_gradient))
        )
        leaf.requires_grad_()
        optimizer = SparseSGDM({"w": leaf}, masks=mask, lr=0.1, momentum=0.9, weight_decay=0.1)
        leaf.grad = own
        for _ in range(3):
            optimizer.step()
        return leaf.detach()

    torch.testing.assert_close(moved(turned != "gradient", turned != "parameter"), moved(False, False))


def test_a_step_takes_a_closure_and_gives_back_its_result() -> None:
    leaf = torch.zeros(2, requires_grad=True)

    def closure() -> torch.Tensor:
        loss = leaf.sum() + 7
        loss.backward()
        return loss

    optimizer = SparseSGDM({"w": leaf}, masks={"w": torch.tensor([True, False])}, lr=1.0)
    assert optimizer.step(closure).item() == 7
    assert leaf.tolist() == [-1, 0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("share", [None, 0.1, 0.6, 1.0])
def test_an_optimizer_that_goes_on_ends_in_the_bits_of_one_that_was_never_left(
    share: float | None, fused: bool
) -> None:
    """One tensor is frozen as a whole, and so has no momentum, which torch's fused step does not take beside others."""
    words = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "fused": fused}
    masks = None
    if share is not None:
        masks = {**masked(2, share), "scalar": torch.tensor(False)}

    def optimizer(leaves: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(leaves.values(), **words) if masks is None else SparseSGDM(leaves, masks=masks, **words)

    whole, parts = (leaves_of() for _ in range(2))
    descend(optimizer(whole), whole, 6)
    first = optimizer(parts)
    descend(first, parts, 4)
    held = extract_momentum(first, parts, masks=masks)
    before = {name: values.clone() for name, values in held.items()}
    second = optimizer(parts)
    load_momentum(second, parts, held, masks=masks)
    descend(second, parts, 2, gradient=lambda seed: drawn(seed + 4))
    for name in SHAPES:
        assert torch.equal(whole[name], parts[name])
    assert all(torch.equal(held[name], values) for name, values in before.items()), "what is held is not written to"
    if masks is not None:
        assert {name: own.numel() for name, own in held.items()} == {
            name: int(own.sum()) for name, own in masks.items() if own.any()
        }


def test_there_is_no_momentum_of_what_has_not_moved() -> None:
    leaf = nn.Parameter(torch.ones(2))
    assert extract_momentum(torch.optim.SGD([leaf], lr=1.0, momentum=0.9), {"w": leaf}, masks=None) == {}
