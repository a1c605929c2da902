import numpy as np
import pytest
from sklearn.metrics import silhouette_score

from atlas_fl.clustering.k_search import atlas_score, highest_score, k_means, pairwise_distances, score_row, silhouette

LINE = np.array([[0.0], [1.0], [10.0], [11.0]])
HALVES = np.array([0, 0, 1, 1])


def test_every_score_by_hand():
    # silhouette: outer (10.5 - 1) / 10.5, inner (9.5 - 1) / 9.5. Davies-Bouldin: (.5 + .5) / 10.
    # Calinski-Harabasz: (4 * 25 / 1) / (4 * .25 / 2) = 200.
    # S = .25 * 1.899749 + .3 / 1.1 + .2 * 200 / 1200 = .474937 + .272727 + .033333
    row = score_row(LINE, HALVES)
    assert row["silhouette"] == pytest.approx((9.5 / 10.5 + 8.5 / 9.5) / 2)
    assert row["davies_bouldin"] == pytest.approx(0.1)
    assert row["calinski_harabasz"] == pytest.approx(200)
    assert row["atlas"] == pytest.approx(0.780998, abs=1e-6)
    assert (row["k"], row["sizes"], row["singletons"]) == (2, [2, 2], 0)


def test_a_singleton_costs_fifteen_hundredths():
    scores = {"silhouette": 0.2, "davies_bouldin": 1.0, "calinski_harabasz": 5.0}
    assert atlas_score(**scores, singletons=0) - atlas_score(**scores, singletons=2) == pytest.approx(0.3)
    assert score_row(LINE, np.array([0, 0, 1, 2]))["singletons"] == 2


def test_at_nine_clients_the_third_term_is_nothing():
    with_it = atlas_score(silhouette=0, davies_bouldin=1, calinski_harabasz=3, singletons=0)
    assert with_it - 0.4 == pytest.approx(0.2 * 3 / 1003) and with_it - 0.4 < 0.001


@pytest.mark.parametrize("k", [2, 4, 7])
def test_silhouette_equals_scikit_learn_with_singletons_too(k):
    rng = np.random.default_rng(k)
    points, labels = rng.normal(size=(9, 3)), np.r_[np.arange(k), rng.integers(0, k, 9 - k)]
    assert silhouette(pairwise_distances(points), labels) == pytest.approx(silhouette_score(points, labels))


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2, 3]])
def test_one_cluster_and_all_alone_have_no_scores(labels):
    row = score_row(LINE, np.array(labels))
    assert [row[name] for name in ("silhouette", "davies_bouldin", "calinski_harabasz", "atlas")] == [None] * 4


def test_identical_points_have_a_silhouette_of_zero():
    assert silhouette(pairwise_distances(np.zeros((4, 2))), HALVES) == 0


def test_k_means_by_hand():
    labels, inertia = k_means(LINE, 2, seed=0)
    assert inertia == pytest.approx(1) and labels[0] == labels[1] != labels[2] == labels[3]
    assert k_means(LINE, 1, seed=0)[1] == pytest.approx(101)


def table(**columns):
    rows = [{"k": k + 1, "bonus": 0.0} for k in range(len(columns["atlas"]))]
    return [{**row, **{name: column[i] for name, column in columns.items()}} for i, row in enumerate(rows)]


def test_highest_score_wins_and_ties_go_to_fewer_clusters():
    rows = table(atlas=[None, 0.5, 0.7, 0.7], silhouette=[None, 0.3, 0.1, 0.2])
    assert highest_score("atlas", rows) == 3 and highest_score("silhouette", rows) == 2
    rows[3]["bonus"] = 0.2
    assert highest_score("atlas", rows) == 4
    assert highest_score("atlas", table(atlas=[None])) == 1
