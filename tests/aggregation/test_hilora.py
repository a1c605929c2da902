"""HiLoRA's levels: an independent loop over all rounds, clusters and a pull by hand, and what clients compute with."""

import numpy as np
import pytest
import torch

from atlas_fl.client.optimizer import LossScale, apart_from, gradient_chain
from atlas_fl.client.options import TrainOptions
from atlas_fl.methods.hilora import spectral_clusters
from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import adapters_of, federation_of, server_step

NAMES, WEIGHTS = ("one", "two", "three", "four", "five", "six"), (40, 30, 20, 10, 60, 50)
SIDES = {"one": 0, "two": 1, "three": 0, "four": 1, "five": 0, "six": 1}
"""The directions of B that a client trains."""
MODULE, RANK = "q", 2
A, B = f"{MODULE}.lora_A", f"{MODULE}.lora_B"


def drawn_models():
    return {name: {**one, B: torch.zeros_like(one[B])} for name, one in adapters_of(NAMES, [RANK] * 6).items()}


def best(matrix, rank):
    left, values, right = np.linalg.svd(matrix)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def product(params, scale=2.0):
    return scale * (params[B].double() @ params[A].double()).numpy()


def update_of(params, name, round):
    """A model whose B moved in two directions, those of the client's side."""
    draw = torch.Generator().manual_seed(100 * round + NAMES.index(name))
    move = torch.zeros_like(params[B])
    rows = slice(5 * SIDES[name], 5 * SIDES[name] + 2)
    move[rows] = 3 * torch.randn(move[rows].shape, generator=draw)
    a = params[A] + 0.3 * torch.randn(params[A].shape, generator=draw)
    return {**params, A: a, B: params[B] + 0.01 * torch.randn(move.shape, generator=draw) + move}


def mean(updates, members):
    total = sum(WEIGHTS[NAMES.index(name)] for name in members)
    return sum(WEIGHTS[NAMES.index(name)] / total * product(updates[name]) for name in members)


def round_start(done):
    return RoundStart(
        round=9,
        clients=NAMES,
        tasks=dict.fromkeys(NAMES, "t"),
        client_models=done.client_models,
        server_models=done.client_models,
        server_state=done.server_state,
    )


@pytest.mark.parametrize("absent", [(), ("two", "three")])
def test_four_rounds_are_those_of_a_plain_loop(absent) -> None:
    """Two rounds of all, two of the clusters; whoever is absent in the first and the third gets what others have."""
    method = find_method("fedavg_in_levels", rounds=6, personal_rounds=2, basis_decay=0.75, seed=3)
    fed = federation_of(NAMES, weights=list(WEIGHTS))
    models, state = method.begin(drawn_models(), fed)
    drawn, bases, root = None, {}, np.zeros((10, 12))
    groups = [NAMES]
    for round in (1, 2, 3, 4):
        updates = {n: update_of(models[n], n, round) for n in NAMES if round % 2 == 0 or n not in absent}
        wanted = {}
        for group in groups:
            there = [name for name in group if name in updates]
            wanted |= dict.fromkeys(group, best(mean(updates, there), RANK))
        for name in updates if round < 3 else ():
            unit = updates[name][B].double().numpy()
            unit = unit / np.sqrt((unit**2).sum())
            bases[name] = 0.75 * bases[name] + 0.25 * unit if name in bases else unit
        done = server_step(method, state, models, updates, fed, round=round)
        assert (done.server_state is state) == (round == 3), "nothing new is frozen"
        models, state = done.client_models, done.server_state
        predicted = method.predict(round_start(done))
        for name in NAMES:
            np.testing.assert_allclose(product(predicted[name]), root + wanted[name], atol=1e-5)
            if round in (2, 4):
                np.testing.assert_allclose(product(method.frozen_part(state, name)), root + wanted[name], atol=1e-5)
                assert not models[name][B].any() and (drawn is None or models[name][A].equal(drawn))
                drawn = models[name][A]
            elif round == 1:
                assert not method.frozen_part(state, name)
                np.testing.assert_allclose(state["bases"].get(name, {}).get(B, 0), bases.get(name, 0), atol=1e-6)
        if round == 2:
            root, groups = wanted["one"], [("one", "three", "five"), ("two", "four", "six")]
            numbers = {name: int(state["clusters"][name]) for name in NAMES}
            assert [{numbers[name] for name in group} for group in groups] == [{numbers["one"]}, {numbers["two"]}]
            assert numbers["one"] != numbers["two"]


