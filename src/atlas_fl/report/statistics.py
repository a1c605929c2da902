"""Statistics over seeds: intervals by t, paired permutation, Wilcoxon and Bayesian tests, Holm.

The seed is the unit of replication: the clients of a run share its partition, initialisation and rounds, so they are
averaged before anything is tested. Formulas and sources: docs/algorithms/statistics.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64
from scipy import stats

from atlas_fl.frozen import Frozen
from atlas_fl.rng import generator

Scores = Mapping[str, Float64[np.ndarray, "seeds clients"]]
"""Test scores by method, higher is better; row i is the same seed and column j the same client in every method."""
Interval = tuple[float, float]
"""Lower and upper end."""

ALPHA = 0.05
"""Level of tests; intervals hold 1 - ALPHA."""
ROPE = 0.01
"""Differences up to this, in units of the score, are no difference in practice: one point of accuracy."""
PRIOR = 0.5
"""Weight of the pseudo-difference 0 in the Bayesian signed-rank test."""
EXACT_PAIRS = 15
"""Up to so many pairs that differ every flip of signs is counted, and beyond as many random ones."""
DRAWS = 50_000
DECIMALS = 12
"""Differences are rounded to these: .83 - .82 and .52 - .51 are then equal, and their ranks tied."""
TIE = 1e-9
"""Sums of differences that are as near are equal: far above what rounding leaves, far below a step of a score."""


class MethodStatistics(Frozen):
    """One method over seeds and clients; None for what one seed cannot say."""

    seeds: int
    clients: int
    mean: float
    """Over seeds of the mean over clients."""
    std: float | None
    """Standard deviation over seeds of the mean over clients (n - 1)."""
    interval: Interval | None
    """95% t interval of the mean."""
    worst_client: float
    """Mean over seeds of the lowest client's score."""
    lowest_third: float
    """Mean over seeds of the mean of the lowest third of the clients, rounded up: less noisy than a minimum."""
    hurt: float | None
    """Share of seeds x clients that score less than with the baseline on the same seed; None without a baseline."""


class BayesianComparison(Frozen):
    """Posterior probabilities that a method is worse, practically equal or better; they sum to 1."""

    left: float
    """The first method is worse by more than the region of practical equivalence."""
    rope: float
    right: float
    """The first method is better by more than the region of practical equivalence."""


class PairedComparison(Frozen):
    """One method minus another, paired by seed."""

    differences: tuple[float, ...]
    """Difference of each seed."""
    mean: float
    interval: Interval | None
    """95% t interval of the mean difference; None for one seed."""
    effect_size: float | None
    """d_z: mean over standard deviation (n - 1) of the differences; None for one seed or where all are equal."""
    sign_flip_p: float
    """Two-sided p of the sign-flip permutation test."""
    least_p: float
    """The least p that the sign-flip test can reach with as many pairs that differ."""
    adjusted_p: float | None
    """`sign_flip_p` after Holm over all comparisons with the control; None for a comparison that stands alone."""
    wilcoxon_p: float
    """Two-sided p of Wilcoxon's signed-rank test."""
    bayesian: BayesianComparison


def share_of_draws(differences: Float64[np.ndarray, " draws"]) -> BayesianComparison:
    """Shares of bootstrap draws of a difference that are worse, practically equal (within `ROPE`) and better."""
    left, right = float(np.mean(differences < -ROPE)), float(np.mean(differences > ROPE))
    return BayesianComparison(left=left, rope=1 - left - right, right=right)


