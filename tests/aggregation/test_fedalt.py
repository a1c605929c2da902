"""The mean of the others: by hand, with somebody absent, and alone."""

import pytest
import torch

from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import federation_of, server_step


def after_round(weights: list[float], values: dict[str, float]) -> list[float]:
    names = tuple("abcd"[: len(weights)])
    federation = federation_of(names, weights=weights)
    before = {name: {"w": torch.tensor([100.0])} for name in names}
    updates = {name: {"w": torch.tensor([value])} for name, value in values.items()}
    done = server_step(find_method("fedavg_of_others"), {}, before, updates, federation, round=1)
    return [float(done.client_models[name]["w"]) for name in names]


def test_everyone_gets_the_mean_of_the_others_by_hand() -> None:
    """Weights 1, 2, 3: (2 * 6 + 3 * 1) / 5 = 3, (1 * 2 + 3 * 1) / 4 = 1.25 and (1 * 2 + 2 * 6) / 3 = 14/3."""
    assert after_round([1, 2, 3], {"a": 2.0, "b": 6.0, "c": 1.0}) == pytest.approx([3, 1.25, 14 / 3])


def test_who_is_absent_gives_nothing_and_gets_the_mean_of_all() -> None:
    assert after_round([1, 1, 1], {"a": 2.0, "b": 6.0}) == pytest.approx([6, 2, 4])


def test_who_is_alone_keeps_its_model() -> None:
    assert after_round([5], {"a": 2.0}) == [2.0]
    assert after_round([1, 1], {"b": 7.0}) == pytest.approx([7, 7])
