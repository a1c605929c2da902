"""FedSVD's step: the full decomposition in NumPy, by hand, and that products stay."""

import numpy as np
import pytest
import torch

from atlas_fl.methods.fedsvd import orthonormal_rows
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import adapters_of, dense_update, federation_of, server_step


def step(rule, models, weights=(1, 3)):
    fed = federation_of(models, weights=weights)
    return server_step(find_method(rule, space="factors"), {}, models, models, fed, round=1).client_models


def models_of_one_a(seed=1):
    """Two clients that have trained B and the head."""
    x, y = adapters_of("xy", (4, 4), seed=seed).values()
    return {"x": x, "y": {**y, "q.lora_A": x["q.lora_A"]}}


def test_the_factors_are_those_of_the_papers_decomposition():
    """U S V^T = Bbar A in full: A is V^T[:r] and B is U[:, :r] S[:r], each row of A with B's column up to its sign."""
    models = models_of_one_a()
    done = step("fedavg_orthonormal", models)
    product = (models["x"]["q.lora_B"] + 3 * models["y"]["q.lora_B"]).double() / 4 @ models["x"]["q.lora_A"].double()
    left, sizes, right = np.linalg.svd(product.numpy())
    a, b = (done["y"][f"q.lora_{end}"].double().numpy() for end in "AB")
    signs = np.sign((a * right[:4]).sum(1))
    assert a == pytest.approx(signs[:, None] * right[:4], abs=1e-6)
    assert b == pytest.approx(signs * left[:, :4] * sizes[:4], abs=1e-5)
    assert done["x"]["q.lora_A"] is done["y"]["q.lora_A"]


def test_the_average_of_products_stays_and_rows_are_orthonormal():
    models = models_of_one_a(seed=2)
    ours, mean = (step(rule, models)["x"] for rule in ("fedavg_orthonormal", "fedavg"))
    exact = (dense_update(models["x"]) + 3 * dense_update(models["y"])) / 4
    torch.testing.assert_close(dense_update(ours), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense_update(mean), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours["q.lora_A"] @ ours["q.lora_A"].T, torch.eye(4), rtol=0, atol=1e-6)
    assert torch.equal(ours["head.weight"], mean["head.weight"])


def test_by_hand():
    """(3, 4) is 5 times (.6, .8); the first row of a second rank is turned so that its largest entry is positive."""
    a, b = orthonormal_rows(torch.tensor([[3.0, -4.0]]), torch.tensor([[2.0], [0.0]]))
    torch.testing.assert_close(a, torch.tensor([[-0.6, 0.8]]))
    torch.testing.assert_close(b, torch.tensor([[-10.0], [0.0]]))


@pytest.mark.parametrize("b", [torch.zeros(5, 2), torch.tensor([[1.0, 1.0]] * 5), torch.ones(1, 2)])
def test_below_full_rank_factors_stay_as_they_are(b):
    a = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    assert all(new is old for new, old in zip(orthonormal_rows(a, b), (a, b), strict=True))
