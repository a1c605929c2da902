"""Kriging: rows by hand and against other solvers, what halves measure, and risks on planted federations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.rules import RoundModels, StrategyOptions
from atlas_fl.audit.kriging import prediction_row
from atlas_fl.methods.kriging import (
    Atlas,
    Kriging,
    MeasuredSharing,
    alike_in_cluster,
    bound_others,
    correlations,
    measure,
    measure_clusters,
    positive_part,
    prediction_rows,
    variance_over_noise,
)
from tests.aggregation.federations import federation_of

EQUAL = np.full(2, 0.5)
HALF_NAMES = ("first", "second")


def drawn(draw: np.random.Generator, theta: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The Gram matrix of halves of these thetas, (n, d), whose mean has a noise of (n,) in all d values together."""
    n, d = theta.shape
    halves = [theta + draw.standard_normal((n, d)) * np.sqrt(2 * noise / d)[:, None] for _ in range(2)]
    both = np.concatenate(halves)
    return np.asarray(both @ both.T)


def test_rows_by_hand() -> None:
    """K = ((2, 1), (1, 2)) and N = 1: R_12 = 1/2, reliability 2/3, so (R + I / 2) m = (1, 1/2) has m = (5/8, 1/8)."""
    covariance = np.array([[2.0, 1.0], [1.0, 2.0]])
    np.testing.assert_allclose(
        prediction_rows(covariance, np.ones(2), EQUAL), [[5 / 6, 1 / 6], [1 / 6, 5 / 6]], atol=1e-6
    )


def test_lengths_say_nothing_and_reliability_is_of_those_who_are_after_the_same() -> None:
    """Two clients after one thing, a third after another; of the two one has learnt half as much, with less noise."""
    lengths = np.array([2.0, 1.0, 5.0])
    covariance = np.outer(lengths, lengths) * np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    rows = prediction_rows(covariance, np.array([4.0, 0.25, 1.0]), np.full(3, 1 / 3))
    np.testing.assert_allclose(rows, [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], atol=1e-6)
    _, reliability = correlations(covariance, np.array([4.0, 0.25, 1.0]), np.full(3, 1 / 3))
    np.testing.assert_allclose(reliability, [(1 / 2 + 4 / 5) / 2, (1 / 2 + 4 / 5) / 2, 25 / 26])


def test_halves_by_hand() -> None:
    """Halves 3 and 1 of one client, 2 and 4 of another: noise 4 / 4 each, K = ((3 * 1, (12 + 2) / 2), (., 2 * 4))."""
    values = np.array([3.0, 2.0, 1.0, 4.0])
    covariance, noise = measure(np.outer(values, values))
    assert noise.tolist() == [1.0, 1.0]
    assert covariance.tolist() == [[3.0, 7.0], [7.0, 8.0]]


