"""Statistics over seeds: intervals by t and bootstrap, paired permutation, Wilcoxon and Bayesian tests, Holm, power.

The seed is the unit of replication: the clients of a run share its partition, initialisation and rounds, so they are
averaged before anything is tested. Formulas and sources: docs/algorithms/statistics.md.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64
from scipy import special, stats

from atlas_fl.errors import DataError, unknown_name
from atlas_fl.rng import generator

Scores = Mapping[str, Float64[np.ndarray, "seeds clients"]]
"""Test scores by method, higher is better; row i is the same seed and column j the same client in every method."""
Interval = tuple[float, float]
"""Lower and upper end."""

ALPHA = 0.05
"""Level of tests; intervals hold 1 - ALPHA."""
POWER = 0.8
ROPE = 0.01
"""Differences up to this, in units of the score, are no difference in practice: one point of accuracy."""
PRIOR = 0.5
"""Weight of the pseudo-difference 0 in the Bayesian signed-rank test."""
EXACT_PAIRS = 15
"""Up to so many pairs that differ every flip of signs is counted."""
FLIPS = 100_000
DRAWS = 50_000
RESAMPLES = 50_000
TRIM = 0.25
"""Share that the interquartile mean leaves out at either end."""
MOST_SEEDS = 1000
CHUNK = 1 << 20
"""Numbers held at once by what draws many times."""
DECIMALS = 12
"""Differences are rounded to these: .83 - .82 and .52 - .51 are then equal, and their ranks tied."""
TIE = 0.5 * 10.0**-DECIMALS


@dataclass(frozen=True, kw_only=True)
class MethodStatistics:
    """One method over seeds and clients; None for what one seed cannot say."""

    seeds: int
    clients: int
    mean: float
    """Over seeds of the mean over clients."""
    std: float | None
    """Standard deviation over seeds of the mean over clients (n - 1)."""
    interval: Interval | None
    """95% t interval of the mean."""
    interquartile_mean: float
    """Mean of the middle half of all seeds x tasks (Agarwal et al., 2021)."""
    interquartile_interval: Interval | None
    """95% percentile interval of the interquartile mean by bootstrap, in a comparison of seeds with all their tasks."""
    stratified_interval: Interval | None
    """The same by the stratified bootstrap of Agarwal et al.: seeds drawn inside each task on their own."""
    worst_client: float
    """Mean over seeds of the lowest client's score."""
    lowest_third: float
    """Mean over seeds of the mean of the lowest third of the clients, rounded up: less noisy than a minimum."""
    hurt: float | None
    """Share of seeds x clients that score less than with the baseline on the same seed; None without a baseline."""


@dataclass(frozen=True, kw_only=True)
class BayesianComparison:
    """Posterior probabilities that a method is worse, practically equal or better; they sum to 1."""

    left: float
    """The first method is worse by more than the region of practical equivalence."""
    rope: float
    right: float
    """The first method is better by more than the region of practical equivalence."""


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
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
    """Two-sided exact p of Wilcoxon's signed-rank test."""
    probability_of_improvement: float
    """Chance that a run of the first method scores more than a run of the second, whatever their seeds."""
    bayesian: BayesianComparison
    seeds_needed: int | None
    """Seeds at which a paired t test sees this effect size in four of five studies; None if over 1000 or unknown."""


def describe_methods(
    scores: Scores,
    *,
    seed: int,
    baseline: str | None = None,
    tasks: Sequence[str] | None = None,
    whole_seeds: bool = False,
    resamples: int = RESAMPLES,
) -> dict[str, MethodStatistics]:
    """Statistics of every method; a method's interval does not depend on which others are there.

    Args:
        scores: (seeds, clients) by method, all of one shape.
        seed: of the bootstrap.
        baseline: the method that others may hurt clients against.
        tasks: the task of each client; the interquartile mean is over seeds x tasks. None: over seeds.
        whole_seeds: resample seeds with all their tasks, see `bootstrap_interval`.
        resamples: of the bootstrap.

    Raises:
        DataError: shapes differ, or a score is not finite.
        ConfigError: no method is called `baseline`.
    """
    checked = _check_scores(scores)
    others = None if baseline is None else checked[known_method(baseline, checked)]
    return {
        method: describe_method(
            values,
            baseline=others,
            tasks=tasks,
            rng=generator(seed, "statistics", "bootstrap", method),
            whole_seeds=whole_seeds,
            resamples=resamples,
        )
        for method, values in checked.items()
    }


