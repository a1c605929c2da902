"""Noise that follows from a secret: of the stated distribution at every size, and another one for another secret."""

import numpy as np
import pytest
from scipy.stats import chi2, chisquare, kstest, norm, skellam

from atlas_fl.rng import secret_skellam

SECRET = bytes(range(32))


def test_skellam_numbers_are_as_often_as_they_should_be() -> None:
    drawn = secret_skellam(SECRET, 2000.0, 100_000)
    edges = np.arange(-150, 151, 10)
    chances = np.diff(skellam.cdf(edges, 1000.0, 1000.0), prepend=0.0, append=1.0)
    chances[-1] = 1 - chances[:-1].sum()
    found = np.bincount(np.searchsorted(edges, drawn), minlength=len(edges) + 1)
    assert chisquare(found, chances * len(drawn)).pvalue > 1e-4
    # neighbours too: no number is left out
    assert chisquare(np.bincount(drawn % 2), [len(drawn) / 2] * 2).pvalue > 1e-4


@pytest.mark.parametrize("variance", [1e6, 1e10, 1e15])
def test_large_ones_are_normal_and_whole(variance: float) -> None:
    drawn = secret_skellam(SECRET, variance, 20_000)
    assert drawn.dtype == np.int64
    assert kstest(drawn / np.sqrt(variance), norm.cdf).pvalue > 1e-4
    squares = float((drawn.astype(float) ** 2).sum()) / variance
    assert chi2.ppf(1e-6, 20_000) < squares < chi2.ppf(1 - 1e-6, 20_000)
    assert 3.3 < np.abs(drawn).max() / np.sqrt(variance) < 6.0


def test_they_follow_from_the_secret_alone() -> None:
    drawn = secret_skellam(SECRET, 1e8, 5_000)
    assert np.array_equal(drawn, secret_skellam(SECRET, 1e8, 5_000))
    other = secret_skellam(bytes(32), 1e8, 5_000)
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.07
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.07
    assert len(secret_skellam(SECRET, 1e8, 0)) == 0