def describe_method(
    scores: Float64[np.ndarray, "seeds clients"], *, baseline: Float64[np.ndarray, "seeds clients"] | None = None
) -> MethodStatistics:
    """Statistics of one method; clients may be hurt against the scores of the baseline."""
    seeds, clients = scores.shape
    means = scores.mean(axis=1)
    lowest = np.sort(scores, axis=1)[:, : -(-clients // 3)]
    several = seeds > 1
    return MethodStatistics(
        seeds=seeds,
        clients=clients,
        mean=float(means.mean()),
        std=float(means.std(ddof=1)) if several else None,
        interval=t_interval(means) if several else None,
        worst_client=float(lowest[:, 0].mean()),
        lowest_third=float(lowest.mean()),
        hurt=None if baseline is None else hurt_share(scores, baseline),
    )


def task_means(
    scores: Float64[np.ndarray, "seeds clients"], tasks: Sequence[str]
) -> Float64[np.ndarray, "seeds tasks"]:
    """Mean over the clients of each task, in the order in which the tasks first come."""
    names = np.array(tasks)
    return np.stack([scores[:, names == task].mean(axis=1) for task in dict.fromkeys(tasks)], axis=1)


def hurt_share(scores: Float64[np.ndarray, "seeds clients"], baseline: Float64[np.ndarray, "seeds clients"]) -> float:
    """Share of seeds x clients that score less than with the baseline; equal scores are not hurt."""
    return float((round_scores(scores - baseline) < 0).mean())


def t_interval(values: Float64[np.ndarray, " seeds"]) -> Interval:
    """Student's interval of the mean of two or more values."""
    half = stats.t.ppf(1 - ALPHA / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def percentile_interval(draws: Float64[np.ndarray, " draws"]) -> Interval:
    """The middle 95% of these draws."""
    low, high = np.quantile(draws, [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)


def compare_with_control(scores: Scores, *, control: str, seed: int) -> dict[str, PairedComparison]:
    """Every other method minus the control, paired by seed, with Holm's adjustment over all of them.

    `seed` is of what is drawn.
    """
    # sorted, so that the sum of equal scores does not depend on the order of the clients
    means = {method: np.sort(values, axis=1).mean(axis=1) for method, values in scores.items()}
    pairs = {
        method: compare_pair(values, means[control], rng=generator(seed, "statistics", "pair", method, control))
        for method, values in means.items()
        if method != control
    }
    adjusted = holm([pair.sign_flip_p for pair in pairs.values()])
    return {
        method: replace(pair, adjusted_p=float(p)) for (method, pair), p in zip(pairs.items(), adjusted, strict=True)
    }


def compare_pair(
    first: Float64[np.ndarray, " seeds"], second: Float64[np.ndarray, " seeds"], *, rng: np.random.Generator
) -> PairedComparison:
    """One score of each seed under the first method minus that under the second."""
    differences = round_scores(first - second)
    several = len(differences) > 1
    spread = float(differences.std(ddof=1)) if several else 0.0
    return PairedComparison(
        differences=tuple(differences.tolist()),
        mean=float(differences.mean()),
        interval=t_interval(differences) if several else None,
        effect_size=float(differences.mean()) / spread if spread > TIE else None,
        sign_flip_p=sign_flip_p(differences, rng=rng),
        least_p=least_sign_flip_p(int(np.count_nonzero(differences))),
        adjusted_p=None,
        wilcoxon_p=signed_rank_p(differences, rng=rng),
        bayesian=bayesian_signed_rank(differences, rng=rng),
    )


def sign_flip_p(differences: Float64[np.ndarray, " seeds"], *, rng: np.random.Generator) -> float:
    """Two-sided p: the share of flips of signs whose mean is as far from 0 as the mean of the differences.

    Differences of 0, which do not change with their sign, are left out. Of more than `EXACT_PAIRS` others the flips
    are random, and p is twice (1 + number as far at that end) / (1 + flips).
    """
    moved = differences[differences != 0]
    if len(moved) < 2:
        return 1.0
    flips = 2**EXACT_PAIRS
    test = stats.permutation_test((moved,), np.mean, permutation_type="samples", n_resamples=flips, random_state=rng)
    observed, drawn = abs(test.statistic), test.null_distribution  # scipy's own p misses ties of rounded differences
    if len(moved) <= EXACT_PAIRS:
        return float((np.abs(drawn) >= observed - TIE).mean())
    as_far = (drawn * np.sign(test.statistic) >= observed - TIE).sum()
    return float(min(1.0, 2 * (1 + as_far) / (1 + flips)))


def least_sign_flip_p(pairs: int) -> float:
    """The least p that `sign_flip_p` can give where so many pairs differ: 2/2^n, as for Wilcoxon's test, up to 15."""
    return min(1.0, 2.0 ** (1 - pairs)) if pairs <= EXACT_PAIRS else 2 / (1 + 2**EXACT_PAIRS)


def signed_rank_p(differences: Float64[np.ndarray, " seeds"], *, rng: np.random.Generator) -> float:
    """Two-sided p of Wilcoxon's signed-rank test: the sign-flip test of the signed ranks, which is right with ties too.

    Differences of 0 are dropped (Wilcoxon, 1945) and equal sizes share their mean rank. scipy's `exact` takes the
    distribution without ties instead.
    """
    moved = differences[differences != 0]
    return sign_flip_p(stats.rankdata(np.abs(moved)) * np.sign(moved), rng=rng)


def bayesian_signed_rank(
    differences: Float64[np.ndarray, " seeds"], *, rng: np.random.Generator, rope: float = ROPE, draws: int = DRAWS
) -> BayesianComparison:
    """Bayesian signed-rank test with a region of practical equivalence (Benavoli, Corani, Demsar, Zaffalon, JMLR 2017).

    Weights w ~ Dirichlet(.5, 1, ..., 1) lie on the pseudo-difference 0 and the differences d. Right is the weight
    sum_ij w_i w_j [d_i + d_j > 2 rope], ties half; left likewise below -2 rope; rope is the rest. Returned is the share
    of draws in which each is the largest; draws in which two are equal count for both in equal parts.
    """
    points = np.append(0.0, differences)
    sums = points[:, None] + points[None, :]
    above, below = (np.where(np.abs(side - 2 * rope) <= TIE, 0.5, side > 2 * rope) for side in (sums, -sums))
    weights = rng.dirichlet(np.append(PRIOR, np.ones(len(differences))), size=draws)  # (draws, points)
    left, right = (((weights @ side) * weights).sum(axis=1) for side in (below, above))
    masses = np.stack([left, 1 - left - right, right], axis=1)
    largest = masses >= masses.max(axis=1, keepdims=True) - TIE
    worse, equal, better = (largest / largest.sum(axis=1, keepdims=True)).mean(axis=0).tolist()
    return BayesianComparison(left=worse, rope=equal, right=better)


def holm(p_values: Sequence[float] | Float64[np.ndarray, " tests"]) -> Float64[np.ndarray, " tests"]:
    """Adjusted p in the given order: the largest of (h - j + 1) p_(j) over j <= i, at most 1 (Holm, 1979).

    Rejecting what is at most alpha keeps the chance of any false rejection among the h tests at alpha, however they
    depend on each other.
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate((len(values) - np.arange(len(values))) * values[order]))
    return adjusted


def round_scores(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """To twelve decimals, which frees differences of what subtraction leaves behind a score's last digit."""
    return np.round(values, DECIMALS)
