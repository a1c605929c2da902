"""How long runs take: the work of a config by hand, and steps measured on the embedded model."""

import time
from typing import Any

import pytest

from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.run_time import RunTime, measure_run, predict


def predicted(*, step: float = 0.0, evaluation: float = 0.0, **changes: Any) -> RunTime:
    config = with_values(find_preset("smoke"), {"rounds": 6, "batch_size": 8, "strategy": "local", **changes})
    return predict(config, [20, 10], loading=1.0, step=step, evaluation=evaluation)


def test_the_work_of_a_run_by_hand() -> None:
    # two epochs of 20 and of 10 examples, in batches of 8: 3 and 2 steps an epoch
    assert predicted(step=1, local_epochs=2).round == (6 + 4) / 2
    # no clusters, so nothing but importance: 4 batches
    assert predicted(step=1).planning == 4
    assert predicted(evaluation=1).round == 1
    assert RunTime(loading=1, planning=6, round=16, rounds=3).total == 55


def test_what_a_strategy_asks_for_beside_training_is_counted() -> None:
    # two more passes in one of six rounds
    assert predicted(step=1, strategy="atlas").round == pytest.approx((1 + 2 / 6) * predicted(step=1).round)
    # two halves of two batches each for the fingerprint
    assert predicted(step=1, strategy="atlas").planning == 4 + 4
    assert predicted(step=1, fingerprint="delta", fingerprint_steps=3).planning == 4 + 2 * 3


def test_training_clients_alone_is_counted() -> None:
    # 6 rounds of 2.5 steps by half of the clients, importance on 4 batches, and two evaluations at the end
    words = {"step": 1, "evaluation": 10, "strategy": "fedavg", "alone": "sample"}
    assert predicted(participation=0.5, **words).alone == 6 * 2.5 / 2 + 4 + 2 * 10
    assert predicted(**{**words, "alone": "none"}).alone == predicted(**{**words, "strategy": "local"}).alone == 0
    plain = predicted(**{**words, "alone": "none"}).total
    assert predicted(**words).total == plain + predicted(**words).alone


def test_fewer_clients_and_fewer_evaluations_are_less_work() -> None:
    assert predicted(step=1, participation=0.5).round == predicted(step=1).round / 2
    # 2 of 6 rounds are evaluated
    assert predicted(evaluation=1, eval_every=4).round == pytest.approx(1 / 3)


@pytest.mark.slow
def test_a_measurement_is_of_this_machine() -> None:
    measured = measure_run(find_preset("smoke"), start_time=time.perf_counter())
    assert measured.loading > 0 and measured.planning > 0 and measured.round > 0