@pytest.mark.parametrize(
    ("covariance", "noise", "row"),
    [
        ([[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0], [0.5, 0.5]),  # the same client twice: the average
        ([[1.0, 1.0], [1.0, 1.0]], [1.0, 3.0], [0.5, 0.5]),  # ... whose noise is as that of the others who agree
        ([[1.0, 0.0], [0.0, 1.0]], [5.0, 5.0], [1.0, 0.0]),  # nothing in common: one's own
        ([[1.0, -0.9], [-0.9, 1.0]], [0.1, 0.1], [1.0, 0.0]),  # the contrary: nobody is subtracted
        ([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0], [0.5, 0.5]),  # nothing has changed: the shares of the examples
    ],
)
def test_who_shares_with_whom(covariance: list[list[float]], noise: list[float], row: list[float]) -> None:
    rows = prediction_rows(np.array(covariance), np.array(noise), EQUAL)
    np.testing.assert_allclose(rows[0], row, atol=1e-6)


def test_clients_that_are_after_the_same_weigh_by_their_examples() -> None:
    shares = np.array([0.1, 0.3, 0.6])
    rows = prediction_rows(np.full((3, 3), 2.0), np.array([0.3, 5.0, 1.0]), shares)
    np.testing.assert_allclose(rows, np.tile(shares, (3, 1)), atol=1e-6)


def test_who_has_learnt_nothing_is_given_the_average_and_given_to_nobody() -> None:
    shares = np.array([0.5, 0.25, 0.25])
    rows = prediction_rows(np.diag([0.0, 1.0, 1.0]), np.ones(3), shares)
    np.testing.assert_allclose(rows, [shares, [0, 1, 0], [0, 0, 1]], atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_a_general_optimizer_and_of_the_audit(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points = draw.standard_normal((6, 4)) + 0.5
    covariance, noise, examples = positive_part(points @ points.T - 0.3), draw.random(6) * 3, draw.random(6) * 90 + 10
    rows = prediction_rows(covariance, noise, examples / examples.sum())
    correlation, reliability = correlations(covariance, noise, examples / examples.sum())
    for k, row in enumerate(rows):
        program = correlation + np.diag((1 / reliability[k] - 1) * examples.mean() / examples)
        found = minimize(
            lambda m, program=program, k=k: m @ program @ m - 2 * m @ correlation[k],
            np.full(6, 0.2),
            jac=lambda m, program=program, k=k: 2 * (program @ m - correlation[k]),
            bounds=[(0, None)] * 6,
            options={"ftol": 1e-15, "gtol": 1e-12},
        ).x
        np.testing.assert_allclose(row, found / found.sum(), atol=1e-5)
        np.testing.assert_allclose(row, prediction_row(k, covariance, noise, examples), atol=1e-6)


def test_a_matrix_with_negative_eigenvalues_counts_as_its_positive_part() -> None:
    matrix = np.array([[1.0, 2.0], [2.0, 1.0]])  # eigenvalues 3 and -1
    np.testing.assert_allclose(positive_part(matrix), [[1.5, 1.5], [1.5, 1.5]], atol=1e-12)


def test_measurements_are_unbiased() -> None:
    draw = np.random.default_rng(0)
    theta, noise = draw.standard_normal((4, 50)), np.array([5.0, 20.0, 50.0, 1.0])
    results = [measure(drawn(draw, theta, noise)) for _ in range(1000)]
    covariance, measured = (np.mean([one[part] for one in results], axis=0) for part in (0, 1))
    errors = np.std([one[0] for one in results], axis=0) / np.sqrt(1000)
    assert (np.abs(covariance - theta @ theta.T) < 4 * errors).all()
    np.testing.assert_allclose(measured, noise, rtol=0.02)


def risks(draw: np.random.Generator, theta: np.ndarray, noise: np.ndarray) -> dict[str, float]:
    """Mean squared errors of kriging, of the models alone and of their average, summed over values, and of the oracle.

    The oracle is the same rule with the true covariances.
    """
    n, d = theta.shape
    halves = [theta + draw.standard_normal((n, d)) * np.sqrt(2 * noise / d)[:, None] for _ in range(2)]
    models, both = sum(halves) / 2, np.concatenate(halves)
    shares = np.full(n, 1 / n)
    matrices = {
        "kriging": prediction_rows(*measure(both @ both.T), shares),
        "oracle": prediction_rows(theta @ theta.T, noise, shares),
        "alone": np.eye(n),
        "average": np.full((n, n), 1 / n),
    }
    return {name: float(np.square(matrix @ models - theta).sum()) / n for name, matrix in matrices.items()}


@pytest.mark.parametrize(
    ("common", "group", "own", "most"),
    [
        (1, 0, 0, 1.05),
        (1, 0, 1, 1.03),
        (0, 0, 1, 1.03),
        (1, 2, 0, 1.03),
        (0, 2, 0.2, 1.03),
        (1, 1, 1, 1.03),
        (0, 0, 3, 1.03),
    ],
)
def test_planted_federations_are_predicted_as_by_who_knows_the_covariances(
    common: float, group: float, own: float, most: float
) -> None:
    """Three groups of three clients in 2,000 values, of a noise of 1 each; parts of these sizes are planted."""
    draw, d = np.random.default_rng(1), 2000
    found: dict[str, list[float]] = {}
    for _ in range(20):
        shared, groups, each = (draw.standard_normal((count, d)) / np.sqrt(d) for count in (1, 3, 9))
        theta = np.sqrt(common) * shared + np.sqrt(group) * np.repeat(groups, 3, axis=0) + np.sqrt(own) * each
        for name, risk in risks(draw, theta, np.ones(9)).items():
            found.setdefault(name, []).append(risk)
    mean = {name: float(np.mean(values)) for name, values in found.items()}
    assert mean["kriging"] <= most * mean["oracle"]
    assert mean["kriging"] <= 1.05 * min(mean["alone"], mean["average"])


def test_no_other_client_has_more_than_the_largest_share() -> None:
    matrix = np.array([[0.2, 0.8, 0.0], [0.1, 0.6, 0.3], [0.9, 0.05, 0.05]])
    np.testing.assert_allclose(bound_others(matrix, 0.5), [[0.5, 0.5, 0.0], [0.1, 0.6, 0.3], [0.5, 0.05, 0.45]])
    np.testing.assert_allclose(bound_others(matrix, 1.0), matrix, atol=1e-15)


def federation(names: str, tasks: str) -> Federation:
    n = len(names)
    return federation_of(names, weights=range(1, n + 1), clusters=[-1] * n, tasks=tasks)


def reported(b: tuple[float, float], head: tuple[float, float]) -> dict[str, torch.Tensor]:
    """What halves have made of an adapter of rank one, of which A is ones, and of a head."""
    found = {}
    for half, own_b, own_head in zip(HALF_NAMES, b, head, strict=True):
        found[f"{half}/q.lora_A"] = torch.ones(1, 1)
        found[f"{half}/q.lora_B"] = torch.full((1, 1), own_b)
        found[f"{half}/head.w"] = torch.tensor([own_head])
    return found


def begun(names: str) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {"q.lora_A": torch.ones(1, 1), "q.lora_B": torch.zeros(1, 1), "head.w": torch.zeros(1)} for name in names
    }


def test_adapters_meet_over_all_tasks_heads_inside_one_and_who_has_no_halves_is_averaged() -> None:
    strategy = Kriging(max_other_share=1.0)
    start = begun("abc")
    state = strategy.record_reports(
        strategy.init(start), {"a": reported((1, 1), (1, 1)), "b": reported((1, 1), (-1, -1))}
    )
    models = RoundModels(before=start, after=start, server_state=state)
    matrices = strategy.matrices(federation("abc", "xxx"), [True] * 3, round=1, models=models)
    np.testing.assert_allclose(matrices("q.lora_A")[:2], [[0.5, 0.5, 0.0]] * 2, atol=1e-4)
    np.testing.assert_allclose(matrices("head.w")[:2], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], atol=1e-4)
    np.testing.assert_allclose(matrices("q.lora_A")[2], [1 / 6, 2 / 6, 3 / 6])
    apart = strategy.matrices(federation("abc", "xyx"), [True] * 3, round=1, models=models)
    assert apart("head.w")[1].tolist() == [0.0, 1.0, 0.0]
    absent = strategy.matrices(federation("abc", "xxx"), [False, True, False], round=1, models=models)
    assert absent("q.lora_A").tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]


