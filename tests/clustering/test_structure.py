from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from atlas_fl.clustering.cluster import cluster_clients
from atlas_fl.clustering.k_search import WORLDS, draw_alike, draw_unrelated, linkage_silhouette, structure_test
from atlas_fl.clustering.labels import UNDECIDED, ClusteringSettings
from atlas_fl.clustering.result import Clustering, append_client, assign_client
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


@pytest.mark.parametrize(("groups", "found"), [([60] * 5, True), ([300], False), ([1] * 300, False)])
def test_of_many_clients_some_are_tested_and_the_verdict_is_that_of_all(groups, found, planted, monkeypatch):
    first, second, _ = planted(groups, signal=0.3, dim=256)
    verdict = structure_test(first, second, linkage_silhouette, SETTINGS)
    assert verdict.found is found and " (of 256 of 300 clients, drawn at random) " in verdict.reason
    assert verdict == structure_test(first, second, linkage_silhouette, SETTINGS)
    monkeypatch.setattr("atlas_fl.clustering.k_search.MOST_TESTED", 300)
    everyone = structure_test(first, second, linkage_silhouette, SETTINGS)
    assert everyone.found is found and "drawn at random" not in everyone.reason


def blend(common: np.ndarray, own: np.ndarray, shares: list[float], *, noise: float, seed: int) -> np.ndarray:
    """Both halves (2, n, d): a part that all share, a share of the own direction of each, and noise of each half."""
    rng = np.random.default_rng(seed)
    clean = common + np.array(shares)[:, None] * own
    return np.stack([clean + noise * rng.normal(size=clean.shape) / np.sqrt(clean.shape[1]) for _ in range(2)])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("shares", "tasks", "labels", "found"),
    [
        ([0.0] * 8, [0] * 8, (0,) * 8, False),  # alike
        ([0.0] * 7 + [0.8], [0] * 8, (0,) * 7 + (1,), True),  # all but one
        ([0.8] * 6, [0, 0, 0, 1, 1, 1], (0, 0, 0, 1, 1, 1), True),
        ([0.8] * 9, [0, 1, 2] * 3, (0, 1, 2) * 3, True),
        ([0.8] * 5, range(5), (0, 1, 2, 3, 4), False),  # all unlike
    ],
)
def test_alike_clients_are_one_cluster_and_others_are_what_they_are(
    shares: list[float], tasks: Sequence[int], labels: tuple[int, ...], found: bool, seed: int
) -> None:
    """Sketches of one length that mostly agree, as those of Fisher information do, on 0, 1, 2, 3 and 5 tasks."""
    rng = np.random.default_rng(100 + seed)
    directions = rng.normal(size=(9, 1024)) / 32
    first, second = blend(rng.normal(size=1024) / 32, directions[list(tasks)], shares, noise=0.3, seed=seed)
    found_clustering = cluster_clients(first, second, settings=replace(SETTINGS, centre=True))
    assert (found_clustering.labels, found_clustering.structure["found"]) == (labels, found)
    assert "undecided" not in " ".join(found_clustering.warnings)


def test_beside_alike_clients_a_newcomer_is_one_of_them_or_differs() -> None:
    rng = np.random.default_rng(0)
    common, own = rng.normal(size=(2, 1024)) / 32
    halves = blend(common, own, [0.0] * 8 + [0.0, 0.8], noise=0.3, seed=1)
    clustering = cluster_clients(*halves[:, :8], settings=replace(SETTINGS, centre=True))
    alike, other = (assign_client(clustering, *halves[:, client]) for client in (8, 9))
    assert (alike.cluster, alike.similarity) == (0, {0: 1.0}) and alike.reliability > 0.8
    assert other.cluster == UNDECIDED
    grown = append_client(clustering, halves[:, :9], label=0)
    assert grown.similarity[8].tolist() == [1.0] * 9
    assert Clustering.from_json(clustering.to_json()).alike == 0


def test_halves_that_contradict_before_the_mean_is_subtracted_are_undecided() -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 6, 1024))
    clustering = cluster_clients(first, second, settings=replace(SETTINGS, centre=True))
    assert clustering.labels == (UNDECIDED,) * 6 and clustering.alike is None
