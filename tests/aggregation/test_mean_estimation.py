"""Estimates of many means from halves: by hand, by the papers' formulas in plain NumPy, and risks that are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_fl.methods.james_stein import shrinkage
from atlas_fl.methods.kriging import measure
from atlas_fl.methods.mta import means_and_errors, shrinkage_rows
from atlas_fl.methods.registry import find_method
from atlas_fl.methods.stb import neighbour_rows

RULES = {
    "constant": ("mta", {}),
    "minimax": ("mta", {"mta_similarity": "minimax"}),
    "measured": ("mta", {"mta_similarity": "measured"}),
    "james_stein": ("james_stein", {}),
    "stb": ("stb", {}),
}


def rows_of(rule: str, first: np.ndarray, second: np.ndarray, **options: float) -> np.ndarray:
    """The rows of clients with these halves, (n, d) each, of one example each."""
    both = np.concatenate([first, second])
    name, words = RULES[rule]
    return find_method(name, **{**words, **options}).predict_rows(both @ both.T, np.ones(len(first)))


def paper_mta(y: np.ndarray, noise: np.ndarray, a: float, gamma: float) -> np.ndarray:
    """W = (I + gamma / T Sigma L)^-1 with L the Laplacian of A = a 1 1^T."""
    count = len(y)
    similar = np.full((count, count), a)
    laplacian = np.diag(similar.sum(axis=1)) - similar
    return np.linalg.inv(np.eye(count) + gamma / count * np.diag(noise) @ laplacian)


@pytest.mark.parametrize(
    ("rule", "first", "second", "row"),
    [
        # y = 0, 2 and N = 1: a = 2 / 4, W = (I + ((1, -1), (-1, 1)) / 4)^-1 = ((5, 1), (1, 5)) / 6
        ("constant", [1.0, 3.0], [-1.0, 1.0], [5 / 6, 1 / 6]),
        ("minimax", [1.0, 3.0], [-1.0, 1.0], [5 / 6, 1 / 6]),
        # tau^2 = (3 - 1) (1 + 1) / 2 = 2, too
        ("measured", [1.0, 3.0], [-1.0, 1.0], [5 / 6, 1 / 6]),
        # y = 0, 1, 3: the mean square is (1 + 9 + 4) / 3, so v = 7 / 3, own .7 + .3 / 3; the largest is 9, so v = 9 / 2
        ("constant", [1.0, 2.0, 4.0], [-1.0, 0.0, 2.0], [0.8, 0.1, 0.1]),
        ("minimax", [1.0, 2.0, 4.0], [-1.0, 0.0, 2.0], [29 / 33, 2 / 33, 2 / 33]),
        # y = 0, 0, 4, 4 of one value: d = 1, n - 3 = 1 and squares of 4 * 4, so s = 15 / 16
        ("james_stein", [1.0, -1.0, 5.0, 3.0], [-1.0, 1.0, 3.0, 5.0], [61 / 64, 1 / 64, 1 / 64, 1 / 64]),
        # D_01 = 1 * 1 <= 1 and D_02 = 3 * 3 > 1: one neighbour, g = .5 / 2.5 = .2
        ("stb", [1.0, 2.0, 4.0], [-1.0, 0.0, 2.0], [0.6, 0.4, 0.0]),
    ],
)
def test_rows_by_hand(rule: str, first: list[float], second: list[float], row: list[float]) -> None:
    one, other = (np.array(values)[:, None] for values in (first, second))
    assert rows_of(rule, one, other)[0] == pytest.approx(row)


HALVES = st.tuples(st.integers(2, 6), st.integers(2, 40), st.floats(0.1, 3), st.integers(0, 2**32))


def halves_of(case: tuple[int, int, float, int]) -> tuple[np.ndarray, np.ndarray]:
    count, dimension, size, seed = case
    draw = np.random.default_rng(seed)
    theta = size * draw.normal(size=(count, dimension))
    noise = draw.uniform(0.2, 2, (count, 1))
    first, second = (theta + noise * draw.normal(size=theta.shape) for _ in range(2))
    return first, second


@given(HALVES, st.floats(0.2, 4))
@settings(max_examples=60, deadline=None)
def test_multi_task_averaging_is_the_papers_inverse(case: tuple[int, int, float, int], gamma: float) -> None:
    first, second = halves_of(case)
    y, noise = (first + second) / 2, ((first - second) ** 2).sum(axis=1) / 4
    squares = ((y[:, None] - y[None]) ** 2).sum(axis=2)
    n = len(y)
    for rule, spread in (("constant", squares.sum() / n / (n - 1)), ("minimax", squares.max())):
        rows = rows_of(rule, first, second, mta_gamma=gamma)
        assert rows == pytest.approx(paper_mta(y, noise, 2 / spread, gamma), abs=1e-9)
        assert rows.sum(axis=1) == pytest.approx(np.ones(n)) and (rows >= 0).all()


@given(HALVES)
@settings(max_examples=40, deadline=None)
def test_with_a_measured_variance_it_is_the_predictor_of_fay_and_herriot(case: tuple[int, int, float, int]) -> None:
    first, second = halves_of(case)
    y, noise = (first + second) / 2, ((first - second) ** 2).sum(axis=1) / 4
    n, products = len(y), first @ second.T
    between = np.trace(products) / n - (products.sum() - np.trace(products)) / n / (n - 1)
    if between <= 1e-3:
        return
    mean = (y / (between + noise)[:, None]).sum(axis=0) / (1 / (between + noise)).sum()
    kept = (between / (between + noise))[:, None]
    assert rows_of("measured", first, second) @ y == pytest.approx(kept * y + (1 - kept) * mean, abs=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_with_one_value_james_stein_is_that_of_efron_and_morris(seed: int) -> None:
    """n numbers with the noise of one, s = 1 - (n - 3) N / sum (y - mean y)^2: errors of one size and any sign."""
    draw = np.random.default_rng(seed)
    y = draw.normal(size=7) * 2
    errors = 0.8 * draw.choice([-1.0, 1.0], 7)
    both = np.concatenate([y + errors, y - errors])[:, None]
    expected = max(0.0, 1 - (7 - 3) * 0.64 / ((y - y.mean()) ** 2).sum())
    assert shrinkage(both @ both.T) == pytest.approx(expected)


def test_james_stein_has_less_risk_than_the_models_alone_and_finds_how_many_values_there_are() -> None:
    draw, n, d = np.random.default_rng(0), 6, 300
    gains, dimensions = [], []
    for _ in range(200):
        theta = draw.normal(size=(n, d)) / np.sqrt(d)
        first, second = (theta + draw.normal(size=(n, d)) * np.sqrt(2 / d) for _ in range(2))
        both = np.concatenate([first, second])
        y, errors = (first + second) / 2, means_and_errors(both @ both.T)[1]
        gains.append(((rows_of("james_stein", first, second) @ y - theta) ** 2).sum() / n)
        dimensions.append(np.square(errors[~np.eye(n, dtype=bool)]).mean())
    # variance 1 between clients and noise 1: the best factor for a known mean has the risk 1 / 2 + 1 / 2 / n
    assert np.mean(gains) == pytest.approx(0.5 + 0.5 / n, abs=0.03)
    assert 1 / np.mean(dimensions) == pytest.approx(d, rel=0.1)


@given(HALVES, st.floats(0, 3), st.floats(0, 2))
@settings(max_examples=60, deadline=None)
def test_similarity_tests_are_those_of_the_paper_one_client_at_a_time(
    case: tuple[int, int, float, int], zeta: float, c: float
) -> None:
    first, second = halves_of(case)
    rows = rows_of("stb", first, second, stb_zeta=zeta, stb_c=c)
    for k in range(len(first)):
        noise = ((first[k] - second[k]) ** 2).sum() / 4
        near = [
            j for j in range(len(first)) if j == k or (first[k] - first[j]) @ (second[k] - second[j]) <= zeta * noise
        ]
        gamma = c * zeta * (len(near) - 1) / ((1 + c * zeta) * (len(near) - 1) + 1)
        expected = np.zeros(len(first))
        expected[near] = (1 - gamma) / len(near)
        expected[k] += gamma
        assert rows[k] == pytest.approx(expected)


def test_with_c_of_one_and_equal_noise_a_row_minimises_its_bound() -> None:
    """(1 - m_kk)^2 zeta + sum_l m_kl^2 over rows with equal shares of three neighbours."""
    zeta = 1.5
    rows = neighbour_rows(np.ones((4, 4)), np.ones(4), zeta=zeta, c=1.0)
    own = np.linspace(0, 1, 100_001)
    bound = (1 - own) ** 2 * zeta + own**2 + (1 - own) ** 2 / 3
    assert rows[0, 0] == pytest.approx(own[bound.argmin()], abs=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_without_noise_everyone_keeps_its_own_and_without_differences_all_share(rule: str) -> None:
    draw = np.random.default_rng(1)
    apart = draw.normal(size=(4, 20))
    assert rows_of(rule, apart, apart) == pytest.approx(np.eye(4), abs=1e-9)
    error = 0.1 * draw.normal(size=(4, 20))
    same = rows_of(rule, apart[:1] + error, apart[:1] - error)
    assert same == pytest.approx(np.full((4, 4), 0.25), abs=0.1 if rule != "stb" else 0.25)
    assert rows_of(rule, apart[:1], apart[:1] + 1) == pytest.approx(np.ones((1, 1))), "a client alone"


def test_where_nothing_has_changed_it_is_the_average_by_examples() -> None:
    shares = np.array([0.2, 0.8])
    assert shrinkage_rows(0.0, np.zeros(2), shares) == pytest.approx(np.tile(shares, (2, 1)))
    assert shrinkage_rows(0.0, np.array([1.0, 3.0]), shares)[0] == pytest.approx([0.75, 0.25]), "by precision"
    assert measure(np.zeros((4, 4)))[1].tolist() == [0.0, 0.0]
