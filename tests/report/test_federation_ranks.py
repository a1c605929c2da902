"""Average ranks over federations against the example and the table of Demsar (JMLR 2006), and against scipy."""

import numpy as np
import pytest
from scipy import stats

from atlas_fl.report.federation_ranks import (
    MethodRanks,
    nemenyi_difference,
    rank_if_several,
    rank_methods,
    ranks_table,
)
from tests.report.test_comparison_tables import compared_runs

DEMSAR = {
    "C4.5": [.763, .599, .954, .628, .882, .936, .661, .583, .775, 1, .940, .619, .972, .957],
    "C4.5+m": [.768, .591, .971, .661, .888, .931, .668, .583, .838, 1, .962, .666, .981, .978],
    "C4.5+cf": [.771, .590, .968, .654, .886, .916, .609, .563, .866, 1, .965, .614, .97501, .946],
    "C4.5+m+cf": [.798, .569, .967, .657, .898, .931, .685, .625, .875, 1, .962, .669, .975, .970],
}  # fmt: skip
"""Area under the curve of four classifiers on fourteen data sets: table 6 of the paper.

On the last but one, two are printed as .975 and yet ranked 2 and 3; .97501 says which is the higher one.
"""


def friedman_chi2(ranks: MethodRanks) -> float:
    return float(stats.chi2.isf(ranks.friedman_p, len(ranks.average_ranks) - 1))


def arrays(scores: dict[str, list[float]]) -> dict[str, np.ndarray]:
    return {method: np.array(values) for method, values in scores.items()}


def test_the_papers_example() -> None:
    ranks = rank_methods(arrays(DEMSAR), control="C4.5")
    assert list(ranks.average_ranks.values()) == pytest.approx([3.143, 2.000, 2.893, 1.964], abs=5e-4)
    correction = np.mean([stats.tiecorrect(stats.rankdata(row)) for row in zip(*DEMSAR.values())])
    assert friedman_chi2(ranks) * correction == pytest.approx(9.28, abs=0.005), "the paper does not correct for ties"
    assert ranks.critical_difference == pytest.approx(1.25, abs=0.005)


def test_the_papers_comparison_with_a_control() -> None:
    against = rank_methods(arrays(DEMSAR), control="C4.5").against_control
    assert list(against) == ["C4.5+m", "C4.5+cf", "C4.5+m+cf"]
    # z 2.416, 2.342 and .512, p .016, .019 and .607 times 3, 2 and 1
    assert against == pytest.approx({"C4.5+m+cf": 3 * 0.0157, "C4.5+m": 0.0471, "C4.5+cf": 0.6087}, abs=2e-3)
    # Holm rejects the first two at .05
    assert [p <= 0.05 for p in against.values()] == [True, False, True]


@pytest.mark.parametrize("rows", [3, 20, 10_000])
@pytest.mark.parametrize("shape", [(9, 3), (5, 6)])
def test_friedman_is_scipys_with_and_without_ties(rows, shape) -> None:
    matrix = np.random.default_rng(rows).integers(0, rows, shape) / rows
    ranks = rank_methods({str(index): column for index, column in enumerate(matrix.T)})
    reference = stats.friedmanchisquare(*matrix.T)
    assert ranks.friedman_p == pytest.approx(reference.pvalue)


def test_critical_differences_are_the_papers_table() -> None:
    """q_.05 of table 5(a) for two to ten methods; q is what sqrt(k (k + 1) / (6 N)) is multiplied by."""
    table = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]
    quantiles = [nemenyi_difference(k, 8) / np.sqrt(k * (k + 1) / 48) for k in range(2, 11)]
    assert quantiles == pytest.approx(table, abs=1.1e-3)  # some of the table's last digits are rounded otherwise


def test_ranks_by_hand() -> None:
    """Three federations by three methods: ranks 1 2 3, 1 2.5 2.5 and 1 2 3; .3 and .1 + .2 are tied."""
    ranks = rank_methods(arrays({"a": [0.9, 0.8, 0.7], "b": [0.8, 0.3, 0.6], "c": [0.7, 0.1 + 0.2, 0.5]}))
    assert ranks.federations == 3 and ranks.against_control == {}
    assert list(ranks.average_ranks.values()) == pytest.approx([1, 6.5 / 3, 8.5 / 3])
    # 12 * 3 / (3 * 4) (1 + 4.6944 + 8.0278 - 12) = 5.1667; one pair of ties: 1 - 6 / (3 * 24)
    assert friedman_chi2(ranks) == pytest.approx(5.16667 / (1 - 6 / 72), abs=1e-4)


def test_federations_that_all_rank_alike_or_not_at_all() -> None:
    alike = rank_methods(arrays({"a": [0.9, 0.8, 0.7], "b": [0.8, 0.7, 0.6], "c": [0.7, 0.6, 0.5]}))
    assert friedman_chi2(alike) == pytest.approx(6)  # N (k - 1), the most there is
    tied = rank_methods(arrays({"a": [0.9, 0.8], "b": [0.9, 0.8]}), control="a")
    assert tied.friedman_p == 1
    assert tied.against_control == {"b": 1}


def test_methods_that_are_not_in_all_federations_are_named() -> None:
    compared = [compared_runs(names) for names in (("local", "fedavg", "fedper"), ("local", "fedavg"))]
    ranks = rank_if_several(compared)
    assert ranks is not None and set(ranks.average_ranks) == {"local", "fedavg"}
    assert "not ranked, as not in all federations: fedper (1)" in ranks_table(ranks, control="local").note
