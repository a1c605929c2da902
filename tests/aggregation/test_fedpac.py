"""FedPAC's weights of heads: by hand, against a general solver and the audit's, and where clients agree."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.audit.class_features import Report, head_row, smallest_on_simplex
from atlas_fl.methods.fedpac import ClassifierCollaboration, combination_rows, estimate, minimize_on_simplex, summarize
from tests.aggregation.federations import federation_of, server_step


def report(counts, means, variances):
    return {
        "counts": torch.tensor(counts),
        "means": torch.tensor(means, dtype=torch.float32),
        "variances": torch.tensor(variances, dtype=torch.float32),
    }


A = report([2, 2], [[1.0], [0.0]], [1.0, 1.0])
B = report([1, 3], [[3.0], [0.0]], [0.0, 1.0])


def test_the_weights_of_two_clients_by_hand() -> None:
    """h_a = (1/2 * 1, 0), h_b = (1/4 * 3, 0), so || h_a - h_b ||^2 = 1/16.

    v_a = 1/4 (1/2 (1 + 1) - 1/4 * 1 + 1/2 * 1) = 5/16, v_b = 1/4 (1/4 * 9 - 1/16 * 9 + 3/4 * 1) = 39/64.
    For a, 5/16 m^2 + (39/64 + 1/16) (1 - m)^2 is smallest at m = (43/64) / (63/64); for b at (39/64) / (63/64).
    """
    assert estimate(A)[1] == pytest.approx(5 / 16) and estimate(B)[1] == pytest.approx(39 / 64)
    rows = combination_rows([A, B], np.array([4.0, 4.0]))
    assert rows == pytest.approx(np.array([[43 / 63, 20 / 63], [39 / 63, 24 / 63]]), abs=1e-7)


@pytest.mark.slow
@given(st.integers(2, 7), st.integers(1, 8), st.floats(1e-4, 10.0), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_a_row_solves_the_papers_program_as_a_general_solver_and_the_audit_do(n, rank, size, seed) -> None:
    draws = np.random.default_rng(seed)
    bias = draws.normal(size=(n, rank))
    matrix = bias @ bias.T + size * np.diag(draws.uniform(0.1, 1, size=n))
    row = minimize_on_simplex(matrix, np.ones(n))
    assert row.sum() == pytest.approx(1) and (row >= 0).all()
    best = minimize(
        lambda m: m @ matrix @ m,
        np.ones(n) / n,
        jac=lambda m: 2 * matrix @ m,
        bounds=[(0, 1)] * n,
        constraints=[{"type": "eq", "fun": lambda m: m.sum() - 1}],
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert row @ matrix @ row <= best.fun * (1 + 1e-6)
    assert smallest_on_simplex(matrix) == pytest.approx(row, abs=1e-6)


def drawn_reports(count, seed, *, classes=3, width=5):
    draws = np.random.default_rng(seed)
    return [
        summarize(
            torch.from_numpy(draws.normal(size=(size, width)) + draws.normal(size=width)),
            draws.integers(0, classes, size),
            num_labels=classes,
        )
        for size in draws.integers(2, 40, size=count)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_audit_makes_the_same_rows_from_reports(seed: int) -> None:
    reports = drawn_reports(6, seed)
    shares = np.array([float(one["counts"].sum()) for one in reports])
    names = "abcdef"
    written = {
        name: Report(**{key: value.double().numpy() for key, value in one.items()})
        for name, one in zip(names, reports, strict=True)
    }
    for name, row in zip(names, combination_rows(reports, shares), strict=True):
        assert head_row(written, names, name, shares.tolist()) == pytest.approx(row, abs=1e-7)


def test_variances_are_those_of_the_authors_code() -> None:
    """`statistics_extraction` of the authors adds up p_c trace(F^T F / n_c) - p_c^2 mu_c . mu_c, over n."""
    draws = np.random.default_rng(0)
    features, labels = draws.normal(size=(20, 4)), draws.integers(0, 3, 20)
    total = 0.0
    for label in range(3):
        own = features[labels == label]
        p, mean = len(own) / 20, own.mean(axis=0)
        total += p * np.trace(own.T @ own / len(own)) - p**2 * (mean @ mean)
    assert estimate(summarize(torch.from_numpy(features), labels, num_labels=3))[1] == pytest.approx(
        total / 20, rel=1e-5
    )


def test_clients_that_do_not_differ_average_by_their_examples() -> None:
    """The same means, frequencies and variances, of 10 and 30 examples: v is three times as large for the smaller."""
    few, many = (report([n // 2, n // 2], [[1.0], [2.0]], [0.5, 0.25]) for n in (10, 30))
    assert combination_rows([few, many], np.array([10.0, 30.0])) == pytest.approx(np.array([[0.25, 0.75]] * 2))


def test_without_variance_and_differences_shares_decide_and_without_variance_alone_nobody_else_counts() -> None:
    same, other = report([4, 0], [[0.0], [0.0]], [0.0, 0.0]), report([12, 0], [[0.0], [0.0]], [0.0, 0.0])
    assert combination_rows([same, other], np.array([4.0, 12.0])).tolist() == [[0.25, 0.75]] * 2
    far = report([12, 0], [[5.0], [0.0]], [0.0, 0.0])
    rows = combination_rows([report([4, 0], [[1.0], [0.0]], [0.0, 0.0]), far], np.array([4.0, 12.0]))
    assert rows == pytest.approx(np.eye(2), abs=1e-6)


FEDERATION = federation_of("abcd", weights=[4, 4, 8, 4], tasks="xxxy")


def test_adapters_are_averaged_over_all_and_heads_by_features_inside_a_task() -> None:
    strategy = ClassifierCollaboration(StrategyOptions(space="factors"))
    models = {
        name: {"q.lora_A": torch.tensor([[float(k)]]), "head.weight": torch.tensor([[10.0 * k]])}
        for k, name in enumerate("abcd")
    }
    state = strategy.record_reports({}, {"a": A, "b": B, "d": A})
    updates = {name: models[name] for name in "abd"}
    done = server_step(strategy, state, models, updates, FEDERATION, round=1)
    assert done.server_state is state
    assert [done.client_models[name]["q.lora_A"].item() for name in "abcd"] == pytest.approx([4 / 3] * 4)
    heads = [done.client_models[name]["head.weight"].item() for name in "abcd"]
    # c took no part and keeps its head, d is alone in its task
    assert heads == pytest.approx([10 * 20 / 63, 10 * 24 / 63, 20.0, 30.0])


def test_a_layer_below_the_last_one_is_averaged_by_examples_inside_its_task() -> None:
    strategy = ClassifierCollaboration(StrategyOptions(space="factors"))
    models = {
        name: {
            "head.pre_classifier.weight": torch.tensor([[float(k)]]),
            "head.classifier.weight": torch.tensor([[10.0 * k]]),
        }
        for k, name in enumerate("abcd")
    }
    state = strategy.record_reports({}, {"a": A, "b": B, "d": A})
    done = server_step(strategy, state, models, {name: models[name] for name in "abd"}, FEDERATION, round=1)
    below = [done.client_models[name]["head.pre_classifier.weight"].item() for name in "abcd"]
    assert below == pytest.approx([0.5, 0.5, 0.5, 3.0])
    last = [done.client_models[name]["head.classifier.weight"].item() for name in "abcd"]
    assert last == pytest.approx([10 * 20 / 63, 10 * 24 / 63, 20.0, 30.0])
