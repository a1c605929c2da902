"""FedTreeLoRA's outside expert: its mean by hand and layer by layer, its weight and the weight's gradient in torch."""

import numpy as np
import pytest
import torch

from atlas_fl.methods.frozen_part import FrozenCompanion
from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import federation_of, server_step

NAMES, WEIGHTS = ("one", "two", "three", "four"), (40, 30, 20, 10)
LAYERS = {"layer.0.q": 0, "layer.1.q": 1}
CUTS = {"0": (0, 0, 0, 0), "1": (0, 0, 1, 2)}
"""All together below, two and two others alone above."""


def drawn(seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"lora_A": (2, 7), "lora_B": (5, 2)}
    params = {f"{m}.{end}": torch.randn(shape, generator=draw) for m in LAYERS for end, shape in shapes.items()}
    return {**params, "head.weight": torch.randn(2, 7, generator=draw)}


def state_of(cuts=CUTS):
    return {"cuts": {j: {n: torch.tensor(c) for n, c in zip(NAMES, labels)} for j, labels in cuts.items()}}


def after_a_round(there=NAMES, cuts=CUTS):
    method = find_method("fedavg_in_tree_and_outside", space="factors")
    fed = federation_of(NAMES, weights=list(WEIGHTS), layer_of=LAYERS, importance=np.ones((4, 2)) / 2)
    held, updates = {n: drawn(k) for k, n in enumerate(NAMES)}, {n: drawn(10 + NAMES.index(n)) for n in there}
    return method, updates, server_step(method, state_of(cuts), held, updates, fed, round=2)


@pytest.mark.parametrize("there", [NAMES, ("one", "three"), ("one", "two", "four")])
def test_outside_is_the_mean_of_those_in_other_clusters_of_the_layer_that_took_part(there) -> None:
    method, updates, done = after_a_round(there)
    for k, name in enumerate(NAMES):
        part = method.frozen_part(done.server_state, name)
        others = [j for j in range(4) if NAMES[j] in there and CUTS["1"][j] != CUTS["1"][k]]
        assert set(part) == ({"layer.1.q.lora_A", "layer.1.q.lora_B"} if others else set())
        for key, tensor in part.items():
            total = sum(WEIGHTS[j] for j in others)
            wanted = sum(WEIGHTS[j] / total * updates[NAMES[j]][key].double() for j in others)
            torch.testing.assert_close(tensor.double(), wanted, rtol=1e-5, atol=1e-5)


def test_models_are_those_of_the_tree_and_with_one_cluster_nothing_is_outside() -> None:
    tree = find_method("fedtreelora", space="factors")
    fed = federation_of(NAMES, weights=list(WEIGHTS), layer_of=LAYERS, importance=np.ones((4, 2)) / 2)
    for cuts in (CUTS, dict.fromkeys(CUTS, (0, 0, 0, 0))):
        method, updates, done = after_a_round(cuts=cuts)
        plain = server_step(tree, state_of(cuts), updates, updates, fed, round=2).client_models
        for name in NAMES:
            assert all(torch.equal(done.client_models[name][key], plain[name][key]) for key in plain[name])
            assert bool(method.frozen_part(done.server_state, name)) == (cuts is CUTS)


def test_a_weight_by_hand_its_gradient_and_its_range() -> None:
    """0.75 * 2 * 3 * 5 + 0.25 * 2 * 7 * 11 = 61, and lambda's gradient is 2 * (15 - 77) = -124."""
    companion = FrozenCompanion()
    own = {"q.lora_A": torch.tensor([[5.0]]), "q.lora_B": torch.tensor([[3.0]])}
    shared = {"q.lora_A": torch.tensor([[11.0]]), "q.lora_B": torch.tensor([[7.0]])}
    weight = torch.tensor(0.75, requires_grad=True)
    both = companion.combine(own, shared, {"q.lora_gate": weight})
    output = 2 * both["q.lora_B"] @ both["q.lora_A"]
    output.sum().backward()
    assert output.item() == pytest.approx(61.0) and weight.grad is not None and weight.grad.item() == -124.0
    for value, kept in ((1.5, 1.0), (-0.5, 0.0), (0.25, 0.25)):
        leaf = torch.tensor(value, requires_grad=True)
        companion.after_step({"q.lora_gate": leaf, "q.lora_A": own["q.lora_A"]})
        assert leaf.item() == kept
    assert own["q.lora_A"].item() == 5.0


def test_clients_begin_with_their_own_weights_and_predict_with_them() -> None:
    method, _, done = after_a_round()
    known = {"one": {"layer.1.q.lora_gate": torch.tensor(0.9)}}
    start = RoundStart(
        round=3,
        clients=NAMES,
        tasks=dict.fromkeys(NAMES, "movie"),
        client_models=done.client_models,
        server_models=done.client_models,
        server_state=done.server_state,
        by_client={"gate": known},
    )
    gate = method.keep(start)["gate"]
    assert [float(gate[n]["layer.1.q.lora_gate"]) for n in NAMES] == pytest.approx([0.9, 0.5, 0.5, 0.5])
    for name, weight in zip(NAMES, (0.9, 0.5, 0.5, 0.5)):
        outside, inside = method.frozen_part(done.server_state, name), done.client_models[name]
        predicted = method.predict(start)[name]
        for module, share in (("layer.0.q", 1.0), ("layer.1.q", weight)):
            products = [
                params[f"{module}.lora_B"] @ params[f"{module}.lora_A"] if f"{module}.lora_A" in params else 0.0
                for params in (predicted, inside, outside)
            ]
            torch.testing.assert_close(products[0], share * products[1] + (1 - share) * products[2])
