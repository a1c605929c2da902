"""Laws of the statistics over seeds and of ranks over federations, on random accuracies with many ties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.report.federation_ranks import rank_methods
from atlas_fl.report.statistics import compare_pair, describe_method, holm, hurt_share
from tests.examples import examples


@st.composite
def tables(draw):
    """Scores (methods, seeds, clients) in steps of 1/20, and a generator."""
    shape = tuple(draw(st.integers(low, high)) for low, high in ((2, 5), (2, 7), (1, 5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return rng.integers(0, 21, shape) / 20, rng


def compare(first, second):
    return compare_pair(first, second, rng=np.random.default_rng(0))


def described_by(scores):
    return describe_method(scores)


@given(case=tables())
@examples(60)
def test_the_other_way_round_a_comparison_is_mirrored(case) -> None:
    first, second = case[0][:2].mean(axis=2)
    one, other = compare(first, second), compare(second, first)
    assert one.mean == -other.mean and one.interval == pytest.approx((-other.interval[1], -other.interval[0]))
    assert (one.sign_flip_p, one.wilcoxon_p) == (other.sign_flip_p, other.wilcoxon_p)
    mirrored = (other.bayesian.right, other.bayesian.rope, other.bayesian.left)
    assert (one.bayesian.left, one.bayesian.rope, one.bayesian.right) == pytest.approx(mirrored)


@given(case=tables(), shift=st.integers(-20, 20))
@examples(60)
def test_what_a_seed_is_worth_to_both_changes_no_paired_statistic(case, shift) -> None:
    scores, rng = case
    first, second = scores[:2].mean(axis=2)
    worth = rng.integers(-20, 21, len(first)) / 20 + shift
    plain, shifted = compare(first, second), compare(first + worth, second + worth)
    assert shifted.differences == pytest.approx(plain.differences)
    assert (shifted.sign_flip_p, shifted.wilcoxon_p) == pytest.approx((plain.sign_flip_p, plain.wilcoxon_p))
    assert shifted.bayesian == plain.bayesian


@given(case=tables())
@examples(60)
def test_the_order_of_seeds_changes_nothing(case) -> None:
    scores, rng = case
    first, second = scores[:2].mean(axis=2)
    order = rng.permutation(len(first))
    plain, permuted = compare(first, second), compare(first[order], second[order])
    for name in ("mean", "effect_size", "sign_flip_p", "wilcoxon_p", "least_p"):
        assert getattr(permuted, name) == pytest.approx(getattr(plain, name)), name


@given(case=tables())
@examples(60)
def test_every_p_lies_between_the_least_and_one_and_the_posterior_sums_to_one(case) -> None:
    pair = compare(*case[0][:2].mean(axis=2))
    for p in (pair.sign_flip_p, pair.wilcoxon_p):
        assert pair.least_p * (1 - 1e-12) <= p <= 1
    assert pair.bayesian.left + pair.bayesian.rope + pair.bayesian.right == pytest.approx(1)
    low, high = pair.interval
    assert low <= pair.mean <= high


@given(case=tables())
@examples(40)
def test_the_lowest_client_is_below_the_lowest_third_and_that_below_the_mean(case) -> None:
    scores, rng = case
    described = described_by(scores[0])
    assert described.worst_client <= described.lowest_third + 1e-12 and described.lowest_third <= described.mean + 1e-12
    assert described.interval[0] <= described.mean <= described.interval[1]
    permuted = described_by(scores[0][:, rng.permutation(scores.shape[2])])
    for name in ("mean", "std", "worst_client", "lowest_third"):
        assert getattr(permuted, name) == pytest.approx(getattr(described, name)), name


@given(case=tables())
@examples(40)
def test_clients_are_hurt_or_helped_or_score_the_same(case) -> None:
    first, second = case[0][:2]
    same = (np.abs(first - second) < 1e-9).mean()
    assert hurt_share(first, second) + hurt_share(second, first) + same == pytest.approx(1)


@given(p_values=st.lists(st.floats(0, 1), min_size=1, max_size=8), seed=st.integers(0, 2**32))
@examples(100)
def test_holm_lies_between_the_p_and_bonferroni_and_keeps_their_order(p_values, seed) -> None:
    p = np.array(p_values)
    adjusted = holm(p)
    assert (adjusted >= p).all() and (adjusted <= np.minimum(1, len(p) * p)).all()
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()
    order = np.random.default_rng(seed).permutation(len(p))
    assert (holm(p[order]) == adjusted[order]).all()


@given(case=tables())
@examples(60)
def test_ranks_sum_up_and_depend_on_the_order_of_scores_alone(case) -> None:
    matrix = case[0][:, :, 0]
    scores = {f"method{index}": row for index, row in enumerate(matrix)}
    ranks = rank_methods(scores, control="method0")
    assert sum(ranks.average_ranks.values()) == pytest.approx(len(matrix) * (len(matrix) + 1) / 2)
    assert 0 <= ranks.friedman_p <= 1
    stretched = {method: np.exp(values) * np.arange(1, len(values) + 1) for method, values in scores.items()}
    assert rank_methods(stretched, control="method0") == ranks
