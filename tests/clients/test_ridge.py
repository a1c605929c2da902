"""The head that is fitted before anything else."""

import numpy as np
import torch
from sklearn.linear_model import Ridge

from atlas_fl.clients.ridge import ridge_head


def sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    return wide.T @ wide, wide.T @ y


def drawn(count: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=draw, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5]) + 1
    label = torch.randint(0, 4, (count,), generator=draw)
    return x, torch.nn.functional.one_hot(label, 4).double() - 0.25


def test_the_head_of_the_clients_sums_is_that_of_all_images_in_one_place() -> None:
    """scikit-learn's ridge on all rows together is the reference; its intercept is not penalised either."""
    parts = [drawn(count, seed=seed) for seed, count in enumerate((20, 5, 11))]
    gram, cross = (sum(both) for both in zip(*(sums(x, y) for x, y in parts)))
    head = ridge_head(gram, cross, penalty=2.0)
    x, y = (torch.cat(both).numpy() for both in zip(*parts))
    wanted = Ridge(alpha=2.0 * float(np.square(x).mean()), solver="cholesky").fit(x, y)
    np.testing.assert_allclose(head["head.weight"].numpy(), wanted.coef_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(head["head.bias"].numpy(), wanted.intercept_, rtol=1e-5, atol=1e-6)


def test_one_feature_and_two_images_by_hand() -> None:
    """x = (1, -1), y = (1, -1): the slope is 2 / (2 + penalty), since the mean square of x is 1; the bias is 0."""
    x, y = torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    head = ridge_head(*sums(x, y), penalty=2.0)
    assert head["head.weight"].item() == 0.5
    assert head["head.bias"].item() == 0.0