def test_what_is_told_of_sharing_by_hand() -> None:
    """Heads 3 and 1 of a, 1 and 3 of b: each K_kk is 3 and N 1, and K_ab = (3 * 3 + 1 * 1) / 2 = 5, so tau^2 = 0."""
    start = begun("ab")
    strategy = Kriging(max_other_share=1.0)
    state = strategy.record_reports(
        strategy.init(start), {"a": reported((1, 1), (3, 1)), "b": reported((-1, -1), (1, 3))}
    )
    models = RoundModels(before=start, after=start, server_state=state)
    clients = federation("ab", "xx")
    matrices = strategy.matrices(clients, [True, True], round=1, models=models)
    told = {(row.client, row.parameters): row for row in strategy.measured({}, state, clients, matrices)}
    assert set(told) == {(name, parameters) for name in "ab" for parameters in ("adapters", "head")}
    # adapters: no noise at all, and each the contrary of the other
    assert told["a", "adapters"].variance_over_noise is None
    assert (told["a", "adapters"].own_share, told["a", "adapters"].effective_clients) == pytest.approx((1.0, 1.0))
    assert told["a", "head"].variance_over_noise == 0.0
    # both are after the same, so that they weigh by their examples, 1 and 2
    entropy = np.log(3) - 2 / 3 * np.log(2)
    expected = pytest.approx((1 / 3, np.exp(entropy)), abs=1e-6)
    assert (told["a", "head"].own_share, told["a", "head"].effective_clients) == expected


