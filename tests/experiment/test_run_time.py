"""How long runs take: the work of a config by hand, and steps measured on the embedded model."""

import doctest
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment import run_time
from atlas_fl.experiment.run_time import RunTime, Speed, cost_of_a_step, measure_runs, predict


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


CLIENTS = {"a": client(train=20, held_out=5, length=10), "b": client(train=10, held_out=5, length=30)}


def config(**changes: Any) -> Config:
    return with_values(find_preset("smoke"), {"rounds": 6, "batch_size": 8, "strategy": "local", **changes})


def test_the_examples_are_right() -> None:
    assert doctest.testmod(run_time).failed == 0


NOTHING = Speed(device="cpu", load_seconds=0, client_seconds=0, token_seconds=0, evaluate_seconds=0)


def predicted(count: str, **changes: Any) -> RunTime:
    """The counts of steps, of tokens or of evaluated tokens: each takes a second, and all else none."""
    return predict(config(**changes), CLIENTS, replace(NOTHING, **{f"{count}_seconds": 1}))


def test_the_work_of_a_run_by_hand() -> None:
    steps, tokens = (predicted(count, local_epochs=2) for count in ("client", "token"))
    # two epochs of 20 and of 10 examples, in batches of 8: 3 and 2 steps an epoch
    assert (steps.round, tokens.round) == (6 + 4, 2 * (20 * 10 + 10 * 30))
    # no clusters, so nothing but importance: 4 batches of 8 examples
    assert (steps.planning, tokens.planning) == (2 * 4, 4 * 8 * (10 + 30))
    assert (steps.halves, tokens.halves) == (0, 0)
    assert predicted("evaluate").round == 2 * 5 * (10 + 30)


def test_what_a_strategy_asks_for_beside_training_is_counted() -> None:
    for count in ("client", "token"):
        assert predicted(count, strategy="atlas").halves == 2 * predicted(count).round
    # two halves of two batches each for the fingerprint
    assert predicted("client", strategy="atlas").planning == 2 * (4 + 4)
    assert predicted("token", strategy="atlas").planning == (4 + 4) * 8 * (10 + 30)
    assert predicted("client", fingerprint="delta", fingerprint_steps=3).planning == 2 * (4 + 2 * 3)


def test_fewer_clients_and_fewer_evaluations_are_less_work() -> None:
    assert predicted("token", participation=0.5).round == predicted("token").round / 2
    # 2 of 6 rounds are evaluated
    assert predicted("evaluate", eval_every=4).round == pytest.approx(predicted("evaluate").round / 3)


def test_a_run_takes_loading_planning_its_rounds_and_halves() -> None:
    assert RunTime(loading=1, planning=6, round=16, rounds=3, halves=6).total == 61


def test_costs_by_hand_give_back_the_seconds_of_both_steps() -> None:
    client_seconds, token_seconds = cost_of_a_step((1.3, 400), (2.5, 1600), clients=9)
    assert 9 * client_seconds + 400 * token_seconds == pytest.approx(1.3)
    assert 9 * client_seconds + 1600 * token_seconds == pytest.approx(2.5)


@pytest.mark.slow
def test_a_measurement_predicts_runs_with_more_to_do_as_longer() -> None:
    smoke = find_preset("smoke")
    longer = replace(smoke, training=replace(smoke.training, rounds=20))
    measured = measure_runs(smoke, {"smoke": smoke, "longer": longer})
    speed = measured.speed
    assert speed.device == "cpu"
    assert speed.token_seconds > 0 and speed.evaluate_seconds > 0 and speed.load_seconds > 0
    assert measured.runs["longer"].total > 2 * measured.runs["smoke"].total
    assert measured.runs["smoke"].planning == measured.runs["longer"].planning
