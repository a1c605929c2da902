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
from tests.aggregation.federations import federation_of


def vectors(*points):
    return {client: {"w": torch.tensor(point)} for client, point in zip("abcdef", points)}


def after_round(before, updates, state=None, **words):
    federation = federation_of("abcdef"[: len(before)])
    done = find_method("cfl", **words).aggregate(state or {}, before, updates, federation, round=1)
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
    """Updates (2, 0) and (-2, 0.8) average to (0, .4); the longest is 2.154, and .4 / 2.154 is .1857."""
    points = np.array([[2.0, 0.0], [-2.0, 0.8]])
    gram, halves = points @ points.T, np.array([0.5, 0.5])
    assert pull_apart(gram, halves, ratio=0.19)
    assert not pull_apart(gram, halves, ratio=0.18)


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


@pytest.mark.parametrize("strategy", ["cfl", "fedtreelora"])
def test_late_clients_are_refused_in_one_line(strategy):
    values = {"strategy": strategy, "arrive": ("movie-0=2",)}
    with pytest.raises(ConfigError, match=r"tells from earlier updates who belongs together, .* leave --arrive out"):
        validate(with_values(find_preset("smoke"), values))
