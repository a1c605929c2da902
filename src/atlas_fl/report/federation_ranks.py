"""Average ranks of methods over federations: Friedman, Nemenyi, Holm against a control.

Demsar, Statistical comparisons of classifiers over multiple data sets, JMLR 7 (2006): one score of each federation and
method; what is compared is the order of the methods, so that federations of any metric and difficulty weigh the same.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import numpy as np
from jaxtyping import Float64
from scipy import stats

from atlas_fl.frozen import Frozen
from atlas_fl.report.method_comparison import MethodComparison
from atlas_fl.report.statistics import ALPHA, TIE, holm, round_scores
from atlas_fl.report.table import Cell, Table, plain


class MethodRanks(Frozen):
    """Methods over several federations (Demsar, JMLR 2006)."""

    federations: int
    average_ranks: Mapping[str, float]
    """By method; 1 is the best, ties share their mean rank."""
    friedman_p: float
    critical_difference: float
    """Average ranks that lie further apart differ at the 5% level by Nemenyi's test of all pairs."""
    against_control: Mapping[str, float]
    """By method, p of its average rank against the control's: two-sided, after Holm; empty without a control."""
    partial: Mapping[str, int] = field(default_factory=dict)
    """Methods without a rank, since they are not in all federations, and in how many they are."""


def rank_methods(
    scores: Mapping[str, Float64[np.ndarray, " federations"]], *, control: str | None = None
) -> MethodRanks:
    """Average ranks over federations, whether they differ at all, and which ones (Demsar, JMLR 2006).

    Args:
        scores: of two methods and more, one score of each of two federations and more; higher is better.
        control: the method that the others' ranks are compared with.
    """
    matrix = np.stack(list(scores.values()), axis=1)
    federations, methods = matrix.shape
    ranks = stats.rankdata(-round_scores(matrix), axis=1)
    averages = dict(zip(scores, ranks.mean(axis=0).tolist(), strict=True))
    return MethodRanks(
        federations=federations,
        average_ranks=averages,
        friedman_p=float(stats.chi2.sf(_friedman(ranks), methods - 1)),
        critical_difference=nemenyi_difference(methods, federations),
        against_control={} if control is None else _p_against(averages, control, federations),
    )


def rank_if_several(comparisons: Sequence[MethodComparison]) -> MethodRanks | None:
    """Average ranks by the mean scores of the methods that all comparisons have; None if these or the comparisons are
    fewer than two."""
    means = [{name: row.statistics.mean for name, row in one.rows.items()} for one in comparisons]
    counts = Counter(name for mean in means for name in mean)
    common = [name for name, number in counts.items() if number == len(means)]
    if len(means) < 2 or len(common) < 2:
        return None
    control = comparisons[0].control
    scores = {name: np.array([mean[name] for mean in means]) for name in common}
    partial = {name: number for name, number in counts.items() if name not in common}
    return replace(rank_methods(scores, control=control if control in common else None), partial=partial)


def ranks_table(ranks: MethodRanks, *, control: str) -> Table:
    """One row a method, the best first."""
    rows: list[list[Cell]] = [
        [name, plain(rank, 2), plain(ranks.against_control.get(name))]
        for name, rank in sorted(ranks.average_ranks.items(), key=lambda item: item[1])
    ]
    partial = ", ".join(f"{name} ({count})" for name, count in ranks.partial.items())
    return Table(
        title="Ranks over all federations",
        columns=("method", "average rank", f"p against {control} (Holm)"),
        rows=rows,
        note=(
            f"1 is the best of {ranks.federations} federations; Friedman p {ranks.friedman_p:.2g}; ranks that are"
            f" {ranks.critical_difference:.2f} apart\ndiffer at {ALPHA:g} (Nemenyi); coarse below 10 federations"
            + (f"; not ranked, as not in all federations: {partial}" if partial else "")
        ),
    )


def nemenyi_difference(methods: int, federations: int) -> float:
    """Nemenyi's critical difference of average ranks: q sqrt(k (k + 1) / (6 N)), q the studentized range / sqrt(2)."""
    quantile = stats.studentized_range.ppf(1 - ALPHA, methods, np.inf) / np.sqrt(2)
    return float(quantile * _rank_error(methods, federations))


def _rank_error(methods: int, federations: int) -> float:
    """Standard error of the difference of two average ranks."""
    return float(np.sqrt(methods * (methods + 1) / (6 * federations)))


def _friedman(ranks: Float64[np.ndarray, "federations methods"]) -> float:
    """Friedman's chi2 corrected for ties; 0 where every federation has all methods tied.

    scipy's takes three methods and more.
    """
    federations, methods = ranks.shape
    squares = (ranks.mean(axis=0) ** 2).sum() - methods * (methods + 1) ** 2 / 4
    uncorrected = 12 * federations / (methods * (methods + 1)) * squares
    correction = np.mean([stats.tiecorrect(row) for row in ranks])
    return float(uncorrected / correction) if correction > TIE else 0.0


def _p_against(averages: Mapping[str, float], control: str, federations: int) -> dict[str, float]:
    """Two-sided p of average ranks minus the control's over their standard error, after Holm over all of them."""
    others = [method for method in averages if method != control]
    differences = np.array([averages[method] - averages[control] for method in others])
    z = differences / _rank_error(len(averages), federations)
    return dict(zip(others, holm(2 * stats.norm.sf(np.abs(z))).tolist(), strict=True))