@pytest.mark.parametrize(
    ("halves", "row"),
    [
        # K_kk = 3 and N = 1 of both, K_ab = 5: tau^2 = 3 - 5 < 1, and a has one of three examples
        (((3.0, 1.0), (1.0, 3.0)), (1 / 3, 2 / 3)),
        # K_aa = 3, K_bb = -1 and N = 1 of both, K_ab = -1: tau^2 = 1 + 1 > 1, and who disagrees is left out
        (((3.0, 1.0), (1.0, -1.0)), (1.0, 0.0)),
        # K_kk = 8 and N = 1 of both, K_ab = -10: tau^2 = 18
        (((4.0, 2.0), (-2.0, -4.0)), (1.0, 0.0)),
    ],
)
def test_a_cluster_is_averaged_where_its_clients_differ_by_less_than_their_noise_by_hand(
    halves: tuple[tuple[float, float], ...], row: tuple[float, float]
) -> None:
    start = {name: {"head.w": torch.zeros(1)} for name in "abc"}
    strategy = Atlas(max_other_share=1.0)
    reports = {
        name: {f"{half}/head.w": torch.tensor([value]) for half, value in zip(("first", "second"), own, strict=True)}
        for name, own in zip("ab", halves, strict=True)
    }
    state = strategy.record_reports(strategy.init(start), reports)
    models = RoundModels(before=start, after=start, server_state=state)
    inside = replace(federation("abc", "xxx"), clusters=np.array([0, 0, 1]))
    for present in ([True, True, True], [True, True, False]):
        matrix = strategy.matrices(inside, present, round=1, models=models)("head.w")
        np.testing.assert_allclose(matrix[0], [*row, 0.0], atol=1e-6)
    few = replace(federation("abcde", "xxxxx"), clusters=np.array([0, 0, 1, 2, 3]))
    more = dict.fromkeys("abcde", start["a"])
    matrix = strategy.matrices(few, [True] * 5, round=1, models=replace(models, before=more, after=more))("head.w")
    np.testing.assert_allclose(matrix[0], [*row, 0.0, 0.0, 0.0], atol=1e-6, err_msg="where few share a cluster, too")
    undecided = strategy.matrices(federation("abc", "xxx"), [True] * 3, round=1, models=models)("head.w")
    over_all = Kriging(max_other_share=1.0).matrices(inside, [True] * 3, round=1, models=models)("head.w")
    np.testing.assert_array_equal(undecided[:2], over_all[:2])


def test_adapters_of_all_are_averaged_where_they_differ_by_less_than_their_noise_and_heads_are_not_by_hand() -> None:
    """Halves 3 and 1 of a, 2 and 2 of b: K_aa = 3, K_bb = 4, N = 1 and 0, K_ab = 4, tau^2 = 7 / 2 - 4 < 1 / 2."""
    start = begun("abc")
    clients = replace(federation("abc", "xxx"), clusters=np.array([0, 1, 1]))

    def matrix(key: str, *, b: tuple[float, float], within: str, present: tuple[bool, ...] = (True,) * 3) -> np.ndarray:
        strategy = Kriging(StrategyOptions(within=within), max_other_share=1.0)
        state = strategy.record_reports(strategy.init(start), {"a": reported((3, 1), (3, 1)), "b": reported(b, b)})
        models = RoundModels(before=start, after=start, server_state=state)
        matrices = strategy.matrices(clients, list(present), round=1, models=models)
        told.clear()
        told.extend(strategy.measured({}, state, clients, matrices))
        return np.asarray(matrices(key))

    told: list[MeasuredSharing] = []
    alike, contrary = (2.0, 2.0), (-2.0, -2.0)
    everyone = np.array([[1 / 6, 2 / 6, 3 / 6]] * 2)
    measured = matrix("q.lora_A", b=alike, within="clusters")
    np.testing.assert_allclose(measured, [*everyone, [0, 2 / 5, 3 / 5]], err_msg="who has not reported: its cluster's")
    own = next(row for row in told if (row.client, row.parameters) == ("a", "adapters"))
    assert own.variance_over_noise == 0.0, "over all, though it is alone in its cluster"
    assert own.own_share == pytest.approx(1 / 6)
    absent = matrix("q.lora_A", b=alike, within="clusters", present=(False, True, True))
    np.testing.assert_allclose(absent, [[1, 0, 0], [0, 2 / 5, 3 / 5], [0, 2 / 5, 3 / 5]])
    for key, b, within in (
        ("head.w", alike, "clusters"),
        ("q.lora_A", contrary, "clusters"),
        ("q.lora_A", alike, "all"),
    ):
        assert np.abs(matrix(key, b=b, within=within)[:2] - everyone).max() > 0.1, (key, within)


