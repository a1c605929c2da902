"""Average ranks of methods over federations: Friedman, Iman and Davenport, Nemenyi, Holm against a control.

Demsar, Statistical comparisons of classifiers over multiple data sets, JMLR 7 (2006): one score of each federation and
method; what is compared is the order of the methods, so that federations of any metric and difficulty weigh the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64
from scipy import stats

from atlas_fl.errors import DataError
from atlas_fl.report.method_comparison import MethodComparison
from atlas_fl.report.statistics import ALPHA, TIE, check_values, holm, known_method, round_scores
from atlas_fl.report.table import Cell, Table, plain


@dataclass(frozen=True, kw_only=True)
class RankComparison:
    """Average rank of a method against the control's."""

    z: float
    """Average rank minus the control's, over its standard error: above 0 is worse than the control."""
    p: float
    """Two-sided, normal."""
    adjusted_p: float
    """After Holm over all methods but the control."""


@dataclass(frozen=True, kw_only=True)
class MethodRanks:
    """Methods over several federations (Demsar, JMLR 2006)."""

    federations: int
    average_ranks: Mapping[str, float]
    """By method; 1 is the best, ties share their mean rank."""
    friedman_chi2: float
    """The statistic, corrected for ties."""
    friedman_p: float
    tie_correction: float
    """Divisor of the chi2 without ties: 1 if there is no tie."""
    iman_davenport_f: float | None
    """None where all federations rank alike and the statistic has no bound."""
    iman_davenport_p: float
    critical_difference: float
    """Average ranks that lie further apart differ at the 5% level by Nemenyi's test of all pairs."""
    against_control: Mapping[str, RankComparison]
    """By method; empty without a control."""


def rank_methods(
    scores: Mapping[str, Float64[np.ndarray, " federations"]], *, control: str | None = None
) -> MethodRanks:
    """Average ranks over federations, whether they differ at all, and which ones (Demsar, JMLR 2006).

    Args:
        scores: one score of each federation, in the same order, by method; higher is better.
        control: the method that the others' ranks are compared with.

    Raises:
        DataError: fewer than two methods or federations, lengths differ, or a score is not finite.
        ConfigError: no method is called `control`.
    """
    checked = {method: check_values(values, "federations", method) for method, values in scores.items()}
    if len(checked) < 2 or len({len(values) for values in checked.values()}) > 1:
        raise DataError(
            f"{len(checked)} methods with {_lengths(checked)} federations; give two or more methods the same"
        )
    matrix = np.stack(list(checked.values()), axis=1)
    federations, methods = matrix.shape
    if federations < 2:
        raise DataError(
            "1 federation; ranks are averaged over two or more, compare seeds of one by compare_with_control"
        )
    ranks = stats.rankdata(-round_scores(matrix), axis=1)
    averages = dict(zip(checked, ranks.mean(axis=0).tolist(), strict=True))
    chi2, correction = _friedman(ranks)
    left_over = federations * (methods - 1) - chi2
    ratio = (federations - 1) * chi2 / left_over if left_over > TIE else None
    freedom = (methods - 1, (methods - 1) * (federations - 1))
    return MethodRanks(
        federations=federations,
        average_ranks=averages,
        friedman_chi2=chi2,
        friedman_p=float(stats.chi2.sf(chi2, methods - 1)),
        tie_correction=correction,
        iman_davenport_f=ratio,
        iman_davenport_p=0.0 if ratio is None else float(stats.f.sf(ratio, *freedom)),
        critical_difference=nemenyi_difference(methods, federations),
        against_control={} if control is None else _against(averages, known_method(control, averages), federations),
    )


def rank_comparisons(comparisons: Sequence[MethodComparison]) -> MethodRanks:
    """Average ranks by the mean scores of the methods that all comparisons have; errors as of `rank_methods`."""
    means = [{name: row.statistics.mean for name, row in one.rows.items()} for one in comparisons]
    common = [name for name in means[0] if all(name in other for other in means)]
    control = comparisons[0].control
    return rank_methods(
        {name: np.array([mean[name] for mean in means]) for name in common},
        control=control if control in common else None,
    )


def rank_if_several(comparisons: Sequence[MethodComparison]) -> MethodRanks | None:
    """Average ranks of the methods that all comparisons have; None if these or the comparisons are fewer than two."""
    if len(comparisons) < 2 or len(set.intersection(*(set(one.rows) for one in comparisons))) < 2:
        return None
    return rank_comparisons(comparisons)


def ranks_table(ranks: MethodRanks, *, control: str) -> Table:
    """One row a method, the best first."""
    rows: list[list[Cell]] = []
    for name, rank in sorted(ranks.average_ranks.items(), key=lambda item: item[1]):
        against = ranks.against_control.get(name)
        rows.append([name, plain(rank, 2), plain(None if against is None else against.adjusted_p)])
    return Table(
        title=f"Ranks over {ranks.federations} comparisons",
        columns=("method", "average rank", "p (Holm)"),
        rows=rows,
        note=(
            f"1 is the best; Friedman p {ranks.friedman_p:.3f}; p against {control}; ranks that are"
            f" {ranks.critical_difference:.2f} apart\ndiffer at {ALPHA:g} (Nemenyi)"
        ),
    )


def ranks_json(ranks: MethodRanks, *, over: Sequence[str]) -> str:
    """The ranks as strict JSON, and what they are over."""
    return json.dumps({"over": list(over), **asdict(ranks)}, indent=1, allow_nan=False) + "\n"


def nemenyi_difference(methods: int, federations: int, *, alpha: float = ALPHA) -> float:
    """Nemenyi's critical difference of average ranks: q sqrt(k (k + 1) / (6 N)), q the studentized range / sqrt(2)."""
    quantile = stats.studentized_range.ppf(1 - alpha, methods, np.inf) / np.sqrt(2)
    return float(quantile * _rank_error(methods, federations))


def _rank_error(methods: int, federations: int) -> float:
    """Standard error of the difference of two average ranks."""
    return float(np.sqrt(methods * (methods + 1) / (6 * federations)))


def _friedman(ranks: Float64[np.ndarray, "federations methods"]) -> tuple[float, float]:
    """Friedman's chi2 corrected for ties, and the correction; 0 where every federation has all methods tied."""
    federations, methods = ranks.shape
    squares = (ranks.mean(axis=0) ** 2).sum() - methods * (methods + 1) ** 2 / 4
    plain = 12 * federations / (methods * (methods + 1)) * squares
    tied = sum(float((counts**3 - counts).sum()) for counts in (np.unique(row, return_counts=True)[1] for row in ranks))
    correction = 1 - tied / (federations * methods * (methods**2 - 1))
    return (float(plain / correction), correction) if correction > TIE else (0.0, correction)


def _against(averages: Mapping[str, float], control: str, federations: int) -> dict[str, RankComparison]:
    error = _rank_error(len(averages), federations)
    z = {method: (rank - averages[control]) / error for method, rank in averages.items() if method != control}
    p = 2 * stats.norm.sf(np.abs(list(z.values())))
    return {
        method: RankComparison(z=z[method], p=float(alone), adjusted_p=float(adjusted))
        for method, alone, adjusted in zip(z, p, holm(p), strict=True)
    }


def _lengths(scores: Mapping[str, npt.NDArray[np.float64]]) -> str:
    return " and ".join(dict.fromkeys(str(len(values)) for values in scores.values())) or "no"
