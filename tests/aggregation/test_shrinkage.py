"""Shrinkage by sums: the kept parts by hand, against known variances, in a step, and at the client."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from atlas_fl.aggregation.rules import Answers
from atlas_fl.methods.method import Aggregated
from atlas_fl.methods.registry import find_method
from atlas_fl.methods.shrinkage import MEANS, NUMBERS, FedAvgWithVariances, ShrunkModels, kept_parts
from atlas_fl.params import SHARE, Params
from tests.aggregation.federations import federation_of, server_step

BY_HAND = {"half_length": 0.5, "agreement": 0.3, "length": 0.5, "squares": 0.5}
"""C = (.3 - .25) / .5 = .1, tau^2 = .5 * .3 / .5 - .1 = .2, N = .5 - .1 - .2 = .2 where all have moved by .3."""


def test_the_kept_parts_by_hand() -> None:
    assert kept_parts(BY_HAND, 0.3, examples={"a": 10, "b": 10}) == pytest.approx({"a": 0.5, "b": 0.5})


def test_who_has_more_examples_keeps_more_of_its_own() -> None:
    """N_a = .2 * 20 / 30 and N_b = .2 * 20 / 10: b_a = .2 / (.2 + .4 / 3) = .6, b_b = .2 / .6 = 1/3."""
    assert kept_parts(BY_HAND, 0.3, examples={"a": 30, "b": 10}) == pytest.approx({"a": 0.6, "b": 1 / 3})


@pytest.mark.parametrize(
    ("means", "moved", "part"),
    [
        ({**BY_HAND, "agreement": 0.05}, 0.3, 0.0),  # two models of one client agree less than two clients do
        (
            {**BY_HAND, "agreement": 0.5},
            0.25,
            1.0,
        ),  # models of one client are equal, and clients have nothing in common
        ({**BY_HAND, "half_length": 0.0}, 0.3, 0.0),
        ({**BY_HAND, "squares": 1.0}, 0.5, 0.0),
    ],
    ids=["alike", "apart", "nothing moved", "alone"],
)
def test_the_ends(means: Mapping[str, float], moved: float, part: float) -> None:
    assert kept_parts(means, moved, examples={"a": 10, "b": 10}) == pytest.approx({"a": part, "b": part})


@pytest.mark.parametrize(("between", "noise"), [(0.0, 1.0), (0.3, 1.0), (1.0, 1.0), (1.0, 0.1)])
def test_the_kept_part_is_the_best_one_where_variances_are_known(between: float, noise: float) -> None:
    """theta_k = mu + sqrt(tau^2) z, w_k = theta_k + noise of variance N mean(n) / n_k, and halves as noisy as models.

    The reference is no formula of ours: the part with the least squared error of mean + b (w_k - mean) to theta_k.
    """
    draw, size = np.random.default_rng(5), 200_000
    counts = {f"client-{k}": count for k, count in enumerate((100, 100, 200, 200, 400))}
    mean_count, shares = np.mean([*counts.values()]), np.array([*counts.values()]) / sum(counts.values())
    centre = draw.normal(size=size)
    thetas, models, halves = [], [], []
    for count in counts.values():
        theta = centre + np.sqrt(between) * draw.normal(size=size)
        deviation = np.sqrt(noise * mean_count / count)
        thetas.append(theta)
        models.append(theta + deviation * draw.normal(size=size))
        halves.append([theta + deviation * draw.normal(size=size) for _ in range(2)])
    mean = sum(share * model for share, model in zip(shares, models, strict=True))
    told = {
        "half_length": sum(p * np.mean(np.square(pair)) for p, pair in zip(shares, halves, strict=True)),
        "agreement": sum(p * np.mean(pair[0] * pair[1]) for p, pair in zip(shares, halves, strict=True)),
        "length": sum(p * np.mean(np.square(model)) for p, model in zip(shares, models, strict=True)),
        "squares": float(np.square(shares).sum()),
    }
    parts = kept_parts({name: float(one) for name, one in told.items()}, float(np.mean(mean**2)), examples=counts)
    grid = np.linspace(0, 1, 101)
    for part, theta, model in zip(parts.values(), thetas, models, strict=True):
        errors = [np.mean(np.square(mean + b * (model - mean) - theta)) for b in grid]
        at = np.mean(np.square(mean + part * (model - mean) - theta))
        assert at <= 1.05 * min(errors), (part, grid[int(np.argmin(errors))])


def report_of(half_length: float, agreement: float, length: float) -> Params:
    return dict(zip(NUMBERS, map(torch.tensor, (half_length, agreement, length)), strict=True))


def step_of(reports: Mapping[str, Params]) -> Aggregated:
    before = {name: {"w": torch.zeros(2), "head.w": torch.zeros(1)} for name in "ab"}
    updates = {
        "a": {"w": torch.tensor([1.0, 0.0]), "head.w": torch.tensor([3.0])},
        "b": {"w": torch.tensor([0.2, 0.4]), "head.w": torch.tensor([5.0])},
    }
    answers = Answers(reports={"variances": reports})
    federation = federation_of(("a", "b"), weights=[1, 1])
    return server_step(find_method("fedavg_with_variances"), {}, before, updates, federation, round=1, answers=answers)


def test_a_step_makes_the_mean_of_all_and_tells_each_what_it_keeps() -> None:
    """The mean is (.6, .2): W = .2; of H = .3, S = .2, L = .3, C = (.2 - .15) / .5 = .1, tau^2 = .1, N = .1."""
    done = step_of({"a": report_of(0.2, 0.1, 0.2), "b": report_of(0.4, 0.3, 0.4)})
    assert all(torch.allclose(one["w"], torch.tensor([0.6, 0.2])) for one in done.client_models.values())
    assert all(float(one["head.w"]) == 4.0 for one in done.client_models.values())
    assert {name: float(one[SHARE]) for name, one in done.server_state[SHARE].items()} == pytest.approx(
        {"a": 0.5, "b": 0.5}
    )
    assert {name: float(one) for name, one in done.server_state[MEANS].items()} == pytest.approx(
        {"half_length": 0.3, "agreement": 0.2, "length": 0.3, "squares": 0.5}
    )


def test_without_reports_nothing_is_told() -> None:
    assert not step_of({}).server_state


def test_a_client_moves_its_own_model_to_the_mean_and_takes_the_head_of_the_mean() -> None:
    own = {"w": torch.tensor([1.0, 0.0]), "head.w": torch.tensor([3.0])}
    mean = {"w": torch.tensor([0.6, 0.2]), "head.w": torch.tensor([4.0])}
    moved = ShrunkModels().companion(own, {**mean, SHARE: torch.tensor(0.25)})
    torch.testing.assert_close(moved["w"], torch.tensor([0.7, 0.15]))
    assert torch.equal(moved["head.w"], mean["head.w"]) and moved.keys() == mean.keys()
    assert torch.equal(ShrunkModels().companion(own, mean)["w"], mean["w"])
    assert ShrunkModels().combine(own, moved, {}) is moved and ShrunkModels().combine(own, {}, {}) is own


def test_a_report_has_the_length_of_the_training_that_follows() -> None:
    before, after = (
        {"w": torch.zeros(4), "head.w": torch.zeros(1)},
        {"w": torch.full((4,), 3.0), "head.w": torch.ones(1)},
    )
    told = FedAvgWithVariances.measure_trained(report_of(1.0, 0.5, 0.0), before, after)
    assert [float(told[name]) for name in NUMBERS] == [1.0, 0.5, 9.0]