@pytest.mark.parametrize(
    ("offset", "alike"),
    [
        # inside either pair tau^2 = -1 / 2 + 1 = 1 / 2 < N = 1, and over all four -1 / 2 + 5 / 6 = 1 / 3
        (0.0, False),
        # the pairs lie five apart: tau^2 over all is 29 / 2 - 35 / 6 = 26 / 3
        (5.0, True),
    ],
)
def test_clusters_that_explain_less_than_they_leave_are_none_by_hand(offset: float, alike: bool) -> None:
    first = np.array([2.0, 1.0, 2.0 + offset, 1.0 + offset])
    halves = np.concatenate([first, first - 2.0])
    assert alike_in_cluster(np.outer(halves, halves), np.array([0, 0, 1, 1])).tolist() == [alike] * 4


@pytest.mark.parametrize("clusters", [[0, 0, 0, 1, -1], [0, 0, 1, 2, -1]])
def test_before_it_is_measured_averages_are_of_clusters_if_most_clients_share_one(clusters: list[int]) -> None:
    start = {name: {"head.w": torch.zeros(1)} for name in "abcde"}
    strategy = Atlas(max_other_share=1.0)
    models = RoundModels(before=start, after=start, server_state=strategy.init(start))
    clients = replace(federation("abcde", "xxxxx"), clusters=np.array(clusters))
    matrix = strategy.matrices(clients, [True] * 5, round=1, models=models)("head.w")
    three, everyone = [1 / 6, 2 / 6, 3 / 6, 0, 0], [1 / 15, 2 / 15, 3 / 15, 4 / 15, 5 / 15]
    of_clusters = three if clusters.count(0) == 3 else everyone
    np.testing.assert_allclose(matrix, [of_clusters, of_clusters, of_clusters, everyone, everyone])


HALF_AND_HALF = np.array([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])


