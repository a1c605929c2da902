"""Laws of every mask strategy in both scopes, of what is sent under a mask, and of every merge."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from atlas_fl.sparse.codec import decode_mask, decode_values, encode_mask, encode_values
from atlas_fl.sparse.fisher import fisher_scores
from atlas_fl.sparse.masked_sgd import SparseSGDM
from atlas_fl.sparse.masks import (
    BY_SENSITIVITY,
    MASKS,
    Evidence,
    bottom_k,
    calibrate_mask,
    density,
    merge_masks,
    num_kept,
    overlap,
)
from atlas_fl.sparse.task_vectors import MERGES, apply_vector, merge_vectors, task_vector
from tests.examples import examples

SCOPES = ("global", "layer")


@st.composite
def models(draw):
    """Weights and scores of some parameters, most of them with many ties."""
    seed, levels = draw(st.integers(0, 2**31)), draw(st.sampled_from([1, 3, 1000]))
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4))
    source = torch.Generator().manual_seed(seed)
    params = {
        f"p{i}": torch.randint(-levels, levels + 1, shape, generator=source).float() for i, shape in enumerate(shapes)
    }
    scores = {name: torch.randint(0, levels, value.shape, generator=source).float() for name, value in params.items()}
    return params, scores


def strategies():
    return [(strategy, scope) for strategy in MASKS for scope in SCOPES]


@pytest.mark.parametrize(("strategy", "scope"), strategies())
@given(model=models(), sparsity=st.floats(0.001, 0.999))
@examples(25)
def test_a_mask_has_exactly_its_ones_whatever_the_ties_and_the_order(strategy, scope, model, sparsity) -> None:
    params, scores = model
    words = {"sparsity": sparsity, "scope": scope, "seed": 3}
    mask = calibrate_mask(lambda _: scores, params, names=params, strategy=strategy, **words)
    if scope == "global":
        assert num_kept(mask) == round((1 - sparsity) * sum(value.numel() for value in params.values()))
    else:
        assert {name: int(own.sum()) for name, own in mask.items()} == {
            name: round((1 - sparsity) * value.numel()) for name, value in params.items()
        }
    assert all(own.dtype is torch.bool and own.shape == params[name].shape for name, own in mask.items())
    backwards = dict(reversed(params.items()))
    turned = calibrate_mask(lambda _: scores, backwards, names=backwards, strategy=strategy, **words)
    assert list(turned) == list(reversed(mask))
    assert all(torch.equal(mask[name], turned[name]) for name in mask)


@pytest.mark.parametrize(("strategy", "scope"), strategies())
@pytest.mark.parametrize("sparsity", [0.3, 0.9])
def test_no_frozen_weight_ranks_before_a_kept_one(strategy: str, scope: str, sparsity: float) -> None:
    source = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(40, 3, generator=source), "b": torch.randn(50, generator=source)}
    scores = {name: value.exp() for name, value in params.items()}
    words = {"names": params, "sparsity": sparsity, "scope": scope, "seed": 0}
    mask = calibrate_mask(lambda _: scores, params, strategy=strategy, **words)
    if strategy == "random":
        return
    shown = scores if strategy in BY_SENSITIVITY else {name: value.abs() for name, value in params.items()}
    sign = -1 if strategy in ("most_sensitive", "highest_magnitude") else 1
    for names in [["a", "b"]] if scope == "global" else [["a"], ["b"]]:
        kept = torch.cat([sign * shown[name][mask[name]] for name in names])
        frozen = torch.cat([sign * shown[name][~mask[name]] for name in names])
        assert kept.max() <= frozen.min()


@pytest.mark.parametrize("scope", SCOPES)
def test_the_five_strategies_have_equal_density_and_differ(scope: str) -> None:
    source = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(60, 30, generator=source), "b": torch.randn(90, generator=source)}
    scores = {name: torch.rand(value.shape, generator=source) for name, value in params.items()}
    words = {"names": params, "sparsity": 0.77, "scope": scope, "seed": 1}
    made = [calibrate_mask(lambda _: scores, params, strategy=each, **words) for each in MASKS]
    assert len({num_kept(mask) for mask in made}) == 1
    if scope == "layer":
        assert all(density(mask) == density(made[0]) for mask in made)
    alike = overlap(made)
    assert (alike.diagonal() == 1).all()
    assert (alike == alike.T).all()
    assert all(alike[i, j] < 0.6 for i in range(5) for j in range(i))
    pair = {"first": made[0], "third": made[2]}
    both, either = (merge_masks(pair, method=method) for method in ("intersection", "union"))
    assert alike[0, 2] == pytest.approx(num_kept(both) / num_kept(either))


@pytest.mark.parametrize(("strategy", "scope"), strategies())
def test_one_round_of_calibration_is_a_single_pass_and_more_are_nested(strategy: str, scope: str) -> None:
    source = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(30, 7, generator=source), "b": torch.randn(40, generator=source)}
    rounds_of: list[dict[str, torch.Tensor]] = []

    def score(weights):
        rounds_of.append(weights)
        mixing = torch.cat([weights["a"].flatten(), weights["b"]]).sum()  # turned-down weights change every score
        return {name: (value * 7 + mixing * params[name]).sin().abs() for name, value in weights.items()}

    words = {"names": ["a", "b"], "strategy": strategy, "sparsity": 0.87, "scope": scope, "seed": 2}
    evidence = Evidence(params=params, scores=score(params), seed=2)
    parts = [params] if scope == "global" else [{name: value} for name, value in params.items()]
    single: dict[str, torch.Tensor] = {}
    for part in parts:
        count = round(0.13 * sum(value.numel() for value in part.values()))
        single |= bottom_k(partial(MASKS[strategy], evidence), part, count=count)
    once = calibrate_mask(score, params, **words)
    assert all(torch.equal(once[name], single[name]) for name in params)
    rounds_of.clear()
    several = calibrate_mask(score, params, rounds=4, **words)
    assert num_kept(several) == num_kept(single)
    if strategy in BY_SENSITIVITY:
        assert len(rounds_of) == 4
        untouched = [sum(int((weights[name] == params[name]).sum()) for name in params) for weights in rounds_of]
        if scope == "global":
            assert untouched == [round(0.13 ** (done / 4) * 250) for done in range(4)]
        for earlier, later in pairwise(rounds_of):
            assert all(((earlier[name] == params[name]) >= (later[name] == params[name])).all() for name in params)
        assert any(not torch.equal(several[name], single[name]) for name in params), "re-scoring has an effect"
    else:
        assert not rounds_of
        assert all(torch.equal(several[name], single[name]) for name in params)


@pytest.mark.parametrize(("strategy", "scope"), strategies())
@given(model=models(), sparsity=st.floats(0.05, 0.99))
@examples(15)
def test_a_mask_and_what_it_keeps_arrive_as_they_were(strategy, scope, model, sparsity) -> None:
    params, scores = model
    words = {"names": params, "sparsity": sparsity, "scope": scope, "seed": 3}
    mask = calibrate_mask(lambda _: scores, params, strategy=strategy, **words)
    found = decode_mask(encode_mask(mask), params)
    assert all(torch.equal(found[name], own) for name, own in mask.items())
    values = encode_values(params, mask)
    zeroed, whole = decode_values(values, mask, params), decode_values(values, mask, params, into=params)
    for name, value in params.items():
        assert torch.equal(zeroed[name], value * mask[name])
        assert torch.equal(whole[name], value)


def trained(strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(before, after, mask) of a small network that was scored, masked and trained for a few steps."""
    source = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    named = dict(module.named_parameters())
    with torch.no_grad():
        for value in named.values():
            value.normal_(generator=source)
    before = {name: value.detach().clone() for name, value in named.items()}
    inputs = torch.randn(32, 6, generator=source)
    scores = fisher_scores(
        lambda params, rows: functional_call(module, dict(params), (rows,)), named, names=named, inputs=inputs, seed=0
    )
    mask = calibrate_mask(lambda _: scores, before, names=before, strategy=strategy, sparsity=0.8, seed=0)
    optimizer = SparseSGDM(named, masks=mask, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), torch.arange(32) % 3).backward()
        optimizer.step()
    return before, {name: value.detach() for name, value in named.items()}, mask


