"""FLoRA's stack and FedEx's residual: by hand, held to dense sums of products, alone, over rounds, ranks."""

import pytest
import torch
from torch import Tensor

from atlas_fl.aggregation.exact_average import add_factors, residual, stack_products
from atlas_fl.aggregation.lora_product import stack_factors, truncated_svd
from atlas_fl.errors import ConfigError

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


def test_a_residual_of_different_ranks_is_refused_in_one_line() -> None:
    a, b = clients([2, 3], 12, 20)
    with pytest.raises(ConfigError, match=r"these have \[2, 3\]: set --ranks, or take flora"):
        residual(a, b, 1.0, [0.5, 0.5])
