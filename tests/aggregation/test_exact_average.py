"""FLoRA's stack and FedEx's residual: by hand, held to dense sums of products, alone, over rounds, ranks."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from atlas_fl.aggregation.lora_product import add_factors, residual, stack_factors, stack_products, truncated_svd
from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.errors import ConfigError
from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.registry import RULES, find_method
from tests.aggregation.federations import federation_of, server_step

WEIGHTS = [0.5, 0.3, 0.2]
SIDES = [(12, 20), (20, 12), (4, 20), (20, 4)]


def clients(ranks: list[int], d_out: int, d_in: int) -> tuple[list[Tensor], list[Tensor]]:
    chance = torch.Generator().manual_seed(1)
    a = [torch.randn(rank, d_in, generator=chance) for rank in ranks]
    return a, [torch.randn(d_out, rank, generator=chance) for rank in ranks]


def dense_sum(a: list[Tensor], b: list[Tensor], scales: list[float], weights: list[float]) -> Tensor:
    terms = [w * s * (y.double() @ x.double()) for x, y, s, w in zip(a, b, scales, weights)]
    return torch.stack(terms).sum(0)


def test_a_stack_and_a_residual_by_hand() -> None:
    """A = 1, 3 and B = 2, 4, halves: 1 + 6 = 7 in all; the means give 3 * 2 = 6, so 1 remains."""
    a, b = [torch.tensor([[1.0]]), torch.tensor([[3.0]])], [torch.tensor([[2.0]]), torch.tensor([[4.0]])]
    stacked, rest = stack_products(a, b, [1.0, 1.0], [0.5, 0.5]), residual(a, b, 1.0, [0.5, 0.5])
    assert float(stacked.b @ stacked.a) == 7
    assert float(rest.b @ rest.a) == 1


@pytest.mark.parametrize(("d_out", "d_in"), SIDES)
def test_stack_and_averages_with_their_residual_are_the_sum_of_products(d_out: int, d_in: int) -> None:
    a, b = clients([3, 3, 3], d_out, d_in)
    want = dense_sum(a, b, [2.0] * 3, WEIGHTS)
    stacked, rest = stack_products(a, b, [2.0] * 3, WEIGHTS), residual(a, b, 2.0, WEIGHTS)
    mean_a, mean_b = (sum(w * x.double() for w, x in zip(WEIGHTS, factor)) for factor in (a, b))
    assert isinstance(mean_a, Tensor) and isinstance(mean_b, Tensor)
    torch.testing.assert_close(stacked.b @ stacked.a, want)
    torch.testing.assert_close(2.0 * mean_b @ mean_a + rest.b @ rest.a, want)
    assert (2.0 * mean_b @ mean_a - want).norm() > 0.1 * want.norm()
    assert len(stacked.a) == min(9, d_out, d_in) and len(rest.a) == min(6, d_out, d_in)


def test_stacks_take_different_ranks_and_flexlora_is_their_best_approximation() -> None:
    a, b = clients([2, 5, 3], 30, 40)
    scales = [2.0, 0.5, 1.0]
    want = dense_sum(a, b, scales, WEIGHTS)
    stacked = stack_products(a, b, scales, WEIGHTS)
    torch.testing.assert_close(stacked.b @ stacked.a, want)
    shares = torch.tensor([[w for w, x in zip(WEIGHTS, a) for _ in range(len(x))]], dtype=torch.float64)
    (flexlora,) = truncated_svd(*stack_factors(a, b, scales), shares, ranks=[3])
    left, values, right = torch.linalg.svd(stacked.b @ stacked.a)
    torch.testing.assert_close(flexlora.left @ flexlora.right, left[:, :3] * values[:3] @ right[:3])


def test_one_client_alone_has_its_own_product_and_nothing_remains() -> None:
    a, b = clients([3], 12, 20)
    stacked, rest = stack_products(a, b, [2.0], [1.0]), residual(a, b, 2.0, [1.0])
    assert torch.equal(stacked.a, a[0].double()) and torch.equal(stacked.b, 2.0 * b[0].double())
    assert rest.a.shape == (0, 20) and rest.b.shape == (12, 0)


@pytest.mark.parametrize(("d_out", "d_in"), SIDES)
def test_what_is_frozen_adds_up_over_rounds_and_is_never_larger_than_the_module(d_out: int, d_in: int) -> None:
    a, b = clients([3, 3, 3], d_out, d_in)
    once = stack_products(a, b, [1.0] * 3, WEIGHTS)
    frozen = add_factors(add_factors(once, once), once)
    torch.testing.assert_close(frozen.b @ frozen.a, 3 * dense_sum(a, b, [1.0] * 3, WEIGHTS))
    assert len(frozen.a) == min(d_out, d_in)


NAMES = ("one", "two", "three")
MODULES = {"layer.0.q": (12, 20), "layer.1.q": (20, 12)}


def federation():
    importance, layers = np.full((3, 2), 0.5), {"layer.0.q": 0, "layer.1.q": 1}
    return federation_of(
        NAMES, weights=[50, 30, 20], adjacency=np.ones((3, 3)) - np.eye(3), importance=importance, layer_of=layers
    )


def drawn_models(seed: int, ranks: tuple[int, int, int] = (3, 3, 3)) -> dict[str, dict[str, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    return {
        name: {
            **{f"{m}.lora_A": torch.randn(rank, d_in, generator=chance) for m, (_, d_in) in MODULES.items()},
            **{f"{m}.lora_B": torch.randn(d_out, rank, generator=chance) for m, (d_out, _) in MODULES.items()},
            "head.weight": torch.randn(2, 5, generator=chance),
        }
        for name, rank in zip(NAMES, ranks)
    }


def update_of(params: Mapping[str, Tensor], module: str) -> Tensor:
    """s B A with s = 2; zeros where nothing is."""
    if f"{module}.lora_A" not in params:
        return torch.zeros(MODULES[module], dtype=torch.float64)
    return 2 * params[f"{module}.lora_B"].double() @ params[f"{module}.lora_A"].double()


@pytest.mark.parametrize("name", ["fedavg_stacked", "fedavg_with_residual"])
def test_over_rounds_with_absent_clients_everyone_computes_with_the_sum_of_all_products(name: str) -> None:
    """By the papers' own bookkeeping, dense: W += the exact average in each round, with what adapters hold on top."""
    strategy, fed = find_method(name, space="factors"), federation()
    models = {client: {**params, **{key: 0 * params[key] for key in params if key.endswith("lora_B")}}
              for client, params in drawn_models(0).items()}  # fmt: skip
    state = strategy.init(models)
    base = {module: torch.zeros(sides, dtype=torch.float64) for module, sides in MODULES.items()}
    for round, there in enumerate((NAMES, ("one", "three"), ("two",)), start=1):
        updates = {client: drawn_models(round)[client] for client in there}
        done = server_step(strategy, state, models, updates, fed, round=round)
        shares = np.array([fed.weights[NAMES.index(client)] for client in there])
        for module in MODULES:
            terms = [p * update_of(updates[client], module) for p, client in zip(shares / shares.sum(), there)]
            mean = torch.stack(terms).sum(0)
            for client, params in done.client_models.items():
                frozen = WithFrozenPart().frozen_part(done.server_state)
                got = update_of(frozen, module) + update_of(params, module)
                torch.testing.assert_close(got, base[module] + mean, rtol=1e-5, atol=1e-5)
                if name == "fedavg_stacked":
                    assert params[f"{module}.lora_A"] is models[client][f"{module}.lora_A"]
                    assert not params[f"{module}.lora_B"].any()
            base[module] += update_of(WithFrozenPart().newest_part(done.server_state), module)
        state, models = done.server_state, dict(done.client_models)


