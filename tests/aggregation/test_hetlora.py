"""HetLoRA's weights: the norms of the clients' updates, from dense products and by hand."""

import pytest
import torch

from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.methods.hetlora import FedAvgByNorm, update_norm
from tests.aggregation.federations import federation_of, server_step

OPTIONS = StrategyOptions(space="factors", align="pad", scale=lambda rank: 4.0 / rank)


def model(rank: int, *, size: float, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "q.lora_A": torch.randn(rank, 6, generator=draw),
        "q.lora_B": size * torch.randn(5, rank, generator=draw),
        "head.weight": torch.randn(3, 6, generator=draw),
    }


XY = federation_of("xy", weights=[1, 2])


@pytest.mark.parametrize("rank", [1, 3])
def test_the_norm_is_that_of_the_dense_update(rank: int) -> None:
    params = model(rank, size=2.0)
    dense = 4.0 / rank * (params["q.lora_B"] @ params["q.lora_A"]).double()
    assert update_norm(params, OPTIONS) == pytest.approx(float(dense.norm()), rel=1e-6)


def test_a_client_weighs_as_much_as_its_update_is_large_by_hand() -> None:
    """Ranks 1 of scale 4: norms 4 * 3 and 4 * 1, so shares 3/4 and 1/4; the head by examples, 1/3 and 2/3."""
    clients = {
        "x": {"q.lora_A": torch.tensor([[1.0, 0.0]]), "q.lora_B": torch.tensor([[3.0]]), "head.w": torch.tensor([3.0])},
        "y": {"q.lora_A": torch.tensor([[0.0, 1.0]]), "q.lora_B": torch.tensor([[1.0]]), "head.w": torch.tensor([0.0])},
    }
    result = server_step(FedAvgByNorm(OPTIONS), {}, clients, clients, XY, round=1)
    for mixed in result.client_models.values():
        assert mixed["q.lora_A"].tolist() == [[0.75, 0.25]]
        assert mixed["q.lora_B"].tolist() == [[2.5]]
        assert mixed["head.w"].item() == pytest.approx(1.0)


def test_where_nobody_has_an_update_examples_count() -> None:
    clients = {name: model(2, size=0.0, seed=k) for k, name in enumerate(("x", "y"))}
    result = server_step(FedAvgByNorm(OPTIONS), {}, clients, clients, XY, round=1)
    wanted = (clients["x"]["q.lora_A"] + 2 * clients["y"]["q.lora_A"]) / 3
    torch.testing.assert_close(result.client_models["x"]["q.lora_A"], wanted)


def test_a_client_of_a_small_rank_gets_the_leading_rows() -> None:
    clients = {"x": model(3, size=1.0, seed=1), "y": model(1, size=1.0, seed=2)}
    result = server_step(FedAvgByNorm(OPTIONS), {}, clients, clients, XY, round=1)
    x, y = (result.client_models[name]["q.lora_A"] for name in ("x", "y"))
    assert x.shape == (3, 6) and torch.equal(x[:1], y)
