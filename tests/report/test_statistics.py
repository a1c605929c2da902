"""Statistics over seeds against hand numbers, scipy's own tests, baycomp and simulations."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from atlas_fl.report.statistics import (
    bayesian_signed_rank,
    compare_pair,
    compare_with_control,
    describe_method,
    holm,
    hurt_share,
    least_sign_flip_p,
    round_scores,
    sign_flip_p,
    signed_rank_p,
    t_interval,
)

LOCAL = np.array([[0.6, 0.7, 0.8, 0.9], [0.4, 0.6, 0.8, 1.0]])
"""Two seeds by four clients."""


def rng(seed=0):
    return np.random.default_rng(seed)


def accuracies(source, size, rows=200):
    """Shares of test rows, as accuracies are: full of ties."""
    return source.integers(0, rows + 1, size) / rows


def test_a_method_by_hand() -> None:
    fedavg = np.array([[0.7, 0.7, 0.7, 0.7], [0.6, 0.6, 0.8, 0.7]])
    described = describe_method(fedavg, baseline=LOCAL)
    assert (described.seeds, described.clients) == (2, 4)
    assert described.mean == pytest.approx((0.7 + 0.675) / 2)
    assert described.std == pytest.approx(0.025 / np.sqrt(2))
    # t_.975 with one degree of freedom is 12.706; the standard error is .0125
    assert described.interval == pytest.approx((0.6875 - 0.15883, 0.6875 + 0.15883), abs=1e-5)
    assert described.worst_client == pytest.approx(0.65)
    assert described.lowest_third == pytest.approx((0.7 + 0.6) / 2)  # two of four clients
    assert described.hurt == pytest.approx(3 / 8)  # clients 2 and 3 of the first seed, 3 of the second


def test_one_seed_has_no_spread_and_no_interval() -> None:
    described = describe_method(LOCAL[:1])
    assert described.mean == pytest.approx(0.75)
    assert [described.std, described.interval, described.hurt] == [None] * 3
    assert describe_method(LOCAL[:1, :3]).lowest_third == pytest.approx(0.6)  # one of three


def test_scores_that_differ_by_rounding_alone_hurt_nobody() -> None:
    assert 0.1 + 0.2 != 0.3
    assert hurt_share(np.array([[0.3, 0.5]]), np.array([[0.1 + 0.2, 0.6]])) == 0.5


def test_the_t_interval_is_scipys() -> None:
    values = rng(1).normal(0.8, 0.02, 7)
    reference = stats.ttest_1samp(values, 0).confidence_interval()
    assert t_interval(values) == pytest.approx((reference.low, reference.high))


@pytest.mark.parametrize("pairs", range(1, 11))
def test_differences_of_one_sign_reach_the_least_p(pairs) -> None:
    """2/2^n: .25 with three seeds, .0625 with five, .00195 with ten."""
    differences = np.arange(1, pairs + 1) / 100
    assert least_sign_flip_p(pairs) == 2 / 2**pairs
    assert sign_flip_p(differences, rng=rng()) == sign_flip_p(-differences, rng=rng()) == 2 / 2**pairs
    assert signed_rank_p(differences, rng=rng()) == pytest.approx(2 / 2**pairs)


def test_sign_flips_by_hand() -> None:
    """Of 3, 2, -1 (sum 4), eight flips have the sums 6, 4, 2, 0 and their negatives: four are as far from 0 as 4."""
    assert sign_flip_p(np.array([0.03, 0.02, -0.01]), rng=rng()) == 0.5
    # a difference of 0 does not change: with .03 and .02 alone two of four flips are as far
    assert sign_flip_p(np.array([0.03, 0.02, 0.0]), rng=rng()) == 0.5
    assert sign_flip_p(np.zeros(4), rng=rng()) == 1


@pytest.mark.parametrize("denominator", [7, 540, 1080])
def test_sign_flips_count_ties_that_rounding_hides(denominator: int) -> None:
    """Thirds have no last digit: p is that of the numerators, whole numbers whose sums are exact."""
    signs = np.array(list(product([1, -1], repeat=8)))
    for seed in range(20):
        numerators = rng(seed).integers(-4, 5, size=8)
        exact = (np.abs(signs @ numerators) >= abs(numerators.sum())).mean()
        assert sign_flip_p(round_scores(numerators / denominator), rng=rng()) == exact


def test_random_sign_flips_estimate_the_exact_p_and_are_never_zero() -> None:
    differences = np.round(rng(8).normal(0.01, 0.02, 17), 3)
    signs = np.array(list(product([1, -1], repeat=16)))  # of all but the first: the other half is its mirror image
    sums = differences[0] + signs @ differences[1:]
    exact = (np.abs(sums) >= abs(differences.sum()) - 1e-12).mean()
    assert 0.01 < exact < 0.5
    error = 2 * np.sqrt(exact / 2 * (1 - exact / 2) / 2**15)
    assert sign_flip_p(differences, rng=rng()) == pytest.approx(exact, abs=4 * error)
    assert sign_flip_p(np.ones(30), rng=rng()) == least_sign_flip_p(30) == 2 / (1 + 2**15)


@pytest.mark.parametrize("pairs", [3, 6, 10])
def test_wilcoxon_without_ties_is_scipys_exact_test(pairs) -> None:
    differences = rng(pairs).normal(0.3, 1, pairs)
    assert signed_rank_p(differences, rng=rng()) == pytest.approx(stats.wilcoxon(differences, method="exact").pvalue)


def test_wilcoxon_with_ties_and_zeros_counts_all_signs() -> None:
    """By hand: .02, .01, .01, -.01 have the ranks 4, 2, 2, 2, so the negative sum is 2.

    Of sixteen signs the negative sum is 0 once and 2 three times, and as often at the other end: 8/16.
    """
    assert signed_rank_p(np.array([0.02, 0.01, 0.01, -0.01, 0.0]), rng=rng()) == pytest.approx(0.5)
    assert signed_rank_p(np.zeros(3), rng=rng()) == 1
    # the sizes of .83 - .82 and .51 - .52 differ behind the fifteenth digit and are tied all the same
    assert signed_rank_p(round_scores(np.array([0.83 - 0.82, 0.51 - 0.52, 0.7 - 0.6])), rng=rng()) == pytest.approx(
        0.75
    )


BAYCOMP = {
    "better": ([0.012, -0.004, 0.03, 0.008, 0.02, 0.015, -0.011, 0.009, 0.025, 0.01], (0.00002, 0.36406, 0.63592)),
    "equal": ([0.004, -0.003, 0.002, 0.006, -0.005, 0.001, 0.0, 0.008], (0.0, 1.0, 0.0)),
    "worse": ([-0.03, -0.02, 0.005, -0.012, -0.04], (0.87676, 0.12324, 0.0)),
    "ties": ([0.02, 0.0, -0.02], (0.12941, 0.74070, 0.12990)),
}
"""Differences, and `SignedRankTest.probs` of baycomp 1.0.3 with rope .01, 400,000 samples and random state 1."""


@pytest.mark.parametrize("case", BAYCOMP)
def test_the_bayesian_signed_rank_test_is_baycomps(case) -> None:
    differences, expected = BAYCOMP[case]
    posterior = bayesian_signed_rank(np.array(differences), rng=rng(), rope=0.01)
    # four standard errors of 50,000 draws are .009 at most
    assert (posterior.left, posterior.rope, posterior.right) == pytest.approx(expected, abs=0.009)


def test_the_bayesian_signed_rank_test_is_the_formula_of_the_paper() -> None:
    """The double sum of every draw, term by term, from the same weights."""
    points = [0.0, 0.012, -0.03, 0.02, 0.008, 0.01]
    counts, draws = [0, 0, 0], 300
    for weights in rng(5).dirichlet([0.5] + [1] * 5, draws):
        left = right = 0.0
        for (w, d), (v, e) in product(zip(weights, points), repeat=2):
            right += w * v * (1 if d + e > 0.02 + 1e-12 else 0.5 if d + e > 0.02 - 1e-12 else 0)
            left += w * v * (1 if d + e < -0.02 - 1e-12 else 0.5 if d + e < -0.02 + 1e-12 else 0)
        counts[int(np.argmax([left, 1 - left - right, right]))] += 1
    assert min(counts) > 0
    posterior = bayesian_signed_rank(np.array(points[1:]), rng=rng(5), draws=draws)
    assert (posterior.left, posterior.rope, posterior.right) == pytest.approx(tuple(np.array(counts) / draws))


def test_without_a_rope_two_equal_methods_are_as_likely_better_as_worse() -> None:
    posterior = bayesian_signed_rank(np.zeros(5), rng=rng(), rope=0.0, draws=100)
    assert (posterior.left, posterior.rope, posterior.right) == (0.5, 0.0, 0.5)


def test_holm_by_hand() -> None:
    """Sorted .005, .01, .03, .04 times 4, 3, 2, 1 are .02, .03, .06 and .04, which may not fall below .06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == pytest.approx([1, 1])
    assert holm([]).shape == (0,)


