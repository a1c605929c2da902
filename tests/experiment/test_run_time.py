"""How long runs take: the work of a config by hand, and steps measured on the embedded model."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.run_time import RunTime, Speed, measure_runs, predict


def client(*, train: int, held_out: int, length: int) -> Any:
    """Tokens of a client with so many examples of one length."""
    splits = {"train": train, "validation": held_out, "test": held_out}
    return SimpleNamespace(splits={name: Examples(count, length) for name, count in splits.items()})


class Examples:
    """Examples of one length."""

    def __init__(self, count: int, length: int) -> None:
        self.lengths = np.full(count, length)

    def __len__(self) -> int:
        return len(self.lengths)


CLIENTS = [client(train=20, held_out=5, length=10), client(train=10, held_out=5, length=30)]


def config(**changes: Any) -> Config:
    return with_values(find_preset("smoke"), {"rounds": 6, "batch_size": 8, "strategy": "local", **changes})


NOTHING = Speed(device="cpu", load_seconds=0, token_seconds=0, evaluate_seconds=0)


def predicted(count: str, **changes: Any) -> RunTime:
    """The counts of trained or of evaluated tokens: each takes a second, and all else none."""
    return predict(config(**changes), CLIENTS, replace(NOTHING, **{f"{count}_seconds": 1}))


def test_the_work_of_a_run_by_hand() -> None:
    tokens = predicted("token", local_epochs=2)
    # two epochs of 20 and of 10 examples
    assert tokens.round == 2 * (20 * 10 + 10 * 30)
    # no clusters, so nothing but importance: 4 batches of 8 examples
    assert tokens.planning == 4 * 8 * (10 + 30)
    assert predicted("evaluate").round == 2 * 5 * (10 + 30)
    assert RunTime(loading=1, planning=6, round=16, rounds=3).total == 55


def test_what_a_strategy_asks_for_beside_training_is_counted() -> None:
    # two more passes in one of six rounds
    assert predicted("token", strategy="atlas").round == pytest.approx((1 + 2 / 6) * predicted("token").round)
    # two halves of two batches each for the fingerprint
    assert predicted("token", strategy="atlas").planning == (4 + 4) * 8 * (10 + 30)
    assert predicted("token", fingerprint="delta", fingerprint_steps=3).planning == (4 + 2 * 3) * 8 * (10 + 30)


def test_fewer_clients_and_fewer_evaluations_are_less_work() -> None:
    assert predicted("token", participation=0.5).round == predicted("token").round / 2
    # 2 of 6 rounds are evaluated
    assert predicted("evaluate", eval_every=4).round == pytest.approx(predicted("evaluate").round / 3)


@pytest.mark.slow
def test_a_measurement_predicts_runs_with_more_to_do_as_longer() -> None:
    smoke = find_preset("smoke")
    longer = replace(smoke, training=replace(smoke.training, rounds=20))
    measured = measure_runs(smoke, {"smoke": smoke, "longer": longer}, start_time=time.perf_counter())
    speed = measured.speed
    assert speed.device == "cpu"
    assert speed.token_seconds > 0 and speed.evaluate_seconds > 0 and speed.load_seconds > 0
    assert measured.runs["longer"].total > 2 * measured.runs["smoke"].total
    assert measured.runs["smoke"].planning == measured.runs["longer"].planning
