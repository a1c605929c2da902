"""Membership by likelihood ratios, against SciPy and by chance; lower bounds of epsilon that hold and can break."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from atlas_fl.client import private_training
from atlas_fl.config import Config
from atlas_fl.errors import ConfigError
from atlas_fl.privacy_attacks.membership import (
    attack_rates,
    epsilon_bound,
    label_confidence,
    likelihood_ratios,
)
from atlas_fl.privacy_attacks.registry import run_attack
from tests.runs.finished import Make


def test_the_score_is_the_ratio_of_two_normal_densities() -> None:
    draw = np.random.default_rng(0)
    is_member = draw.random((9, 5)) < 0.5
    is_member[:, 4] = True
    confidence = draw.normal(size=(9, 5)) + 2 * is_member
    phi = draw.normal(size=5)
    expected = []
    for side in (is_member, ~is_member):
        columns = [confidence[side[:, k], k] for k in range(5) if side[:, k].any()]
        spread = np.concatenate([column - column.mean() for column in columns])
        deviation = np.sqrt(np.square(spread).sum() / (len(spread) - len(columns)))
        expected.append(norm.logpdf(phi[:4], [column.mean() for column in columns[:4]], deviation))
    found = likelihood_ratios(phi, confidence, is_member)
    assert found[:4] == pytest.approx(expected[0] - expected[1])
    assert found[4] == 0.0, "an example that all have tells nothing"


def test_confidence_is_the_log_odds_of_the_label() -> None:
    logits = np.array([[2.0, 0.5], [2.0, 0.5]])
    assert label_confidence(np.array([0, 1]), logits) == pytest.approx([1.5, -1.5])


def test_rates_by_hand() -> None:
    """Of 100 others one lies above .985; of four members three do."""
    scores = np.concatenate([np.arange(100) / 100, [0.987, 0.988, 0.995, 0.5]])
    is_member = np.arange(104) >= 100
    area, strict, loose = attack_rates(scores, is_member)
    assert (strict, loose) == (0.75, 0.75)
    assert area == pytest.approx((99 + 99 + 100 + 50.5) / 400)


def test_models_that_know_nothing_order_members_by_chance_and_others_above_it() -> None:
    draw = np.random.default_rng(1)
    is_member = np.stack([draw.permutation(200) < 100 for _ in range(12)])
    areas = []
    for shift in (0.0, 1.0):
        confidence = draw.normal(size=(12, 200)) + shift * is_member
        others = ~np.eye(12, dtype=bool)
        scores = [likelihood_ratios(confidence[k], confidence[others[k]], is_member[others[k]]) for k in range(12)]
        areas.append(attack_rates(np.stack(scores), is_member)[0])
    assert areas[0] == pytest.approx(0.5, abs=0.03)
    assert areas[1] > 0.7


@pytest.mark.core
def test_the_bound_of_randomised_response_is_below_its_epsilon_nineteen_times_of_twenty() -> None:
    """Randomised response is the mechanism under which the bound is tight."""
    draw, epsilon = np.random.default_rng(2), 1.5
    correct = draw.binomial(300, 1 / (1 + np.exp(-epsilon)), size=100)
    bounds = [epsilon_bound(coins=300, guesses=300, correct=int(one), delta=0.0) for one in correct]
    assert np.mean(np.array(bounds) <= epsilon) >= 0.9
    assert np.mean(bounds) > 1.0, "a bound of 0 would hold as well"


def test_a_bound_grows_with_right_guesses_and_falls_with_delta() -> None:
    bounds = [epsilon_bound(coins=400, guesses=100, correct=one, delta=0.0) for one in (40, 60, 80, 100)]
    assert bounds == sorted(bounds) and bounds[0] == 0.0
    assert epsilon_bound(coins=400, guesses=100, correct=95, delta=1e-3) < epsilon_bound(
        coins=400, guesses=100, correct=95, delta=0.0
    )
    assert epsilon_bound(coins=400, guesses=100, correct=95, delta=1.0) == 0.0


MEMORISED = {"tasks": "movie", "rounds": 12, "lr": 2e-2, "samples": 24, "max_length": 12, "batch_size": 24}


@pytest.mark.slow
def test_members_are_found_after_training_and_not_after_none(config: Make) -> None:
    (trained,) = run_attack(config(**MEMORISED), "membership", shadows=8)
    (fresh,) = run_attack(config(**{**MEMORISED, "rounds": 1, "lr": 1e-12}), "membership", shadows=8)
    assert trained["auc_low"] > 0.55
    assert fresh["auc"] == pytest.approx(0.5, abs=0.1)
    assert fresh["auc_low"] <= fresh["auc"] <= fresh["auc_high"]


def _audit(config: Config) -> Mapping[str, Any]:
    (row,) = run_attack(config, "canaries", shadows=10)
    return row


@pytest.mark.core
@pytest.mark.slow
def test_the_bound_stays_below_the_accountant_and_exceeds_it_where_the_noise_is_off(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    private = {**MEMORISED, "strategy": "fedavg", "dp": "example", "epsilon": 0.5, "delta": 1e-5, "ranks": 4}
    with_noise = _audit(config(**private))
    assert with_noise["bound"] <= with_noise["epsilon"] <= 0.5
    monkeypatch.setattr(private_training, "noise_multiplier", lambda *_: 0.0)  # the accountant claims it all the same
    without = _audit(config(**private))
    assert without["epsilon"] <= 0.5 < without["bound"], without


def test_what_has_no_classes_and_too_few_shadow_clients_is_one_line(config: Make) -> None:
    with pytest.raises(ConfigError, match="--shadows is 3; allowed: at least 4"):
        run_attack(config(), "canaries", shadows=3)
    with pytest.raises(ConfigError, match="unknown client 'nobody'"):
        run_attack(config(), "membership", client="nobody")
    with pytest.raises(ConfigError, match="unknown attack 'guess'"):
        run_attack(config(), "guess")