def test_a_pair_by_hand() -> None:
    """.02, .01, .03 and .02: mean .02, variance (1 + 1) e-4 / 3, so d_z is sqrt(6)."""
    first, second = np.array([0.82, 0.61, 0.73, 0.52]), np.array([0.8, 0.6, 0.7, 0.5])
    pair = compare_pair(first, second, rng=rng())
    assert pair.differences == (0.02, 0.01, 0.03, 0.02)
    assert pair.mean == pytest.approx(0.02)
    assert pair.effect_size == pytest.approx(np.sqrt(6))
    reference = stats.ttest_rel(first, second)
    assert pair.effect_size * np.sqrt(4) == pytest.approx(reference.statistic)
    assert pair.interval == pytest.approx(tuple(reference.confidence_interval()))
    assert pair.sign_flip_p == pair.least_p == 1 / 8
    assert pair.wilcoxon_p == pytest.approx(1 / 8) and pair.adjusted_p is None


def test_one_seed_says_nothing_and_equal_differences_have_no_effect_size() -> None:
    alone = compare_pair(np.array([0.9]), np.array([0.5]), rng=rng())
    assert (alone.interval, alone.effect_size) == (None, None)
    assert alone.sign_flip_p == alone.wilcoxon_p == alone.least_p == 1
    equal = compare_pair(np.array([0.9, 0.7]), np.array([0.8, 0.6]), rng=rng())
    assert equal.effect_size is None