def test_clusters_are_measured_by_their_members_by_hand() -> None:
    """Changes 3 and 1, 2 and 2: 3 * 1 and 2 * 2 in common, 2 * 2 between the means; noise (5 - 3) / 2 of the first."""
    values = np.array([3.0, 1.0, 2.0, 2.0])
    measured = measure_clusters(np.outer(values, values), HALF_AND_HALF)
    assert measured[0].tolist() == [[3.0, 4.0], [4.0, 4.0]]
    assert measured[1].tolist() == [1.0, 0.0]
    alone = measure_clusters(np.outer(values[:3], values[:3]), np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    assert alone is not None, "a cluster of one has the noise of a member of the other, (9 + 1) / 2 - 3 = 2"
    assert alone[0].tolist() == [[3.0, 4.0], [4.0, 2.0]]
    assert alone[1].tolist() == [1.0, 2.0]
    assert measure_clusters(np.outer(values[:2], values[:2]), np.eye(2)) is None


def test_measurements_of_clusters_are_unbiased() -> None:
    draw, theta, noise = np.random.default_rng(0), np.zeros((4, 50)), np.repeat([5.0, 20.0], 2)
    theta[:2], theta[2:] = draw.standard_normal((2, 1, 50))
    results = []
    for _ in range(1000):
        changes = theta + draw.standard_normal((4, 50)) * np.sqrt(noise / 50)[:, None]
        measured = measure_clusters(changes @ changes.T, HALF_AND_HALF)
        assert measured is not None
        results.append(measured)
    covariance, of_means = (np.mean([one[part] for one in results], axis=0) for part in (0, 1))
    errors = np.std([one[0] for one in results], axis=0) / np.sqrt(1000)
    assert (np.abs(covariance - (theta @ theta.T)[::2, ::2]) < 4 * errors).all()
    np.testing.assert_allclose(of_means, [2.5, 10.0], rtol=0.03)


@pytest.mark.parametrize(
    ("values", "first"),
    [
        # both clusters are after the same, and without noise either is as good: halves of both
        ((2.0, 2.0, 2.0, 2.0), (1 / 6, 1 / 3, 3 / 14, 4 / 14)),
        # contraries: nothing of the other
        ((2.0, 2.0, -2.0, -2.0), (1 / 3, 2 / 3, 0.0, 0.0)),
        # 3 * 1 in common of either, 65 / 21 of the means: R = 1, and with noise everyone weighs by its examples, 1 to 4
        ((3.0, 1.0, 3.0, 1.0), (0.1, 0.2, 0.3, 0.4)),
    ],
)
def test_before_it_is_measured_a_cluster_takes_from_others_what_they_have_in_common_by_hand(
    values: tuple[float, ...], first: tuple[float, ...]
) -> None:
    start = {name: {"head.w": torch.zeros(1)} for name in "abcd"}
    after = {name: {"head.w": torch.tensor([value])} for name, value in zip("abcd", values, strict=True)}
    strategy = Atlas(max_other_share=1.0)
    models = RoundModels(before=start, after=after, server_state=strategy.init(start))
    clients = replace(federation("abcd", "xxxx"), clusters=np.array([0, 0, 1, 1]))
    matrix = strategy.matrices(clients, [True] * 4, round=1, models=models)("head.w")
    np.testing.assert_allclose(matrix[0], first, atol=1e-6)
    np.testing.assert_array_equal(matrix[0], matrix[1])
    bounded = Atlas(max_other_share=0.5).matrices(clients, [True] * 4, round=1, models=models)("head.w")
    assert bounded[0, 2:].sum() <= 0.5 + 1e-12
    without = strategy.matrices(clients, [True, True, False, False], round=1, models=models)("head.w")
    np.testing.assert_allclose(without[0], [1 / 3, 2 / 3, 0, 0])
    apart = replace(clients, head_groups=tuple("xxyy"))
    np.testing.assert_allclose(strategy.matrices(apart, [True] * 4, round=1, models=models)("head.w")[0], without[0])


def test_a_cluster_without_differences_is_averaged_in_most_draws_and_one_that_pays_in_none() -> None:
    """Five clients: the risk of their average is below that of their own models where tau^2 < N, and else above."""
    draw, inside = np.random.default_rng(5), np.zeros(5, np.int64)
    for ratio, wanted in ((0.0, 1.0), (0.5, 1.0), (2.0, 0.0)):
        theta = [draw.standard_normal((5, 300)) * np.sqrt(ratio / 300) for _ in range(50)]
        ratios = [alike_in_cluster(drawn(draw, one, np.ones(5)), inside).all() for one in theta]
        assert np.mean(ratios) == pytest.approx(wanted, abs=0.05)


def test_where_nothing_differs_the_risk_is_within_2_n_over_p_of_the_average() -> None:
    """Nine clients with one theta of 300 values in three clusters, N = 1: the threshold keeps what prediction loses."""
    draw, values, names = np.random.default_rng(7), 300, "abcdefghi"
    clients = replace(federation(names, "x" * 9), weights=np.full(9, 1 / 9), clusters=np.repeat([0, 1, 2], 3))
    start = {name: {"q.lora_A": torch.ones(1, 1), "q.lora_B": torch.zeros(values, 1)} for name in names}
    excess: dict[str, list[float]] = {"clusters": [], "all": []}
    for _ in range(50):
        theta = draw.standard_normal(values) / np.sqrt(values)
        halves = theta + draw.standard_normal((2, 9, values)) * np.sqrt(2 / values)
        reports = {
            name: {
                **{f"{half}/q.lora_A": torch.ones(1, 1) for half in HALF_NAMES},
                **{f"{half}/q.lora_B": torch.tensor(halves[at, k])[:, None] for at, half in enumerate(HALF_NAMES)},
            }
            for k, name in enumerate(names)
        }
        models = halves.mean(axis=0)
        for within, losses in excess.items():
            strategy = Kriging(StrategyOptions(within=within), max_other_share=1.0)
            state = strategy.record_reports(strategy.init(start), reports)
            after = RoundModels(before=start, after=start, server_state=state)
            matrix = np.asarray(strategy.matrices(clients, [True] * 9, round=1, models=after)("q.lora_B"))
            risk, of_average = (
                np.square(one - theta).sum(axis=1).mean() for one in (matrix @ models, models.mean(0)[None])
            )
            losses.append(float(risk - of_average))
    assert np.mean(excess["clusters"]) <= 2 / values
    assert np.mean(excess["all"]) > 2 / values


def test_variance_between_clients_is_measured_without_the_noise() -> None:
    """Planted: tau^2 = 3 and N = 2 over all values, among eight clients with a common part."""
    draw, ratios = np.random.default_rng(3), []
    for _ in range(200):
        theta = draw.standard_normal(400) / 5 + draw.standard_normal((8, 400)) * np.sqrt(3 / 400)
        ratios.append(variance_over_noise(drawn(draw, theta, np.full(8, 2.0))))
    assert float(np.mean(ratios)) == pytest.approx(1.5, rel=0.02)
