"""raFLoRA's average: partition by partition in NumPy, by hand, and that no rank decays where nobody trains."""

import numpy as np
import pytest
import torch

from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import adapters_of, dense_update, federation_of, server_step


def step(rule, models, weights, **words):
    return server_step(find_method(rule, **words), {}, models, models, federation_of(models, weights=weights), round=1)


@pytest.mark.parametrize("ranks", [(2, 4, 4, 7), (3, 3, 3, 3), (1, 2, 5, 8)])
def test_every_partition_is_averaged_over_the_clients_that_have_it(ranks):
    models, examples = adapters_of("abcd", ranks, seed=1), np.array([4.0, 1.0, 3.0, 2.0])
    done = step("fedavg_by_rank", models, examples, scale=lambda rank: 16 / rank)
    whole, low = np.zeros((10, 12)), 0
    for high in sorted(set(ranks)):
        has = [k for k in range(4) if ranks[k] >= high]
        for k in has:
            a, b = (models["abcd"[k]][f"q.lora_{end}"].double().numpy() for end in "AB")
            part = 16 / ranks[k] * b[:, low:high] @ a[low:high]
            whole += examples[k] / examples[has].sum() * part
        low = high
    left, sizes, right = np.linalg.svd(whole, full_matrices=False)
    for client, rank in zip("abcd", ranks):
        params = done.client_models[client]
        got = 16 / rank * (params["q.lora_B"].double() @ params["q.lora_A"].double()).numpy()
        assert got == pytest.approx((left[:, :rank] * sizes[:rank]) @ right[:rank], rel=1e-4, abs=1e-4)
        assert params["q.lora_A"].shape == (rank, 12)
    mean = sum(n * models[c]["head.weight"] for n, c in zip(examples, "abcd")) / 10
    torch.testing.assert_close(done.client_models["a"]["head.weight"], mean.float())


def diagonal(*sizes):
    """A model with this diagonal as the update 2 B A."""
    size = torch.tensor(sizes)
    rows = torch.eye(3)[: len(sizes)]
    return {"q.lora_A": rows, "q.lora_B": rows.T * size / 2}


def test_by_hand_and_only_the_average_of_flexlora_collapses():
    """Of 3 and 1 examples, diagonals (4) and (8, 2): 3/4 * 4 + 1/4 * 8 = 5, and 2 of the only one that has it.

    FlexLoRA has 1/4 * 2 there, and after each further round without training a quarter of it.
    """
    models = {"x": diagonal(4.0), "y": diagonal(8.0, 2.0)}
    tails = {"fedavg_by_rank": [2.0, 2.0, 2.0], "fedavg": [0.5, 0.125, 0.03125]}
    for rule, expected in tails.items():
        held = models
        for tail in expected:
            held = step(rule, held, [3, 1]).client_models
            assert torch.diag(dense_update(held["y"])[:2]).tolist() == pytest.approx([5.0, tail])
            assert torch.diag(dense_update(held["x"])[:2]).tolist() == pytest.approx([5.0, 0.0])


def test_with_one_rank_it_is_flexlora():
    models = adapters_of("abc", (4, 4, 4), seed=3)
    ours, theirs = (step(rule, models, [1, 2, 3]).client_models for rule in ("fedavg_by_rank", "fedavg"))
    for client in models:
        torch.testing.assert_close(dense_update(ours[client]), dense_update(theirs[client]), rtol=1e-5, atol=1e-5)
