import numpy as np
import pytest
import torch

from atlas_fl.errors import DataError
from atlas_fl.ranks.allocation import (
    cluster_importance,
    complexity_factors,
    layer_importance,
    normalise_importance,
    rngwp,
)


def test_importance_is_mean_square_per_parameter_by_hand() -> None:
    # 8/4 = 2, 6/1 = 6, so 1/4 and 3/4
    np.testing.assert_allclose(layer_importance(np.array([8.0, 6.0]), np.array([4, 1])), [0.25, 0.75])


def test_importance_agrees_with_autograd() -> None:
    draw = torch.Generator().manual_seed(0)
    layers = [torch.randn(6, 6, generator=draw, requires_grad=True) for _ in range(3)]
    inputs = torch.randn(4, 6, generator=draw)
    output = inputs
    for layer in layers:
        output = torch.tanh(output @ layer)
    output.square().sum().backward()
    gradients = [layer.grad for layer in layers if layer.grad is not None]
    sums = np.array([float(gradient.square().sum()) for gradient in gradients])
    means = np.array([float(gradient.square().mean()) for gradient in gradients])
    found = layer_importance(sums, np.array([36, 36, 36]))
    np.testing.assert_allclose(found, means / means.sum(), rtol=1e-6)
    assert found.sum() == pytest.approx(1.0)


def test_importance_ignores_the_scale_of_the_loss() -> None:
    sums, counts = np.array([1.0, 2.0, 5.0]), np.array([3, 2, 1])
    np.testing.assert_allclose(layer_importance(sums * 1e300, counts), layer_importance(sums, counts))


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, np.nan], [1.0, np.inf], [1.0, -1.0]])
def test_no_gradient_is_no_measurement(values: list[float]) -> None:
    with pytest.raises(DataError, match=r"layer importance cannot be measured from .* finite and not all zero"):
        normalise_importance(np.array(values))


def test_rngwp_by_hand() -> None:
    first = rngwp(None, np.array([4.0, 6.0]), np.array([2, 2]))
    np.testing.assert_allclose(first, [2.0, 3.0])
    # 0.9 * 2 + 0.1 * 12 = 3.0 and 0.9 * 3 + 0.1 * 3 = 3
    np.testing.assert_allclose(rngwp(first, np.array([24.0, 6.0]), np.array([2, 2])), [3.0, 3.0])


def test_cluster_importance_is_the_mean_over_members_and_spares_the_undecided() -> None:
    importance = np.array([[0.2, 0.8], [0.4, 0.6], [0.9, 0.1], [0.5, 0.5]])
    before = importance.copy()
    found = cluster_importance(importance, [0, 0, 1, -1])
    np.testing.assert_allclose(found, [[0.3, 0.7], [0.3, 0.7], [0.9, 0.1], [0.5, 0.5]])
    np.testing.assert_array_equal(importance, before)
    np.testing.assert_allclose(found.sum(axis=1), 1.0)


def test_complexity_factors_by_hand() -> None:
    # clusters have difficulty 1 and 0.5; the lone client 0: 1, 0.5 + 0.5 * 0.5, 0.5
    found = complexity_factors(np.array([0.8, 1.2, 0.5, 0.0]), [0, 0, 1, -1])
    np.testing.assert_allclose(found, [1.0, 1.0, 0.75, 0.5])
    np.testing.assert_allclose(complexity_factors(np.zeros(2), [0, 1]), 1.0)
