"""FedMomentum's step: the full decomposition in NumPy, by hand, and that nothing of the average is lost."""

import numpy as np
import pytest
import torch

from atlas_fl.methods.fedmomentum import FedAvgWithRest
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import adapters_of, dense_update, federation_of, server_step


def step(models, weights, *, state=None, before=None):
    fed = federation_of(before or models, weights=weights)
    return server_step(find_method("fedavg_with_rest"), state or {}, before or models, models, fed, round=1)


def test_adapter_and_rest_are_the_leading_and_the_other_singular_directions():
    models, shares = adapters_of("xyz", (3, 3, 3), seed=1), np.array([0.5, 0.2, 0.3])
    done = step(models, shares)
    mean = sum(share * dense_update(models[c]).numpy() for share, c in zip(shares, "xyz"))
    left, sizes, right = np.linalg.svd(mean, full_matrices=False)
    leading, rest = ((left[:, part] * sizes[part]) @ right[part] for part in (slice(3), slice(3, None)))
    assert dense_update(done.client_models["y"]).numpy() == pytest.approx(leading, rel=1e-4, abs=1e-4)
    frozen = FedAvgWithRest().newest_part(done.server_state)
    assert dense_update(frozen).numpy() == pytest.approx(rest, rel=1e-4, abs=1e-4)
    assert len(frozen["q.lora_A"]) == 2 * 3, "of rank (n - 1) r"
    a, b = (done.client_models["y"][f"q.lora_{end}"].double().numpy() for end in "AB")
    assert np.linalg.norm(a, axis=1) ** 2 == pytest.approx(sizes[:3], rel=1e-4)
    assert 2 * np.linalg.norm(b, axis=0) ** 2 == pytest.approx(sizes[:3] / 2, rel=1e-4)


def test_by_hand():
    """The mean of diagonals (6, 0) and (0, 2) is (3, 1): 3 is the adapter's of rank one, 1 is the rest."""
    models = {
        "x": {"q.lora_A": torch.tensor([[1.0, 0.0]]), "q.lora_B": torch.tensor([[3.0], [0.0]])},
        "y": {"q.lora_A": torch.tensor([[0.0, 1.0]]), "q.lora_B": torch.tensor([[0.0], [1.0]])},
    }
    done = step(models, [1, 1])
    torch.testing.assert_close(dense_update(done.client_models["x"]).float(), torch.diag(torch.tensor([3.0, 0.0])))
    rest = FedAvgWithRest().newest_part(done.server_state)
    torch.testing.assert_close(dense_update(rest).float(), torch.diag(torch.tensor([0.0, 1.0])))


def test_over_rounds_with_absent_clients_what_is_computed_with_is_the_sum_of_all_averages():
    held, state, exact = adapters_of("xyz", (2, 2, 2), seed=0), {}, torch.zeros(10, 12, dtype=torch.float64)
    for number, present in enumerate(("xyz", "xz", "yz"), 1):
        trained = {c: one for c, one in adapters_of("xyz", (2, 2, 2), seed=number).items() if c in present}
        weights = {"x": 1.0, "y": 2.0, "z": 5.0}
        total = sum(weights[c] for c in present)
        before = 0 if number == 1 else dense_update(held["x"])
        done = step(trained, list(weights.values()), state=state, before=held)
        exact += sum(weights[c] / total * dense_update(trained[c]) for c in present) - before
        held, state = done.client_models, done.server_state
        computed = dense_update(held["y"]) + dense_update(FedAvgWithRest().frozen_part(state))
        torch.testing.assert_close(computed, exact, rtol=1e-4, atol=1e-4)
