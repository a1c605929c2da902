"""The audit's own accountant of differential privacy, against published epsilons and another library's bounds."""

import pytest

from atlas_fl.audit.privacy import spent
from tests.client.test_privacy import ORACLES

dp_accounting = pytest.importorskip("dp_accounting", reason="the extra dp is not installed")


@pytest.mark.parametrize(("q", "noise", "steps", "delta", "epsilon"), ORACLES)
def test_the_second_accountant_agrees_with_published_settings(q, noise, steps, delta, epsilon) -> None:
    assert spent(((q, steps),), noise, delta) == pytest.approx(epsilon, abs=1e-3)


@pytest.mark.parametrize(("q", "noise", "steps", "delta", "_"), ORACLES)
def test_no_bound_by_renyi_divergence_is_below_it(q, noise, steps, delta, _) -> None:
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise)), steps)
    bound = accountant.get_epsilon(delta)
    assert bound * 0.3 < spent(((q, steps),), noise, delta) <= bound


def test_losses_beyond_the_finest_grid_are_composed_on_a_coarser_one() -> None:
    """Gaussian noise of 0.1 in five full batches is one Gaussian of 0.1 / sqrt(5)."""
    assert spent(((1.0, 5),), 0.1, 1e-5) == pytest.approx(spent(((1.0, 1),), 0.1 / 5**0.5, 1e-5), rel=1e-3)
    assert spent(((1.0, 5),), 0.1, 1e-5) == pytest.approx(344.45, abs=0.5)  # of privacy loss distributions
    assert spent(((0.001, 1),), 8.0, 0.5) == 0.0


def test_steps_at_two_rates_are_composed_as_another_accountant_does() -> None:
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    for q, steps in ((0.04, 250), (0.08, 25)):
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(0.8)), steps)
    assert spent(((0.04, 250), (0.08, 25)), 0.8, 1e-3) == pytest.approx(accountant.get_epsilon(1e-3), abs=1e-3)
    assert spent(((0.04, 250), (0.04, 25)), 0.8, 1e-3) == pytest.approx(spent(((0.04, 275),), 0.8, 1e-3), rel=1e-9)
