"""Learning rates over a run."""

import pytest
import torch

from atlas_fl.client.local_training import SCHEDULES, learning_rate, optimizer_step
from atlas_fl.client.options import TrainOptions


def rate(schedule: str, *, step: int, steps: int, warmup: float = 0.0) -> float:
    return learning_rate(TrainOptions(seed=0, lr=1.0, schedule=schedule, warmup=warmup), step=step, steps=steps)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rate_rises_to_its_peak_and_never_again(schedule: str) -> None:
    factors = [rate(schedule, warmup=0.2, step=step, steps=50) for step in range(50)]
    assert factors[9] == factors[10] == 1.0
    assert factors[:10] == sorted(factors[:10]) and factors[10:] == sorted(factors[10:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)


def test_the_rate_goes_on_where_the_round_before_ended() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    options = TrainOptions(seed=0, lr=1.0, schedule="linear", warmup=0.0, rounds=3)
    rates = []
    for number in (1, 2, 3):
        for done in range(4):
            optimizer_step(optimizer, options, round=number, done=done, steps=4)
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1 - step / 12 for step in range(12)])
