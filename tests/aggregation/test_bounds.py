"""The norm bound: an update is measured against those that were trained beside it."""

import math

import numpy as np
import pytest
import torch

from atlas_fl.aggregation.norm_bound import BODY, HEADS, bound_updates, change_norms, clip_update, find_excesses
from atlas_fl.aggregation.rules import StrategyOptions

PRODUCT = StrategyOptions(space="product", share=("A", "B", "head"), scale=lambda rank: 16 / rank)
FACTORS = StrategyOptions(space="factors", share=("A", "B", "head"), scale=lambda rank: 16 / rank)
CLIENTS = ("a", "b", "c", "d", "e")
TASKS = dict(zip(CLIENTS, ("x", "x", "x", "y", "y")))


def model(seed, *, rank=3, size=1.0):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q.lora_A": (rank, 9), "q.lora_B": (7, rank), "v.lora_A": (rank, 5), "v.lora_B": (8, rank)}
    shapes |= {"head.weight": (2, 9), "norm.bias": (4,)}
    return {key: size * torch.randn(shape, generator=draw) for key, shape in shapes.items()}


def dense(params):
    pairs = {
        module: 16 / 3 * params[f"{module}.lora_B"].double() @ params[f"{module}.lora_A"].double() for module in "qv"
    }
    return pairs | {"norm": params["norm.bias"].double()}


def distance(one, other):
    return math.sqrt(sum(float((dense(one)[key] - value).square().sum()) for key, value in dense(other).items()))


def moved(seed, before, *, size=0.1):
    draw = torch.Generator().manual_seed(seed)
    return {key: tensor + size * torch.randn(tensor.shape, generator=draw) for key, tensor in before.items()}


def round_of(**sizes):
    before = {client: model(seed) for seed, client in enumerate(CLIENTS)}
    after = {
        client: moved(seed + 10, before[client], size=sizes.get(client, 0.1)) for seed, client in enumerate(CLIENTS)
    }
    return before, after


def test_the_norm_of_a_change_is_that_of_the_dense_update():
    before, after = model(1), moved(2, model(1))
    norms = change_norms(before, after, PRODUCT)
    assert norms[BODY] == pytest.approx(distance(before, after), rel=1e-9)
    assert norms[HEADS] == pytest.approx(
        float((after["head.weight"] - before["head.weight"]).double().norm()), rel=1e-6
    )
    assert change_norms(before, before, PRODUCT) == {BODY: pytest.approx(0.0, abs=1e-5), HEADS: 0.0}


def test_factors_that_are_mixed_apart_are_measured_apart():
    before = model(1)
    after = before | {"q.lora_A": before["q.lora_A"] * 1e6, "q.lora_B": before["q.lora_B"] / 1e6}
    assert change_norms(before, after, PRODUCT)[BODY] < 1e-2
    assert change_norms(before, after, FACTORS)[BODY] > 1e6


def test_the_norm_by_hand():
    before = {"q.lora_A": torch.tensor([[1.0, 0.0]]), "q.lora_B": torch.tensor([[1.0]]), "head.bias": torch.zeros(2)}
    after = {
        "q.lora_A": torch.tensor([[1.0, 2.0]]),
        "q.lora_B": torch.tensor([[2.0]]),
        "head.bias": torch.tensor([3, 4.0]),
    }
    # 16 (2 [1 2] - [1 0]) = 16 [1 4], and 5 for the head
    assert change_norms(before, after, PRODUCT) == {BODY: pytest.approx(16 * math.sqrt(17)), HEADS: pytest.approx(5)}


def test_what_is_not_shared_or_not_here_is_not_measured():
    before, after = model(1), moved(2, model(1))
    only_a = StrategyOptions(space="factors", share=("A",), scale=lambda _: 2.0)
    wanted = math.sqrt(
        sum(float((after[k] - before[k]).double().square().sum()) for k in before if "_A" in k or "bias" in k)
    )
    assert change_norms(before, after, only_a) == {BODY: pytest.approx(wanted), HEADS: 0.0}
    hidden = after | {key: after[key].new_empty(0) for key in after if not key.endswith("_A") and "bias" not in key}
    assert change_norms(before, hidden, only_a) == change_norms(before, after, only_a)