def test_stack_fedex_and_flexlora_of_any_rank_are_one_update() -> None:
    """Three clients of rank 3: rank 9 holds all of their sum."""
    fed, updates = federation(), drawn_models(1)
    padded = {
        client: {
            key: torch.nn.functional.pad(t, (0, 0, 0, 6) if key.endswith("A") else (0, 6)) if "lora" in key else t
            for key, t in params.items()
        }
        for client, params in updates.items()
    }
    flexlora = find_method("fedavg", space="product")
    whole = server_step(flexlora, {}, padded, padded, fed, round=1).client_models["one"]
    for name in ("fedavg_stacked", "fedavg_with_residual"):
        done = server_step(find_method(name, space="factors"), {}, updates, updates, fed, round=1)
        for module in MODULES:
            frozen = WithFrozenPart().frozen_part(done.server_state)
            got = update_of(frozen, module) + update_of(done.client_models["one"], module)
            torch.testing.assert_close(got, update_of(whole, module), rtol=1e-4, atol=1e-4)


def test_stacks_take_clients_of_different_ranks_and_one_without_an_adapter_and_fedex_refuses_them() -> None:
    fed, updates = federation(), drawn_models(1, ranks=(2, 0, 4))
    done = server_step(RULES["fedavg_stacked"](StrategyOptions()), {}, updates, updates, fed, round=1)
    for module in MODULES:
        mean = 0.5 * update_of(updates["one"], module) + 0.2 * update_of(updates["three"], module)
        torch.testing.assert_close(
            update_of(WithFrozenPart().frozen_part(done.server_state), module), mean, rtol=1e-5, atol=1e-5
        )
    with pytest.raises(ConfigError, match=r"fedavg_with_residual needs one rank, and .* differ; take one rank"):
        RULES["fedavg_with_residual"](StrategyOptions()).check(updates, fed)


def test_what_a_round_sends_has_the_rank_of_all_and_of_all_but_one() -> None:
    fed, updates = federation(), drawn_models(1)
    ranks = {}
    for name in ("fedavg_stacked", "fedavg_with_residual"):
        done = server_step(RULES[name](StrategyOptions()), {}, updates, updates, fed, round=1)
        ranks[name] = len(WithFrozenPart().newest_part(done.server_state)["layer.0.q.lora_A"])
    assert ranks == {"fedavg_stacked": 9, "fedavg_with_residual": 6}
