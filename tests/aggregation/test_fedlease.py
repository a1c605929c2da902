"""FedLEASE's experts and routers: where they begin, what is averaged where, and what a client stands on."""

import numpy as np
import pytest
import torch

from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.registry import find_method
from atlas_fl.models.lora import packed_linear
from atlas_fl.params import flatten_state, unflatten_state
from tests.aggregation.federations import adapters_of, federation_of, server_step

NAMES, WEIGHTS, CLUSTERS = ("one", "two", "three", "four", "five"), (40, 30, 20, 10, 5), (4, 4, 2, -1, 2)
"""Three clusters, one of them of an undecided client."""
MATES = {"one": (0, 1), "two": (0, 1), "three": (2, 4), "four": (3,), "five": (2, 4)}
EXPERTS = {"one": (1, 2), "two": (1, 2), "three": (0, 2), "four": (0, 1), "five": (0, 2)}
"""The clusters of the others, in the order of their first clients."""
FIRST = ("one", "three", "four")


def begun(clusters=CLUSTERS, **options):
    method = find_method("fedavg_cluster_routed", **options)
    fed = federation_of(NAMES, weights=list(WEIGHTS), clusters=clusters)
    drawn = adapters_of(NAMES, [2] * 5)
    return method, fed, *method.begin(drawn, fed)


def after_a_round(there=NAMES, **options):
    method, fed, models, state = begun(**options)
    updates = {
        name: {key: one + NAMES.index(name) + 1 for key, one in params.items()}
        for name, params in models.items()
        if name in there
    }
    return method, fed, models, updates, server_step(method, state, models, updates, fed, round=1)


def test_everyone_begins_with_its_adapter_one_router_and_other_experts_of_zeros() -> None:
    method, _, models, state = begun()
    drawn = adapters_of(NAMES, [2] * 5)
    for name in NAMES:
        assert all(torch.equal(models[name][key], drawn[name][key]) for key in drawn[name])
        router = models[name]["q.lora_gate"]
        assert router.shape == (5, 12) and torch.equal(router, models["one"]["q.lora_gate"])
        assert router.abs().max() <= 12**-0.5 and router.std().item() == pytest.approx((12 * 3) ** -0.5, rel=0.2)
        frozen = method.frozen_part(state, name)
        assert {key: tuple(one.shape) for key, one in frozen.items()} == {"q.lora_A": (4, 12), "q.lora_B": (10, 4)}
        assert not any(one.any() for one in frozen.values())
    other = begun(seed=1)[2]
    assert not torch.equal(other["one"]["q.lora_gate"], models["one"]["q.lora_gate"])


def test_of_one_cluster_there_is_no_router() -> None:
    _, _, models, state = begun(clusters=(0,) * 5)
    assert state == {} and not any(key.endswith("lora_gate") for params in models.values() for key in params)


@pytest.mark.parametrize("there", [NAMES, ("one", "five"), ("two", "three", "four")])
def test_experts_and_routers_are_averages_inside_clusters(there) -> None:
    method, _, models, updates, done = after_a_round(there)
    for name in NAMES:
        mates = [k for k in MATES[name] if NAMES[k] in there]
        for key, found in done.client_models[name].items():
            total = sum(WEIGHTS[k] for k in mates)
            mean = sum(WEIGHTS[k] / total * updates[NAMES[k]][key].double() for k in mates)
            wanted = mean if mates else models[name][key].double()
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    # a cluster of which nobody took part has sent nothing, and stays zero
    sent = {k: any(NAMES[mate] in there for mate in MATES[first]) for k, first in enumerate(FIRST)}
    for name in NAMES:
        frozen = method.frozen_part(done.server_state, name)
        for place, k in enumerate(EXPERTS[name]):
            expert = done.client_models[FIRST[k]]
            a, b = frozen["q.lora_A"][2 * place : 2 * place + 2], frozen["q.lora_B"][:, 2 * place : 2 * place + 2]
            assert torch.equal(a, expert["q.lora_A"] if sent[k] else torch.zeros(2, 12))
            assert torch.equal(b, expert["q.lora_B"] if sent[k] else torch.zeros(10, 2))


@pytest.mark.parametrize("scale", [lambda _: 2.0, lambda rank: 16 / rank, lambda rank: 16 / rank**0.5])
def test_a_client_computes_with_its_experts_as_its_router_weighs_them(scale) -> None:
    """In plain PyTorch, whatever the scale of a rank; and the router has an effect."""
    method, _, _, _, done = after_a_round(scale=scale)
    start = RoundStart(
        round=2,
        clients=NAMES,
        tasks=dict.fromkeys(NAMES, "t"),
        client_models=done.client_models,
        server_models=done.client_models,
        server_state=done.server_state,
    )
    predicted, x = method.predict(start), torch.randn(50, 12, generator=torch.Generator().manual_seed(2))
    for name in NAMES:
        params, own = predicted[name], done.client_models[name]
        experts = [own, *(done.client_models[FIRST[k]] for k in EXPERTS[name])]
        outputs = torch.stack([scale(2) * x @ one["q.lora_A"].T @ one["q.lora_B"].T for one in experts])
        largest, places = (x @ own["q.lora_gate"].T).topk(3)
        shares = torch.zeros(50, 5).scatter(1, places, largest.softmax(1))
        weights = torch.cat([shares[:, :3].sum(1, keepdim=True), shares[:, 3:]], dim=1)
        wanted = (weights.T[:, :, None] * outputs).sum(0)
        layer = {"weight": torch.zeros(12, 10), "bias": None, "segments": (range(0, 50),)}
        factors = (params["q.lora_A"], params["q.lora_B"])
        common = {**layer, "scales": (scale(6),), "factors": factors}
        torch.testing.assert_close(
            packed_linear(x, gates=(params["q.lora_gate"],), **common), wanted, rtol=1e-4, atol=1e-3
        )
        turned = packed_linear(x, gates=(-params["q.lora_gate"],), **common)
        assert (turned - wanted).norm() > 0.1 * wanted.norm()


def test_what_is_frozen_is_the_same_after_a_checkpoint_in_any_order() -> None:
    clusters = tuple(range(12))
    names = [f"client-{k}" for k in clusters]
    method, fed = find_method("fedavg_cluster_routed"), federation_of(names, clusters=clusters)
    models, state = method.begin(adapters_of(names, [2] * 12), fed)
    state = server_step(method, state, models, models, fed, round=1).server_state
    turned = unflatten_state(dict(sorted(flatten_state(state).items())))
    for name in names:
        first, second = method.frozen_part(state, name), method.frozen_part(turned, name)
        assert all(torch.equal(first[key], second[key]) for key in first)
    assert np.array_equal(method.frozen_part(state, "client-3")["q.lora_A"][6:8], models["client-4"]["q.lora_A"])
