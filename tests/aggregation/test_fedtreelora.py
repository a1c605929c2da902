"""FedTreeLoRA's nested cuts: planted trees, by hand, and over rounds."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_fl.errors import ConfigError
from atlas_fl.methods.fedtreelora import CUTS, nested_cuts
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import federation_of, server_step

FLAT = np.full((4, 4), 1.0) - np.eye(4)
"""Distances without structure: every silhouette of two clusters is 0."""
PAIRS = np.array([[0, 0.2, 1, 1], [0.2, 0, 1, 1], [1, 1, 0, 0.2], [1, 1, 0.2, 0]])


FEDERATION = federation_of("abcd", layer_of={"layer.0.q": 0, "layer.1.q": 1})


def model(*factors, head=0.0):
    params = {}
    for layer, (a, b) in enumerate(factors):
        params |= {f"layer.{layer}.q.lora_A": torch.tensor([a]), f"layer.{layer}.q.lora_B": torch.tensor(b)[:, None]}
    return params | {"head.weight": torch.tensor([head])}


def test_a_layer_without_structure_is_one_cluster_and_one_with_two_pairs_is_cut_by_hand():
    """Of the pairs a = .2 and b = 1 for everyone, so the silhouette is .8; it is no better with three clusters."""
    cuts = nested_cuts([FLAT, PAIRS], step=2, threshold=0.1)
    assert [cut.tolist() for cut in cuts] == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert [cut.tolist() for cut in nested_cuts([FLAT, PAIRS], step=2, threshold=0.81)] == [[0] * 4] * 2


def test_a_layer_has_at_most_so_many_clusters_more_than_the_one_below():
    three = np.abs(np.subtract.outer(*[np.array([0.0, 0.1, 5.0, 5.1, 9.0, 9.1])] * 2))
    assert [cut.max() + 1 for cut in nested_cuts([three, three, three], step=1, threshold=0.1)] == [2, 3, 3]
    assert [cut.max() + 1 for cut in nested_cuts([three], step=5, threshold=0.1)] == [3]


@given(st.integers(3, 7), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_every_cut_refines_those_below(n, layers, step, seed):
    draws = np.random.default_rng(seed).normal(size=(layers, n, 2))
    distances = [np.linalg.norm(points[:, None] - points[None], axis=2) for points in draws]
    cuts = nested_cuts(distances, step=step, threshold=0.1)
    for lower, upper in pairwise(cuts):
        together = upper[:, None] == upper[None]
        assert (lower[:, None] == lower[None])[together].all()
        assert upper.max() <= lower.max() + step


@pytest.mark.parametrize("space", ["product", "factors"])
def test_lower_layers_are_averaged_over_all_and_upper_ones_in_their_clusters(space):
    """All four agree in the lower layer; in the upper one, as in their heads, the second two go the other way."""
    strategy = find_method("fedtreelora", space=space, tree_threshold=0.5)
    begun = {client: model(([1.0, 0.0], [0.0]), ([1.0, 0.0], [0.0])) for client in "abcd"}
    trained = {
        client: model(([1.0, 0.0], [2.0 + k]), ([1.0, 0.0], [(1.0 + k) * (1 if k < 2 else -1)]), head=float(k))
        for k, client in enumerate("abcd")
    }
    done = server_step(strategy, {}, begun, trained, FEDERATION, round=1)
    cuts = {layer: [int(clusters[c]) for c in "abcd"] for layer, clusters in done.server_state[CUTS].items()}
    assert cuts == {"0": [0, 0, 0, 0], "1": [0, 0, 1, 1]}

    def update(client, layer):
        a, b = (done.client_models[client][f"layer.{layer}.q.lora_{end}"] for end in "AB")
        return float((b @ a)[0, 0])

    assert [update(client, 0) for client in "abcd"] == pytest.approx([3.5] * 4)
    assert [update(client, 1) for client in "abcd"] == pytest.approx([1.5, 1.5, -3.5, -3.5])
    heads = [float(done.client_models[client]["head.weight"]) for client in "abcd"]
    assert heads == pytest.approx([0.5, 0.5, 2.5, 2.5])
    # the tree stays, whatever later updates say
    later = server_step(strategy, done.server_state, done.client_models, begun, FEDERATION, round=2)
    assert later.server_state is done.server_state


def test_there_is_one_average_until_everyone_took_part():
    strategy = find_method("fedtreelora")
    begun = {client: model(([1.0, 0.0], [0.0]), ([1.0, 0.0], [0.0])) for client in "abcd"}
    trained = {client: model(([1.0, 0.0], [1.0]), ([1.0, 0.0], [float(k) - 1.5])) for k, client in enumerate("abc")}
    done = server_step(strategy, {}, begun, trained, FEDERATION, round=1)
    assert done.server_state == {}
    assert float(done.client_models["d"]["layer.1.q.lora_B"] @ done.client_models["d"]["layer.1.q.lora_A"][:, :1]) == (
        pytest.approx(-0.5)
    )


def test_parameters_without_a_layer_are_refused():
    whole = {client: {"w": torch.zeros(2)} for client in "abcd"}
    with pytest.raises(ConfigError, match=r"^w is in no layer"):
        find_method("fedtreelora").check(whole, FEDERATION)