def test_who_is_beyond_the_bound_is_refused_with_its_figures_and_the_others_are_the_same():
    before, after = round_of(d=50.0)
    kept, reasons = bound_updates(before, after, TASKS, PRODUCT, mode="refuse", ratio=10)
    assert kept.keys() == set("abce")
    assert all(kept[client] is after[client] for client in kept)
    assert reasons.keys() == {"d"}
    assert reasons["d"].startswith("the change of its adapters or weights has norm ")
    assert " times the median " in reasons["d"]
    assert reasons["d"].endswith(" of 5 clients; allowed are 10 (--max-norm-ratio)")


def test_honest_updates_pass_untouched():
    before, after = round_of()
    for mode in ("refuse", "clip", "off"):
        kept, reasons = bound_updates(before, after, TASKS, PRODUCT, mode=mode, ratio=10)
        assert not reasons
        assert all(kept[client] is after[client] for client in CLIENTS)


def test_heads_are_compared_inside_their_task_and_two_are_not_compared():
    before, after = round_of()
    far = after["a"] | {"head.weight": after["a"]["head.weight"] * 1e4}
    kept, reasons = bound_updates(before, after | {"a": far}, TASKS, PRODUCT, mode="refuse", ratio=10)
    assert kept.keys() == set("bcde")
    assert "the change of its head has norm" in reasons["a"] and "of 3 clients" in reasons["a"]
    far = after["d"] | {"head.weight": after["d"]["head.weight"] * 1e4}
    assert not bound_updates(before, after | {"d": far}, TASKS, PRODUCT, mode="refuse", ratio=10)[1], "two of task y"


@pytest.mark.parametrize(
    "norms", [{"a": 1.0, "b": 1e9}, {"a": 0.0, "b": 0.0, "c": 5.0}, {"a": math.inf, "b": math.inf, "c": 1}]
)
def test_where_there_is_no_measure_nobody_is_refused(norms):
    by_part = {client: {BODY: norm, HEADS: 0.0} for client, norm in norms.items()}
    assert not find_excesses(by_part, dict.fromkeys(norms, "x"), ratio=10)


def test_an_update_that_overflows_is_beyond_every_bound():
    norms = {client: {BODY: norm, HEADS: 0.0} for client, norm in zip("abc", (1.0, 2.0, math.inf))}
    assert find_excesses(norms, dict.fromkeys("abc", "x"), ratio=10).keys() == {"c"}


@pytest.mark.parametrize("space", [PRODUCT, FACTORS])
def test_a_clipped_update_goes_the_same_way_and_not_farther_than_twice_the_bound(space):
    before, after = round_of(d=50.0)
    norms = {client: change_norms(before[client], after[client], space) for client in CLIENTS}
    middle = float(np.median([norm[BODY] for norm in norms.values()]))
    kept, reasons = bound_updates(before, after, TASKS, space, mode="clip", ratio=10)
    assert kept.keys() == set(CLIENTS) and reasons.keys() == {"d"}
    assert all(kept[client] is after[client] for client in "abce")
    now = change_norms(before["d"], kept["d"], space)[BODY]
    assert now <= (2 if space is PRODUCT else 1) * 10 * middle * (1 + 1e-5)
    assert now >= 3 * middle
    assert {key: tensor.shape for key, tensor in kept["d"].items()} == {key: t.shape for key, t in after["d"].items()}
    assert torch.equal(kept["d"]["head.weight"], after["d"]["head.weight"]), "of two heads none is clipped"


def test_a_clipped_product_is_the_best_of_its_rank():
    before, after = model(1), moved(2, model(1), size=5.0)
    factor = 0.25
    limits = {BODY: factor * change_norms(before, after, PRODUCT)[BODY]}
    new = dense(clip_update(before, after, PRODUCT, limits=limits))
    for key, was in dense(before).items():
        wanted = was + factor * (dense(after)[key] - was)
        if wanted.ndim == 2:
            left, values, right = torch.linalg.svd(wanted, full_matrices=False)
            wanted = (left[:, :3] * values[:3]) @ right[:3]
        assert torch.allclose(new[key], wanted, atol=1e-4 * float(wanted.norm()))


def test_a_change_that_overflows_is_clipped_to_nothing():
    before = {"w": torch.full((3,), -3e38)}
    after = {"w": torch.full((3,), 3e38)}
    assert torch.equal(clip_update(before, after, PRODUCT, limits={BODY: 1.0})["w"], before["w"])