def test_clients_are_averaged_before_they_are_compared() -> None:
    gains = np.array([[0.1, 0, 0, 0.02], [0.2, 0, 0, -0.04]])
    scores = {"local": LOCAL, "atlas": LOCAL + gains}
    assert compare_with_control(scores, control="local", seed=1)["atlas"].differences == pytest.approx((0.03, 0.04))


def null_table(source, *, methods=5, seeds=10, clients=9, gain=0.0):
    """Accuracies of equal methods, but for `gain` of the last; a seed is luck for all clients of a method."""
    shared = source.normal(0.8, 0.03, (1, seeds, clients))
    effects = source.normal(0, 0.01, (methods, seeds, 1)) + source.normal(0, 0.02, (methods, seeds, clients))
    effects[-1] += gain
    return np.round((shared + effects) * 200) / 200


def rejections(table, test):
    """Which of the methods differ from the first one by a test of (seeds, clients) differences, after Holm."""
    return holm([test(values - table[0]) for values in table[1:]]) <= 0.05


def flip_seeds(differences):
    return sign_flip_p(differences.mean(axis=1), rng=rng())


@pytest.mark.slow
def test_without_a_difference_one_table_in_twenty_has_a_rejection() -> None:
    """200 tables of ten seeds, four methods and a control; more than binomial luck (1 in 1000) is a broken test.

    The same tables with clients as if each were a run of its own: the test can fail.
    """
    tables = [null_table(rng([1, table])) for table in range(200)]
    most = stats.binom.ppf(0.999, 200, 0.05)
    assert 0 < sum(rejections(table, flip_seeds).any() for table in tables) <= most
    pooled = sum(rejections(table, lambda cells: stats.ttest_1samp(cells.ravel(), 0).pvalue).any() for table in tables)
    assert pooled > 3 * most


@pytest.mark.slow
def test_a_planted_difference_is_seen_and_only_there() -> None:
    """Three points of accuracy, about 1.8 standard deviations of a difference: d_z 1.1 suffices for ten seeds."""
    seen = np.array([rejections(null_table(rng([2, table]), gain=0.03), flip_seeds) for table in range(60)])
    assert seen[:, -1].mean() >= 0.9
    assert seen[:, :-1].any(axis=1).mean() <= stats.binom.ppf(0.999, 60, 0.05) / 60


def test_the_whole_comparison_sees_what_was_planted_and_what_is_practically_equal() -> None:
    table = null_table(rng(3), gain=0.05)
    same = table[0] + rng(4).choice([-0.005, 0.005], table[0].shape)
    scores = {"local": table[0], "fedavg": same, "atlas": table[-1]}
    pairs = compare_with_control(scores, control="local", seed=1)
    assert list(pairs) == ["fedavg", "atlas"]
    assert (
        pairs["atlas"].adjusted_p == pytest.approx(2 * pairs["atlas"].sign_flip_p) and pairs["atlas"].adjusted_p < 0.01
    )
    assert pairs["atlas"].interval[0] > 0.02 and pairs["atlas"].bayesian.right > 0.95
    assert pairs["fedavg"].adjusted_p > 0.05 and pairs["fedavg"].bayesian.rope > 0.95
    assert compare_with_control(scores, control="local", seed=1) == pairs
