import dataclasses

import numpy as np
import pytest
import torch

from atlas_fl.errors import ConfigError
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import federation_of, server_step

TWO = federation_of(
    "ab",
    weights=[1, 3],
    adjacency=np.array([[0.0, 2.0], [2.0, 0.0]]),
    importance=np.array([[0.1, 0.9], [0.3, 0.7]]),
    layer_of={"layer.0.q": 0, "layer.1.q": 1},
)


def heads(*values):
    return {client: {"head.bias": torch.tensor([value])} for client, value in zip("ab", values)}


def after(name, updates, *, round=1, **words):
    strategy = find_method(name, **words)
    before = heads(0.0, 0.0)
    models = server_step(strategy, strategy.init(before), before, updates, TWO, round=round).client_models
    return [float(models[client]["head.bias"]) for client in "ab"]


def test_every_rule_by_hand():
    trained = heads(4.0, 8.0)
    assert after("local", trained) == [4, 8]
    assert after("fedavg", trained) == [7, 7]
    assert after("fedavg_cluster", trained) == [7, 7]
    assert after("atlas_no_laplacian", trained) == [7, 7]
    assert after("atlas_laplacian", trained, eta=0.25) == [5, 7]
    assert after("atlas_laplacian", trained, eta=1.0) == [8, 4]


THREE = federation_of(
    "abc",
    weights=[1, 3, 5],
    clusters=[0, 1, 0],
    adjacency=np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 3.0], [1.0, 3.0, 0.0]]),
)
"""`c` joins the others: in the cluster of `a`, with an edge to each."""


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("local", 1.0),
        ("fedavg", (1 * 4 + 3 * 8) / 4),
        ("fedavg_cluster", 4.0),
        ("atlas_no_laplacian", 4.0),
        ("atlas_laplacian", (1 * 4 + 3 * 8) / 4),
    ],
)
def test_who_joins_begins_with_its_row_of_the_rule_by_hand(name, begins):
    strategy = find_method(name, eta=0.1)
    fresh = {"c": {"head.bias": torch.tensor([1.0])}}
    found = strategy.initial_models(strategy.init(heads(4.0, 8.0)), heads(4.0, 8.0), fresh, THREE)
    assert found.keys() == {"c"}
    assert float(found["c"]["head.bias"]) == begins


@pytest.mark.parametrize("name", ["fedavg", "fedavg_cluster", "atlas_laplacian"])
def test_who_joins_and_meets_nobody_keeps_its_own_model(name):
    """Another task for the head, no cluster and no edge for the rest; nor do two newcomers mix with each other."""
    alone = dataclasses.replace(
        THREE, clusters=np.array([0, -1, -1]), adjacency=np.zeros((3, 3)), head_groups=("t", "u", "u")
    )
    fresh = {client: {"head.bias": torch.tensor([value])} for client, value in (("b", 2.0), ("c", 1.0))}
    found = find_method(name).initial_models({}, {"a": heads(4.0, 8.0)["a"]}, fresh, alone)
    assert [float(found[client]["head.bias"]) for client in "bc"] == [2.0, 1.0]


def test_eta_decays_from_the_second_round_on():
    trained = heads(4.0, 8.0)
    assert after("atlas_laplacian", trained, eta=0.5, eta_decay=0.5, round=1) == [6, 6]
    assert after("atlas_laplacian", trained, eta=0.5, eta_decay=0.5, round=2) == [5, 7]
    strategy = find_method("atlas_laplacian", eta=0.4, eta_decay=0.5)
    assert [strategy.eta(round) for round in (1, 2, 3)] == pytest.approx([0.4, 0.2, 0.1])
    assert find_method("fedavg", eta=0.4).eta(1) == 0.0


def test_the_graph_needs_no_absent_client_to_come():
    alone = {"a": heads(4.0, 0.0)["a"]}
    assert after("atlas_laplacian", alone, eta=0.25) == [3, 0]
    assert after("fedavg", alone) == [4, 4]


def test_layer_weighting_scales_eta_by_importance():
    strategy = find_method("atlas_laplacian", eta=0.4, layer_weighting="importance")
    matrices = strategy.matrices(TWO, [True, True], round=1)
    # mean importance .2 and .8: a quarter of eta for layer 0, all of it for layer 1 and the head
    assert matrices("layer.0.q.lora_A")[0, 1] == pytest.approx(0.1)
    assert matrices("layer.0.q.lora_B")[0, 1] == pytest.approx(0.1)
    assert matrices("layer.1.q.lora_B")[0, 1] == pytest.approx(0.4)
    assert matrices("head.bias")[0, 1] == pytest.approx(0.4)
    assert matrices("layer.1.q.lora_A") is matrices("layer.1.q.lora_B")
    with pytest.raises(ConfigError, match=r"^pooler is in no layer, and .*--layer-weighting none"):
        matrices("pooler.lora_A")


def test_averages_know_no_layer_weighting():
    strategy = find_method("fedavg", layer_weighting="importance")
    assert strategy.matrices(TWO, [True, True], round=1)("pooler.lora_A").tolist() == [[0.25, 0.75]] * 2


def test_standard_fl_mixes_tasks_but_not_their_heads():
    apart = federation_of("ab", weights=[1, 3], clusters=[0, 1], tasks=("movie", "trec"))
    matrices = find_method("fedavg").matrices(apart, [True, True], round=1)
    assert matrices("q.lora_A").tolist() == [[0.25, 0.75]] * 2
    assert matrices("head.bias").tolist() == [[1, 0], [0, 1]]


def test_flags_say_what_a_rule_needs():
    flags = {
        name: (strategy.communicates, strategy.clustered)
        for name in ("local", "fedavg", "fedavg_cluster", "atlas_laplacian", "atlas_no_laplacian")
        for strategy in [find_method(name)]
    }
    assert flags == {
        "local": (False, False),
        "fedavg": (True, False),
        "fedavg_cluster": (True, True),
        "atlas_laplacian": (True, True),
        "atlas_no_laplacian": (True, True),
    }


def test_an_unknown_strategy_is_named():
    with pytest.raises(ConfigError, match="unknown strategy 'fedavgg'; did you mean 'fedavg'"):
        find_method("fedavgg")