def test_a_client_that_sent_nothing_while_there_was_no_cluster_is_alone() -> None:
    method, fed = find_method("fedavg_in_levels", rounds=2), federation_of(NAMES, weights=list(WEIGHTS))
    models = drawn_models()
    updates = {name: update_of(models[name], name, 1) for name in NAMES if name != "two"}
    clusters = server_step(method, {}, models, updates, fed, round=1).server_state["clusters"]
    labels = {name: int(clusters[name]) for name in NAMES}
    assert labels["two"] not in {labels[name] for name in NAMES if name != "two"}
    assert labels["one"] == labels["three"] == labels["five"] != labels["four"] == labels["six"]


def test_clusters_by_hand() -> None:
    """Of two and three clients at distance 0 inside and 1 between; of equal ones, and of two, there is one cluster."""
    apart = np.array([[0.0 if (i < 2) == (j < 2) else 1.0 for j in range(5)] for i in range(5)])
    labels = spectral_clusters(apart)
    assert len(set(labels[:2])) == len(set(labels[2:])) == 1 and labels[0] != labels[4]
    three = np.array([[abs(i // 2 - j // 2) for j in range(6)] for i in range(6)], float)
    assert [len(set(spectral_clusters(np.minimum(three, 1.0))[k : k + 2])) for k in (0, 2, 4)] == [1, 1, 1]
    assert len(set(spectral_clusters(np.minimum(three, 1.0)))) == 3
    assert not spectral_clusters(np.zeros((4, 4))).any() and not spectral_clusters(apart[1:3, 1:3]).any()


def test_the_pull_by_hand() -> None:
    """U = (3, 4) / 5 at length 1 and B = (1, 2): U^T B = 2.2, and the gradient is 2 * 0.5 * 2.2 * U = (1.32, 1.76)."""
    frozen = {B: torch.tensor([[30.0], [40.0]]), A: torch.ones(1, 3)}
    b = torch.tensor([[1.0], [2.0]], requires_grad=True)
    (0.5 * (torch.tensor([0.6, 0.8]) @ b).square()).sum().backward()
    pull = apart_from(frozen, weight=0.5)
    assert pull(B, b.detach()).flatten().tolist() == pytest.approx([1.32, 1.76])
    torch.testing.assert_close(pull(B, b.detach()), b.grad)
    assert not pull("head.weight", torch.ones(2)).any()
    leaves = {B: b, A: torch.ones(1, 3, requires_grad=True)}
    for weight, part, added in ((0.5, frozen, [1.32, 1.76]), (0.0, frozen, [0, 0]), (0.5, {}, [0, 0])):
        for leaf in leaves.values():
            leaf.grad = torch.zeros_like(leaf)
        options = TrainOptions(seed=0, orthogonality=weight, clip=0.0)
        assert gradient_chain(leaves, options, LossScale(enabled=False), frozen=part)(leaves, None)
        assert b.grad is not None and b.grad.flatten().tolist() == pytest.approx(added)


@pytest.mark.parametrize("scale", [lambda _: 2.0, lambda rank: 16 / rank, lambda rank: 16 / rank**0.5])
def test_levels_add_up_whatever_the_scale_of_a_rank(scale) -> None:
    method, fed = find_method("fedavg_in_levels", rounds=2, scale=scale), federation_of(NAMES, weights=list(WEIGHTS))
    models, total, state = drawn_models(), 0.0, {}
    for round in (1, 2):
        done = server_step(method, state, models, {n: update_of(models[n], n, round) for n in NAMES}, fed, round=round)
        updates = {name: update_of(models[name], name, round) for name in NAMES}
        labels = {name: int(state["clusters"][name]) for name in NAMES} if state else dict.fromkeys(NAMES, 0)
        there = [name for name in NAMES if labels[name] == labels["one"]]
        total = total + scale(RANK) / 2 * best(mean(updates, there), RANK)
        state, models = done.server_state, done.client_models
        frozen = method.frozen_part(state, "one")
        assert len(frozen[A]) == RANK * round
        np.testing.assert_allclose(product(frozen, scale(RANK * round)), total, atol=1e-5)
