"""Blocks between frozen factors: Fed-SB and RAVAN held to their equations in NumPy, by hand, and exact averages."""

import numpy as np
import pytest
import torch

from atlas_fl.errors import ConfigError
from atlas_fl.methods.core import merge_core
from atlas_fl.methods.fedsb import factors_of
from atlas_fl.methods.registry import find_method
from atlas_fl.models.lora import with_core
from tests.aggregation.federations import federation_of, server_step

NAMES, WEIGHTS = ("one", "two", "three"), (50, 30, 20)
FEDERATION = federation_of(NAMES, weights=list(WEIGHTS), layer_of={"q": 0}, importance=np.ones((3, 1)))
D_OUT, D_IN, RANK = 10, 12, 4


def plain(seed=0):
    draw = torch.Generator().manual_seed(seed)
    a, head = torch.randn(RANK, D_IN, generator=draw), torch.randn(2, D_IN, generator=draw)
    return {"q.lora_A": a, "q.lora_B": torch.zeros(D_OUT, RANK), "head.weight": head}


def moved(params, seed):
    """The model after a round in which blocks, their factors and the head moved."""
    draw = torch.Generator().manual_seed(seed)
    still = ("q.lora_A", "q.lora_B")
    return {k: t if k in still else t + torch.randn(t.shape, generator=draw) for k, t in params.items()}


def dense(params, scale=2.0):
    """s sum_i s_i B_i H_i A_i, head by head, as the papers write it."""
    a, b, core = (params[f"q.lora_{end}"].double().numpy() for end in ("A", "B", "core"))
    sizes = params["q.lora_scale"].double().numpy() if "q.lora_scale" in params else np.ones(len(core))
    width, total = RANK // len(core), np.zeros((D_OUT, D_IN))
    for i, block in enumerate(core):
        part = slice(i * width, (i + 1) * width)
        total += scale * sizes[i] * b[:, part] @ block @ a[part]
    return total


def test_blocks_by_hand() -> None:
    """Heads 3 (2) and 5 (7) on A = (1, 10): 3 * 2 * 1 = 6 and 5 * 7 * 10 = 350."""
    params = {"q.lora_A": torch.tensor([[1.0], [10.0]]), "q.lora_core": torch.tensor([[[2.0]], [[7.0]]])}
    assert with_core({**params, "q.lora_scale": torch.tensor([3.0, 5.0])}, "q").flatten().tolist() == [6.0, 350.0]
    square = {**params, "q.lora_core": torch.tensor([[[0.0, 1.0], [2.0, 0.0]]])}
    assert with_core(square, "q").flatten().tolist() == [10.0, 2.0]


@pytest.mark.parametrize(("name", "heads"), [("fedavg_of_cores", 1), ("fedavg_of_heads", 2), ("fedavg_of_heads", 4)])
def test_the_average_of_products_is_the_product_of_averages_and_factors_keep_their_bits(name, heads) -> None:
    words = {"ravan_heads": heads} if name == "fedavg_of_heads" else {}
    method = find_method(name, space="factors", **words)
    start = method.begin(dict.fromkeys(NAMES, plain()), FEDERATION)[0]
    if name == "fedavg_of_cores":
        made = factors_of("q", torch.randn(D_OUT, D_IN, generator=torch.Generator().manual_seed(3)), RANK, eta=0.1)
        start = {client: {**params, **made} for client, params in start.items()}
    state = method.init(start)
    for round, there in enumerate((NAMES, ("one", "three")), start=1):
        updates = {client: moved(start[client], 10 * round + k) for k, client in enumerate(there)}
        done = server_step(method, state, start, updates, FEDERATION, round=round)
        shares = np.array([WEIGHTS[NAMES.index(client)] for client in there], float)
        mean = sum(p * dense(updates[client]) for p, client in zip(shares / shares.sum(), there))
        for client in NAMES:
            np.testing.assert_allclose(dense(done.client_models[client]), mean, rtol=1e-5, atol=1e-4)
            assert all(done.client_models[client][f"q.lora_{end}"] is start[client][f"q.lora_{end}"] for end in "AB")
            merged = merge_core(done.client_models[client])
            assert set(merged) == {"q.lora_A", "q.lora_B", "head.weight"}
            product = 2 * merged["q.lora_B"].double() @ merged["q.lora_A"].double()
            np.testing.assert_allclose(product.numpy(), mean, rtol=1e-4, atol=1e-4)
        start = done.client_models