def describe_method(
    scores: Float64[np.ndarray, "seeds clients"],
    *,
    rng: np.random.Generator,
    baseline: Float64[np.ndarray, "seeds clients"] | None = None,
    tasks: Sequence[str] | None = None,
    whole_seeds: bool = False,
    resamples: int = RESAMPLES,
) -> MethodStatistics:
    """Statistics of one method; arguments as in `describe_methods`.

    Raises:
        DataError: shapes differ, or a score is not finite.
    """
    values = check_values(scores, "seeds x clients")
    seeds, clients = values.shape
    means = values.mean(axis=1)
    runs = means[:, None] if tasks is None else task_means(values, tasks)
    lowest = np.sort(values, axis=1)[:, : -(-clients // 3)]
    several = seeds > 1
    interval = bootstrap_interval(runs, rng=rng, whole_seeds=whole_seeds, resamples=resamples) if several else None
    stratified = bootstrap_interval(runs, rng=rng, resamples=resamples) if several and whole_seeds else interval
    return MethodStatistics(
        seeds=seeds,
        clients=clients,
        mean=float(means.mean()),
        std=float(means.std(ddof=1)) if several else None,
        interval=t_interval(means) if several else None,
        interquartile_mean=interquartile_mean(runs),
        interquartile_interval=interval,
        stratified_interval=stratified,
        worst_client=float(lowest[:, 0].mean()),
        lowest_third=float(lowest.mean()),
        hurt=None if baseline is None else hurt_share(values, baseline),
    )


def task_means(
    scores: Float64[np.ndarray, "seeds clients"], tasks: Sequence[str]
) -> Float64[np.ndarray, "seeds tasks"]:
    """Mean over the clients of each task, in the order in which the tasks first come.

    Raises:
        DataError: there is not one task for each client.
    """
    if len(tasks) != scores.shape[1]:
        raise DataError(f"{len(tasks)} tasks for {scores.shape[1]} clients; name the task of each client once")
    names = np.array(tasks)
    return np.stack([scores[:, names == task].mean(axis=1) for task in dict.fromkeys(tasks)], axis=1)


def hurt_share(scores: Float64[np.ndarray, "seeds clients"], baseline: Float64[np.ndarray, "seeds clients"]) -> float:
    """Share of seeds x clients that score less than with the baseline; equal scores are not hurt.

    Raises:
        DataError: the shapes differ.
    """
    return float((_differences(scores, baseline) < 0).mean())


def t_interval(values: Float64[np.ndarray, " seeds"], *, confidence: float = 1 - ALPHA) -> Interval:
    """Student's interval of the mean of two or more values."""
    half = stats.t.ppf((1 + confidence) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def interquartile_mean(runs: Float64[np.ndarray, "seeds tasks"]) -> float:
    """Mean without the lowest and the highest quarter, rounded down, of all seeds x tasks or seeds x federations."""
    return float(stats.trim_mean(runs.ravel(), TRIM))


def bootstrap_interval(
    runs: Float64[np.ndarray, "seeds tasks"],
    *,
    rng: np.random.Generator,
    whole_seeds: bool = False,
    resamples: int = RESAMPLES,
    confidence: float = 1 - ALPHA,
) -> Interval:
    """Percentile interval of the interquartile mean, seeds drawn again with replacement (Agarwal et al., NeurIPS 2021).

    Args:
        runs: a column for each task or federation.
        rng: draws the seeds.
        whole_seeds: a drawn seed brings all its columns. False draws inside each column on its own, as rliable does,
            which is right where columns are runs of their own; tasks of one federation share their runs, and if a good
            seed is good for all of them, the interval is then too narrow.
        resamples: how often.
        confidence: share of the resamples inside.

    Raises:
        DataError: not two dimensions, or a score is not finite.
    """
    seeds, tasks = check_values(runs, "seeds x tasks").shape

    def draw(count: int) -> Float64[np.ndarray, " count"]:
        rows = rng.integers(seeds, size=(count, seeds, 1 if whole_seeds else tasks))
        drawn: npt.NDArray[np.float64] = stats.trim_mean(runs[rows, np.arange(tasks)].reshape(count, -1), TRIM, axis=1)
        return drawn

    means = _in_chunks(draw, resamples, width=runs.size)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def compare_with_control(
    scores: Scores,
    *,
    control: str,
    seed: int,
    rope: float = ROPE,
    of: Literal["mean", "worst", "lowest_third"] = "mean",
    draws: int = DRAWS,
) -> dict[str, PairedComparison]:
    """Every other method minus the control, paired by seed, with Holm's adjustment over all of them.

    Args:
        scores: (seeds, clients) by method, all of one shape.
        control: the method that the others are compared with.
        seed: of what is drawn.
        rope: half width of the region of practical equivalence, in units of the score.
        of: what stands for the clients of a seed: their mean, the lowest of them, or the mean of their lowest third.
        draws: from the Bayesian posterior.

    Raises:
        DataError: shapes differ, or a score is not finite.
        ConfigError: no method is called `control`.
    """
    checked = {method: _of_each_seed(values, of) for method, values in _check_scores(scores).items()}
    other = checked[known_method(control, checked)]
    pairs = {
        method: compare_pair(
            values, other, rng=generator(seed, "statistics", "pair", method, control), rope=rope, draws=draws
        )
        for method, values in checked.items()
        if method != control
    }
    adjusted = holm([pair.sign_flip_p for pair in pairs.values()])
    return {
        method: replace(pair, adjusted_p=float(p)) for (method, pair), p in zip(pairs.items(), adjusted, strict=True)
    }


def _of_each_seed(scores: Float64[np.ndarray, "seeds clients"], of: str) -> Float64[np.ndarray, " seeds"]:
    lowest = {"mean": scores.shape[1], "worst": 1, "lowest_third": -(-scores.shape[1] // 3)}[of]
    means: npt.NDArray[np.float64] = np.sort(scores, axis=1)[:, :lowest].mean(axis=1)
    return means


def compare_pair(
    first: Float64[np.ndarray, " seeds"],
    second: Float64[np.ndarray, " seeds"],
    *,
    rng: np.random.Generator,
    rope: float = ROPE,
    draws: int = DRAWS,
) -> PairedComparison:
    """One score of each seed under the first method minus that under the second.

    Raises:
        DataError: the two are not of one length, or a score is not finite.
    """
    differences = _differences(first, second, shape="seeds")
    several = len(differences) > 1
    spread = float(differences.std(ddof=1)) if several else 0.0
    effect = float(differences.mean()) / spread if spread > TIE else None
    return PairedComparison(
        differences=tuple(differences.tolist()),
        mean=float(differences.mean()),
        interval=t_interval(differences) if several else None,
        effect_size=effect,
        sign_flip_p=sign_flip_p(differences, rng=rng),
        least_p=least_sign_flip_p(int(np.count_nonzero(differences))),
        adjusted_p=None,
        wilcoxon_p=signed_rank_p(differences),
        probability_of_improvement=probability_of_improvement(first, second),
        bayesian=bayesian_signed_rank(differences, rng=rng, rope=rope, draws=draws),
        seeds_needed=None if effect is None else seeds_needed(effect),
    )


def sign_flip_p(differences: Float64[np.ndarray, " seeds"], *, rng: np.random.Generator, flips: int = FLIPS) -> float:
    """Two-sided p: the share of flips of signs whose mean is as far from 0 as the mean of the differences.

    All 2^n flips up to 15 differences other than 0, which do not change with their sign; beyond that random flips and
    p = (1 + number as far) / (1 + flips). Sums that differ by rounding are equal.
    """
    moved = round_scores(differences)
    moved = moved[moved != 0]
    least = abs(moved.sum()) - TIE
    if len(moved) <= EXACT_PAIRS:
        signs = 1 - 2 * ((np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1)
        return float((np.abs(signs @ moved) >= least).mean())

    def draw(count: int) -> Float64[np.ndarray, " count"]:
        sums: npt.NDArray[np.float64] = (2.0 * rng.integers(2, size=(count, len(moved)), dtype=np.int8) - 1) @ moved
        return sums

    sums = _in_chunks(draw, flips, width=len(moved))
    return float((1 + np.count_nonzero(np.abs(sums) >= least)) / (1 + flips))


def least_sign_flip_p(pairs: int, *, flips: int = FLIPS) -> float:
    """The least p that `sign_flip_p` can give where so many pairs differ: 2/2^n, as for Wilcoxon's test, up to 15."""
    return min(1.0, 2.0 ** (1 - pairs)) if pairs <= EXACT_PAIRS else 1 / (1 + flips)


def signed_rank_p(differences: Float64[np.ndarray, " seeds"]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test, exact with ties too.

    Differences of 0 are dropped (Wilcoxon, 1945) and equal sizes share their mean rank; the distribution of rank sums
    over all 2^n signs is built difference by difference. scipy's `exact` takes the distribution without ties instead.
    """
    moved = round_scores(differences)
    moved = moved[moved != 0]
    if not len(moved):
        return 1.0
    ranks = np.rint(2 * stats.rankdata(np.abs(moved))).astype(np.int64)  # twice a mean rank is an integer
    chances = np.zeros(int(ranks.sum()) + 1)
    chances[0] = 1.0
    for rank in ranks:
        chances[rank:] = (chances[rank:] + chances[:-rank]) / 2
        chances[:rank] /= 2
    positive = int(ranks[moved > 0].sum())
    return min(1.0, 2 * float(chances[: min(positive, int(ranks.sum()) - positive) + 1].sum()))


def probability_of_improvement(first: Float64[np.ndarray, "..."], second: Float64[np.ndarray, "..."]) -> float:
    """Mann-Whitney's U over n_x n_y: how often a run of the first scores more than one of the second, ties half.

    (seeds,), or (seeds, tasks) for the mean over tasks (Agarwal et al., 2021). Runs are not paired; their numbers may
    differ.
    """
    return float(0.5 + 0.5 * np.sign(round_scores(first[:, None] - second[None, :])).mean())


def bayesian_signed_rank(
    differences: Float64[np.ndarray, " seeds"],
    *,
    rng: np.random.Generator,
    rope: float = ROPE,
    draws: int = DRAWS,
) -> BayesianComparison:
    """Bayesian signed-rank test with a region of practical equivalence (Benavoli, Corani, Demsar, Zaffalon, JMLR 2017).

    Weights w ~ Dirichlet(.5, 1, ..., 1) lie on the pseudo-difference 0 and the differences d. Right is the weight
    sum_ij w_i w_j [d_i + d_j > 2 rope], ties half; left likewise below -2 rope; rope is the rest. Returned is the share
    of draws in which each is the largest; draws in which two are equal count for both in equal parts.

    Raises:
        DataError: the rope is negative.
    """
    if not rope >= 0:
        raise DataError(f"rope is {rope}; it is a half width of at least 0 in units of the score, such as {ROPE}")
    points = np.append(0.0, round_scores(differences))
    sums = points[:, None] + points[None, :]
    above, below = (np.where(np.abs(side - 2 * rope) <= TIE, 0.5, side > 2 * rope) for side in (sums, -sums))
    concentration = np.append(PRIOR, np.ones(len(differences)))

    def draw(count: int) -> Float64[np.ndarray, "count 3"]:
        weights = rng.dirichlet(concentration, size=count)
        left, right = (((weights @ side) * weights).sum(axis=1) for side in (below, above))
        masses = np.stack([left, 1 - left - right, right], axis=1)
        largest = masses >= masses.max(axis=1, keepdims=True) - TIE
        shares: npt.NDArray[np.float64] = largest / largest.sum(axis=1, keepdims=True)
        return shares

    left, middle, right = _in_chunks(draw, draws, width=len(points)).mean(axis=0).tolist()
    return BayesianComparison(left=left, rope=middle, right=right)


def seeds_needed(
    effect_size: float, *, power: float = POWER, alpha: float = ALPHA, most: int = MOST_SEEDS
) -> int | None:
    """The least number of seeds, from 2, at which a two-sided paired t test has this power for d_z; None over `most`.

    Under the effect the statistic is noncentral t with n - 1 degrees of freedom and noncentrality d_z sqrt(n), and its
    square is noncentral F, which has both tails in one and, unlike scipy's nct, is no NaN where one of them vanishes.
    """

    def power_of(seeds: int) -> float:
        critical = stats.t.ppf(1 - alpha / 2, seeds - 1) ** 2
        return 1 - float(special.ncfdtr(1, seeds - 1, seeds * effect_size**2, critical))

    numbers = range(2, most + 1)
    index = bisect_left(numbers, power, key=power_of)
    return numbers[index] if index < len(numbers) else None


def holm(p_values: Sequence[float] | Float64[np.ndarray, " tests"]) -> Float64[np.ndarray, " tests"]:
    """Adjusted p in the given order: the largest of (h - j + 1) p_(j) over j <= i, at most 1 (Holm, 1979).

    Rejecting what is at most alpha keeps the chance of any false rejection among the h tests at alpha, however they
    depend on each other.

    Raises:
        DataError: a p is not between 0 and 1.
    """
    values = np.asarray(p_values, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise DataError(f"p values are {values.min()} to {values.max()}; each lies between 0 and 1")
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate((len(values) - np.arange(len(values))) * values[order]))
    return adjusted


def _in_chunks(draw: Callable[[int], npt.NDArray[np.float64]], times: int, *, width: int) -> npt.NDArray[np.float64]:
    """Results of `draw(count)` for `times` draws in all, never more than about CHUNK numbers at once."""
    chunk = max(1, CHUNK // width)
    return np.concatenate([draw(min(chunk, times - start)) for start in range(0, times, chunk)])


def round_scores(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """To twelve decimals, which frees differences of what subtraction leaves behind a score's last digit."""
    rounded: npt.NDArray[np.float64] = np.round(values, DECIMALS)
    return rounded


def _differences(
    first: npt.NDArray[np.float64], second: npt.NDArray[np.float64], *, shape: str = "seeds x clients"
) -> npt.NDArray[np.float64]:
    """The first minus the second, rounded."""
    first, second = check_values(first, shape), check_values(second, shape)
    if first.shape != second.shape:
        raise DataError(f"scores of the shapes {first.shape} and {second.shape}; pair the same seeds and clients")
    return round_scores(first - second)


def check_values(values: npt.NDArray[np.float64], shape: str, method: str = "") -> npt.NDArray[np.float64]:
    """The values as float64.

    Args:
        values: any array.
        shape: its dimensions in words, with ` x ` between them.
        method: whose they are, for the message.

    Raises:
        DataError: the dimensions are other ones, there is no value, or one is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    whose = f"scores of {method}" if method else "scores"
    if array.ndim != shape.count(" x ") + 1 or not array.size:
        raise DataError(f"{whose} have the shape {array.shape}; give {shape}, one or more of each")
    if not np.isfinite(array).all():
        raise DataError(f"{whose} hold NaN or infinity; leave out the seeds that have no test score of every client")
    return array


def _check_scores(scores: Scores) -> dict[str, npt.NDArray[np.float64]]:
    checked = {method: check_values(values, "seeds x clients", method) for method, values in scores.items()}
    if len({values.shape for values in checked.values()}) != 1:
        shapes = ", ".join(f"{method} {values.shape}" for method, values in checked.items()) or "no method"
        raise DataError(f"scores of different shapes: {shapes}; give every method the same seeds and clients")
    return checked


def known_method(method: str, methods: Mapping[str, object]) -> str:
    """The name itself.

    Raises:
        ConfigError: no method is called so.
    """
    if method not in methods:
        raise unknown_name("method", method, methods)
    return method
