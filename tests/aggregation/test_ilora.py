"""ILoRA: where adapters begin, what a round makes of them by hand and by a dense program, and what is taken off."""

import numpy as np
import pytest
import torch

from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import adapters_of, federation_of, server_step

NAMES, WEIGHTS, RANKS = ("one", "two", "three"), (50, 30, 20), (4, 2, 3)
A, B = "q.lora_A", "q.lora_B"
W0 = torch.randn(10, 12, generator=torch.Generator().manual_seed(5))
"""Frozen weights of the only module."""


def begun(scale=lambda _: 2.0, ranks=RANKS, weights=W0):
    method = find_method("fedavg_by_qr", scale=scale)
    fed = federation_of(NAMES, weights=list(WEIGHTS))
    return method, fed, *method.begin_in_weights(adapters_of(NAMES, ranks), fed, {"q": weights}.__getitem__)


def product(params, scale):
    return scale(len(params[A])) * (params[B].double() @ params[A].double()).numpy()


def first_directions(matrix, rank):
    """Q and R of NumPy, with a positive diagonal of R."""
    q, upper = np.linalg.qr(np.asarray(matrix, np.float64))
    signs = np.where(np.diag(upper) < 0, -1.0, 1.0)
    return (q * signs)[:, :rank], (signs[:, None] * upper)[:rank]


@pytest.mark.parametrize("scale", [lambda _: 2.0, lambda rank: 16 / rank])
def test_adapters_begin_in_the_frozen_weights_and_clients_compute_with_these(scale) -> None:
    method, _, models, state = begun(scale)
    start = RoundStart(
        round=1,
        clients=NAMES,
        tasks=dict.fromkeys(NAMES, "t"),
        client_models=models,
        server_models=models,
        server_state=state,
    )
    predicted = method.predict(start)
    for name, rank in zip(NAMES, RANKS):
        q, upper = first_directions(W0, rank)
        np.testing.assert_allclose(models[name][B], q, atol=1e-5)
        np.testing.assert_allclose(product(models[name], scale), q @ upper, atol=1e-5)
        frozen = method.frozen_part(state, name)
        np.testing.assert_allclose(product(frozen, scale), -q @ upper, atol=1e-5)
        assert len(predicted[name][A]) == 2 * rank
        np.testing.assert_allclose(product(predicted[name], scale), 0.0, atol=1e-5)
        # the first directions of a larger rank are those of a smaller one
        assert models[name][B][:, :2].equal(models["two"][B])


@pytest.mark.parametrize("there", [NAMES, ("two", "three"), ("one",)])
def test_a_round_keeps_the_first_directions_of_the_average_for_every_rank(there) -> None:
    def scale(rank):
        return 16 / rank

    method, fed, models, state = begun(scale)
    draw = torch.Generator().manual_seed(1)
    updates = {
        name: {key: one + torch.randn(one.shape, generator=draw) for key, one in models[name].items()} for name in there
    }
    done = server_step(method, state, models, updates, fed, round=1)
    assert done.server_state is state
    total = sum(WEIGHTS[NAMES.index(name)] for name in there)
    mean = sum(WEIGHTS[NAMES.index(name)] / total * product(updates[name], scale) for name in there)
    for name, rank in zip(NAMES, RANKS):
        q, upper = first_directions(mean, rank)
        np.testing.assert_allclose(product(done.client_models[name], scale), q @ upper, atol=1e-4)
        if there != ("one",) or rank < 4:
            np.testing.assert_allclose(done.client_models[name][B], q, atol=1e-4)
    np.testing.assert_allclose(product(done.client_models["one"], scale)[:, :4], mean[:, :4], atol=1e-4)


def test_directions_that_an_average_lacks_are_orthogonal_to_its_own_and_hold_nothing() -> None:
    method, fed, models, state = begun()
    updates = {"two": {key: one + 0.5 for key, one in models["two"].items()}}
    done = server_step(method, state, models, updates, fed, round=1).client_models
    np.testing.assert_allclose(product(done["one"], lambda _: 2.0), product(updates["two"], lambda _: 2.0), atol=1e-5)
    b = done["one"][B].double()
    torch.testing.assert_close(b.T @ b, torch.eye(4, dtype=torch.float64), atol=1e-5, rtol=0)
    assert done["one"][A][:2].norm() > 1e3 * done["one"][A][2:].norm()


def test_directions_by_hand() -> None:
    """Of (3 1; 4 2) the first direction is (3, 4) / 5, along which the matrix has (5, 2.2)."""
    method, _, models, _ = begun(lambda _: 2.0, ranks=(1, 1, 1), weights=torch.tensor([[3.0, 1.0], [4.0, 2.0]]))
    assert models["one"][B].flatten().tolist() == pytest.approx([0.6, 0.8])
    assert models["one"][A].flatten().tolist() == pytest.approx([2.5, 1.1])
    assert method.frozen_part({"start": {"one": models["one"]}}, "one")[B].flatten().tolist() == pytest.approx(
        [-0.6, -0.8]
    )


def test_above_the_sides_of_a_matrix_there_are_zeros() -> None:
    _, _, models, _ = begun(ranks=(4, 2, 3), weights=torch.randn(3, 12, generator=torch.Generator().manual_seed(2)))
    assert models["one"][B].shape == (3, 4) and not models["one"][B][:, 3].any() and not models["one"][A][3].any()
