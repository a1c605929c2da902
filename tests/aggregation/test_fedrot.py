"""FedRot-LoRA: the paper's closed form in NumPy, a rotation by hand, and that rotated copies are one model."""

import numpy as np
import pytest
import torch

from atlas_fl.methods.fedrot import align, nearest_rotation
from atlas_fl.methods.registry import find_method
from atlas_fl.params import LORA_A, LORA_B
from tests.aggregation.federations import adapters_of, dense_update, federation_of, server_step


def step(before, updates, *, round, weights=(1, 3), **words):
    fed = federation_of(before, weights=weights)
    return server_step(find_method("fedavg_rotated", **words), {}, before, updates, fed, round=round).client_models


def rotated(params, turn):
    return {**params, "q.lora_A": turn.T @ params["q.lora_A"], "q.lora_B": params["q.lora_B"] @ turn}


def rotation(size, seed):
    """A drawn rotation."""
    turn = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))[0]
    return turn * torch.tensor([1.0] * (size - 1) + [float(torch.det(turn).sign())])


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("round", [1, 2, 3])
def test_factors_are_those_of_the_papers_closed_form(round, strength):
    """M = A_ref A_k^T or B_ref^T B_k = U S V^T, R* = V diag(1, ..., det U V^T) U^T, and the soft one again."""
    sent = dict.fromkeys("xy", adapters_of("x", (4,), seed=1)["x"])
    updates = adapters_of("xy", (4, 4), seed=2)
    total = {"q.lora_A": np.zeros((4, 12)), "q.lora_B": np.zeros((10, 4))}
    for client, share in (("x", 0.25), ("y", 0.75)):
        a, b = (updates[client][f"q.lora_{end}"].double().numpy() for end in "AB")
        reference = {end: sent[client][f"q.lora_{end}"].double().numpy() for end in "AB"}
        turn = np.eye(4)
        if round > 1:
            u, _, vt = np.linalg.svd(reference["A"] @ a.T if round == 2 else reference["B"].T @ b)
            best = vt.T @ np.diag([1, 1, 1, np.linalg.det(u @ vt)]) @ u.T
            u, _, vt = np.linalg.svd((1 - strength) * np.eye(4) + strength * best)
            turn = u @ np.diag([1, 1, 1, np.linalg.det(u @ vt)]) @ vt
        total["q.lora_A"] += share * turn.T @ a
        total["q.lora_B"] += share * b @ turn
    done = step(sent, updates, round=round, rotation_strength=strength)
    for key, wanted in total.items():
        assert done["y"][key].numpy() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("round", [2, 3])
def test_copies_in_other_coordinates_are_one_model_again(round):
    """The average of rotated copies has their product, which that of the factors as they came has not."""
    model = adapters_of("x", (4,), seed=3)["x"]
    updates = {"x": rotated(model, rotation(4, 1)), "y": rotated(model, rotation(4, 2))}
    sent = dict.fromkeys("xy", model)
    exact = dense_update(model)
    hard, none = (step(sent, updates, round=round, rotation_strength=strength)["x"] for strength in (1.0, 0.0))
    torch.testing.assert_close(dense_update(hard), exact, rtol=1e-4, atol=1e-4)
    assert float((dense_update(none) - exact).norm()) > 0.1 * float(exact.norm())


def test_a_quarter_turn_by_hand():
    """A is turned by 90 degrees: with all of the strength it is turned back, with half of it by 45."""
    sent = {"q.lora_A": torch.eye(2), "q.lora_B": torch.eye(2)}
    turned = {"q.lora_A": torch.tensor([[0.0, -1.0], [1.0, 0.0]]), "q.lora_B": torch.tensor([[0.0, 1.0], [-1.0, 0.0]])}
    half = 0.5**0.5
    torch.testing.assert_close(align(turned, sent, by=LORA_A, strength=1.0)["q.lora_A"], torch.eye(2))
    found = align(turned, sent, by=LORA_B, strength=0.5)
    torch.testing.assert_close(found["q.lora_A"], torch.tensor([[half, -half], [half, half]]))
    torch.testing.assert_close(found["q.lora_B"] @ found["q.lora_A"], torch.eye(2))


@pytest.mark.parametrize("seed", range(4))
def test_no_rotation_is_nearer(seed):
    matrix = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    best = nearest_rotation(matrix)
    assert float(torch.det(best)) == pytest.approx(1.0)
    others = [rotation(3, 10 + k).double() for k in range(300)]
    assert all(float((best - matrix).norm()) <= float((other - matrix).norm()) for other in others)