def test_fedsb_begins_with_the_first_step_of_all_weights_at_its_rank() -> None:
    method = find_method("fedavg_of_cores", space="factors", lr=0.5, first_step=0.1, scale=lambda rank: 8 / rank)
    start = method.begin(dict.fromkeys(NAMES, plain()), FEDERATION)[0]
    assert not with_core(start["one"], "q").any()
    draw = torch.Generator().manual_seed(4)
    reports = {client: {"q": torch.randn(D_OUT, D_IN, generator=draw)} for client in NAMES}
    state = method.record_reports({}, reports)
    updates = {client: moved(params, 5) for client, params in start.items()}
    done = server_step(method, state, start, updates, FEDERATION, round=1)
    gradient = sum(reports[client]["q"].double().numpy() for client in NAMES)
    left, values, right = np.linalg.svd(-0.05 * np.sign(gradient))
    best = (left[:, :RANK] * values[:RANK]) @ right[:RANK]
    for client in NAMES:
        got = done.client_models[client]
        np.testing.assert_allclose(dense(got, scale=2.0), best, atol=1e-5)
        for basis in (got["q.lora_A"] @ got["q.lora_A"].T, got["q.lora_B"].T @ got["q.lora_B"]):
            torch.testing.assert_close(basis, torch.eye(RANK), atol=1e-5, rtol=0)
    assert server_step(method, done.server_state, done.client_models, {}, FEDERATION, round=2).server_state


def test_ravan_begins_with_orthonormal_factors_for_everyone_and_a_head_of_nothing() -> None:
    method = find_method("fedavg_of_heads", space="factors", ravan_heads=2, seed=7)
    one, two = method.begin({"one": plain(0), "two": plain(1)}, FEDERATION)[0].values()
    for end in ("A", "B"):
        basis = one[f"q.lora_{end}"]
        assert torch.equal(basis, two[f"q.lora_{end}"])
        gram = basis @ basis.T if end == "A" else basis.T @ basis
        torch.testing.assert_close(gram, torch.eye(RANK), atol=1e-5, rtol=0)
    assert not one["q.lora_core"].any() and one["q.lora_scale"].tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"--ravan-heads is 3, and q has rank 4; allowed: a divisor of it, such as 1"):
        find_method("fedavg_of_heads", ravan_heads=3).begin({"one": plain()}, FEDERATION)


@pytest.mark.parametrize(("d_out", "d_in"), [(10, 12), (3, 12), (10, 3)])
def test_factors_of_a_matrix_of_less_rank_go_on_orthonormal_beside_zeros(d_out, d_in) -> None:
    """sign(G) of ones alone has rank 1 and the singular value sqrt(d_out d_in)."""
    made = factors_of("q", torch.ones(d_out, d_in), RANK, eta=1.0)
    assert made["q.lora_core"].diagonal(dim1=1, dim2=2)[0].tolist() == pytest.approx([(d_out * d_in) ** 0.5, 0, 0, 0])
    torch.testing.assert_close(made["q.lora_B"] @ made["q.lora_core"][0] @ made["q.lora_A"], -torch.ones(d_out, d_in))
    for basis, side in ((made["q.lora_A"].T, d_in), (made["q.lora_B"], d_out)):
        wanted = torch.eye(RANK) * (torch.arange(RANK) < side)
        torch.testing.assert_close(basis.T @ basis, wanted, atol=1e-5, rtol=0)
