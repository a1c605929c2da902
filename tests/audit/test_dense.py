"""The dense computation of a round: exact where several answers are right, whatever LAPACK does."""

import numpy as np
import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.audit.dense import decompose, is_best, rank_error
from tests.audit.written import edit_tensors, found


def test_the_errors_of_an_honest_run_are_far_below_the_tolerance(run):
    report = audit_run(run)
    worst = max(row.error for row in report.rows if row.error is not None)
    assert 0 < worst < 1e-5
    assert list(report.rounds()) == [("run", round) for round in (1, 2, 3)]


def test_an_honest_run_passes_although_divide_and_conquer_fails(run, monkeypatch):
    """It did on a real run: a finite sum of updates of rank 56 in 384 dimensions."""
    calls = []

    def fails(matrix, **_):
        calls.append(matrix.shape)
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", fails)
    assert audit_run(run).ok
    edit_tensors(run, 1, "start", lambda flat: flat["movie-2/layer.1.q.lora_B"].mul_(1.001))
    assert (1, "movie-2", "mixed") in found(audit_run(run))
    assert calls


def test_the_decomposition_is_that_of_the_matrix():
    matrix = np.random.default_rng(0).normal(size=(7, 3)) @ np.ones((3, 5))
    left, values, right = decompose(matrix)
    assert (left * values) @ right == pytest.approx(matrix)


@pytest.mark.parametrize(
    ("kept", "spoil", "is_right"),
    [(1, 0.0, True), (2, 0.0, True), (2, 0.01, False), (0, 0.0, False)],
    ids=["the larger", "the other of two equals", "spoiled", "the first twice"],
)
def test_where_singular_values_tie_any_best_approximation_is_right(kept, spoil, is_right):
    """The second and third singular values differ by 1e-6; `kept` is which of them is kept."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(6, 6)))[0] for _ in range(2))
    values = np.array([3.0, 1.0 + 1e-6, 1.0])
    wanted = (left[:, :3] * values) @ right[:, :3].T
    got = (left[:, [0, kept]] * values[[0, kept]]) @ right[:, [0, kept]].T
    got[0] += spoil
    error, _ = rank_error(wanted, got, 2, size=float(np.linalg.norm(wanted)))
    assert (error <= 1e-4) == is_right


def test_a_best_approximation_neither_stretches_a_direction_nor_leaves_out_a_larger_one():
    def best(mixed, got):
        return is_best(np.diag(mixed), np.diag(got), 2, size=float(np.linalg.norm(mixed)))

    assert best([3.0, 1.0, 1.0], [3.0, 1.0, 0.0]) and best([3.0, 1.0, 1.0], [3.0, 0.0, 1.0])
    assert not best([3.0, 1.0, 1.0], [3.0, 1.1, 0.0]), "the kept one of two equals is a tenth too long"
    assert not best([3.0, 1.0, 2.0], [3.0, 1.0, 0.0]), "the larger one was left out"