@pytest.mark.parametrize("strategy", MASKS)
def test_a_sparse_upload_filled_up_is_the_dense_update(strategy: str) -> None:
    before, after, mask = trained(strategy)
    update = task_vector(after, before)
    assert sum(int((value != 0).sum()) for value in update.values()) > 0.5 * num_kept(mask)
    sent = decode_values(encode_values(update, mask), mask, update)
    weights = decode_values(encode_values(after, mask), mask, after, into=before)
    for name in update:
        assert torch.equal(sent[name], update[name])
        assert torch.equal(weights[name].view(torch.int32), after[name].view(torch.int32))


def vectors(seed: int, count: int):
    source = torch.Generator().manual_seed(seed)
    return [{"a": torch.randn(9, 4, generator=source), "b": torch.randn(14, generator=source)} for _ in range(count)]


@pytest.mark.parametrize("method", MERGES)
def test_a_vector_merged_with_itself_is_itself(method: str) -> None:
    (one,) = vectors(0, 1)
    for count in (1, 2, 4):
        merged = merge_vectors([one] * count, method=method, keep=1.0)
        assert all(torch.equal(merged[name], one[name]) for name in one)


@pytest.mark.parametrize("method", MERGES)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 5), keep=st.sampled_from([0.1, 0.5, 1.0]))
@examples(20)
def test_merging_knows_no_order_and_follows_a_scale(method, seed, count, keep) -> None:
    several = vectors(seed, count)
    merged = merge_vectors(several, method=method, keep=keep)
    turned = merge_vectors(several[::-1], method=method, keep=keep)
    larger = merge_vectors(
        [{key: -4.0 * tensor for key, tensor in one.items()} for one in several], method=method, keep=keep
    )
    for name in merged:
        torch.testing.assert_close(turned[name], merged[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(larger[name], -4.0 * merged[name])


@pytest.mark.parametrize("method", MERGES)
def test_merging_leaves_its_inputs_alone(method: str) -> None:
    several = vectors(1, 3)
    copies = [{name: value.clone() for name, value in one.items()} for one in several]
    merge_vectors(several, method=method)
    assert all(torch.equal(one[name], copy[name]) for one, copy in zip(several, copies) for name in one)


def test_ties_does_not_dilute_vectors_that_do_not_meet() -> None:
    """Under disjoint masks each keeps its full value, where the mean halves it."""
    one, two = vectors(2, 2)
    first = {name: torch.arange(value.numel()).view(value.shape) % 2 == 0 for name, value in one.items()}
    apart = [
        {name: value * first[name] for name, value in one.items()},
        {name: value * ~first[name] for name, value in two.items()},
    ]
    ties, mean = (merge_vectors(apart, method=method, keep=1.0) for method in ("ties", "mean"))
    for name in one:
        assert torch.equal(ties[name], apart[0][name] + apart[1][name])
        assert torch.equal(mean[name], ties[name] / 2)


@given(scale=st.floats(-2, 2), seed=st.integers(0, 2**31))
@examples(20)
def test_applying_a_task_vector_is_a_line_through_both_models(scale: float, seed: int) -> None:
    start, end = vectors(seed, 2)
    found = apply_vector(start, task_vector(end, start), scale=scale)
    for name in start:
        line = (1 - scale) * start[name].double() + scale * end[name].double()
        assert math.isclose(float((found[name] - line).abs().max()), 0, abs_tol=1e-5)
