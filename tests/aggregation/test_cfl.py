"""CFL's cuts in two: against every bipartition, by hand, and over rounds."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_fl.aggregation.distances import cosines
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.config.validation import validate
from atlas_fl.errors import ConfigError
from atlas_fl.methods.cfl import CLUSTERS, bipartition, clusters_in, pull_apart
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import federation_of, server_step


def vectors(*points):
    return {client: {"w": torch.tensor(point)} for client, point in zip("abcdef", points)}


def after_round(before, updates, state=None, **words):
    federation = federation_of("abcdef"[: len(before)])
    words = {"bipartition_round": 0, "bipartition_norm": 0.5, "bipartition_ratio": 1.0, **words}
    done = server_step(find_method("cfl", **words), state or {}, before, updates, federation, round=1)
    return clusters_in(done.server_state[CLUSTERS], federation).tolist(), done


@given(st.integers(2, 6), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_no_other_bipartition_has_a_smaller_largest_cosine_across(n, seed):
    similarities = cosines(np.cov(np.random.default_rng(seed).normal(size=(n, 5))))
    apart = bipartition(similarities)
    assert not apart[0] and apart.any()

    def across(part):
        return similarities[np.ix_(part, [k for k in range(n) if k not in part])].max()

    least = min(across(part) for size in range(1, n) for part in combinations(range(n), size))
    assert across(np.flatnonzero(apart).tolist()) == pytest.approx(least)


def test_the_norm_of_the_average_by_hand():
    """Updates (2, 0) and (-2, 0.8) average to (0, .4); the longest is 2.154."""
    points = np.array([[2.0, 0.0], [-2.0, 0.8]])
    gram, halves = points @ points.T, np.array([0.5, 0.5])
    assert pull_apart(gram, halves, eps_1=0.41, eps_2=2.15)
    assert not pull_apart(gram, halves, eps_1=0.39, eps_2=2.15)
    assert not pull_apart(gram, halves, eps_1=0.41, eps_2=2.16)


def test_clients_that_pull_against_each_other_are_averaged_apart_from_this_round_on():
    before = vectors(*[[1.0, 1.0]] * 4)
    updates = vectors([3.0, 1.0], [-1.0, 1.0], [4.0, 2.0], [-2.0, 1.0])
    clusters, done = after_round(before, updates)
    assert clusters == [0, 1, 0, 1]
    assert done.client_models["a"]["w"].tolist() == done.client_models["c"]["w"].tolist() == [3.5, 1.5]
    assert done.client_models["d"]["w"].tolist() == [-1.5, 1.0]
    # in the next round each cluster agrees, and stays whole
    more = {client: {"w": params["w"] + torch.tensor([0.5, 0.0])} for client, params in done.client_models.items()}
    again, _ = after_round(done.client_models, more, done.server_state)
    assert again == [0, 1, 0, 1]


def test_clients_that_pull_one_way_stay_together():
    clusters, done = after_round(vectors(*[[0.0, 0.0]] * 4), vectors([1.0, 0.2], [1.0, -0.2], [2.0, 0.1], [1.5, 0.0]))
    assert clusters == [0, 0, 0, 0]
    assert done.client_models["b"]["w"].tolist() == pytest.approx([1.375, 0.025])


def test_a_cluster_of_which_somebody_is_absent_stays_whole():
    before = vectors(*[[0.0, 0.0]] * 3)
    updates = vectors([1.0, 0.0], [-1.0, 0.0], [1.0, 0.0])
    assert after_round(before, updates)[0] == [0, 1, 0]
    del updates["c"]
    assert after_round(before, updates)[0] == [0, 0, 0]


def clusters_after_rounds(optima, *, num_rounds, noise, seed=0, **words):
    """Clusters after rounds of clients with the loss 1/2 || w - optimum ||^2, whose gradients are noisy."""
    names = "abcdefghijklmnopqrstuvwxyz"[: len(optima)]
    federation, rng, state = federation_of(names), np.random.default_rng(seed), {}
    method, models = find_method("cfl", rounds=80, **words), {name: {"w": torch.zeros(20)} for name in names}
    by_round = {}
    for number in range(1, num_rounds + 1):
        updates = {}
        for name, optimum in zip(names, optima, strict=True):
            pull = optimum + noise * torch.tensor(rng.normal(size=20), dtype=torch.float32) - models[name]["w"]
            updates[name] = {"w": models[name]["w"] + 0.5 * pull}
        done = server_step(method, state, models, updates, federation, round=number)
        state, models = done.server_state, done.client_models
        by_round[number] = clusters_in(state[CLUSTERS], federation).tolist()
    return by_round


@pytest.mark.parametrize("num_clients", [8, 16])
def test_alike_clients_are_not_cut_and_planted_ones_are_after_round_20(num_clients):
    """Of alike ones the average at rest is a root of n shorter than each, below any fixed quotient of many clients."""
    planted = [torch.full((20,), sign * 1.0) for sign in [1, -1] * (num_clients // 2)]
    alike = [torch.ones(20)] * num_clients
    assert clusters_after_rounds(alike, num_rounds=40, noise=0.3)[40] == [0] * num_clients
    found = clusters_after_rounds(planted, num_rounds=40, noise=0.1)
    assert found[20] == [0] * num_clients and found[21] == found[40] == [0, 1] * (num_clients // 2)
    early = clusters_after_rounds(planted, num_rounds=1, noise=0.1, bipartition_round=0)
    assert early[1] == [0, 1] * (num_clients // 2)


def test_a_cluster_of_two_stays_whole():
    apart = vectors([1.0, 0.0], [-1.0, 0.0])
    assert after_round(vectors(*[[0.0, 0.0]] * 2), apart)[0] == [0, 0]


@pytest.mark.parametrize("strategy", ["cfl", "fedtreelora"])
def test_late_clients_are_refused_in_one_line(strategy):
    values = {"strategy": strategy, "arrive": ("movie-0=2",)}
    with pytest.raises(ConfigError, match=r"tells from earlier updates who belongs together, .* leave --arrive out"):
        validate(with_values(find_preset("smoke"), values))
