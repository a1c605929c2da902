import numpy as np
import pytest
from sklearn.decomposition import PCA

from atlas_fl.clustering.sketch import project_sketches


def test_one_component_by_hand():
    # (0,0), (3,4), (6,8) lie on a line through (3,4): -5, 0, 5, and nothing is left for a second component
    found = project_sketches(np.array([[0.0, 0], [3, 4], [6, 8]]), components=1)
    assert np.sort(found.points[:, 0]) == pytest.approx([-5, 0, 5])
    assert found.explained_variance == pytest.approx(1)


@pytest.mark.parametrize("components", [2, 5])
def test_equals_scikit_learn_up_to_sign(components):
    rows = np.random.default_rng(0).normal(size=(20, 8)) * np.arange(1, 9)
    model = PCA(components).fit(rows)
    found = project_sketches(rows, components=components)
    assert np.abs(found.points) == pytest.approx(np.abs(model.transform(rows)), abs=1e-8)
    assert found.explained_variance == pytest.approx(model.explained_variance_ratio_.sum())
    assert (found.points[np.abs(found.points).argmax(axis=0), range(components)] > 0).all()


def test_n_clients_have_at_most_n_minus_1_components():
    rows = np.random.default_rng(0).normal(size=(9, 1024))
    found = project_sketches(rows, components=64)
    assert found.points.shape == (9, 8) and found.explained_variance == pytest.approx(1)
    apart = np.linalg.norm(rows[0] - rows[5])
    assert np.linalg.norm(found.points[0] - found.points[5]) == pytest.approx(apart)


def test_one_client_and_identical_clients_have_nothing_to_explain():
    assert project_sketches(np.ones((1, 5))).points.shape == (1, 0)
    same = project_sketches(np.ones((4, 5)) / 3)
    assert not same.points.any() and same.explained_variance == 1


def test_incremental_equals_the_whole_in_one_batch_and_is_close_in_many():
    rng = np.random.default_rng(0)
    for num, tolerance in ((60, 1e-8), (700, 0.02)):
        rows = rng.normal(size=(num, 30)) * np.r_[[9.0, 7.0, 5.0], np.full(27, 0.1)]
        whole, parts = (project_sketches(rows, components=3, incremental=incremental) for incremental in (False, True))
        scale = np.abs(whole.points).max()
        assert parts.points == pytest.approx(whole.points, abs=tolerance * scale)
        assert parts.explained_variance == pytest.approx(whole.explained_variance, abs=tolerance)
