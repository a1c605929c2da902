from dataclasses import replace

import numpy as np
import pytest

from atlas_fl.clustering.k_search import WORLDS, draw_alike, draw_unrelated, linkage_silhouette, structure_test
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.clustering.sketch import cross_similarity, reliability

SETTINGS = ClusteringSettings(seed=0, draws=19)


def test_rotations_keep_reliability_and_forget_resemblance(planted):
    first, second, _ = planted([5], signal=0.8)
    turned = draw_unrelated(first, second, rng=np.random.default_rng(0))
    cross = cross_similarity(*turned)
    assert reliability(cross) == pytest.approx(reliability(cross_similarity(first, second)))
    assert np.abs(cross - np.diag(np.diag(cross))).max() < 0.3 < cross_similarity(first, second)[0, 1]
    assert np.linalg.norm(turned[0], axis=1) == pytest.approx(np.ones(5))


def test_alike_clients_keep_reliability_and_share_one_direction(planted):
    first, second, _ = planted([1] * 4, signal=0.6, dim=4000)
    cross = cross_similarity(*draw_alike(first, second, rng=np.random.default_rng(0)))
    own = reliability(cross_similarity(first, second))
    assert np.diag(cross) == pytest.approx(own, abs=0.06)
    assert cross == pytest.approx(np.sqrt(np.outer(own, own)), abs=0.06)


def test_the_percentile_by_hand():
    first = np.eye(3, 50)
    # the clients score .175; the draws 0, .01, ..., .18 in one world, so one reaches it; fewer in the other
    scores = iter([0.175, *(0.01 * draw for draw in range(19)), *(0.001 * draw for draw in range(19))])
    verdict = structure_test(first, first, lambda *_: next(scores), SETTINGS)
    assert not verdict.found
    assert verdict.reason == "silhouette 0.175 is not above the 95th percentile 0.180 of unrelated clients"


def test_it_must_beat_both_worlds():
    first = np.eye(3, 50)
    for low, high in ((0.0, 0.9), (0.9, 0.0)):
        scores = iter([0.5, *[low] * 19, *[high] * 19])
        assert not structure_test(first, first, lambda *_, scores=scores: next(scores), SETTINGS).found
    scores = iter([0.5, *[0.4] * 38])
    assert structure_test(first, first, lambda *_: next(scores), SETTINGS).found


def test_a_statistic_of_zero_is_never_structure():
    first = np.eye(3, 50)
    assert not structure_test(first, first, lambda *_: 0.0, SETTINGS).found
    scores = iter([0.0, *[-0.5] * 38])
    assert not structure_test(first, first, lambda *_: next(scores), SETTINGS).found


@pytest.mark.parametrize("num", [1, 2])
def test_two_clients_are_too_few_to_test(num):
    verdict = structure_test(np.eye(num, 5), np.eye(num, 5), lambda *_: 1.0, SETTINGS)
    assert not verdict.found and verdict.reason == f"{num} decided clients are too few to test for structure"


@pytest.mark.parametrize("world", WORLDS)
def test_what_chance_splits_or_joins_is_rarely_called_structure(world, planted):
    proposed, alarms = 0, 0
    for seed in range(12):
        first, second, _ = planted([6] if world == "alike" else [1] * 6, signal=0.06, dim=128, seed=seed)
        proposed += linkage_silhouette(first, second, SETTINGS) > 0
        alarms += structure_test(first, second, linkage_silhouette, replace(SETTINGS, seed=seed)).found
    assert proposed == 12 and alarms <= 2
