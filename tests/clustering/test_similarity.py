import numpy as np
import pytest

from atlas_fl.clustering.sketch import (
    corrected_similarity,
    cross_similarity,
    normalise_sketches,
    reliability,
    unit_rows,
)


def test_correction_by_hand():
    # .4 / sqrt(.5 * .8) = .632...
    cross = np.array([[0.5, 0.4], [0.4, 0.8]])
    assert corrected_similarity(cross) == pytest.approx(np.array([[1, 0.6324555], [0.6324555, 1]]))
    assert reliability(cross).tolist() == [0.5, 0.8]
    assert cross.tolist() == [[0.5, 0.4], [0.4, 0.8]]


def test_cross_similarity_by_hand():
    # cosines across halves are [[1, 0], [.6, .8]]; symmetrised .3
    first, second = np.array([[2.0, 0], [3, 4]]), np.array([[1.0, 0], [0, 5]])
    assert cross_similarity(first, second) == pytest.approx(np.array([[1, 0.3], [0.3, 0.8]]))


def test_correction_recovers_the_cosine_that_noise_hides():
    rng = np.random.default_rng(0)
    truth, noise = 0.5, [0.6, 0.9]
    found = []
    for _ in range(50):
        base = unit_rows(rng.normal(size=(2, 2000)))
        clean = np.stack([base[0], truth * base[0] + (1 - truth**2) ** 0.5 * base[1]])
        halves = [clean + np.array(noise)[:, None] * unit_rows(rng.normal(size=clean.shape)) for _ in range(2)]
        cross = cross_similarity(*halves)
        assert cross[0, 1] < 0.45
        found.append(corrected_similarity(cross)[0, 1])
    assert np.mean(found) == pytest.approx(truth, abs=0.02)


def test_without_signal_there_is_no_evidence_and_noise_is_clipped():
    cross = np.array([[-0.1, 0.2, 0.2], [0.2, 0.1, 0.3], [0.2, 0.3, 0.2]])
    assert corrected_similarity(cross).tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    assert corrected_similarity(cross, floor=0.4)[1, 2] == pytest.approx(0.75)


def test_rows_of_nothing_have_no_direction():
    rows = np.array([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0]])
    assert unit_rows(rows).tolist() == [[0.6, 0.8], [0, 0], [0, 0]]
    same = np.array([[1.0, 0.0], [1.0, 0.0]], dtype=np.float32)
    assert not normalise_sketches(same, offset=same.mean(axis=0)).any()


def test_centring_uncovers_differences_behind_a_common_part():
    first = np.array([[10.0, 1.0], [10.0, -1.0]])
    assert cross_similarity(first, first)[0, 1] > 0.9
    centred = normalise_sketches(first, offset=normalise_sketches(first).mean(axis=0))
    assert cross_similarity(centred, centred)[0, 1] == pytest.approx(-1)
