"""Learning rates over a run."""

import pytest

from atlas_fl.client.local_training import SCHEDULES, rate_factor


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rate_rises_to_its_peak_and_never_again(schedule: str) -> None:
    factors = [rate_factor(schedule, warmup=0.2, step=step, steps=50) for step in range(50)]
    assert factors[9] == factors[10] == 1.0
    assert factors[:10] == sorted(factors[:10]) and factors[10:] == sorted(factors[10:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)


def test_steps_by_hand() -> None:
    found = [round(rate_factor("step", warmup=0.0, step=step, steps=8), 3) for step in range(8)]
    assert found == [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]


def test_half_of_a_cosine_by_hand() -> None:
    assert rate_factor("cosine", warmup=0.0, step=2, steps=4) == pytest.approx(0.5)
