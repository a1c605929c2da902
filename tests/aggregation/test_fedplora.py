"""Fed-PLoRA held to its equations, dense and module by module; by hand; with one rank for all it is FedIT."""

import numpy as np
import torch

from atlas_fl.methods.fedplora import draw_modules
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import federation_of, server_step

MODULE, NAMES, WEIGHTS, RANKS, ROUNDS = "layer.0.q", ("one", "two", "three"), (50, 30, 20), (2, 6, 3), 3
FIXED = {"space": "factors", "scale": lambda rank: 16 / rank}
"""A scale that depends on the rank, so that modules have to be scaled as they pass between clients."""


def federation(names=NAMES, weights=WEIGHTS):
    return federation_of(names, weights=list(weights), layer_of={MODULE: 0}, importance=np.ones((len(names), 1)))


def drawn(name, rank, seed):
    draw = torch.Generator().manual_seed(100 * seed + NAMES.index(name))
    a, b = torch.randn(rank, 7, generator=draw), torch.randn(5, rank, generator=draw)
    return {f"{MODULE}.lora_A": a, f"{MODULE}.lora_B": b, "head.weight": torch.randn(2, 7, generator=draw)}


def dense(params, scale=FIXED["scale"]):
    a, b = (params[f"{MODULE}.lora_{end}"].double().numpy() for end in "AB")
    return scale(len(a)) * b @ a if len(a) else 0.0


def test_rounds_equal_the_equations_with_clients_that_are_absent() -> None:
    method, fed = find_method("fedavg_by_rank_one", **FIXED), federation()
    start = {name: drawn(name, 6, 0) for name in NAMES}
    first = {name: {**start["two"], **{f"{MODULE}.lora_A": start["two"][f"{MODULE}.lora_A"][:rank],
             f"{MODULE}.lora_B": torch.zeros(5, rank)}} for name, rank in zip(NAMES, RANKS)}  # fmt: skip
    state, models = method.init(first), first
    a = start["two"][f"{MODULE}.lora_A"].double().numpy()
    sb, chosen = np.zeros((5, 6)), {name: list(range(rank)) for name, rank in zip(NAMES, RANKS)}
    for round, there in enumerate((NAMES, ("one", "three"), ("two",)), start=1):
        for name in NAMES:  # folding: everyone begins with all modules
            whole = dense(models[name]) + (dense(part) if (part := method.frozen_part(state, name)) else 0.0)
            np.testing.assert_allclose(whole, sb @ a, rtol=1e-5, atol=1e-5)
        updates = {name: drawn(name, RANKS[NAMES.index(name)], round) for name in there}
        done = server_step(method, state, models, updates, fed, round=round)
        for j in range(6):
            trained = [name for name in there if j in chosen[name]]
            total = sum(WEIGHTS[NAMES.index(name)] for name in trained)
            if trained:
                parts = [(WEIGHTS[NAMES.index(n)] / total, updates[n], chosen[n].index(j)) for n in trained]
                a[j] = sum(p * own[f"{MODULE}.lora_A"][place].double().numpy() for p, own, place in parts)
                sb[:, j] = sum(
                    p * 16 / len(own[f"{MODULE}.lora_A"]) * own[f"{MODULE}.lora_B"][:, place].double().numpy()
                    for p, own, place in parts
                )
        state, models = done.server_state, done.client_models
        chosen = {name: state["chosen"][name][MODULE].tolist() for name in NAMES}
        assert [len(chosen[name]) for name in NAMES] == list(RANKS)
        assert [len(models[name][f"{MODULE}.lora_A"]) for name in NAMES] == list(RANKS)


def test_a_module_by_hand() -> None:
    """Modules 1 and 2 of a client with 3 examples of 4, 1 of the other: A_1 = (3 * 4 + 1 * 8) / 4 = 5, A_2 = 7."""
    method = find_method("fedavg_by_rank_one", space="factors")
    pairs = {"one": ([4.0, 7.0], 3), "two": ([8.0], 1)}
    models = {
        n: {"q.lora_A": torch.tensor(v)[:, None], "q.lora_B": torch.ones(1, len(v))} for n, (v, _) in pairs.items()
    }
    fed = federation_of(tuple(pairs), weights=[3, 1], layer_of={"q": 0}, importance=np.ones((2, 1)))
    state = server_step(method, method.init(models), models, models, fed, round=1).server_state
    assert state["whole"]["q.lora_A"].flatten().tolist() == [5.0, 7.0]


def test_with_one_rank_it_is_fedit_and_nothing_is_frozen() -> None:
    method, fedit = (find_method(name, space="factors") for name in ("fedavg_by_rank_one", "fedavg"))
    models, updates = ({name: drawn(name, 4, seed) for name in NAMES} for seed in (1, 2))
    done = server_step(method, method.init(models), models, updates, federation(), round=1)
    wanted = server_step(fedit, {}, models, updates, federation(), round=1).client_models
    assert not any(method.frozen_part(done.server_state, name) for name in NAMES)
    for name in NAMES:
        torch.testing.assert_close(dict(done.client_models[name]), dict(wanted[name]))


def test_draws_are_of_a_round_and_a_client_and_reach_every_module() -> None:
    def drawn_in(round, client):
        return tuple(draw_modules({"q": 2}, {"q": 6}, seed=1, draw=round, client=client)["q"].tolist())

    draws = {(round, client): drawn_in(round, client) for round in range(20) for client in NAMES}
    assert {j for places in draws.values() for j in places} == set(range(6))
    assert len(set(draws.values())) > 8 and all(one[0] < one[1] for one in draws.values())
    assert drawn_in(3, "one") == draws[3, "one"]
