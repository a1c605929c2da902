"""FedAMP's mixture: by hand, by the paper's formula pair by pair, and who is near."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_fl.methods.fedamp import attention
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import federation_of, server_step


def test_rows_by_hand():
    """Squared distances 1, 4, 4 have the mean 3: e^(-1/3) / 2 = .3583 and e^(-4/3) / 2 = .1318."""
    squares = np.array([[0.0, 1, 4], [1, 0, 4], [4, 4, 0]])
    rows = attention(squares, alpha=1.0, sigma=1.0)
    expected = [[0.5099, 0.3583, 0.1318], [0.3583, 0.5099, 0.1318], [0.1318, 0.1318, 0.7364]]
    assert rows == pytest.approx(np.array(expected), abs=1e-4)


@given(st.integers(2, 6), st.floats(0.1, 1), st.floats(0.2, 5), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_rows_are_the_papers_with_its_own_alpha_and_sigma(n, alpha, sigma, seed):
    """Their m_kl = alpha' A'(d^2) with A(x) = 1 - e^(-x / sigma'): sigma' and alpha' are ours times what scales."""
    points = np.random.default_rng(seed).normal(size=(n, 3))
    squares = ((points[:, None] - points[None]) ** 2).sum(axis=2)
    paper_sigma = sigma * squares.sum() / (n * (n - 1))
    paper_alpha = alpha * paper_sigma / (n - 1)
    rows = attention(squares, alpha=alpha, sigma=sigma)
    assert rows.sum(axis=1) == pytest.approx(np.ones(n)) and (rows >= 0).all()
    for k in range(n):
        for other in (other for other in range(n) if other != k):
            slope = np.exp(-squares[k, other] / paper_sigma) / paper_sigma
            assert rows[k, other] == pytest.approx(paper_alpha * slope)


def test_the_unit_of_the_model_changes_nothing():
    squares = np.array([[0.0, 1, 4], [1, 0, 9], [4, 9, 0]])
    assert attention(squares, alpha=0.7, sigma=2.0) == pytest.approx(attention(1e6 * squares, alpha=0.7, sigma=2.0))


def test_the_near_count_more_and_the_absent_not_at_all():
    names = ("a", "b", "c", "d")
    fed = federation_of(names)
    before = {name: {"w": torch.zeros(2)} for name in names}
    updates = {name: {"w": torch.tensor([value, 0.0])} for name, value in zip("abc", (0.0, 1.0, 3.0))}
    done = server_step(find_method("fedavg_by_distance"), {}, before, updates, fed, round=1)
    weights = attention(np.array([[0.0, 1, 9], [1, 0, 4], [9, 4, 0]]), alpha=1.0, sigma=1.0)
    for row, name in zip(weights, names, strict=False):
        assert float(done.client_models[name]["w"][0]) == pytest.approx(row @ [0.0, 1, 3], rel=1e-6)
    assert done.client_models["d"] is before["d"]
    assert weights[0, 1] > weights[0, 2]
