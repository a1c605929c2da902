"""The mean of the others, which each client takes itself out of: by hand, with somebody absent, lost, and alone."""

from collections.abc import Mapping

import pytest
import torch

from atlas_fl.methods.feddpa import FedDpa
from atlas_fl.methods.method import Aggregated
from atlas_fl.methods.registry import find_method
from atlas_fl.params import SHARE
from tests.aggregation.federations import federation_of, server_step

BEFORE = 100.0


def step_of(weights: list[float], values: Mapping[str, float], **given: object) -> Aggregated:
    names = tuple("abcd"[: len(weights)])
    before = {name: {"w": torch.tensor([BEFORE])} for name in names}
    updates = {name: {"w": torch.tensor([value])} for name, value in values.items()}
    state = {SHARE: {name: {SHARE: torch.tensor(0.1)} for name in names}}
    federation = federation_of(names, weights=weights)
    return server_step(find_method("fedavg_of_others"), state, before, updates, federation, round=1, **given)


def shares_of(done: Aggregated) -> list[float]:
    return [float(one[SHARE]) for one in done.server_state[SHARE].values()]


def others_of(weights: list[float], values: dict[str, float]) -> list[float]:
    """The companion of every client, whose own model is what it sent, or that of before."""
    done = step_of(weights, values)
    companions = []
    for (name, mean), share in zip(done.client_models.items(), done.server_state[SHARE].values(), strict=True):
        own = {"w": torch.tensor([values.get(name, BEFORE)])}
        companions.append(float(FedDpa().companion(own, {**mean, **share})["w"]))
    return companions


def test_everyone_gets_the_mean_of_the_others_by_hand() -> None:
    """Weights 1, 2, 3: (2 * 6 + 3 * 1) / 5 = 3, (1 * 2 + 3 * 1) / 4 = 1.25 and (1 * 2 + 2 * 6) / 3 = 14/3."""
    assert others_of([1, 2, 3], {"a": 2.0, "b": 6.0, "c": 1.0}) == pytest.approx([3, 1.25, 14 / 3], abs=1e-6)


def test_the_server_makes_the_mean_of_all_and_tells_each_its_share() -> None:
    done = step_of([1, 2, 3], {"a": 2.0, "b": 6.0, "c": 1.0})
    assert [float(params["w"]) for params in done.client_models.values()] == pytest.approx([17 / 6] * 3)
    assert shares_of(done) == pytest.approx([1 / 6, 1 / 3, 1 / 2])


def test_who_is_absent_gives_nothing_and_gets_the_mean_of_all() -> None:
    assert others_of([1, 1, 1], {"a": 2.0, "b": 6.0}) == pytest.approx([6, 2, 4])


def test_who_is_alone_keeps_its_model() -> None:
    assert others_of([5], {"a": 2.0}) == [2.0]
    assert others_of([1, 1], {"b": 7.0}) == pytest.approx([7, 7])


def test_where_nobody_came_or_the_sum_is_lost_the_shares_of_before_hold() -> None:
    assert shares_of(step_of([1, 2], {})) == pytest.approx([0.1, 0.1])
    assert shares_of(step_of([1, 2], {"a": 2.0, "b": 2.0}, shares={})) == pytest.approx([0.1, 0.1])


def test_the_shares_of_a_sum_are_those_of_who_is_in_it() -> None:
    done = step_of([1, 2], {"a": 2.0, "b": 2.0}, shares={"a": 0.0, "b": 1.0})
    assert shares_of(done) == [0.0, 1.0]


def test_a_companion_without_a_share_is_what_was_sent() -> None:
    shared = {"w": torch.tensor([3.0])}
    assert FedDpa().companion({"w": torch.tensor([7.0])}, shared) is shared
